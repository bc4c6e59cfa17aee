"""Find collectives that no kernel overlaps, in the traces of `profiling.enable_profiling`.

    python scripts/exposed_comm.py outputs/profile_traces/iteration_100             # all ranks of a step
    python scripts/exposed_comm.py outputs/profile_traces/iteration_100/rank0_trace.json

For each trace, it prints milliseconds of a recorded step:

- all: from the first kernel to the end of the last one
- computing
- sending: NCCL's kernels, including the wait for a slower rank
- exposed: sending while this GPU computes nothing

Overlapping kernels count once. A list of the longest exposed collectives follows.
docs/guides/parallelism.md lists remedies. Traces of CPU ranks contain no kernels.

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
    """Milliseconds of all recorded steps. by_kind: exposed milliseconds by kind of collective."""

    num_steps: int
    total: float
    computed: float
    sent: float
    exposed: float
    by_kind: Counter[str]


def merged(spans: Spans) -> Spans:
    """Return the union of the spans as disjoint spans, in order."""
    result: Spans = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def without(spans: Spans, covers: Spans) -> Spans:
    """Return the parts of `spans` that no span of `covers` covers. Both must be merged."""
    result: Spans = []
    first = 0
    for start, end in spans:
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        index = first
        while start < end and index < len(covers) and covers[index][0] < end:
            if covers[index][0] > start:
                result.append((start, covers[index][0]))
            start = covers[index][1]
            index += 1
        if start < end:
            result.append((start, end))
    return result


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def kind_of(kernel: str) -> str:
    """Return the kind of collective: AllGather for `ncclDevKernel_AllGather_RING_LL(...)`."""
    words = kernel.partition("(")[0].split("_")
    return words[1] if len(words) > 1 else kernel


def exposed_in(events: list[dict[str, Any]]) -> Exposed | None:
    """Return the times of a Chrome trace, whose times are microseconds; None without kernels."""
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
    """Return the events of a trace. Raises ValueError if the file is not a trace."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a Chrome trace: {type(error).__name__}: {error}") from error
    return events


def row(name: str, times: Exposed) -> str:
    each = [
        value / times.num_steps
        for value in (times.total, times.computed, times.sent, times.exposed)
    ]
    return (
        f"{name:>24}"
        + "".join(f"{value:>11,.1f}" for value in each)
        + f"{times.exposed / times.total:>9.1%}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a trace, or a folder of rank<r>_trace.json")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the command. Return its exit code."""
    path = parse(arguments).trace
    files = [path] if path.is_file() else sorted(path.glob("*_trace.json*"))
    rows, kinds = [], Counter[str]()
    for file in files:
        try:
            times = exposed_in(read(file))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        if times is not None:
            rows.append(row(file.name.partition("_trace")[0], times))
            kinds.update({kind: time / times.num_steps for kind, time in times.by_kind.items()})
    if not rows:
        print(f"{path} contains no trace with GPU kernels", file=sys.stderr)
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
