"""Exit a process without tearing down native libraries."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

from torchtitan_like.util.exit_codes import RANK_SIGNALS
from torchtitan_like.util.output import flush_or_discard

MAX_WAIT_SECONDS = 60  # for threads that still write


def end_process(code: int) -> NoReturn:
    """Wait for Python threads, flush all output, and exit with `code`. Runs no native destructors.

    NOTE: threads of a destroyed gloo group race with the interpreter's finalization. On torch 2.13,
    about 1 in 50 finished runs ended with SIGSEGV, which a launcher reports as a crash.

    A signal during the wait exits at once with the same code: a late signal must not turn a
    completed job into a failed one. An alarm does the same for a thread that hangs.
    """
    _flush()
    for signum in (*RANK_SIGNALS, signal.SIGALRM):
        signal.signal(signum, lambda *_: os._exit(code))
    signal.alarm(MAX_WAIT_SECONDS)
    # The interpreter calls this too: it stops idle workers of thread pools, such as the compiler's.
    threading._shutdown()  # type: ignore[attr-defined]
    logging.shutdown()
    _flush()
    os._exit(code)


def _flush() -> None:
    """Flush stdout and stderr. A full disk or closed pipe does not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        flush_or_discard(stream)
