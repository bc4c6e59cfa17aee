"""Follow live runs: their status on the terminal, or a page that is written again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.report.status import has_ended, status_lines
from torchtitan_like.util.files import write_atomically

if TYPE_CHECKING:
    from torchtitan_like.report.history import History


def watch_run(run: Path, every: float | None) -> None:
    """Show the status every some seconds until the run has ended. None: show it once."""
    with _display(run) as show:
        while True:
            is_last = has_ended(run)
            show()
            if every is None or is_last:
                return
            time.sleep(max(0.0, every))


@contextmanager
def _display(run: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the status: in place in a terminal, else as plain lines."""
    if not sys.stdout.isatty():
        yield lambda: print("\n".join(status_lines(run, time.time())), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    from torchtitan_like.report.terminal import status_view

    console = Console(file=getattr(sys.stdout, "unescaped", sys.stdout))
    with Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield lambda: live.update(status_view(run, time.time()), refresh=True)


def write_pages(
    page: Path, runs: Sequence[Path], every: float | None, *, is_redacted: bool
) -> Iterator[int]:
    """Write the page every some seconds until all runs have ended. None: write it once.

    Yields the number of bytes of the first page and of the last one.
    """
    from torchtitan_like.report.history import read_histories

    is_first = True
    while True:
        refresh_seconds = None if every is None or all(map(has_ended, runs)) else every
        histories = read_histories(runs, is_redacted=is_redacted)
        num_bytes = write_page(
            page, histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds
        )
        if is_first or refresh_seconds is None:
            yield num_bytes
        if refresh_seconds is None:
            return
        is_first = False
        time.sleep(refresh_seconds)


def write_page(
    page: Path,
    histories: Sequence[History],
    *,
    is_redacted: bool,
    refresh_seconds: float | None = None,
) -> int:
    """Replace the page. Returns its number of bytes."""
    from torchtitan_like.report.page import render_page

    text = render_page(histories, is_redacted=is_redacted, refresh_seconds=refresh_seconds)
    html = text.encode(errors="replace")
    write_atomically(page, html)
    return len(html)
