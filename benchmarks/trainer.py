"""The trainer, compared with a bare PyTorch loop with the same architecture, data, and optimizer.

    python -m benchmarks.trainer [--rounds 5] [--cases S,M,XS,S2]

Each round runs both in new processes, one after the other, so that noise affects both equally. The
table has medians of the figures, and of the ratio within a round. One thread per rank. On one rank,
throughput is tokens per second of CPU time, because wall time depends on other processes. On two
ranks it is tokens per second of wall time.

The loop trains a Llama of plain torch modules (plain_llama.py) of the same sizes. It uses fused
AdamW, clipping and autocast for bf16, and prints one line per step. On two ranks it calls
`fully_shard` on each layer and the root. It reads the same token file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """One model size and layout. `steps` steps are measured after `warmup` steps."""

    args: dict[str, object]
    seq_len: int
    batch: int
    dtype: str
    ranks: int
    warmup: int
    steps: int


S = {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": 2048}
CASES = {
    "XS": Case(
        {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 2048}, 64, 1, "float32", 1, 20, 100
    ),
    "S": Case(S, 2048, 1, "float32", 1, 2, 6),
    "M": Case(
        {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 32000},
        512,
        4,
        "bfloat16",
        1,
        2,
        5,
    ),
    "S2": Case(S, 2048, 1, "float32", 2, 2, 6),
}


class Clock:
    """Records CPU and wall seconds of this process at the start of every step and at the end."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float]] = []

    def read(self) -> None:
        self.readings.append((time.process_time(), time.time()))

    def report(self, case: Case, launched_at: float, modules: int) -> None:
        """Print one JSON line: times per step and until step 1, peak memory, imported modules."""
        timed = self.readings[case.warmup :]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(timed, timed[1:], strict=False)]
        print("RESULT " + json.dumps({
            "cpu_s": statistics.median(s[0] for s in steps),
            "wall_s": statistics.median(s[1] for s in steps),
            "start_cpu_s": self.readings[1][0],
            "start_wall_s": self.readings[1][1] - launched_at,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "modules": modules,
        }), flush=True)  # fmt: skip


def settings(case: Case, folder: str) -> list[str]:
    """Return the arguments of a run that logs every step and saves no checkpoint."""
    overrides = {
        "job.dump_folder": folder,
        "model.hf_assets_path": str(ROOT / "tests/assets/tokenizer"),
        "training.dataset": "shakespeare",
        "training.seq_len": case.seq_len,
        "training.local_batch_size": case.batch,
        "training.steps": case.warmup + case.steps,
        "training.mixed_precision_param": case.dtype,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
        "lr_scheduler.warmup_steps": 2,
        "data.cache_folder": str(Path(folder).parent / "tokens"),
        **{f"model.args.{key}": value for key, value in case.args.items()},
    }
    return [part for key, value in overrides.items() for part in (f"--{key}", str(value))]


def run_trainer(case: Case, launched_at: float, folder: str) -> None:
    """Run the trainer with an additional clock."""
    from torchtitan_like.process_start import begin_rank

    begin_rank(settings(case, folder))  # `python -m torchtitan_like.train` also calls it
    from torchtitan_like import run, train

    clock, modules = Clock(), 0
    build_optimization = train.build_optimization

    def count_modules(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal modules
        modules = len(sys.modules)
        return build_optimization(*args, **kwargs)

    class TimedTrainer(train.Trainer):
        def train_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            clock.read()
            return super().train_step(*args, **kwargs)

        def _finish(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            clock.read()
            return super()._finish(*args, **kwargs)

    train.build_optimization = count_modules
    run.Trainer = TimedTrainer  # type: ignore[misc]
    code = run.main(settings(case, folder))
    assert code == 0, code
    if int(os.environ.get("RANK", 0)) == 0:
        clock.report(case, launched_at, modules)


def run_loop(case: Case, launched_at: float, folder: str) -> None:
    """Run the bare loop."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from benchmarks.plain_llama import PlainLlama
    from torchtitan_like.models.dense.flavors import LLAMA3

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = PlainLlama(replace(LLAMA3["debugmodel"], **case.args), case.seq_len)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
    if world_size > 1:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    modules = len(sys.modules)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = np.memmap(next(Path(folder).parent.glob("tokens/**/*.bin")), dtype=np.uint16)
    per_step = case.batch * case.seq_len * world_size
    clock = Clock()
    for step in range(case.warmup + case.steps):
        clock.read()
        start = (step * per_step + rank * case.batch * case.seq_len) % (len(tokens) - per_step - 1)
        window = torch.from_numpy(
            tokens[start : start + case.batch * case.seq_len + 1].astype(np.int64)
        )
        inputs, labels = window[:-1].view(case.batch, -1), window[1:].view(case.batch, -1)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item(), flush=True)
    clock.read()
    if rank == 0:
        clock.report(case, launched_at, modules)
    if world_size > 1:
        dist.destroy_process_group()


def launch(variant: str, name: str, folder: Path) -> dict[str, float]:
    """Run the trainer or the loop in a new process, or with torchrun, and return the figures."""
    case = CASES[name]
    out = Path(tempfile.mkdtemp(dir=folder))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    script = [
        __file__,
        "--child",
        variant,
        "--cases",
        name,
        "--folder",
        str(out),
        "--launched-at",
        repr(time.time()),
    ]
    runner = [sys.executable]
    if case.ranks > 1:
        runner += ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
        runner += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    process = subprocess.run([*runner, *script], env=env, capture_output=True, text=True)
    _, marker, result = process.stdout.rpartition("RESULT ")
    if process.returncode or not marker:
        raise SystemExit(
            f"{variant} {name} failed ({process.returncode}):\n"
            f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
        )
    # Output of another rank may follow on the same line.
    figures: dict[str, float] = json.JSONDecoder().raw_decode(result)[0]
    return figures


def spread(values: list[float], digits: int) -> str:
    """Format as median (minimum - maximum)."""
    low, median, high = min(values), statistics.median(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def compare(name: str, rounds: int, folder: Path) -> list[str]:
    """Run all rounds of one case and return its table rows."""
    case = CASES[name]
    pairs = []
    launch("trainer", name, folder)  # fills the token cache and the page cache
    for index in range(rounds):
        order = ("trainer", "loop") if index % 2 == 0 else ("loop", "trainer")
        figures = {variant: launch(variant, name, folder) for variant in order}
        pairs.append((figures["trainer"], figures["loop"]))
        print(f"{name}: round {index + 1} of {rounds}", file=sys.stderr)
    tokens = case.batch * case.seq_len
    clock = "cpu_s" if case.ranks == 1 else "wall_s"
    rows = []
    for label, key, scale, digits in (
        (f"tokens per {clock[:-2]} second and rank", clock, tokens, 0),
        ("ms per step", clock, 1e3, 2),
        ("ms of CPU per step and rank", "cpu_s", 1e3, 2),
        ("launch to end of step 1, s of CPU", "start_cpu_s", 1, 2),
        ("peak memory of rank 0, MB", "rss_mb", 1, 0),
        ("modules before the optimizer", "modules", 1, 0),
    ):
        rate = label.startswith("tokens")
        figure = [
            tuple(tokens / variant[key] if rate else variant[key] * scale for variant in pair)
            for pair in pairs
        ]
        trainer, loop = [f[0] for f in figure], [f[1] for f in figure]
        ratios = [a / b for a, b in figure]
        rows.append(
            f"| {name} | {label} | {spread(trainer, digits)} | {spread(loop, digits)} "
            f"| {spread(ratios, 3)} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per case")
    parser.add_argument(
        "--cases", default=",".join(CASES), help="comma separated: " + ", ".join(CASES)
    )
    parser.add_argument("--child", choices=["trainer", "loop"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--launched-at", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child = run_trainer if arguments.child == "trainer" else run_loop
        child(CASES[arguments.cases], arguments.launched_at, arguments.folder)
        return
    import torch

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases.split(","):
            rows += compare(name, arguments.rounds, Path(folder))
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} {capability}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{arguments.rounds} rounds, "
        f"`python -m benchmarks.trainer --rounds {arguments.rounds} --cases {arguments.cases}`"
    )
    print("\n| case | figure | trainer | bare loop | ratio |\n|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
