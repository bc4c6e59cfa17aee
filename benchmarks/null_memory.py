"""Measure the peak GPU memory of one rank of a large run on a machine without a GPU.

    NULL_GPU_PYTHON benchmarks/null_memory.py [--cases 8b,70b] [--details]

Each case runs the trainer for four steps as rank 0 of 8 to 512 ranks. The device computes nothing
(tests/gpu_null). The other ranks do not exist: collectives return immediately, and exchanges
between hosts return this rank's values. Sizes, streams and PyTorch's caching allocator are real.
Initial weights are not computed.

The Python needs a CUDA build of torch and the project's dependencies. Prints a Markdown table.
--details adds the contents of the memory at the peak of a step, and the use of each stream's pool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
NUM_STEPS = 4
COMMON = f"""
    --model.hf_assets_path tests/assets/tokenizer
    --data.sources.corpus.path torchtitan_like/data/corpus/shakespeare_train.jsonl
    --checkpoint.no-enable --validation.no-enable --metrics.no-enable_tensorboard
    --profiling.no-enable_profiling --metrics.log_freq 100 --training.steps {NUM_STEPS}
"""
COMPILE = "--compile.enable"
FLOAT8 = (
    "--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output "
    "--quantize.linear.float8.recipe_name tensorwise"
)
TP = "--parallelism.tensor_parallel_degree"
PP = "--parallelism.pipeline_parallel_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
MICRO_BATCH = "--parallelism.pipeline_parallel_microbatch_size"
BATCH = "--training.local_batch_size"
LAYOUT_405B = f"{TP} 8 {PP} 8 {SCHEDULE} 1F1B {BATCH} 32 {MICRO_BATCH} 4 {COMPILE} {FLOAT8}"


@dataclass(frozen=True)
class Case:
    """One run: its TOML file, number of ranks and further arguments. Rank 0 is measured."""

    config: str
    num_ranks: int
    arguments: str = ""


CASES = {
    "8b": Case("llama3_8b", 8),
    "8b-whole-logits": Case("llama3_8b", 8, "--loss.chunk_mib 0"),
    "8b-compiled": Case("llama3_8b", 8, COMPILE),
    "8b-batch-2-compiled": Case("llama3_8b", 8, f"{BATCH} 2 {COMPILE}"),
    "8b-tp-2": Case("llama3_8b", 8, f"{TP} 2"),
    "70b": Case("llama3_70b", 256, f"{TP} 8 {BATCH} 16 {COMPILE} {FLOAT8}"),
    "405b": Case("llama3_405b", 512, LAYOUT_405B),
}

# The content of a memory block: the first row whose (file, function) is in the stack of its
# allocation. "" matches every function.
CONTENTS = [
    ("optim/loss.py", "", "head and loss"),
    ("_fully_shard/_fsdp_collectives.py", "foreach_reduce", "gradients"),
    ("_fully_shard/_fsdp_param.py", "to_accumulated_grad_if_needed", "gradients"),
    ("_fully_shard/_fsdp_param_group.py", "unshard", "gathered weights"),
    ("_fully_shard/_fsdp_param_group.py", "wait_for_unshard", "gathered weights"),
    ("distributed/initialize.py", "materialize", "weights"),
    ("optim/optimizer.py", "", "optimizer state"),
    ("modules/module.py", "_call_impl", "activations"),
]
BACKWARD = "backward pass"  # allocations of autograd's thread without a Python frame


# ---- the run, in a new process


def run_case(case: Case, folder: Path, details: bool) -> dict[str, Any]:
    """Run the trainer as rank 0 of `case` and read the allocator."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(case.num_ranks), LOCAL_WORLD_SIZE="8"
    )
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = (
        "1024"  # otherwise other, missing ranks would be roots
    )
    import torch
    import torch.distributed as dist

    from torchtitan_like import run, train
    from torchtitan_like.distributed import world

    class MirrorGroup(world.HostGroup):
        """A group whose missing members send the values of this rank."""

        def __init__(self, ranks: list[int], timeout: Any) -> None:
            super().__init__(ranks[:1], timeout)
            self.size = len(ranks)

        def sum_async(self, values: list[int]) -> world.PendingSum:
            return world.PendingSum(torch.tensor(values, dtype=torch.int64) * self.size, None)

        def gather(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([rows] * self.size)

        def gather_objects(self, value: Any) -> list[Any]:
            return [value] * self.size

        def broadcast_object(self, value: Any) -> Any:
            return value

    readings: dict[str, Any] = {}

    class MeasuredTrainer(train.Trainer):
        def train_step(self, step: int, *args: Any) -> Any:
            if step == 1:
                readings["after_build"] = torch.cuda.memory_allocated()
            if step == NUM_STEPS:
                readings["between_steps"] = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            record = super().train_step(step, *args)
            if step == NUM_STEPS:
                stats = torch.cuda.memory_stats()
                readings["active"] = stats["active_bytes.all.peak"]
                readings["reserved"] = stats["reserved_bytes.all.peak"]
                readings["retries"] = stats["num_alloc_retries"]
                if details:
                    readings["peak"] = describe_peak(torch.cuda.memory._snapshot())
            return record

    world.HostGroup = MirrorGroup  # type: ignore[misc]
    train.initialize = lambda *args: None
    train.weight_hash = lambda part: 0
    train.nonfinite_names = lambda named: []  # all flags read from the device are False
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", rank=0, world_size=case.num_ranks, store=dist.HashStore(), device_id=device
    )
    if details:
        torch.cuda.memory._record_memory_history(max_entries=10_000_000, stacks="python")
    arguments = [
        "--job.config_file",
        f"train_configs/{case.config}.toml",
        "--job.dump_folder",
        str(folder),
    ]
    run.Trainer = MeasuredTrainer  # type: ignore[misc]
    code = run.main([*arguments, *COMMON.split(), *case.arguments.split()])
    if code:
        raise SystemExit(code)
    return readings


# ---- the allocator's history


def describe_peak(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the active memory at its peak by content, and the use of each stream's pool."""
    events = snapshot["device_traces"][0]
    blocks: dict[int, tuple[int, int, str]] = {}  # address -> size, stream, content
    active = peak = 0
    sizes_by_content: Counter[str] = Counter()
    at_peak: Counter[str] = Counter()
    pools: Counter[int] = Counter()
    used_by_stream: Counter[int] = Counter()
    used_at_peak: Counter[int] = Counter()
    for event in events:
        action, size, stream = event["action"], event["size"], event["stream"]
        if action in ("segment_alloc", "segment_map"):
            pools[stream] += size
        elif action in ("segment_free", "segment_unmap"):
            pools[stream] -= size
        elif action == "alloc":
            content = content_of(event["frames"])
            blocks[event["addr"]] = size, stream, content
            active += size
            sizes_by_content[content] += size
            used_by_stream[stream] += size
            if active > peak:
                peak, at_peak, used_at_peak = active, sizes_by_content.copy(), used_by_stream.copy()
        elif action == "free_completed" and event["addr"] in blocks:
            size, stream, content = blocks.pop(event["addr"])
            active -= size
            sizes_by_content[content] -= size
            used_by_stream[stream] -= size
    return {
        "active": peak,
        "contents": dict(at_peak.most_common()),
        "pools": {str(stream): [size, used_at_peak[stream]] for stream, size in pools.items()},
    }


def content_of(frames: Sequence[dict[str, Any]]) -> str:
    """Return a name for the contents of a block that was allocated by these frames."""
    for file, function, content in CONTENTS:
        if any(
            frame["filename"].endswith(file) and function in ("", frame["name"]) for frame in frames
        ):
            return content
    return "other" if frames else BACKWARD


# ---- all cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default=",".join(CASES),
        help=f"comma-separated names of {', '.join(CASES)}",
    )
    parser.add_argument(
        "--details", action="store_true", help="print the contents of memory at the peak"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        readings = run_case(CASES[options.cases], options.child / "outputs", options.details)
        (options.child / "readings.json").write_text(json.dumps(readings))
        os._exit(0)  # the process group cannot be destroyed without its peers
    from tests.gpu_null.harness import build_device

    print(
        "| case | after build | between steps | peak active | peak reserved (GiB) |\n"
        "|---|---|---|---|---|",
        flush=True,
    )
    all_readings = {}
    with tempfile.TemporaryDirectory() as name:
        library = build_device(Path(name))
        for case in options.cases.split(","):
            folder = Path(name) / case
            folder.mkdir()
            command = [sys.executable, __file__, "--cases", case, "--child", str(folder)]
            command += ["--details"] * options.details
            with (folder / "log.txt").open("w+") as log:
                code = subprocess.call(
                    command, cwd=ROOT, env=environment(library), stdout=log, stderr=log
                )
                if code:
                    log.seek(0)
                    raise SystemExit(
                        f"{log.read()}\n{case} ended with code {code}; its log is above"
                    )
            readings = all_readings[case] = json.loads((folder / "readings.json").read_text())
            figures = (
                readings[key] / GIB
                for key in ("after_build", "between_steps", "active", "reserved")
            )
            print(f"| {case} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)
    for case, readings in all_readings.items() if options.details else ():
        peak = readings["peak"]
        print(f"\n{case}, {peak['active'] / GIB:.2f} GiB at the peak:")
        for content, size in peak["contents"].items():
            print(f"  {size / GIB:6.2f} {content}")
        for pool, used in peak["pools"].values():
            print(f"  {used / GIB:6.2f} in use of a stream's pool of {pool / GIB:.2f}")


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process on a null device with enough memory for all cases."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NULL_CUDA_MEMORY_GIB": "200",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # run_train.sh also sets it
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN needs a real device
    }


if __name__ == "__main__":
    main()
