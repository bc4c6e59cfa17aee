"""Look after a run from outside, from a batch job or cron: one look, then an exit code.

    python scripts/watchdog.py job NAME                                 # is a job of this name running or queued?
    python scripts/watchdog.py log outputs/metrics.jsonl --max-silence 60     # has the file grown in the last hour?
    python scripts/watchdog.py disk outputs /data --min-free-gib 500 --min-free-inodes 100000 --min-saves 5

`disk` also takes what no file system tells: `--free-command CMD` prints the free bytes, and after them the free inodes if it
knows them (a site's quota tool); `--quota-gib N` is compared with what the folders hold. `--min-saves` counts in checkpoints
of the size of the newest one below the folder, `--min-days` in the time that so many take, by the last two. Many file systems
slow down or refuse to write from 80 % on, and what they say of themselves may be half an hour old: leave room.

Every look is a line on standard output, with --log also appended to a file. Exit code 0: all is well; 1: an alert; 2: it
cannot be told. --notify COMMAND gets an alert on its standard input, for example `mail -s training me@example.org`, or with
--json-text, which makes it {"text": ...}, and the address in the environment, `curl --silent --json @- "$WEBHOOK"`. --dry-run
prints the command instead.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.notify import run_command
from torchtitan_like.report.disk import Space, checkpoints_left, disk_usage, free_space, newest_checkpoint

GIB = 2**30


@dataclass(frozen=True)
class Look:
    """What was seen, and whether somebody should know."""

    said: str
    is_alert: bool


# ---- job


def look_at_job(name: str, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Look:
    """Does Slurm run or queue a job called ``name`` of this user? OSError when it cannot be asked."""
    command = ["squeue", "--noheader", "--me", f"--name={name}", "--format=%i %T"]
    done = run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")
    jobs = [line.split() for line in done.stdout.splitlines() if line.strip()]
    alive = [f"{job} {state.lower()}" for job, state in jobs if state not in ("COMPLETING", "COMPLETED")]
    return Look(f"job {name}: {', '.join(alive) or 'neither running nor queued'}", not alive)


# ---- log


def look_at_log(file: Path, max_silence: float, now: float) -> Look:
    """Was ``file`` written to in the last ``max_silence`` minutes?"""
    try:
        silence = (now - file.stat().st_mtime) / 60
    except FileNotFoundError:
        return Look(f"log {file}: it is not there", True)
    return Look(f"log {file}: written {silence:.0f} min ago (at most {max_silence:g})", silence > max_silence)


# ---- disk


def told_by(command: str) -> Space:
    """Free bytes, and inodes if there is a second number, as ``command`` prints them. ValueError when it does not."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    numbers = done.stdout.split()
    if done.returncode != 0 or not 1 <= len(numbers) <= 2 or not all(word.isdecimal() for word in numbers):
        raise ValueError(f"{command}: expected the free bytes [and free inodes], got {done.stdout + done.stderr!r}")
    return Space(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)


def look_at_disk(path: Path, options: argparse.Namespace) -> Look:
    """Are there bytes, inodes and room for checkpoints left at ``path``?"""
    left = told_by(options.free_command) if options.free_command else free_space(path)
    if options.quota_gib is not None:
        left = Space(min(left.num_bytes, int(options.quota_gib * GIB) - disk_usage(path)[0]), left.num_inodes)
    said = [f"{left.num_bytes / GIB:,.1f} GiB free (at least {options.min_free_gib:g})"]
    alerts = [left.num_bytes < options.min_free_gib * GIB]
    if left.num_inodes is not None:
        said.append(f"{left.num_inodes:,} inodes free (at least {options.min_free_inodes:,})")
        alerts.append(left.num_inodes < options.min_free_inodes)
    save = newest_checkpoint(path)
    if save is not None:
        saves = checkpoints_left(left, save)
        said.append(f"{saves:,} checkpoints left (at least {options.min_saves})")
        alerts.append(saves < options.min_saves)
        if save.seconds:
            days = saves * save.seconds / 86400
            said.append(f"{days:.1f} days of saves left (at least {options.min_days:g})")
            alerts.append(days < options.min_days)
    return Look(f"disk {path}: {', '.join(said)}", any(alerts))


# ---- the command


def parse(arguments: list[str]) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--log", type=Path, metavar="FILE", help="append every look to it, as the run's own log")
    common.add_argument("--notify", metavar="COMMAND", help="what gets an alert on its standard input")
    common.add_argument("--dry-run", action="store_true", help="print the command that would be notified")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    job = kinds.add_parser("job", parents=[common])
    job.add_argument("name", help="the job's name (sbatch --job-name)")
    log = kinds.add_parser("log", parents=[common])
    log.add_argument("file", type=Path)
    log.add_argument("--max-silence", type=float, default=30, metavar="MINUTES")
    disk = kinds.add_parser("disk", parents=[common])
    disk.add_argument("path", type=Path, nargs="+", help="a run's folder, or any on the disk")
    disk.add_argument("--min-free-gib", type=float, default=0, metavar="N")
    disk.add_argument("--min-free-inodes", type=int, default=0, metavar="N")
    disk.add_argument("--min-saves", type=int, default=0, metavar="N", help="checkpoints that must still fit")
    disk.add_argument("--min-days", type=float, default=0, metavar="N", help="days for which saves must still fit")
    disk.add_argument("--free-command", metavar="COMMAND", help="prints the free bytes [and free inodes]")
    disk.add_argument("--quota-gib", type=float, metavar="N", help="what each path may hold; it is counted")
    return parser.parse_args(arguments)


def look(options: argparse.Namespace) -> list[Look]:
    if options.kind == "job":
        return [look_at_job(options.name)]
    if options.kind == "log":
        return [look_at_log(options.file, options.max_silence, time.time())]
    return [look_at_disk(path, options) for path in options.path]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(arguments)
    try:
        looks = look(options)
        lines = [f"{'ALERT ' if seen.is_alert else ''}{seen.said}" for seen in looks]
        print("\n".join(lines))
        if options.log is not None:
            with open(options.log, "a", encoding="utf-8") as log:
                log.writelines(f"{time.strftime('%F %T')} watchdog {line}\n" for line in lines)
        alerts = [seen.said for seen in looks if seen.is_alert]
        if alerts and options.notify:
            if options.dry_run:
                print(f"would run: {options.notify}")
            else:
                run_command(options.notify, "\n".join(alerts))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if alerts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
