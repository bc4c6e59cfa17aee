"""Show the results of a finished run: the report page, and text that the model generates."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.check.model_checks import check_model
from torchtitan_like.checkpoint.step_folders import published_steps
from torchtitan_like.util.exit_codes import LAUNCHER_SIGNALS, RunFailure
from torchtitan_like.util.output import show, show_error

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig

PAGE = "report.html"  # in the run folder
PROMPT = "The"
NUM_TOKENS = "60"
MAX_PARAMETERS = 50_000_000  # of a model that generates text, which takes seconds on a CPU
SECONDS = 180  # until a page or a text is given up


def show_results(config: JobConfig, python: str, environ: Mapping[str, str]) -> None:
    """Write the page and print the text, each in a process of its own. A failure is one warning.

    python, environ: of these processes.
    """

    def titan(purpose: str, *words: str) -> str | None:
        return _output(purpose, [python, "-m", "torchtitan_like", *words], environ)

    folder, checkpoint = Path(config.job.dump_folder), config.checkpoint
    page = folder / PAGE
    if titan("No page was written", "run", "report", str(folder), "-o", str(page)) is not None:
        show(f"Page: {page}")
    steps = []
    if checkpoint.enable:
        with suppress(OSError, RunFailure):
            steps = published_steps(folder / checkpoint.folder)
    model = check_model(config)
    if not steps or model.spec is None or model.spec.num_params(model.args) > MAX_PARAMETERS:
        return
    step = steps[-1].path
    words = ("generate", str(step), "--prompt", PROMPT, "--num-tokens", NUM_TOKENS)
    text = titan("No text was generated", *words)
    if text is not None:
        show(f"Text from {step.name}:\n{text.rstrip()}")


def _output(purpose: str, command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return what a command prints. If it fails, warn with its last line, and return None."""
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            preexec_fn=_end_on_signals,
        )
    except subprocess.TimeoutExpired:
        reason = f"it took more than {SECONDS} s"
    except OSError as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.splitlines()
        reason = lines[-1] if lines else f"it ended with code {done.returncode}"
    show_error(f"{purpose}: {reason}")
    return None


def _end_on_signals() -> None:
    """Undo `SignalRelay.ignore`: Ctrl-C ends the process, and the launcher returns its code."""
    for signum in LAUNCHER_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
