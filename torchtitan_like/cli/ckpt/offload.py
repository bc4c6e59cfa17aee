"""`titan ckpt offload`: copy checkpoints to an archive, then remove all but the newest."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchtitan_like.cli.common import DAMAGED, positive_int, run_checked

EXAMPLE = "titan ckpt offload outputs/checkpoint /archive/run-7 --keep 2 --dry-run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the checkpoint folder of a run"
    )
    parser.add_argument("dest", metavar="DEST", help="a folder, or an address for --command")
    parser.add_argument(
        "--keep",
        type=positive_int,
        default=2,
        metavar="N",
        help="number of newest steps to keep in FOLDER (default: 2), in addition to pinned steps "
        "and the newest full one",
    )
    parser.add_argument(
        "--command",
        help="how to copy one step; {src} is its folder, {dst} is DEST, {name} is step-N",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print what would be copied and removed"
    )
    parser.epilog = (
        "Every complete step is verified, copied, and compared with its copy. DEST also gets\n"
        "step-N.sha256, for `sha256sum --check`. Old steps are then removed from FOLDER; not if\n"
        "DEST is on another machine, where a copy cannot be read back. Example of a command:\n"
        '  --command "rsync -a {src} {dst}"\n'
        "Exit codes: 0 all steps are copied, 1 a step is damaged, 2 another error.\n\n"
        f"example: {EXAMPLE}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Copy and remove checkpoints. Returns the exit code."""
    from torchtitan_like.checkpoint.tools.offload import offload

    def action() -> int:
        is_complete = offload(
            arguments.folder,
            arguments.dest,
            keep=arguments.keep,
            command=arguments.command,
            dry_run=arguments.dry_run,
        )
        return 0 if is_complete else DAMAGED

    return run_checked(action)
