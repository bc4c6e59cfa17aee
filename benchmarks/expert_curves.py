r"""Loss of a small MoE (8 experts, top 2) and of a dense model with as many active parameters.

    python -m benchmarks.expert_curves FOLDER [--steps 400] [--section.key value ...]

Trains both on the shipped text with the same data, seed, optimizer, and schedule, one rank each.
Writes FOLDER/expert_curves.csv (validation losses by step, tokens, and active FLOPs) and
FOLDER/expert_curves.svg. If FOLDER already contains a run, it resumes, or ends at once if it is
finished.
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
PANEL_WIDTH, PANEL_HEIGHT, MARGIN, TOP = 340, 240, 48, 16
COLORS = {"dense": "#2f6fde", "moe": "#d9480f"}
TEXT_COLOR, GRID_COLOR = "#777", "#8884"
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


def draw(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Return an SVG picture of the losses over tokens (left) and over active FLOPs (right)."""
    losses = [row["validation_loss"] for rows in curves.values() for row in rows]
    low, high = int(min(losses)), int(max(losses)) + 1

    def y(loss: float) -> float:
        return TOP + PANEL_HEIGHT * (high - loss) / (high - low)

    def text(x: float, at_y: float, content: str, anchor: str, color: str = TEXT_COLOR) -> str:
        place = f'x="{x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} fill="{color}">{content}</text>'

    width, height = 2 * PANEL_WIDTH + 3 * MARGIN, PANEL_HEIGHT + TOP + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="sans-serif" font-size="13">',
        "<title>Validation loss in nats per token of a dense model and of a MoE</title>",
    ]
    for panel, (key, label) in enumerate((("tokens", "tokens"), ("active_flops", "active FLOPs"))):
        left = MARGIN + panel * (PANEL_WIDTH + MARGIN)
        last = max(row[key] for rows in curves.values() for row in rows)
        for loss in range(low, high + 1):
            ends = f'x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"'
            parts.append(f'<line {ends} stroke="{GRID_COLOR}"/>')
            parts.append(text(left - 8, y(loss) + 4, str(loss), "end"))
        for half in range(3):
            x = left + PANEL_WIDTH * half / 2
            parts.append(text(x, TOP + PANEL_HEIGHT + 18, f"{last * half / 2:.3g}", "middle"))
        parts.append(text(left + PANEL_WIDTH / 2, height - 6, label, "middle"))
        for row_index, (name, rows) in enumerate(curves.items()):
            points = " ".join(
                f"{left + PANEL_WIDTH * row[key] / last:.1f},{y(row['validation_loss']):.1f}"
                for row in rows
            )
            style = f'fill="none" stroke="{COLORS[name]}" stroke-width="1.5"'
            parts.append(f'<polyline points="{points}" {style}/>')
            at_y = TOP + 16 + 18 * row_index
            parts.append(text(left + PANEL_WIDTH, at_y, name, "end", COLORS[name]))
    return "\n".join([*parts, "</svg>", ""])


def read_csv(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of expert_curves.csv by model."""
    curves: dict[str, list[dict[str, Any]]] = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            values = {key: float(text) for key, text in row.items() if key != "model"}
            curves.setdefault(row["model"], []).append(values)
    return curves


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
    (folder / "expert_curves.svg").write_text(draw(curves))


if __name__ == "__main__":
    main()
