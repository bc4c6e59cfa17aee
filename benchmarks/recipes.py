"""Run the recipes of train_configs/recipes with several seeds, and commit their curves.

    python -m benchmarks.recipes FOLDER [--recipes dense_1m muon ...] [--seeds 3]
    python -m benchmarks.recipes FOLDER --rates [--recipes dense_1m muon lion]
    python -m benchmarks.recipes FOLDER --collect

Runs each recipe with `titan bench` into FOLDER/RECIPE, one thread a run, from the folder that has
`corpus`. Called again, it continues. --rates runs 200 steps with each learning rate of a grid instead,
into FOLDER/rates/RECIPE. --collect writes, from all runs that are done:

- train_configs/recipes/RECIPE.csv: bits per byte of each validation, by seed
- docs/recipes/results.csv: one row for each run and held-out dataset
- docs/recipes/learning_rates.csv: the held-out loss of each learning rate
- docs/images/recipes.svg: the curves over each other
- the tables of docs/recipes/index.md, between their markers
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torchtitan_like.bench.results import DONE, interval, write_csv
from torchtitan_like.util.exit_codes import ExitCode
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.jsonl import read_rows as read_json_lines
from torchtitan_like.util.pictures import PALETTE, picture
from torchtitan_like.util.run_directory import read_exit

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "torchtitan_like/train_configs/recipes"
PAGE = ROOT / "docs/recipes/index.md"
PICTURE = ROOT / "docs/images/recipes.svg"
RESULTS = PAGE.with_name("results.csv")
BASE = "dense_1m"
# The recipes that docs/recipes/index.md compares.
COMPARED = [BASE, "muon"]
RATES = {
    BASE: "2e-3,4e-3,8e-3,16e-3",
    "muon": "2e-3,4e-3,8e-3,16e-3,32e-3",
    "lion": "2.5e-4,5e-4,1e-3,2e-3",
}
RATES_FILE = PAGE.with_name("learning_rates.csv")
TABLE = re.compile(r"(<!-- (results|rates) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def titan(*words: str) -> int:
    """Run a command of `titan` on one rank with one thread. Returns the exit code."""
    words += ("--nproc", "1", "--validation.reference_curve=None")
    command = [sys.executable, "-m", "torchtitan_like", *words]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def run(recipe: str, folder: Path, num_seeds: int) -> int:
    """Run what is not done of a recipe. Returns the exit code."""
    toml = str(CONFIGS / f"{recipe}.toml")
    if recipe != "wsd_branch":
        words = ("--repeat", str(num_seeds), f"--job.dump_folder={folder / recipe}")
        return titan("bench", toml, *words)
    codes = []
    for seed in range(1, num_seeds + 1):  # each starts from its own run of wsd.toml
        name = f"base,seed={seed}"
        own = (f"--debug.seed={seed}", f"--job.dump_folder={folder / recipe / name}")
        start = folder / "wsd" / name / "checkpoint/step-300"
        codes.append(titan("train", toml, *own, f"--checkpoint.initial_load_path={start}"))
    return max(codes)


def run_rates(recipe: str, folder: Path) -> int:
    """Run what is not done of the grid of a recipe. Returns the exit code."""
    rates = ("--grid", "--vary", f"optimizer.lr={RATES[recipe]}")
    own = ("--training.steps=200", "--lr_scheduler.warmup_steps=20", "--validation.freq=200")
    target = f"--job.dump_folder={folder / 'rates' / recipe}"
    return titan("bench", str(CONFIGS / f"{recipe}.toml"), *rates, *own, target)


# ---- rows and tables


def read_rates(folder: Path) -> list[Row]:
    """Return the last held-out loss of each learning rate, from the runs that are done."""
    rows: list[Row] = []
    for recipe in RATES:
        file = folder / "rates" / recipe / "bench.csv"
        for row in read_csv(file) if file.exists() else []:
            if row["state"] != DONE:
                continue
            loss = f"{float(row['validation_loss']):.4f}"
            rows.append({"recipe": recipe, "lr": row["optimizer.lr"], "heldout_loss": loss})
    return rows


def read_rows(recipe: str, folder: Path) -> tuple[list[Row], list[Row]]:
    """Return the curve of a recipe and its results, from the runs that are done."""
    curve: list[Row] = []
    results: list[Row] = []
    for run_folder in sorted((folder / recipe).glob("*,seed=*")):
        if read_exit(run_folder).code != ExitCode.DONE:
            continue
        seed = int(run_folder.name.rpartition("=")[2])
        steps = read_json_lines(run_folder / "metrics.jsonl")
        validations = read_json_lines(run_folder / "validation.jsonl")
        names = list(dict.fromkeys(row.get("set", "") for row in validations))
        for name in names:
            rows = [row for row in validations if row.get("set", "") == name]
            if name == names[0]:
                curve += [
                    {
                        "seed": seed,
                        "step": row["step"],
                        "bits_per_byte": f"{row['bits_per_byte']:.5f}",
                    }
                    for row in rows
                ]
            last = rows[-1]
            results.append(
                {
                    "recipe": recipe,
                    "seed": seed,
                    "heldout": name or "heldout",
                    "steps": last["step"],
                    "tokens": steps[-1]["n_tokens_seen"],
                    "loss": f"{last['loss']:.5f}",
                    "bits_per_byte": f"{last['bits_per_byte']:.5f}",
                    "seconds": f"{_seconds_of_steps(steps):.0f}",
                    "data_digest_chain": steps[-1]["data_digest_chain"],
                }
            )
    return curve, results


def _seconds_of_steps(rows: Sequence[Row]) -> float:
    """Return the time of all steps; validations and checkpoints are left out."""
    logged = [row for row in rows if "step_s" in row]  # the mean since the row before
    steps = [0, *(row["step"] for row in logged)]
    counts = (after - before for before, after in zip(steps, steps[1:], strict=False))
    return float(sum(row["step_s"] * count for row, count in zip(logged, counts, strict=True)))


def read_csv(file: Path) -> list[Row]:
    """Return the rows of a CSV file, as text."""
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def results_table(results: Sequence[Row]) -> str:
    """Return a table of the bits per byte of each compared recipe and held-out dataset."""
    base = {(row["heldout"], row["seed"]): row for row in results if row["recipe"] == BASE}
    lines = [
        "| recipe | held-out | bits/byte | against the baseline | tokens | seconds of steps |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for recipe in COMPARED:
        rows = [row for row in results if row["recipe"] == recipe]
        for name in dict.fromkeys(row["heldout"] for row in rows):
            ours = [row for row in rows if row["heldout"] == name]
            spread = interval([float(row["bits_per_byte"]) for row in ours])
            changes = [
                float(row["bits_per_byte"]) - float(base[name, row["seed"]]["bits_per_byte"])
                for row in ours
                if (name, row["seed"]) in base
            ]
            change = str(interval(changes)) if changes and recipe != BASE else "–"
            seconds = fmean(float(row["seconds"]) for row in ours)
            tokens = int(ours[0]["tokens"]) / 1e6
            lines.append(
                f"| `{recipe}` | {name} | {spread} | {change} | {tokens:.2f}M | {seconds:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def rates_table(rates: Sequence[Row]) -> str:
    """Return a table of the held-out losses by recipe and learning rate."""
    lines = ["| recipe | learning rate: held-out loss after 200 steps |", "| --- | --- |"]
    for recipe in RATES:
        cells = [f"{row['lr']}: {row['heldout_loss']}" for row in rates if row["recipe"] == recipe]
        lines.append(f"| {recipe} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page_with_tables() -> str:
    """Return the text of the page with the tables of the committed results."""

    def replace(match: re.Match[str]) -> str:
        if match.group(2) == "rates":
            return match.group(1) + rates_table(read_csv(RATES_FILE)) + match.group(3)
        return match.group(1) + results_table(read_csv(RESULTS)) + match.group(3)

    return TABLE.sub(replace, PAGE.read_text())


def draw(path: Path) -> None:
    """Draw bits per byte over the steps: the mean of the seeds, and their range."""
    with picture(path, 6.4, 3.6) as figure:
        panel = figure.subplots()
        lowest = []
        for recipe, color in zip(COMPARED, PALETTE, strict=False):
            by_step: dict[int, list[float]] = {}
            for row in read_csv(CONFIGS / f"{recipe}.csv"):
                by_step.setdefault(int(row["step"]), []).append(float(row["bits_per_byte"]))
            steps = [step for step in sorted(by_step) if step > 1]
            means = [fmean(by_step[step]) for step in steps]
            panel.plot(steps, means, color=color, label=recipe)
            low, high = ([end(by_step[step]) for step in steps] for end in (min, max))
            panel.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            lowest += means[-1:]
        panel.set_ylim(min(lowest) - 0.05, max(lowest) + 0.8)
        panel.set_xlabel("step")
        panel.set_ylabel("bits per byte of held-out text")
        panel.grid(True)
        panel.legend(frameon=False)


def collect(folder: Path, recipes: Iterable[str]) -> None:
    """Write the files that are committed; see the module."""
    results = read_csv(RESULTS) if RESULTS.exists() else []
    for recipe in recipes:
        curve, rows = read_rows(recipe, folder)
        if rows:
            write_csv(CONFIGS / f"{recipe}.csv", curve)
            results = [row for row in results if row["recipe"] != recipe] + rows
    write_csv(RESULTS, results)
    if rates := read_rates(folder):
        write_csv(RATES_FILE, rates)
    draw(PICTURE)
    write_atomically(PAGE, page_with_tables())


def main() -> int:
    """Run or collect. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(file.stem for file in CONFIGS.glob("*.toml"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=3)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--rates", action="store_true")
    mode.add_argument("--collect", action="store_true")
    options = parser.parse_args()
    if options.collect:
        collect(options.folder, options.recipes)
        return 0
    if options.rates:
        codes = [run_rates(name, options.folder) for name in options.recipes if name in RATES]
    else:
        codes = [run(name, options.folder, options.seeds) for name in options.recipes]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
