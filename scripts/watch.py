"""How a run is doing, from its folder alone: `python scripts/watch.py outputs`, on any machine that sees it.

Step, loss, speed, memory, time left, checkpoints and disk; of every rank where it is and for how long it has been silent
(attempts/<n>/heartbeat/rank-*.json of the newest attempt, where there are any). --once prints that and ends; otherwise it is
printed anew every --every seconds until Ctrl-C. Exit code of --once: 0, or 1 when the folder is no run's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from scripts.watchdog import GIB, newest_save, saves_left, space
from torchtitan_like.util.jsonl import decode

RECENT = 1000  # rows from which the time of a step is taken
TAIL = 8 * 2**20  # bytes that hold them: after a million steps the whole file is not for every look
SILENT = 60.0  # seconds without a heartbeat that are pointed out
Row = dict[str, Any]


def rows_of(file: Path) -> list[Row]:
    """The last rows that are whole: the newest line may still be under way."""
    try:
        with file.open("rb") as stream:
            begin = max(0, stream.seek(0, os.SEEK_END) - TAIL)
            stream.seek(begin)
            lines = stream.read().split(b"\n")[begin > 0 : -1]
    except FileNotFoundError:
        return []
    return [decode(line) for line in lines[-RECENT:]]


def json_of(file: Path) -> Row:
    """Its content; empty when it is not there, or just being written."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def total_steps(folder: Path) -> int | None:
    """`training.steps` of the newest attempt."""
    for line in (folder / "config.toml").read_text(encoding="utf-8").partition("[training]")[2].splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "steps":
            return int(value.partition("#")[0])
        if line.startswith("["):
            break
    return None


def duration(seconds: float) -> str:
    """As 3 d 04:05 h, 4:05 h, 5:06 min or 7 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02} h"
    if hours:
        return f"{hours}:{minutes:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def progress_lines(folder: Path, now: float) -> list[str]:
    """Where the run is, and when it will be done: by the median time between the rows that are there."""
    rows, total = rows_of(folder / "metrics.jsonl"), total_steps(folder)
    if not rows:
        return ["no step is done yet"]
    last = rows[-1]
    lines = [f"step {last['step']:,} of {total:,} " if total else f"step {last['step']:,} "]
    lines[0] += f"({duration(max(0.0, now - last['time']))} ago), {last['n_tokens_seen']:,} tokens"
    lines.append(f"loss {float(last['loss']):.4f}, grad_norm {float(last['grad_norm']):.4f}, lr {last['lr']:.3g}")
    logged = next((row for row in reversed(rows) if "tps" in row), {})
    speed = [f"{logged[key]:,.{digits}f} {unit}" for key, digits, unit in SPEEDS if logged.get(key) is not None]
    if speed:
        lines.append(", ".join(speed))
    gaps = sorted(b["time"] - a["time"] for a, b in zip(rows, rows[1:], strict=False) if b["step"] == a["step"] + 1)
    if gaps and total and last["step"] < total:
        step = gaps[len(gaps) // 2]
        lines.append(
            f"{step:.3g} s a step: {duration((total - last['step']) * step)} left, without saves and validation"
        )
    return lines


SPEEDS = (
    ("tps", 0, "tokens/s on each device"),
    ("tflops", 2, "TFLOP/s"),
    ("mfu", 1, "% MFU"),
    ("memory_gib", 2, "GiB"),
)


def end_lines(folder: Path) -> list[str]:
    end = json_of(folder / "exit.json")
    return [f"ended at step {end['step']}: {end['reason']} (code {end['code']})"] if end else []


def disk_line(folder: Path) -> str:
    left, save = space(folder), newest_save(folder)
    text = f"disk: {left.num_bytes / GIB:,.1f} GiB free"
    return text if save is None else f"{text}, room for {saves_left(left, save):,} checkpoints"


def heartbeat_lines(folder: Path, now: float) -> list[str]:
    """One line for each place where ranks are, that of the slowest first, and one for each rank that is silent."""
    attempts = [int(path.name) for path in (folder / "attempts").glob("[0-9]*") if path.name.isdecimal()]
    if not attempts:
        return []
    beats = {}
    for file in (folder / "attempts" / str(max(attempts)) / "heartbeat").glob("rank-*.json"):
        beat = json_of(file)
        if beat:
            beats[int(file.stem.removeprefix("rank-"))] = beat
    places: dict[tuple[Any, ...], list[int]] = {}
    for rank, beat in sorted(beats.items()):
        places.setdefault((beat.get("step") or 0, beat.get("micro_batch") or 0, beat.get("phase") or ""), []).append(
            rank
        )
    lines = []
    for (step, micro_batch, phase), ranks in sorted(places.items()):
        oldest = max(now - beats[rank]["time"] for rank in ranks)
        where = f"step {step} micro-batch {micro_batch} {phase}".rstrip()
        lines.append(
            f"{len(ranks)} of {len(beats)} ranks in {where}, heard up to {duration(max(0.0, oldest))} ago: {few(ranks)}"
        )
    silent = [rank for rank, beat in sorted(beats.items()) if now - beat["time"] > SILENT]
    if silent and not (folder / "exit.json").exists():
        lines.append(f"SILENT for more than {SILENT:g} s: ranks {few(silent)}")
    return lines


def few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def report(folder: Path, now: float) -> list[str]:
    """All that can be told. OSError when the folder is no run's."""
    return [*progress_lines(folder, now), *end_lines(folder), disk_line(folder), *heartbeat_lines(folder, now)]


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder (job.dump_folder)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS")
    options = parser.parse_args(arguments)
    try:
        while True:
            lines = report(options.run, time.time())
            clear = "\033[2J\033[H" if sys.stdout.isatty() and not options.once else ""
            print(clear + "\n".join(lines), flush=True)
            if options.once:
                return 0
            time.sleep(options.every)
    except OSError as error:
        print(
            f"{options.run} is not the folder of a run: {os.strerror(error.errno or 0)}: {error.filename}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
