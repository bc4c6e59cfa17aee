"""Send a request to a run: create or remove its switch files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.report.files import read_run_config
from torchtitan_like.util.exit_codes import WORTH_A_RETRY
from torchtitan_like.util.run_directory import EXIT, Switches, read_exit, switches


def switch_files(run: Path) -> tuple[Switches, dict[str, Any]]:
    """Return the paths of a run's switch files, and its configuration. Raises ValueError."""
    config = read_run_config(run)
    defaults = Resilience()
    section = config.get("resilience", {})
    paths = switches(
        run,
        str(Path(section.get("kill_switch_path", defaults.kill_switch_path)).expanduser()),
        str(Path(section.get("save_switch_path", defaults.save_switch_path)).expanduser()),
    )
    return paths, config


def request_stop(run: Path) -> str:
    """Create the kill switch. Return a message about its effect.

    Raises ValueError, and creates nothing, if the run has ended for good; OSError.
    """
    path = switch_files(run)[0].kill
    effect = "the run saves and ends with code 130"
    if (run / EXIT).exists():
        end = read_exit(run)
        if end.code not in WORTH_A_RETRY:
            raise ValueError(
                f"{run} has ended: {end.reason} (code {end.code}). Expected a live run, or one that "
                "another job continues. Nothing was written."
            )
        effect = "the run has ended already, and its next job ends at once"
    path.touch()
    return (
        f"{path} is created: {effect}. No run starts in this folder while the file exists. "
        f"To allow runs again: titan run stop {run} --clear"
    )


def clear_stop(run: Path) -> str:
    """Remove the kill switch. Return a message about its effect. Raises OSError, ValueError."""
    path = switch_files(run)[0].kill
    path.unlink(missing_ok=True)
    return f"{path} is removed: runs may start in this folder again"


def request_save(run: Path, *, export: bool = False) -> str:
    """Create the switch file that requests a checkpoint, or a Hugging Face export.

    Raises ValueError if the run would ignore it, OSError.
    """
    paths, config = switch_files(run)
    if not config.get("checkpoint", {}).get("enable", False):
        raise ValueError(
            f"{run} would ignore the request: checkpoint.enable is false. Expected true. "
            "Start the run again with --checkpoint.enable."
        )
    if (run / EXIT).exists():
        end = read_exit(run)
        raise ValueError(
            f"{run} has ended: {end.reason} (code {end.code}). Expected a live run. "
            "Start it again, or work with its newest checkpoint."
        )
    path = paths.export if export else paths.save
    path.touch()
    return f"{path} is created: the run removes it and saves within its next steps"
