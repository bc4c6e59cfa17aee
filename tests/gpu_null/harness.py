"""Build the null CUDA device and run the trainer on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_null.recording import recording_path
from tests.harness.runner import ROOT, run_trainer

SOURCES = Path(__file__).parent / "device"
NUM_STEPS = 6
TIMEOUT = 900  # seconds; compiling takes minutes on few cores
DETAILED_STEP = (
    5  # whose calls are recorded one by one and compared; the last step logs, and ends the run
)


def build_device(folder: Path) -> Path:
    """Compile the device against the CUDA headers that torch's wheels have brought; returns the
    library.

    Raises RuntimeError, with the compiler's output, if that fails.
    """
    site = Path(sysconfig.get_path("purelib"))
    includes = [*site.glob("nvidia/*/include"), site / "triton/backends/nvidia/include"]
    library = folder / "libcuda.so.1"  # the name under which Triton looks for the driver
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-fvisibility=hidden"]
    command += [f"-I{path}" for path in includes]
    command += [*map(str, sorted(SOURCES.glob("*.c"))), "-lpthread", "-ldl", "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"gcc could not compile the null CUDA device:\n{result.stderr}\n"
            "Expected gcc and the CUDA headers of torch's wheels (nvidia/*/include and triton). Install a CUDA build "
            "of torch, and gcc"
        )
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)  # NVML, which expandable segments ask
    return library


@dataclass(frozen=True)
class Recorded:
    """What the ranks of one run have recorded, in rank order, and what the run printed."""

    ranks: list[dict[str, Any]]
    output: str


def run_recorded(library: Path, folder: Path, arguments: list[str], num_ranks: int) -> Recorded:
    """Run the trainer on `num_ranks` null devices in `folder`. AssertionError if it does not end
    well."""
    environment = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NULL_CUDA_LIBRARY": str(library),
        "NULL_CUDA_FOLDER": str(folder),
        "NULL_CUDA_DETAILED_STEP": str(DETAILED_STEP),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # One cache for each run: kernels that an earlier run compiled change the peak of reserved memory.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # cuDNN's own library needs a real device. PyTorch then takes the flash kernel.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }
    folder.mkdir(parents=True, exist_ok=True)
    outputs = folder / "outputs"
    arguments = ["--job.dump_folder", str(outputs), "--training.steps", str(NUM_STEPS), *arguments]
    module = "tests.gpu_null.rank"
    run = run_trainer(
        arguments, num_ranks, outputs, env=environment, timeout=TIMEOUT, module=module
    )
    assert run.returncode == 0, run.tail
    assert run.exit is not None and run.exit["code"] == 0, run.tail
    ranks = [json.loads(recording_path(folder, rank).read_text()) for rank in range(num_ranks)]
    return Recorded(ranks, run.stdout)


def demangled(name: str) -> str:
    """A C++ name as a person reads it."""
    result = subprocess.run(["c++filt", name], capture_output=True, text=True)
    return result.stdout.strip() or name


def main() -> None:
    """Print what a step of the trainer costs: `python -m tests.gpu_null.harness NUM_RANKS
    TRAINER_ARGUMENTS`."""
    import tempfile

    num_ranks, arguments = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorded = run_recorded(build_device(folder), folder / "run", arguments, num_ranks)
    for rank, recording in enumerate(recorded.ranks):
        for step, counts in recording["steps"].items():
            print(f"rank {rank}, step {step}: {counts}")
    print("\n".join(describe_calls(recorded.ranks[0]["calls"])))


def describe_calls(calls: list[list[Any]]) -> list[str]:
    """One line for each group of equal calls, by kind and phase."""
    lines = []
    for kind, phase, site, detail, number in sorted(
        calls, key=lambda call: (call[0], call[1], -call[4])
    ):
        lines.append(f"{number:4} {kind} in {phase}: {demangled(detail)[:160]}\n       {site}")
    return lines


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
