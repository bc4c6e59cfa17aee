"""Run the recipes of train_configs/recipes with several seeds, and commit their curves.

    python -m benchmarks.recipes FOLDER [--recipes dense_1m muon ...] [--seeds 3]
    python -m benchmarks.recipes FOLDER --rates [--recipes dense_1m muon lion]
    python -m benchmarks.recipes FOLDER --collect

Start it in the folder that has `corpus`. Runs the recipes of the pages with `titan bench`, one
thread a run, into FOLDER/RECIPE. Called again, it continues. --rates instead runs 200 steps with
each learning rate of a grid, into FOLDER/rates/RECIPE. --collect writes from the runs that are
done:

- train_configs/recipes/RECIPE.csv: bits per byte of each validation, by seed
- docs/recipes/results.csv: one row for each run and held-out dataset
- docs/recipes/learning_rates.csv: the held-out loss of each learning rate
- docs/images/recipes_PAGE.svg: the curves of a page of docs/recipes over each other
- the tables of these pages, between their markers
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torchtitan_like.bench.results import (
    DONE,
    difference,
    interval,
    step_seconds_so_far,
    write_csv,
)
from torchtitan_like.bench.run_list import is_done
from torchtitan_like.report.history import read_histories
from torchtitan_like.util.files import write_atomically
from torchtitan_like.util.jsonl import read_rows as read_json_lines
from torchtitan_like.util.pictures import PALETTE, picture

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "torchtitan_like/train_configs/recipes"
FOLDER = ROOT / "docs/recipes"
RESULTS = FOLDER / "results.csv"
RATES_FILE = FOLDER / "learning_rates.csv"
BASE = "dense_1m"
# The recipes of each page, in the order in which they run. Each is compared with the first one that
# has read as many tokens.
PAGES = {
    "optimizers": [BASE, "muon", "lion"],
    "experts": [BASE, "moe"],
    "schedules": [BASE, "wsd", "cosine_short", "wsd_branch"],
    "ramps": [BASE, "batch_ramp", "seq_ramp_start", "seq_ramp"],
    "states": [BASE, "bf16_states", "8bit_states"],
    "mixture": [BASE, "little_code", "more_code"],
    "sizes": [BASE, "dense_3m"],
}
# Recipes that start from a checkpoint of another one, with the same seed.
STARTS = {"wsd_branch": "wsd", "seq_ramp": "seq_ramp_start"}
START_STEP = 300
RATES = {
    BASE: "2e-3,4e-3,8e-3,16e-3",
    "muon": "2e-3,4e-3,8e-3,16e-3,32e-3",
    "lion": "5e-4,1e-3,2e-3,4e-3,8e-3",
}
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
    if recipe not in STARTS:
        words = ("--repeat", str(num_seeds), f"--job.dump_folder={folder / recipe}")
        return titan("bench", toml, *words)
    codes = []
    for seed in range(1, num_seeds + 1):
        name = f"base,seed={seed}"
        own = (f"--debug.seed={seed}", f"--job.dump_folder={folder / recipe / name}")
        start = folder / STARTS[recipe] / name / f"checkpoint/step-{START_STEP}"
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
        if not is_done(run_folder):
            continue
        seed = int(run_folder.name.rpartition("=")[2])
        steps = read_json_lines(run_folder / "metrics.jsonl")
        validations = read_json_lines(run_folder / "validation.jsonl")
        seconds = step_seconds(run_folder)
        if recipe in STARTS:
            seconds += step_seconds(folder / STARTS[recipe] / run_folder.name, START_STEP)
        names = list(dict.fromkeys(row.get("set", "") for row in validations))
        for name in names:
            rows = [row for row in validations if row.get("set", "") == name]
            if name == names[0]:
                curve += [
                    {
                        "seed": seed,
                        "step": row["step"],
                        "tokens": row["n_tokens_seen"],
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
                    "seconds": f"{seconds:.0f}",
                    "data_digest_chain": steps[-1]["data_digest_chain"],
                }
            )
    return curve, results


def step_seconds(run_folder: Path, last_step: int | None = None) -> float:
    """Return the seconds of the steps of a run, all or up to one."""
    (history,) = read_histories([run_folder], is_redacted=False)
    seconds = step_seconds_so_far(history)
    if last_step is not None:
        seconds = seconds[history.step <= last_step]
    return float(seconds[-1])


def read_csv(file: Path) -> list[Row]:
    """Return the rows of a CSV file, as text."""
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def scores_of(rows: Sequence[Row], heldout: str) -> dict[int, float]:
    """Return the bits per byte of a held-out dataset by seed."""
    return {
        int(row["seed"]): float(row["bits_per_byte"]) for row in rows if row["heldout"] == heldout
    }


def results_table(recipes: Sequence[str]) -> str:
    """Return a table of the committed results: one line for each recipe and held-out dataset."""
    head = ["recipe", "held out", "bits/byte", "difference", "tokens", "seconds"]
    head.append("digest chain of seed 1")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    results = {
        recipe: [row for row in read_csv(RESULTS) if row["recipe"] == recipe] for recipe in recipes
    }
    for recipe, rows in results.items():
        for name in dict.fromkeys(row["heldout"] for row in rows):
            scores = scores_of(rows, name)
            tokens = float(rows[0]["tokens"])
            base = next(
                other
                for other, others in results.items()
                if others and float(others[0]["tokens"]) == tokens and scores_of(others, name)
            )
            change = difference(scores, scores_of(results[base], name))
            change_text = "–" if base == recipe else f"{change} to `{base}`"
            seconds = fmean(float(row["seconds"]) for row in rows)
            lines.append(
                f"| `{recipe}` | {name} | {interval(scores.values())} | {change_text} | "
                f"{tokens / 1e6:.2f}M | {seconds:,.0f} | `{rows[0]['data_digest_chain']}` |"
            )
    return "\n".join(lines) + "\n"


def rates_table() -> str:
    """Return a table of the held-out losses by recipe and learning rate."""
    rates = read_csv(RATES_FILE)
    lines = ["| recipe | learning rate: held-out loss after 200 steps |", "| --- | --- |"]
    for recipe in RATES:
        cells = [f"{row['lr']}: {row['heldout_loss']}" for row in rates if row["recipe"] == recipe]
        lines.append(f"| {recipe} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page_path(page: str) -> Path:
    """Return where a page is."""
    return FOLDER / f"{page}.md"


def page_with_tables(page: str) -> str:
    """Return the text of a page with the tables of the committed results."""

    def replace(match: re.Match[str]) -> str:
        table = rates_table() if match.group(2) == "rates" else results_table(PAGES[page])
        return match.group(1) + table + match.group(3)

    return TABLE.sub(replace, page_path(page).read_text())


def draw(page: str) -> None:
    """Draw bits per byte over the tokens: the mean of the seeds, and their range."""
    with picture(ROOT / f"docs/images/recipes_{page}.svg", 6.4, 3.6) as figure:
        panel = figure.subplots()
        lowest = []
        for recipe, color in zip(PAGES[page], PALETTE, strict=False):
            by_tokens: dict[float, list[float]] = {}
            for row in read_csv(CONFIGS / f"{recipe}.csv"):
                if row["step"] != "1":
                    scores = by_tokens.setdefault(int(row["tokens"]) / 1e6, [])
                    scores.append(float(row["bits_per_byte"]))
            tokens, means = list(by_tokens), [fmean(scores) for scores in by_tokens.values()]
            panel.plot(tokens, means, "o-", color=color, markersize=4, label=recipe)
            low, high = ([end(scores) for scores in by_tokens.values()] for end in (min, max))
            panel.fill_between(tokens, low, high, color=color, alpha=0.25, linewidth=0)
            lowest += means[-1:]
        panel.set_ylim(min(lowest) - 0.05, max(lowest) + 0.8)
        panel.set_xlabel("tokens, millions")
        panel.set_ylabel("bits per byte of held-out text")
        panel.grid(True)
        panel.legend(frameon=False)


def collect(folder: Path, recipes: Iterable[str]) -> None:
    """Write the files that are committed; see the module. Recipes without new runs keep theirs."""
    results: list[Row] = []
    for recipe in recipes:
        curve, rows = read_rows(recipe, folder)
        if rows:
            write_csv(CONFIGS / f"{recipe}.csv", curve)
            results += rows
    for file, new in ((RESULTS, results), (RATES_FILE, read_rates(folder))):
        replaced = {row["recipe"] for row in new}
        kept = [row for row in read_csv(file) if row["recipe"] not in replaced]
        write_csv(file, sorted(kept + new, key=lambda row: str(row["recipe"])))
    for page in PAGES:
        draw(page)
        write_atomically(page_path(page), page_with_tables(page))


def main() -> int:
    """Run or collect. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(file.stem for file in CONFIGS.glob("*.toml"))
    parser.add_argument("folder", type=Path)
    on_pages = list(dict.fromkeys(itertools.chain(*PAGES.values())))
    parser.add_argument("--recipes", nargs="+", choices=every, default=on_pages)
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
