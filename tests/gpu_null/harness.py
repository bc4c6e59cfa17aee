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
# The step whose calls are recorded individually and compared. The last step logs and ends the run.
DETAILED_STEP = 5


def build_device(folder: Path) -> Path:
    """Compile the device with the CUDA headers of torch's wheels and return the library.

    Raise RuntimeError with the compiler's output if the compilation fails.
    """
    site = Path(sysconfig.get_path("purelib"))
    includes = [*site.glob("nvidia/*/include"), site / "triton/backends/nvidia/include"]
    library = folder / "libcuda.so.1"  # the library name that Triton loads
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-fvisibility=hidden"]
    command += [f"-I{path}" for path in includes]
    command += [*map(str, sorted(SOURCES.glob("*.c"))), "-lpthread", "-ldl", "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"gcc could not compile the null CUDA device:\n{result.stderr}\n"
            "Expected gcc and the CUDA headers of torch's wheels (nvidia/*/include and triton). "
            "Install a CUDA build of torch, and gcc"
        )
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)  # NVML, for expandable segments
    return library


@dataclass(frozen=True)
class Recorded:
    """The recordings of all ranks of one run, in rank order, and the output of the run."""

    ranks: list[dict[str, Any]]
    output: str


def run_recorded(library: Path, folder: Path, arguments: list[str], num_ranks: int) -> Recorded:
    """Run the trainer on `num_ranks` null devices. Raise AssertionError if the run fails."""
    environment = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NULL_CUDA_LIBRARY": str(library),
        "NULL_CUDA_FOLDER": str(folder),
        "NULL_CUDA_DETAILED_STEP": str(DETAILED_STEP),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # One cache per run: kernels compiled by an earlier run change the peak of reserved memory.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # cuDNN needs a real device. PyTorch uses the flash kernel instead.
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


def demangle(name: str) -> str:
    """Return the demangled form of a C++ name."""
    result = subprocess.run(["c++filt", name], capture_output=True, text=True)
    return result.stdout.strip() or name


def main() -> None:
    """Print the device calls of a trainer step.

    Usage: `python -m tests.gpu_null.harness NUM_RANKS TRAINER_ARGUMENTS`.
    """
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
    """Return one line for each group of equal calls, sorted by kind and phase."""
    lines = []
    for kind, phase, site, detail, number in sorted(
        calls, key=lambda call: (call[0], call[1], -call[4])
    ):
        lines.append(f"{number:4} {kind} in {phase}: {demangle(detail)[:160]}\n       {site}")
    return lines


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
