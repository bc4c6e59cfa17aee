"""Who is where, by the files of scripts/trace_lines.py: `python scripts/trace_ranks.py FOLDER`.

Ranks whose last lines are at the same places stand together, the largest group first: the few are the odd ones out. With
--count TEXT, also how many lines of each rank hold it: a rank that called all_reduce once less than the others is the one
they wait for. Only the main thread is looked at, unless --thread names another (ProfilerThread-1, ...).

Exit code 0: all stand together, and counts are equal; 1: they do not; 2: there is nothing to look at.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trace:
    """rank: with its host and process. last: places, the newest at the end. seconds: from the start to the last of them."""

    rank: str
    last: tuple[str, ...]
    seconds: float
    counts: tuple[int, ...]


def read(file: Path, num_last: int, thread: str, texts: list[str]) -> Trace:
    """The end of a rank's file, and how many of its lines hold each of ``texts``. The torn last line does not count."""
    host, rank, pid = file.stem.removeprefix("trace-").rsplit("-", 2)
    last: deque[str] = deque(maxlen=num_last)
    counts, seconds = [0] * len(texts), 0.0
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            time, _, rest = line.strip().partition(" ")
            if not line.endswith("\n") or not rest.startswith(f"{thread} "):
                continue
            seconds = float(time)
            last.append(rest.removeprefix(f"{thread} "))
            counts = [count + (text in rest) for count, text in zip(counts, texts, strict=True)]
    return Trace(f"{rank} ({host}, process {pid})", tuple(last), seconds, tuple(counts))


def grouped(traces: list[Trace]) -> list[list[Trace]]:
    """Those at the same places, the largest group first."""
    groups: dict[tuple[str, ...], list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.last, []).append(trace)
    return sorted(groups.values(), key=len, reverse=True)


def report(traces: list[Trace], texts: list[str]) -> tuple[list[str], bool]:
    """Lines for a person, and whether nobody is odd."""
    groups = grouped(traces)
    lines = []
    for group in groups:
        lines.append(
            f"{len(group)} of {len(traces)} ranks, last heard {max(one.seconds for one in group):.1f} s after the start:"
        )
        lines += [f"    {place}" for place in group[0].last]
        lines += [f"  rank {one.rank}" for one in group[:8]] + ["  ..."] * (len(group) > 8)
    for number, text in enumerate(texts):
        counts: dict[int, list[str]] = {}
        for one in traces:
            counts.setdefault(one.counts[number], []).append(one.rank.partition(" ")[0])
        told = "; ".join(
            f"{count:,} on ranks {', '.join(ranks[:8])}{' ...' * (len(ranks) > 8)}" for count, ranks in counts.items()
        )
        lines.append(f"lines with {text!r}: {told}")
    return lines, len(groups) == 1 and all(len({one.counts[i] for one in traces}) == 1 for i in range(len(texts)))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that of TRACE_TO")
    parser.add_argument("--last", type=int, default=3, metavar="N", help="lines to compare (3)")
    parser.add_argument("--count", action="append", default=[], metavar="TEXT")
    parser.add_argument("--thread", default="MainThread")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(arguments)
    files = sorted(options.folder.glob("trace-*-*-*.txt"), key=lambda file: int(file.stem.rsplit("-", 2)[1]))
    if not files:
        print(f"{options.folder} holds no trace-<host>-<rank>-<pid>.txt of scripts/trace_lines.py", file=sys.stderr)
        return 2
    lines, is_even = report([read(file, options.last, options.thread, options.count) for file in files], options.count)
    print("\n".join(lines))
    return 0 if is_even else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
