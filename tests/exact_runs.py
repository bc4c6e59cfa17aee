"""Run a fixed set of small runs and record every number that a run must reproduce.

    python -m tests.exact_runs before.json             # in the tree before a change
    python -m tests.exact_runs after.json              # in the tree after it
    python -m tests.exact_runs --compare before.json after.json

A change that only moves or renames code leaves both files equal. Floats are written as hex, so that
equal means equal to the last bit. Files of checkpoints are compared by their hashes. Run both on one
machine: the numbers depend on its CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.trainer import ForkServer
from tests.harness.runner import EXACT

EXACT_KEYS = (*EXACT, "sources")
VALIDATION_KEYS = ("step", "set", "loss", "bits_per_byte", "num_tokens")
TINY = {
    "model.hf_assets_path": "tests/assets/tokenizer",
    "model.args.dim": 32,
    "model.args.n_layers": 2,
    "model.args.n_heads": 4,
    "training.dataset": "shakespeare",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 6,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 2,
    "metrics.enable_tensorboard": False,
    "checkpoint.enable": False,
    "validation.enable": False,
    "activation_checkpoint.mode": "none",
    "debug.seed": 42,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama3": {"model.name": "llama3", "model.flavor": "debugmodel", "model.args.n_kv_heads": 2,
               "model.args.multiple_of": 16},
    "qwen3": {"model.name": "qwen3", "model.flavor": "debugmodel", "model.args.n_kv_heads": 2,
              "model.args.hidden_dim": 96, "model.args.head_dim": 8,
              "model.args.enable_weight_tying": False},
}  # fmt: skip
# Number of ranks and settings.
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one rank": (1, {}),
    "FSDP 2": (2, {}),
    "TP 2": (2, {"parallelism.tensor_parallel_degree": 2}),
    "PP 2": (2, {"parallelism.pipeline_parallel_degree": 2}),
    "CP 2": (2, {"parallelism.context_parallel_degree": 2}),
}
DEEPSEEK_V3 = {
    "model.name": "deepseek_v3",
    "model.flavor": "debugmodel",
    "model.args.inter_dim": 64,
    "model.args.moe_inter_dim": 32,
    "model.args.kv_lora_rank": 16,
    "model.args.qk_nope_head_dim": 8,
    "model.args.qk_rope_head_dim": 4,
    "model.args.v_head_dim": 8,
}
CORPUS = "torchtitan_like/data/corpus/shakespeare_train.jsonl"
HELD_OUT = "torchtitan_like/data/corpus/shakespeare_validation.jsonl"
MIXTURE = {
    "training.dataset": "",
    "data.sources.a.path": CORPUS,
    "data.sources.a.weight": 2.0,
    "data.sources.b.path": HELD_OUT,
    "data.sources.b.weight": 1.0,
}
VALIDATION = {
    "validation.enable": True,
    "validation.seq_len": 32,
    "validation.local_batch_size": 2,
    "validation.steps": 4,
    "validation.freq": 3,
}
MUON = {"optimizer.name": "Muon", "optimizer.lr": 2e-2}
EMA = {"ema.enable": True, "ema.validation": True, **VALIDATION}
FLOAT8 = {
    "model.converters": "quantize.linear.float8",
    "quantize.linear.float8.emulate": True,
    "quantize.linear.float8.filter_fqns": "[]",  # all layers here are too small to gain
}
CHECKPOINTS = {"checkpoint.enable": True, "checkpoint.interval": 3}
# Keys of a manifest that a refactor or the time of a step may change. `files` is compared by hashes.
MANIFEST_EXCEPT = ("config", "files", "self", "metrics_bytes")


@dataclass(frozen=True)
class Run:
    """One run: a name, the number of ranks and the settings in addition to `TINY`.

    is_resumed: save at steps 3 and 6, then train steps 4 to 6 again from step 3.
    """

    name: str
    num_ranks: int
    settings: Mapping[str, object] = field(default_factory=dict)
    is_resumed: bool = False


RUNS = [
    *(
        Run(f"{family}, {layout}", num_ranks, {**model, **settings})
        for family, model in FAMILIES.items()
        for layout, (num_ranks, settings) in LAYOUTS.items()
    ),
    Run("bfloat16, FSDP 2", 2, {"training.mixed_precision_param": "bfloat16"}),
    Run("cached, best-fit packing, validated", 2, {"data.packing": "best_fit", **VALIDATION}),
    Run("streamed", 2, {"training.dataset": "", "data.sources.s.path": CORPUS,
                        "data.sources.s.streaming": True}),
    Run("mixture, validated", 2, {**MIXTURE, **VALIDATION}),
    Run("mixture with a stream", 2, {**MIXTURE, "data.sources.a.streaming": True}),
    Run("spikes are skipped", 2, {"training.steps": 14, "resilience.on_spike": "skip",
                                  "resilience.spike_window": 8, "resilience.spike_threshold": 0.2}),
    Run("gradients are clipped", 2, {"training.max_norm": 0.1}),
    Run("a non-finite step is skipped", 2, {"resilience.on_nonfinite": "skip",
                                            "experimental.custom_import": "tests.harness.nan_backward"}),
    Run("DeepSeek-V3, EP 2, resumed", 2,
        {**DEEPSEEK_V3, "parallelism.expert_parallel_degree": 2}, is_resumed=True),
    Run("Muon, averaged weights, 4 micro-batches, resumed", 2,
        {**MUON, **EMA, "training.global_batch_size": 16}, is_resumed=True),
    Run("float8, emulated", 2, FLOAT8),
    Run("packed mixture with a stream, resumed", 2,
        {**MIXTURE, "data.sources.a.streaming": True, "data.packing": "best_fit"}, is_resumed=True),
]  # fmt: skip


def arguments(run: Run, folder: Path) -> list[str]:
    """Return the command line of one run."""
    settings = {
        "job.config_file": "train_configs/debug_model.toml",
        "job.dump_folder": folder / "outputs",
        "data.cache_folder": folder / "tokens",
        **TINY,
        **({} if "model.name" in run.settings else FAMILIES["llama3"]),
        **run.settings,
        **(CHECKPOINTS if run.is_resumed else {}),
    }
    return [argument for key, value in settings.items() for argument in (f"--{key}", str(value))]


def read_exact_rows(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the exact keys of every row of a JSONL file, floats as hex. [] if there is no file."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: with_hex_floats(row[key]) for key in keys if key in row} for row in rows]


def with_hex_floats(value: Any) -> Any:
    """Return `value` with every float as hex."""
    if isinstance(value, dict):
        return {key: with_hex_floats(item) for key, item in value.items()}
    return value.hex() if isinstance(value, float) else value


def execute(run: Run, server: ForkServer) -> dict[str, Any]:
    """Execute one run and return its exact numbers. Raises SystemExit if the run fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = train(run, folder, server)
        if run.is_resumed:
            shutil.rmtree(folder / "outputs/checkpoint/step-6")
            if train(run, folder, server) != numbers:
                raise SystemExit(f"{run.name}: differs after the resume from step 3")
        return numbers


def train(run: Run, folder: Path, server: ForkServer) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint in `folder`."""
    outputs = folder / "outputs"
    result = server.start(arguments(run, folder), run.num_ranks, outputs).wait()
    if any(result.codes) or result.exit is None or result.exit["reason"] != "done":
        raise SystemExit(f"{run.name} ended with {result.codes}, {result.exit}:\n{result.output}")
    steps = sorted(outputs.glob("checkpoint/step-*"))
    return {
        "steps": read_exact_rows(outputs / "metrics.jsonl", EXACT_KEYS),
        "validation": read_exact_rows(outputs / "validation.jsonl", VALIDATION_KEYS),
        "checkpoints": {path.name: read_step(path) for path in steps},
    }


def read_step(folder: Path) -> dict[str, Any]:
    """Return the hashes of the files of a checkpoint, and its manifest without its settings."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [path for path in folder.iterdir() if path.name not in ("config.toml", "manifest.json")]
    return {
        "files": {path.name: hash_file(path) for path in sorted(files)},
        "manifest": {
            key: with_hex_floats(value)
            for key, value in manifest.items()
            if key not in MANIFEST_EXCEPT
        },
    }


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(path: Path) -> None:
    """Execute all runs and write their numbers to `path`."""
    numbers = {}
    start = time.monotonic()
    server = ForkServer({"OMP_NUM_THREADS": "1"})
    for count, run in enumerate(RUNS, start=1):
        numbers[run.name] = execute(run, server)
        elapsed = time.monotonic() - start
        remaining = elapsed / count * (len(RUNS) - count)
        print(f"{100 * count // len(RUNS):3}%  {run.name}  ({remaining:.0f} s left)", flush=True)
    server.close()
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def compare(before: Path, after: Path) -> list[str]:
    """Print a table of the runs of two files; return the names of runs that differ."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    different = []
    print(
        "| run | steps | skipped | validation rows | checkpoints | numbers | equal |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name in dict.fromkeys([*old, *new]):
        is_equal = old.get(name) == new.get(name)
        different += [] if is_equal else [name]
        run = new.get(name) or old[name]
        steps, validation = run["steps"], run["validation"]
        skipped = sum(row["skipped"] for row in steps)
        numbers = sum(map(len, steps + validation))
        verdict = "yes" if is_equal else "NO"
        counts = (len(steps), skipped, len(validation), len(run["checkpoints"]), numbers)
        print(f"| {name} | {' | '.join(map(str, counts))} | {verdict} |")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--compare", action="store_true", help="compare two recorded files")
    arguments = parser.parse_args()
    if not arguments.compare:
        record(arguments.files[0])
    elif different := compare(*arguments.files):
        raise SystemExit(f"{len(different)} runs differ: {', '.join(different)}")


if __name__ == "__main__":
    main()
