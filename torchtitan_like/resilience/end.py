"""The last thing a process does."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from torchtitan_like.resilience.requests import SIGNALS

LONGEST_WAIT = 60  # seconds for threads that have something to write


def end_process(code: int) -> NoReturn:
    """End with `code` once all that Python has to write is written, without tearing down native libraries.

    NOTE: the threads of a destroyed gloo group race with the interpreter's finalisation: about 1 in 50 finished runs
    ended with SIGSEGV (seen on torch 2.13), and a launcher then takes a completed job for a crash. As it would after a signal
    that comes this late: it ends the waiting for threads, with the code; and so does the alarm, for one that hangs.
    """
    _flush()
    for signum in (*SIGNALS, signal.SIGALRM):
        signal.signal(signum, lambda *_: os._exit(code))
    signal.alarm(LONGEST_WAIT)
    # As the interpreter waits: idle workers of a ThreadPoolExecutor, such as the compiler's, end only when they are told to.
    threading._shutdown()  # type: ignore[attr-defined]
    logging.shutdown()
    _flush()
    os._exit(code)


def _flush() -> None:
    """Flush stdout and stderr. A full disk or a closed pipe behind them does not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
