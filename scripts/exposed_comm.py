"""Find collectives that no kernel overlaps, in the traces of `profiling.enable_profiling`.

    python scripts/exposed_comm.py outputs/profile_traces/iteration_100             # all ranks of a step
    python scripts/exposed_comm.py outputs/profile_traces/iteration_100/rank0_trace.json

For each trace, it prints the milliseconds of a recorded step: from its first kernel to its last, of
computing, of sending (NCCL's kernels, including the wait for a slower rank), and of *exposed*
sending, while that GPU computes nothing. Overlapping collectives count once, and so do overlapping
kernels. A list of the longest exposed collectives follows. docs/guides/parallelism.md lists
remedies. Traces of CPU ranks contain no kernels.

Exit codes: 0; 2 if there is no trace with kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of all recorded steps; by_kind: those exposed, by the kernel's name."""

    num_steps: int
    total: float
    computed: float
    sent: float
    exposed: float
    by_kind: Counter[str]


def merged(spans: Spans) -> Spans:
    """Return the union of the spans as disjoint spans, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(spans: Spans, covers: Spans) -> Spans:
    """What of `spans` no span of `covers` covers. Both are merged."""
    found: Spans = []
    first = 0
    for begin, end in spans:
        while first < len(covers) and covers[first][1] <= begin:
            first += 1
        at = first
        while begin < end and at < len(covers) and covers[at][0] < end:
            if covers[at][0] > begin:
                found.append((begin, covers[at][0]))
            begin = covers[at][1]
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def kind_of(kernel: str) -> str:
    """`ncclDevKernel_AllGather_RING_LL(...)` -> AllGather."""
    words = kernel.partition("(")[0].split("_")
    return words[1] if len(words) > 1 else kernel


def exposed_in(events: list[dict[str, Any]]) -> Exposed | None:
    """None where no kernel is among the events (times of a Chrome trace are microseconds)."""
    computed: Spans = []
    sent: dict[str, Spans] = {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in KERNELS:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        name = str(event["name"])
        if name.lower().startswith("nccl"):
            sent.setdefault(kind_of(name), []).append(span)
        else:
            computed.append(span)
    everything = merged([*computed, *(span for spans in sent.values() for span in spans)])
    if not everything:
        return None
    computed = merged(computed)
    sending = merged([span for spans in sent.values() for span in spans])
    steps = {
        event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")
    }
    by_kind = Counter(
        {kind: length(without(merged(spans), computed)) / 1000 for kind, spans in sent.items()}
    )
    return Exposed(
        num_steps=max(1, len(steps)),
        total=(everything[-1][1] - everything[0][0]) / 1000,
        computed=length(computed) / 1000,
        sent=length(sending) / 1000,
        exposed=length(without(sending, computed)) / 1000,
        by_kind=by_kind,
    )


def read(file: Path) -> list[dict[str, Any]]:
    """The events of a trace. Raises ValueError where it holds none."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no Chrome trace: {type(error).__name__}: {error}") from error
    return events


def row(name: str, found: Exposed) -> str:
    each = [
        value / found.num_steps
        for value in (found.total, found.computed, found.sent, found.exposed)
    ]
    return (
        f"{name:>24}"
        + "".join(f"{value:>11,.1f}" for value in each)
        + f"{found.exposed / found.total:>9.1%}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", type=Path, help="a trace, or a folder of rank<r>_trace.json")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    place = parse(arguments).place
    files = [place] if place.is_file() else sorted(place.glob("*_trace.json*"))
    rows, kinds = [], Counter[str]()
    for file in files:
        try:
            found = exposed_in(read(file))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        if found is not None:
            rows.append(row(file.name.partition("_trace")[0], found))
            kinds.update({kind: time / found.num_steps for kind, time in found.by_kind.items()})
    if not rows:
        print(f"{place} holds no trace with kernels of a GPU", file=sys.stderr)
        return 2
    print(
        f"{'ms of a step':>24}{'all':>11}{'computing':>11}{'sending':>11}{'exposed':>11}{'of all':>9}"
    )
    print("\n".join(rows))
    for kind, time in kinds.most_common(8):
        print(f"{kind:>24}{'':>33}{time / len(rows):>11,.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
