"""Cost of `resilience` in a step without events: the calls that rank 0 makes in each step.

    python benchmarks/resilience.py [--rounds 9] [--folder DIR]

The table has microseconds of CPU time (user and system) per step on one thread: medians of the
rounds, with (minimum-maximum). `default` is `[resilience]` with its default values. `all on` skips
non-finite steps and spikes on the device, and has a deadline and a host-memory limit, which a rank
checks every 5 s.

--folder is the run directory with the switch files. Choose a folder on your runs' file system.

No row contains a collective: the all-reduce of the valid tokens includes the requests. `agreement`
is their additional cost on the host. The values are on the CPU; on a GPU, `update gate` launches
small kernels.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan_like.config.sections_run import Resilience
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.resilience.agreement import Requests, StepAgreement, Switches, first_stop, send
from torchtitan_like.resilience.heartbeat import RankPosition
from torchtitan_like.resilience.limits import Limits, used_memory_percent
from torchtitan_like.resilience.nonfinite import UpdateGate
from torchtitan_like.resilience.spikes import SpikeDetector

STEPS = 500
CHECK_INTERVAL_S, SHORT_STEP_S = 5.0, 0.1
ALL_ON = {
    "on_nonfinite": "skip",
    "on_spike": "skip",
    "max_runtime_minutes": 600,
    "max_cpu_mem_percent": 99,
}
Call = Callable[[], object]


def calls_of_a_step(section: Resilience, folder: Path) -> dict[str, Call]:
    """Return the calls of one step by name, with full windows, which have the highest cost."""
    device = torch.device("cpu")
    requests, group = Requests(), HostGroup.alone()
    switches, position = Switches(folder, section), RankPosition()
    limits = Limits(section, device, used_percent=lambda: 50.0)
    norms = {"grad_norms": [1.0] * section.spike_window}
    update_gate: UpdateGate[int] = UpdateGate(section, device, 0, norms)
    detector = SpikeDetector(
        section, lambda *_, **__: None, lambda step: lambda: None, lambda *_: None
    )
    grad_norm = torch.tensor(1.0)
    row = {"step": 1, "loss": 1.0, "grad_norm": 1.0}
    detector.observe([row] * section.spike_window)

    def gate() -> None:
        update_gate.was_frozen()
        update_gate.gate(grad_norm)
        update_gate.record(1)

    def agree() -> None:
        local = StepAgreement.of_rank(0, 0, requests.take())
        first_stop(send(local, group).wait().requests)

    def beat() -> None:
        position.move("step", 1)
        position.move("step", 1, 0)

    return {
        "switch files": switches.read,
        "limits": limits.reached,
        "update gate": gate,
        "agreement": agree,
        "heartbeat": beat,
        "spikes": lambda: detector.observe([row]),
    }


def microseconds(call: Call, num: int = STEPS) -> float:
    """Return the CPU time of one call, the mean of `num` calls."""
    start = time.process_time()
    for _ in range(num):
        call()
    return 1e6 * (time.process_time() - start) / num


def measure(section: Resilience, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per step by call and round, and their sums, after a warm-up round."""
    calls = calls_of_a_step(section, folder)
    rounds_measured: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        figures = {name: microseconds(call) for name, call in calls.items()}
        if section.max_cpu_mem_percent < 100:  # many short steps share one check
            figures["memory check"] = (
                microseconds(used_memory_percent, 20) * SHORT_STEP_S / CHECK_INTERVAL_S
            )
        rounds_measured.append({**figures, "all": sum(figures.values())})
    return {name: [figures[name] for figures in rounds_measured[1:]] for name in rounds_measured[0]}


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help=f"rounds of {STEPS} steps")
    parser.add_argument(
        "--folder", type=Path, help="the run directory (default: a temporary folder)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        columns = [
            measure(Resilience(**section), Path(folder), arguments.rounds)
            for section in ({}, ALL_ON)
        ]
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{arguments.rounds} rounds of {STEPS} steps\n"
    )
    print("| us of CPU per step | default | all on |\n|---|---|---|")
    for name in columns[1]:
        print(
            f"| {name} | "
            + " | ".join(spread(column[name]) if name in column else "-" for column in columns)
            + " |"
        )


if __name__ == "__main__":
    main()
