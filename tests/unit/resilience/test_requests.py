"""Every request of a rank is sent once, and every way to stop has an exit code."""

import inspect
import itertools
import os
import signal
import sys

import pytest

from torchtitan_like.resilience.agreement import (
    EXIT_CODES,
    Request,
    Requests,
    StepAgreement,
    Stopped,
    first_stop,
)
from torchtitan_like.util.exit_codes import ExitCode


def test_a_request_is_sent_once():
    requests = Requests()
    requests.add(Request.TERMINATE)
    requests.add(Request.TERMINATE)
    assert requests.take() == [int(r is Request.TERMINATE) for r in Request]
    assert requests.take() == [0] * len(Request)


def test_reading_requests_during_validation_does_not_consume_them():
    requests = Requests()
    requests.add(Request.TERMINATE)
    counts = requests.counts()
    assert (
        counts
        == requests.counts()
        == requests.take()
        == [int(r is Request.TERMINATE) for r in Request]
    )
    assert not any(requests.counts())


def test_a_signal_while_requests_are_read_is_sent_once():
    """A signal handler may run before any opcode; this exchange or the next sends its request."""

    def count_with_signal_at(number):
        """Count how often a signal before opcode `number` of `take` is sent; None at the end."""
        requests, num_opcodes = Requests(), 0

        def trace(frame, event, _):
            nonlocal num_opcodes
            if frame.f_code.co_filename != requests_file:
                return None  # a call by Python itself, such as a finalizer
            frame.f_trace_opcodes = True
            num_opcodes += event == "opcode"
            if event == "opcode" and num_opcodes == number:
                sys.settrace(None)
                requests.add(Request.TERMINATE)
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            sent = requests.take()
        finally:
            sys.settrace(former)
        if num_opcodes < number:
            return None
        return sent[Request.TERMINATE] + requests.take()[Request.TERMINATE]

    requests_file = inspect.getfile(Requests)
    number = itertools.count(1)
    counts = list(iter(lambda: count_with_signal_at(next(number)), None))
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
    agreement = StepAgreement.of_rank(0, 0, [counts.get(request, 0) for request in Request])
    assert first_stop(agreement.requests) is expected


@pytest.mark.parametrize(
    ("signum", "request_"),
    [
        (signal.SIGTERM, Request.TERMINATE),
        (signal.SIGINT, Request.INTERRUPT),
        (signal.SIGUSR1, Request.TERMINATE),
    ],
)
def test_a_signal_is_a_request_and_handlers_are_restored(signum, request_):
    former = signal.getsignal(signum)
    requests = Requests()
    with requests.listening():
        with pytest.raises(Stopped) as stopped:  # before the first step, a signal raises
            os.kill(os.getpid(), signum)
        assert stopped.value.request is request_ and not any(requests.take())
        os.kill(os.getpid(), signum)  # the second signal does not interrupt the shutdown
    assert requests.take()[request_] == 1
    assert signal.getsignal(signum) is former


def test_every_stop_has_an_exit_code_and_codes_are_unique():
    assert set(EXIT_CODES) == set(Request) - {Request.SAVE, Request.EXPORT, Request.RUN_AGAIN}
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
    assert ExitCode.BAD_CONFIG == 78


def test_the_guide_documents_every_code_and_cause(repo_root):
    guide = (repo_root / "docs/guides/operations.md").read_text()
    for code in ExitCode:
        (line,) = [
            line
            for line in guide.splitlines()
            if line.startswith(f"| {int(code)} | `{code.reason}` |")
        ]
        causes = [
            request.name.lower() for request, exit_code in EXIT_CODES.items() if exit_code is code
        ]
        assert all(f"`{cause}`" in line or cause == code.reason for cause in causes), (line, causes)
