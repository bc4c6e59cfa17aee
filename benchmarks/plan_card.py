"""Compare plans with runs that were measured on one GPU.

    git worktree add /tmp/then c7ff721
    PYTHONPATH=/tmp/then python benchmarks/plan_card.py record --gpu h200-141g
    PYTHONPATH=. python benchmarks/plan_card.py record --gpu h100-80g
    PYTHONPATH=. python benchmarks/plan_card.py table

The runs on the H200 are dry-run with the code that was measured. Its allocator had no expandable
segments, nor had that of the runs on the H100. `benchmarks/gpu_jobs.py` compares the same jobs with
plans on the card where it runs.

WORK=tiny in the environment makes the models tiny, to check both programs on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

MODELS = {
    "1.5B": "dim=2048 n_layers=16 n_heads=32 n_kv_heads=8 multiple_of=256 vocab_size=128256 "
    "ffn_dim_multiplier=1.5",
    "8B": "dim=4096 n_layers=32 n_heads=32 n_kv_heads=8 multiple_of=1024 vocab_size=128256 "
    "ffn_dim_multiplier=1.3",
    "debug": "dim=256 n_layers=6 n_heads=16 n_kv_heads=16 multiple_of=256 vocab_size=2048",
    "experts": "dim=1024 n_layers=12 n_heads=16 n_kv_heads=4 head_dim=128 hidden_dim=3072 "
    "vocab_size=32768 moe_inter_dim=512 num_experts=64 top_k=8",
    "1B": "",
}
FLAVORS = {"experts": ("qwen3", "debugmodel_moe"), "1B": ("llama3", "1B")}
SHAPES = {"debug": (8, 2048), "experts": (4, 4096)}  # samples and tokens of each; else (1, 8192)
if os.environ.get("WORK") == "tiny":
    TINY = "dim=64 n_layers=2 n_heads=4 n_kv_heads=2 vocab_size=2048"
    EXPERTS = f"{TINY} head_dim=16 hidden_dim=128 moe_inter_dim=32 num_experts=8 top_k=2"
    MODELS = {name: EXPERTS if name == "experts" else f"{TINY} multiple_of=32" for name in MODELS}
    SHAPES = dict.fromkeys(MODELS, (2, 64))
OPTIONS = {
    "eager": "--activation_checkpoint.mode=none",
    "graphs": "--activation_checkpoint.mode=none --compile.cuda_graphs",
    "op": "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op",
    "compiled": "--activation_checkpoint.mode=none --compile.enable",
    "full, compiled": "--activation_checkpoint.mode=full --compile.enable",
    "float8, compiled": "--activation_checkpoint.mode=none --compile.enable "
    "--model.converters=quantize.linear.float8 --quantize.linear.float8.recipe_name=rowwise "
    "--quantize.linear.float8.filter_fqns=output",
}


class CardRun(NamedTuple):
    """A measured run: milliseconds of a step, GiB active (0: not measured) and reserved."""

    gpu: str
    model: str
    option: str
    milliseconds: float
    active: float
    reserved: float


def settings(model: str, option: str, steps: int = 30) -> list[str]:
    """Return the arguments of a run."""
    name, flavor = FLAVORS.get(model, ("llama3", "debugmodel"))
    samples, seq_len = SHAPES.get(model, (1, 8192))
    return [
        f"--model.name={name}",
        f"--model.flavor={flavor}",
        *(f"--model.args.{pair}" for pair in MODELS[model].split()),
        f"--training.local_batch_size={samples}",
        f"--training.seq_len={seq_len}",
        f"--training.steps={steps}",
        "--training.mixed_precision_param=bfloat16",
        *("--checkpoint.no-enable", "--validation.no-enable"),
        "--metrics.no-enable_tensorboard",
        *OPTIONS[option].split(),
    ]


# docs/benchmarks/2026-11-26-gpu-h200.md and 2026-11-28-gpu-h100.md. Of the H100, 1B is 8,192 tokens /
# `tps` of step 20, and its memory the reserved one.
RUNS = (
    CardRun("h200-141g", "1.5B", "compiled", 179.8, 28.75, 30.33),
    CardRun("h200-141g", "1.5B", "op", 216.8, 24.23, 25.85),
    CardRun("h200-141g", "8B", "full, compiled", 1018.5, 120.71, 122.38),
    CardRun("h200-141g", "debug", "eager", 22.9, 1.41, 1.60),
    CardRun("h200-141g", "experts", "eager", 200.9, 33.51, 34.86),
    CardRun("h200-141g", "1.5B", "float8, compiled", 192.5, 25.75, 27.34),
    CardRun("h100-80g", "1.5B", "compiled", 171.8, 30.91, 33.24),
    CardRun("h100-80g", "1.5B", "op", 230.6, 26.93, 30.28),
    CardRun("h100-80g", "1B", "eager", 193.2, 0, 34.16),
    CardRun("h100-80g", "1B", "compiled", 170.6, 0, 30.37),
    CardRun("h100-80g", "1B", "op", 211.7, 0, 27.31),
    CardRun("h100-80g", "1B", "full, compiled", 199.4, 0, 22.82),
    CardRun("h100-80g", "debug", "eager", 37.0, 0, 1.60),
)


def load(arguments: list[str]) -> Any:
    """Return the configuration of a run."""
    try:
        module = importlib.import_module("torchtitan_like.check")
    except ImportError:  # of the older code
        module = importlib.import_module("torchtitan_like.preflight")
    with contextlib.redirect_stdout(sys.stderr):
        return module.load_checked(arguments, 1, training=False, device_type="cuda")[0]


def record(arguments: list[str], path: Path) -> None:
    """Write the recording of a dry run."""
    import torch

    from torchtitan_like.plan import fake
    from torchtitan_like.plan.dry_run import record_ranks

    if not hasattr(fake, "_no_kernel"):  # the older code divides an operator that is one kernel
        library = torch.library.Library("aten", "IMPL")
        library.impl("silu_backward", lambda *_: None, "PrivateUse1")
    recorded = record_ranks(load(arguments), 1, [0], matmul_workspace=32 * 2**20)[0].recording
    path.write_bytes(pickle.dumps(recorded))


def predict(path: Path, option: str, gpu_name: str, *, is_expandable: bool) -> list[float]:
    """Return the planned milliseconds of a step, and the GiB active and reserved.

    gpu_name: of a GPU, or the path of a device file that `benchmarks.calibrate` wrote.
    """
    from torchtitan_like.plan.allocator import replay
    from torchtitan_like.plan.clusters import typical_cluster
    from torchtitan_like.plan.durations import durations
    from torchtitan_like.plan.fusion import fused_memory
    from torchtitan_like.plan.gpus import load_gpu
    from torchtitan_like.plan.timeline import play

    recording = pickle.loads(path.read_bytes())
    is_compiled = option.endswith("compiled")
    gpu = load_gpu(gpu_name)
    seconds = durations(recording, gpu, typical_cluster(gpu_name, 1), fuses=is_compiled)
    planned = play(recording, seconds, gpu.host_operator_us * 1e-6).seconds
    memory = fused_memory(recording) if is_compiled else recording
    reserved = replay(memory, is_expandable=is_expandable)
    return [1e3 * planned, reserved.active / 2**30, reserved.num_bytes / 2**30]


def percent(planned: float, measured: float) -> str:
    """Return the relative error of a plan; "" if nothing was measured."""
    return f"{100 * (planned / measured - 1):+.1f} %" if measured else ""


def print_row(run: CardRun, path: Path) -> None:
    """Print planned and measured time and memory."""
    planned = predict(path, run.option, run.gpu, is_expandable=False)
    errors = [percent(*pair) for pair in zip(planned, run[3:], strict=True)]
    print(
        f"| {run.gpu} | {run.model} {run.option} | {planned[0]:.1f} | {run.milliseconds} "
        f"| {errors[0]} | {planned[1]:.2f} | {run.active or ''} | {errors[1]} "
        f"| {planned[2]:.2f} | {run.reserved:.2f} | {errors[2]} |"
    )


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("record", "table"))
    parser.add_argument("--gpu", default="", help="only the runs on this one")
    parser.add_argument("--cache", type=Path, default=Path("outputs/plan_card"))
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if arguments.command == "table":
        print("| GPU | run | ms | measured | error | active | measured | error ", end="")
        print("| reserved | measured | error |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for run in RUNS:
        if not arguments.gpu or run.gpu == arguments.gpu:
            name = f"{run.gpu} {run.model} {run.option}.pickle".replace(" ", "_")
            if arguments.command == "record":
                record(settings(run.model, run.option), arguments.cache / name)
            else:
                print_row(run, arguments.cache / name)


if __name__ == "__main__":
    main()
