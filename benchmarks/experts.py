r"""Speed of the experts: grouped products, one layer, and whole steps of the Qwen3 MoE debug model.

    python -m benchmarks.experts [--rounds 5] [--parts products layer 2048 16384]

One thread, fp32, CPU time, medians of ratios within a round. The peak of memory is its growth
during one call, in a forked process.

`products`: `grouped_linear` against `grouped_mm` called directly, forward and backward; 64 experts
of 256 x 768 share 16,384 rows. `layer`: the experts' SwiGLU against a loop that reads `w[i]` for
each expert, as TorchTitan 0.2.2 computes it on a CPU. Both have the same rows and weights.

`2048` and `16384` time whole steps on so many tokens, in sequences of 2,048, each in a new process.
They compare this trainer with bare loops around the models of transformers (with `grouped_mm`) and
of TorchTitan 0.2.2. A loop has forward, loss, backward, clipping, and fused AdamW. TorchTitan's
model imports triton, so it needs a CUDA build of torch. It counts with `torch.histc` of int64,
which CPUs lack: here the counts are converted to fp32 and back. Its rows are omitted if
`torchtitan` is not installed. With 16,384 tokens, all models recompute their activations to save
memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_EXPERTS, DIM, HIDDEN_DIM, ROWS = 64, 256, 768, 16_384
SEQ_LEN = 2048
SUBJECTS = ("trainer", "transformers", "torchtitan")


def cpu_seconds(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def peak_growth(function: Callable[[], object]) -> float:
    """Return by how many MB a call raises the peak of resident memory, in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function()
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, str(growth / 1024).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return float(result)


def compare(
    subject: Callable[[], object], baseline: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Return median CPU seconds of both, and the median of baseline / subject."""
    subject()
    baseline()
    pairs = [(cpu_seconds(subject), cpu_seconds(baseline)) for _ in range(rounds)]
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return times[0], times[1], statistics.median(b / a for a, b in pairs)


def uneven_ends() -> Any:
    """Return (experts,) int32: the end of each expert's rows, for tokens routed at random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_EXPERTS, (ROWS,), generator=generator)
    return torch.bincount(ids, minlength=NUM_EXPERTS).cumsum(0).to(torch.int32)


def measure_products(rounds: int) -> None:
    import torch
    from torch.nn import functional as F

    from torchtitan_like.models.layers.grouped_linear import grouped_linear

    ends = uneven_ends()
    x = torch.randn(ROWS, DIM, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, HIDDEN_DIM, DIM, requires_grad=True)
    grad = torch.randn(ROWS, HIDDEN_DIM)

    def grouped() -> None:
        torch.autograd.grad(grouped_linear(x, weight, ends), (x, weight), grad)

    def floor() -> None:
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        torch.autograd.grad(out, (x, weight), grad)

    peaks = peak_growth(grouped), peak_growth(floor)
    a, b, ratio = compare(grouped, floor, rounds)
    print(
        f"products: grouped_linear {1e3 * a:.0f} ms, peak {peaks[0]:.0f} MB; "
        f"grouped_mm {1e3 * b:.0f} ms, peak {peaks[1]:.0f} MB; {1 / ratio:.3f} times the floor",
        flush=True,
    )


def measure_layer(rounds: int) -> None:
    import torch
    from torch.nn import functional as F

    from torchtitan_like.models.layers.moe import Experts, sort_by_expert

    experts = Experts(NUM_EXPERTS, DIM, HIDDEN_DIM)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    ends = uneven_ends()
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    ids = torch.arange(NUM_EXPERTS).repeat_interleave(torch.tensor(counts))
    routes = sort_by_expert(ids[:, None], torch.ones(ROWS, 1), NUM_EXPERTS)
    x = torch.randn(ROWS, DIM, requires_grad=True)
    grad = torch.randn(ROWS, DIM)
    inputs = (x, *experts.parameters())

    def loop(rows: Any) -> Any:
        outputs = []
        for i, part in enumerate(rows.split(counts)):
            hidden = F.silu(part @ experts.w1[i].t()) * (part @ experts.w3[i].t())
            outputs.append(hidden @ experts.w2[i].t())
        return torch.cat(outputs)

    def grouped() -> None:
        torch.autograd.grad(experts.compute_rows(x, routes), inputs, grad)

    def looped() -> None:
        torch.autograd.grad(loop(x), inputs, grad)

    peaks = peak_growth(grouped), peak_growth(looped)
    torch.testing.assert_close(experts.compute_rows(x, routes), loop(x))
    a, b, ratio = compare(grouped, looped, rounds)
    print(
        f"layer: experts {1e3 * a:.0f} ms, peak {peaks[0]:.0f} MB; "
        f"loop over w[i] {1e3 * b:.0f} ms, peak {peaks[1]:.0f} MB; {ratio:.2f} times as fast",
        flush=True,
    )


def report(readings: list[float]) -> None:
    """Print the CPU seconds between the last readings, and the peak of resident memory."""
    steps = [b - a for a, b in zip(readings[1:], readings[2:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps({"cpu_s": statistics.median(steps), "rss_mb": peak}), flush=True)


def run_trainer(num_tokens: int, num_steps: int, folder: str) -> None:
    """Run the trainer with an additional clock."""
    settings = {
        "job.dump_folder": folder,
        "model.name": "qwen3",
        "model.flavor": "debugmodel_moe",
        "model.hf_assets_path": ROOT / "tests/assets/tokenizer",
        "training.dataset": "shakespeare",
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": num_tokens // SEQ_LEN,
        "training.steps": num_steps + 1,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "full" if num_tokens > SEQ_LEN else "none",
        "metrics.log_freq": 1,
    }
    argv = [f"--{key}={value}" for key, value in settings.items()]
    from torchtitan_like.process_start import begin_rank

    begin_rank(argv)
    from torchtitan_like import run, train

    readings: list[float] = []

    class TimedTrainer(train.Trainer):
        def train_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            readings.append(time.process_time())
            return super().train_step(*args, **kwargs)

        def _finish(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            readings.append(time.process_time())
            return super()._finish(*args, **kwargs)

    run.Trainer = TimedTrainer  # type: ignore[misc]
    code = run.main(argv)
    assert code == 0, code
    report(readings)


def transformers_model(recompute: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Return the model of transformers, and its logits of tokens (batch, seq)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from torchtitan_like.models.dense.flavors import QWEN3
    from torchtitan_like.models.dense.hf import hf_config

    config = Qwen3MoeConfig(**hf_config(QWEN3["debugmodel_moe"]))
    config._experts_implementation = "grouped_mm"
    model = Qwen3MoeForCausalLM(config)
    if recompute:
        model.gradient_checkpointing_enable()
        model.train()
    return model, lambda tokens: model(tokens, use_cache=False).logits


def torchtitan_model(recompute: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Return TorchTitan's model, and its logits of tokens (batch, seq)."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torchtitan.models.qwen3 import Qwen3Model, qwen3_args

    histc = torch.histc
    torch.histc = lambda x, **kwargs: histc(x.float(), **kwargs).long()
    args = qwen3_args["debugmodel_moe"]
    args.moe_args.use_grouped_mm = False  # its kernels need compute capability 9.0
    model = Qwen3Model(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    if recompute:
        for name, block in list(model.layers.named_children()):
            model.layers.register_module(name, checkpoint_wrapper(block))
    return model, model


def run_loop(build: Callable[..., Any], num_tokens: int, num_steps: int, folder: str) -> None:
    """Run a bare loop around a model on random tokens."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    model, logits = build(num_tokens > SEQ_LEN)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    readings = []
    for step in range(num_steps + 1):
        readings.append(time.process_time())
        window = torch.randint(2048, (num_tokens // SEQ_LEN, SEQ_LEN + 1))
        optimizer.zero_grad()
        out = logits(window[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), window[:, 1:].flatten())
        del out
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item(), flush=True)
    readings.append(time.process_time())
    report(readings)


RUNS: dict[str, Callable[[int, int, str], None]] = {
    "trainer": run_trainer,
    "transformers": lambda *args: run_loop(transformers_model, *args),
    "torchtitan": lambda *args: run_loop(torchtitan_model, *args),
}


def run_process(subject: str, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Run a subject in a new process, and return its figures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.experts", "--child", subject, folder,
             "--parts", str(num_tokens), "--steps", str(num_steps)],
            env=environment, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"{subject} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    figures: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return figures


def measure_steps(num_tokens: int, num_steps: int, rounds: int) -> None:
    subjects = [s for s in SUBJECTS if s != "torchtitan" or importlib.util.find_spec(s)]
    results: dict[str, list[dict[str, float]]] = {subject: [] for subject in subjects}
    for i in range(rounds):
        for subject in subjects:
            figures = run_process(subject, num_tokens, num_steps)
            print(f"{num_tokens} tokens, round {i + 1}, {subject}: {figures}", flush=True)
            results[subject].append(figures)
    for subject in subjects:
        ratios = [
            other["cpu_s"] / own["cpu_s"]
            for own, other in zip(results["trainer"], results[subject], strict=True)
        ]
        cpu = statistics.median(figures["cpu_s"] for figures in results[subject])
        peak = statistics.median(figures["rss_mb"] for figures in results[subject])
        print(
            f"{num_tokens} tokens, {subject}: {cpu:.2f} s of CPU a step, "
            f"{statistics.median(ratios):.3f} times the trainer's "
            f"({min(ratios):.3f}-{max(ratios):.3f}); peak {peak:,.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps to time in each process")
    parser.add_argument(
        "--parts", nargs="+", default=["products", "layer", "2048", "16384"],
        choices=["products", "layer", "2048", "16384"],
    )  # fmt: skip
    parser.add_argument("--child", nargs=2, metavar=("SUBJECT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        subject, folder = options.child
        RUNS[subject](int(options.parts[0]), options.steps, folder)
        return
    import torch

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread")
    for part in options.parts:
        if part == "products":
            measure_products(options.rounds)
        elif part == "layer":
            measure_layer(options.rounds)
        else:
            measure_steps(int(part), options.steps, options.rounds)


if __name__ == "__main__":
    main()
