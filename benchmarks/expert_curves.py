r"""Loss of a small MoE (8 experts, top 2) and of a dense model with as many active parameters.

    python -m benchmarks.expert_curves FOLDER [--steps 400] [--section.key value ...]

Trains both on the shipped text with the same data, seed, optimizer, and schedule, one rank each.
Writes FOLDER/expert_curves.csv (validation losses by step, tokens, and active FLOPs), and, where
matplotlib is installed, FOLDER/expert_curves.svg. If FOLDER already contains a run, it resumes, or
ends at once if it is finished.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCH, SEQ_LEN = 8, 256
SIZES = {
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "enable_weight_tying": False,
}
# Two experts of 192 hidden units process a token, so the dense model has 384.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("debugmodel", {"hidden_dim": 384}),
    "moe": (
        "debugmodel_moe",
        {
            "num_experts": 8,
            "top_k": 2,
            "moe_inter_dim": 192,
            "load_balance": "global",
            "load_balance_coeff": 1e-3,
        },
    ),
}


def train(name: str, folder: Path, steps: int, settings: list[str]) -> None:
    """Train a model as far as `steps`; its run directory is FOLDER/name."""
    flavor, args = MODELS[name]
    keys = {
        "job.config_file": ROOT / "torchtitan_like/train_configs/debug_model.toml",
        "job.dump_folder": folder / name,
        "model.name": "qwen3",
        "model.flavor": flavor,
        "model.hf_assets_path": ROOT / "tests/assets/tokenizer",
        **{f"model.args.{key}": value for key, value in {**SIZES, **args}.items()},
        "training.local_batch_size": BATCH,
        "training.seq_len": SEQ_LEN,
        "training.steps": steps,
        "lr_scheduler.warmup_steps": 40,
        "optimizer.lr": 2e-3,
        "validation.freq": 25,
        "validation.steps": 8,
    }
    argv = [f"--{key}={value}" for key, value in keys.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "torchtitan_like.train", *argv, *settings],
        check=True, cwd=ROOT, env=environment,
    )  # fmt: skip


def read_curve(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return one row for each validation of a run."""
    from torchtitan_like.models import get_spec

    flavor, changes = MODELS[name]
    spec = get_spec("qwen3")
    args = replace(spec.flavors[flavor], **SIZES, **changes)
    rows = [json.loads(line) for line in (folder / name / "validation.jsonl").open()]
    return [
        {
            "model": name,
            "step": row["step"],
            "tokens": row["step"] * BATCH * SEQ_LEN,
            "active_flops": row["step"] * BATCH * SEQ_LEN * spec.flops_per_token(args, SEQ_LEN),
            "validation_loss": row["loss"],
        }
        for row in rows
    ]


def draw(curves: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Draw the losses over tokens and over active FLOPs."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, key, label in zip(
        axes, ("tokens", "active_flops"), ("tokens", "active FLOPs"), strict=True
    ):
        for name, rows in curves.items():
            axis.plot(
                [row[key] for row in rows], [row["validation_loss"] for row in rows], label=name
            )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per token")
    axes[0].legend()
    pyplot.rcParams["svg.fonttype"] = "none"
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options, settings = parser.parse_known_args()
    folder = options.folder.resolve()
    for name in MODELS:
        train(name, folder, options.steps, settings)
    curves = {name: read_curve(name, folder) for name in MODELS}
    with (folder / "expert_curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curves["moe"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for rows in curves.values() for row in rows)
    try:
        draw(curves, folder / "expert_curves.svg")
    except ModuleNotFoundError:
        print("matplotlib is not installed: no picture is drawn.")


if __name__ == "__main__":
    main()
