"""Compare five steps of 30 small runs on a GPU with the same steps on the CPU of the same machine.

    python -m benchmarks.cpu_gpu [--only llama3,gpt_oss] [--workers 12] [--steps 5]

Prints a line for each run as it ends: the largest relative difference of loss and gradient norm,
and its limit. Runs that no CPU can do, or that must not change a number, are compared with another
case.
Returns the number of runs that failed or differ. Without a GPU both sides run on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchtitan_like.util.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "--training.seq_len=256 --training.local_batch_size=4 --metrics.log_freq=1 --debug.seed=7 "
    "--metrics.no-enable_tensorboard --validation.no-enable --checkpoint.no-enable "
    "--lr_scheduler.warmup_steps=2"
).split()
FP32 = "--training.mixed_precision_param=float32"
BF16 = "--training.mixed_precision_param=bfloat16"
FLOAT8 = "--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns=[]"
SECONDS = 240  # that one run may take


@dataclass(frozen=True)
class Case:
    """limit: of the relative difference. equals: the case whose CPU run it is compared with."""

    config: str
    arguments: str
    limit: float
    equals: str = ""


def both_dtypes(name: str, config: str) -> dict[str, Case]:
    return {name: Case(config, FP32, 1e-3), f"{name}-bf16": Case(config, BF16, 2e-2)}


CASES = {
    **both_dtypes("llama3", "debug_model"),
    **both_dtypes("qwen3_moe", "qwen3_moe_debug"),
    **both_dtypes("deepseek_v3", "deepseek_v3_debug"),
    **both_dtypes("gpt_oss", "gpt_oss_debug"),
    **both_dtypes("llama4", "llama4_debug"),
    "flex": Case("debug_model", f"{FP32} --model.flavor=debugmodel_flex_attn", 1e-3),
    "varlen": Case("debug_model", f"{BF16} --model.flavor=debugmodel_varlen_attn", 2e-2),
    "compile": Case("debug_model", f"{FP32} --compile.enable", 1e-3, "llama3"),
    "flex-compile": Case(
        "debug_model", f"{BF16} --model.flavor=debugmodel_flex_attn --compile.enable", 2e-2
    ),
    "qwen3_moe-compile": Case(
        "qwen3_moe_debug", f"{BF16} --compile.enable", 2e-2, "qwen3_moe-bf16"
    ),
    "gpt_oss-compile": Case("gpt_oss_debug", f"{BF16} --compile.enable", 2e-2, "gpt_oss-bf16"),
    "in-backward": Case("debug_model", f"{FP32} --optimizer.early_step_in_backward", 1e-3),
    "muon": Case("debug_model", f"{FP32} --optimizer.name=Muon", 2e-2),
    "lion": Case("debug_model", f"{FP32} --optimizer.name=Lion", 1e-3),
    "adamw8bit": Case("debug_model", f"{FP32} --optimizer.name=AdamW8bit", 2e-2),
    "bf16-state": Case("debug_model", f"{FP32} --optimizer.state_dtype=bfloat16", 5e-3),
    "ema": Case("debug_model", f"{FP32} --ema.enable", 1e-3),
    "accumulation": Case(
        "debug_model", f"{FP32} --training.global_batch_size=8 --training.local_batch_size=2", 1e-3
    ),
    "ac-full": Case("debug_model", f"{FP32} --activation_checkpoint.mode=full", 1e-3, "llama3"),
    "ac-op": Case(
        "debug_model",
        f"{FP32} --activation_checkpoint.mode=selective "
        "--activation_checkpoint.selective_ac_option=op",
        1e-3,
        "llama3",
    ),
    "cpu-offload": Case("debug_model", f"{FP32} --training.enable_cpu_offload", 1e-3, "llama3"),
    "foreach": Case("debug_model", f"{FP32} --optimizer.implementation=foreach", 1e-3, "llama3"),
    "overflow": Case("debug_model", f"{FP32} --debug.detect_overflow", 1e-3, "llama3"),
    "float8-rowwise": Case(
        "debug_model",
        f"{BF16} {FLOAT8} --quantize.linear.float8.recipe_name=rowwise",
        5e-2,
        "llama3-bf16",
    ),
    "float8-tensorwise": Case(
        "debug_model",
        f"{BF16} {FLOAT8} --compile.enable",
        5e-2,
        "llama3-bf16",
    ),
}


def run(folder: Path, case: Case, steps: int, hides_gpu: bool) -> list[tuple[float, float]]:
    """Train in a new process. Return loss and gradient norm of each step; fewer if it failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    if hides_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torchtitan_like.train"]
    command += [f"--job.config_file=train_configs/{case.config}.toml", f"--training.steps={steps}"]
    command += [f"--job.dump_folder={folder}", *COMMON, *case.arguments.split()]
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            log.write(f"Error: took more than {SECONDS} s\n")
    rows = folder / "metrics.jsonl"
    return [(r["loss"], r["grad_norm"]) for r in read_rows(rows)] if rows.exists() else []


def largest_difference(
    actual: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> float:
    """Return the largest relative difference of a number."""
    pairs = [
        pair for rows in zip(actual, expected, strict=True) for pair in zip(*rows, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def last_error(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "Error" in line), "".join(lines[-1:]))[:200]


def compare(names: list[str], folder: Path, workers: int, steps: int) -> int:
    """Run the cases, and print a line for each. Return how many failed or differ."""
    wrong = 0
    needed = dict.fromkeys(CASES[name].equals or name for name in names)
    with ThreadPoolExecutor(workers) as pool:
        on_cpu: dict[str, Future[list[tuple[float, float]]]] = {
            name: pool.submit(run, folder / "cpu" / name, CASES[name], steps, True)
            for name in needed
        }
        on_gpu = {
            name: pool.submit(run, folder / "gpu" / name, CASES[name], steps, False)
            for name in names
        }
        for name in names:
            case = CASES[name]
            reference = case.equals or name
            actual, expected = on_gpu[name].result(), on_cpu[reference].result()
            if len(actual) == len(expected) == steps:
                difference = largest_difference(actual, expected)
                is_right = difference <= case.limit
                text = f"{difference:.1e} (limit {case.limit:g})"
            else:
                failed = folder / ("gpu" if len(actual) < steps else "cpu")
                is_right = False
                text = last_error(failed / (name if len(actual) < steps else reference))
            wrong += not is_right
            print(f"{'equal' if is_right else 'WRONG'}  {name:18} {text}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} runs are equal", flush=True)
    return wrong


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="names of cases")
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}. Expected some of {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        return compare(names, Path(folder), args.workers, args.steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
