"""A rank notes, all ranks act; a code for every way to end."""

import inspect
import itertools
import os
import signal
import sys

import pytest

from torchtitan_like.resilience.requests import (
    EXIT_CODES,
    Request,
    Requests,
    Stopped,
    decode_requests,
    first_stop,
)
from torchtitan_like.util.exit_codes import ExitCode


def test_a_request_is_sent_once():
    requests = Requests()
    requests.note(Request.TERMINATE)
    requests.note(Request.TERMINATE)
    assert requests.take() == [int(r is Request.TERMINATE) for r in Request]
    assert requests.take() == [0] * len(Request)


def test_a_request_during_validation_is_sent():
    requests = Requests()
    requests.note(Request.TERMINATE)
    counts = requests.noted()
    assert counts == requests.noted() == requests.take() == [int(r is Request.TERMINATE) for r in Request]
    assert not any(requests.noted())


def test_a_signal_while_requests_are_read_is_sent_once():
    """A handler may run between any two operations. Its request is sent now or in the next exchange."""

    def counts_with_a_note_before(number):
        """How often a note made before the operation `number` of `take` was sent; None: it has fewer operations."""
        requests, at = Requests(), 0

        def look(frame, event, _):
            nonlocal at
            if frame.f_code.co_filename != requests_file:
                return None  # what Python itself calls in between, a finalizer for one
            frame.f_trace_opcodes = True
            at += event == "opcode"
            if event == "opcode" and at == number:
                sys.settrace(None)
                requests.note(Request.TERMINATE)
            return look

        former = sys.gettrace()
        sys.settrace(look)
        try:
            sent = requests.take()
        finally:
            sys.settrace(former)
        return sent[Request.TERMINATE] + requests.take()[Request.TERMINATE] if at >= number else None

    requests_file = inspect.getfile(Requests)
    number = itertools.count(1)
    counts = list(iter(lambda: counts_with_a_note_before(next(number)), None))
    assert len(counts) > len(Request) and set(counts) == {1}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, None),
        ({Request.TERMINATE: 1}, Request.TERMINATE),
        ({Request.DATA_EXHAUSTED: 4}, Request.DATA_EXHAUSTED),
        ({Request.TERMINATE: 2, Request.BAD_NUMBERS: 1}, Request.BAD_NUMBERS),
        ({Request.SAVE: 1, Request.EXPORT: 1}, None),
        ({Request.SAVE: 1, Request.SAVE_FAILED: 1}, Request.SAVE_FAILED),
    ],
)
def test_the_first_stop_of_the_table_wins(counts, expected):
    assert first_stop(decode_requests([counts.get(request, 0) for request in Request])) is expected


@pytest.mark.parametrize(
    ("signum", "request_"),
    [(signal.SIGTERM, Request.TERMINATE), (signal.SIGINT, Request.INTERRUPT), (signal.SIGUSR1, Request.TERMINATE)],
)
def test_a_signal_is_a_request_and_handlers_are_restored(signum, request_):
    former = signal.getsignal(signum)
    requests = Requests()
    with requests.listening():
        with pytest.raises(Stopped) as stopped:  # no rank has made a step yet
            os.kill(os.getpid(), signum)
        assert stopped.value.request is request_ and not any(requests.take())
        os.kill(os.getpid(), signum)  # does not disturb what the first one ends
    assert requests.take()[request_] == 1
    assert signal.getsignal(signum) is former


def test_every_stop_has_a_code_and_codes_differ():
    assert set(EXIT_CODES) == set(Request) - {Request.SAVE, Request.EXPORT}
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    assert ExitCode.BAD_CONFIG == 78


def test_the_guide_documents_every_code_and_cause(repo_root):
    guide = (repo_root / "docs/guides/operations.md").read_text()
    for code in ExitCode:
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| {int(code)} | `{code.reason}` |")]
        causes = [request.name.lower() for request, end in EXIT_CODES.items() if end is code]
        assert all(f"`{cause}`" in line or cause == code.reason for cause in causes), (line, causes)
