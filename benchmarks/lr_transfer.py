r"""Loss over the learning rate at several widths, in the standard parametrization and in muP.

    python -m benchmarks.lr_transfer FOLDER [--steps 100] [--section.key value ...]

Trains Llama models of 2 layers, heads of 32 dimensions, on the shipped text: one run for each
parametrization, width, and learning rate, with the same data, seed, and schedule. Initial weights
have a standard deviation of sqrt(2 / (5 width)) in both. The base model of muP has width 64, where
both parametrizations are the same run. Appends each result to
FOLDER/lr_transfer.csv (mean training loss of the last 20 steps) and draws FOLDER/lr_transfer.svg.
Called again, it runs only what the file lacks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from torchtitan_like.util.pictures import PALETTE, picture

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (64, 128, 256, 512)
HEAD = 32
RATES = tuple(2.0**exponent for exponent in range(-10, -3))
KINDS = ("standard", "mup")
Losses = dict[tuple[str, int, float], float]  # by parametrization, width, learning rate


def train(kind: str, width: int, lr: float, steps: int, settings: list[str]) -> float:
    """Return the mean training loss of the last 20 steps; inf after a non-finite loss."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "job.config_file": ROOT / "torchtitan_like/train_configs/debug_model.toml",
            "job.dump_folder": folder,
            "model.hf_assets_path": ROOT / "tests/assets/tokenizer",
            "model.args.dim": width,
            "model.args.n_heads": width // HEAD,
            "model.args.n_layers": 2,
            "model.args.multiple_of": 32,
            "model.args.init_std": "sqrt(2/(5h))",
            "model.parametrization": kind,
            "optimizer.lr": lr,
            "lr_scheduler.warmup_steps": 10,
            "training.local_batch_size": 8,
            "training.seq_len": 64,
            "training.steps": steps,
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": False,
            "checkpoint.enable": False,
            "validation.enable": False,
        }
        if kind != "standard":
            base = {"model.base_args.dim": WIDTHS[0], "model.base_args.n_heads": WIDTHS[0] // HEAD}
            keys |= base
        argv = [f"--{key}={json.dumps(v) if isinstance(v, bool) else v}" for key, v in keys.items()]
        command = [sys.executable, "-m", "torchtitan_like.train", *argv, *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
        )
        file = Path(folder) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.open()] if file.exists() else []
        if len(rows) < steps:
            if "non-finite" not in process.stderr:
                raise SystemExit(process.stderr[-3000:])
            return float("inf")
        return fmean(float(row["loss"]) for row in rows[-20:])


def read(file: Path) -> Losses:
    """Return the results in the file; none if it does not exist."""
    if not file.exists():
        return {}
    with file.open(newline="") as stream:
        return {
            (row["parametrization"], int(row["width"]), float(row["lr"])): float(row["loss"])
            for row in csv.DictReader(stream)
        }


def best_rate(losses: Losses, kind: str, width: int) -> float:
    """Return the learning rate with the lowest loss."""
    return min(RATES, key=lambda lr: losses[kind, width, lr])


def draw(losses: Losses, path: Path) -> None:
    """Draw a panel for each parametrization, with a line for each width and a dot at its best rate."""
    with picture(path, 8, 3.4) as figure:
        panels = figure.subplots(1, len(KINDS), sharey=True)
        for panel, kind in zip(panels, KINDS, strict=True):
            for width, color in zip(WIDTHS, PALETTE, strict=False):
                ys = [losses[kind, width, lr] for lr in RATES]
                panel.plot(RATES, ys, color=color, label=f"width {width}")
                best = best_rate(losses, kind, width)
                panel.plot([best], [losses[kind, width, best]], "o", color=color)
            panel.set_xscale("log", base=2)
            panel.set_xticks(RATES[::2], [f"1/{1 / lr:.0f}" for lr in RATES[::2]])
            panel.set_title(f'parametrization = "{kind}"')
            panel.set_xlabel("optimizer.lr")
            panel.grid(True)
        finite = sorted(losses.values())
        panels[0].set_ylim(finite[0] - 0.1, min(finite[0] + 2.5, finite[-1] + 0.1))
        panels[0].set_ylabel("training loss, nats per token")
        panels[1].legend(frameon=False, loc="upper center")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    options, settings = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "lr_transfer.csv"
    losses = read(file)
    with file.open("a", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        if not losses:
            writer.writerow(("parametrization", "width", "lr", "loss"))
        for width in (WIDTHS[0], *reversed(WIDTHS[1:])):
            for lr in RATES:
                for kind in KINDS:
                    if (kind, width, lr) in losses:
                        continue
                    is_base = kind == "mup" and width == WIDTHS[0]
                    loss = (
                        losses["standard", width, lr]
                        if is_base
                        else train(kind, width, lr, options.steps, settings)
                    )
                    losses[kind, width, lr] = loss
                    writer.writerow((kind, width, lr, f"{loss:.4f}"))
                    stream.flush()
                    print(f"{kind} width {width} lr {lr:.5f}: loss {loss:.4f}", flush=True)
    draw(losses, options.folder / "lr_transfer.svg")
    for kind in KINDS:
        rates = [f"{width}: {best_rate(losses, kind, width):.5f}" for width in WIDTHS]
        print(f"best learning rates, {kind}: {', '.join(rates)}")


if __name__ == "__main__":
    main()
