"""Train the same jobs on one GPU with this trainer, TorchTitan 0.2.2 and a bare loop, beside plans.

    python -m benchmarks.gpu_jobs plan FOLDER      # the dry runs, on the CPU
    python -m benchmarks.gpu_jobs run FOLDER [--seconds 300] [--only "debug,1.5B saved"]

`run` measures the card for `titan plan` (benchmarks.calibrate), trains each job with each system in
turn, and prints two tables: speed and memory, and the errors of plans. TorchTitan takes part where
it is installed. Every run is a new process; the next one imports while one measures. Times are
medians of steps by CUDA events. TFLOP/s count 6 x matrix parameters and causal attention.

"1.5B saved" writes a checkpoint of 18 GB in the background, and compares the steps during it.
Without a GPU the jobs run on the CPU: WORK=tiny makes the models tiny (benchmarks.plan_card).
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.plan_card import (
    FLAVORS,
    MODELS,
    SHAPES,
    percent,
    predict,
    record,
    settings,
)

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests/assets/tokenizer"
CORPUS = ROOT / "torchtitan_like/data/corpus/shakespeare_train.jsonl"
WARMUP = 4  # steps that are not measured
SAVE_AFTER, STEPS_AFTER_SAVE = 12, 5
CALIBRATION_SECONDS = 15
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Job(NamedTuple):
    """A model and an option of benchmarks.plan_card. seconds: the limit of one run on the card."""

    model: str
    option: str
    steps: int = 14
    seconds: int = 60
    has_plain_loop: bool = False


JOBS = {
    "1.5B compiled": Job("1.5B", "compiled", has_plain_loop=True),
    "8B full AC compiled": Job("8B", "full, compiled", steps=9, seconds=80),
    "1.5B eager per-op AC": Job("1.5B", "op", seconds=40),
    "debug": Job("debug", "eager", steps=60, seconds=40, has_plain_loop=True),
    "debug with graphs": Job("debug", "graphs", steps=60, seconds=40),
    "experts eager": Job("experts", "eager", seconds=40),
    "experts compiled": Job("experts", "compiled", seconds=80),
    "1.5B float8 rowwise": Job("1.5B", "float8, compiled"),
    "1.5B saved": Job("1.5B", "compiled", steps=1000, seconds=90),
}
SAVED = "1.5B saved"


def arguments_of(name: str) -> list[str]:
    """Return the arguments of this trainer that decide what a job computes."""
    job = JOBS[name]
    arguments = settings(job.model, job.option, job.steps)
    is_small = DEVICE == "cuda" and torch.cuda.mem_get_info()[1] < 130 * 2**30
    if job.model == "8B" and is_small:
        arguments += ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
    if job.option == "graphs" and DEVICE == "cpu":
        arguments.remove("--compile.cuda_graphs")
    if "float8" in job.option and DEVICE == "cpu":
        arguments.append("--quantize.linear.float8.emulate")
    if name == SAVED:
        arguments.remove("--checkpoint.no-enable")
        arguments += ["--checkpoint.enable", "--checkpoint.interval=100000"]
        arguments.append("--checkpoint.async_mode=async_with_pinned_mem")
    return arguments


# ---- one run


class Clock:
    """Records the end of each step on the device, and the peaks of memory."""

    def __init__(self, name: str, system: str, folder: Path) -> None:
        self.name = name
        self.system = system
        self.folder = folder
        self.ends: list[Any] = []
        self.peaks = [0, 0]  # bytes active and reserved
        self.asked_for_save = 0.0

    def wait_for_card(self) -> None:
        """Wait until no other run uses the card. From then on the run's time is limited."""
        self._lock = open(self.folder / "card.lock", "w")  # noqa: SIM115 # held to the end
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if DEVICE == "cuda":
            signal.alarm(JOBS[self.name].seconds)

    def tick(self) -> None:
        if DEVICE == "cpu":
            self.ends.append(time.perf_counter())
        else:
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
            peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            self.peaks = [max(pair) for pair in zip(self.peaks, peaks, strict=True)]
        if self.name == SAVED:
            self._watch_save()

    def milliseconds(self) -> list[float]:
        if DEVICE == "cpu":
            return [1e3 * (end - start) for start, end in pairwise(self.ends)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(self.ends)]

    def write(self, **more: Any) -> None:
        """Write the result of the run."""
        times = self.milliseconds()[WARMUP - 1 :]
        result = {"ms": statistics.median(times), "gib": [peak / 2**30 for peak in self.peaks]}
        path = self.folder / f"{self.name}.{self.system}.json"
        path.write_text(json.dumps(result | more))

    def _watch_save(self) -> None:
        """Ask for a checkpoint, and end the process some steps after it is published."""
        run, number = self.folder / SAVED, len(self.ends)
        if number == SAVE_AFTER:
            (run / "SAVE").touch()
            self.asked_for_save = time.monotonic()
        published = [path for path in run.glob("checkpoint/step-*") if path.suffix == ""]
        if published and not hasattr(self, "published"):
            self.published = number, time.monotonic() - self.asked_for_save
        if published and number >= self.published[0] + STEPS_AFTER_SAVE:
            end, seconds = self.published
            times = self.milliseconds()
            during = times[SAVE_AFTER - 1 : end - 1]
            num_bytes = sum(file.stat().st_size for file in published[0].iterdir())
            self.write(
                before=statistics.median(times[WARMUP - 1 : SAVE_AFTER - 1]),
                during=statistics.median(during), mean=statistics.mean(during),
                longest=max(during), seconds=seconds, gb=num_bytes / 1e9,
            )  # fmt: skip
            shutil.rmtree(run)
            os._exit(0)


def train_ours(clock: Clock) -> None:
    from torchtitan_like.process_start import begin_rank

    arguments = [
        f"--job.dump_folder={clock.folder / clock.name}",
        f"--model.hf_assets_path={TOKENIZER}",
        "--training.dataset=shakespeare",
        f"--data.cache_folder={clock.folder / 'tokens'}",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1000",
        "--debug.seed=1",
        *arguments_of(clock.name),
    ]
    begin_rank(arguments)
    from torchtitan_like import run, train

    class TimedTrainer(train.Trainer):
        def train_step(self, *args: Any, **options: Any) -> Any:
            result = super().train_step(*args, **options)
            clock.tick()
            return result

    run.Trainer = TimedTrainer  # type: ignore[misc]
    clock.wait_for_card()
    if code := run.main(arguments):
        sys.exit(code)


def train_torchtitan(clock: Clock) -> None:
    """Train with TorchTitan 0.2.2 of PyPI, whose settings have the same names."""
    job = JOBS[clock.name]
    model_sizes = sizes(job.model)
    text = clock.folder / "text"
    text.mkdir(exist_ok=True)
    shutil.copy(CORPUS, text / "data.json")
    taken = [
        argument
        for argument in arguments_of(clock.name)
        if argument.startswith(("--training.", "--activation", "--model.conv", "--quantize.linear"))
        or argument == "--compile.enable"
    ]
    sys.argv = [
        "train",
        *taken,
        f"--job.dump_folder={clock.folder / 'torchtitan'}",
        f"--model.name={FLAVORS.get(job.model, ('llama3',))[0]}",
        "--model.flavor=bench",
        f"--model.hf_assets_path={TOKENIZER}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={text}",
        "--lr_scheduler.warmup_steps=2",
        "--metrics.log_freq=1000",
        "--debug.seed=1",
    ]
    if job.model == "experts":
        import torchtitan.models.qwen3 as qwen3

        base = qwen3.qwen3_args["debugmodel_moe"]
        experts = {key: model_sizes.pop(key) for key in ("num_experts", "top_k")}
        moe = type(base.moe_args)(**{**vars(base.moe_args), **experts})
        qwen3.qwen3_args["bench"] = type(base)(
            **model_sizes, moe_enabled=True, moe_args=moe, qk_norm=True, rope_theta=1000000,
            max_seq_len=SHAPES["experts"][1],
        )  # fmt: skip
    else:
        import torchtitan.models.llama3 as llama3

        made = llama3.TransformerModelArgs(**model_sizes, rope_theta=500000)
        llama3.llama3_args["bench"] = made
    from torchtitan import train

    train_step = train.Trainer.train_step

    def timed(trainer: Any, *args: Any) -> None:
        train_step(trainer, *args)
        clock.tick()

    train.Trainer.train_step = timed
    clock.wait_for_card()
    train.main(train.Trainer)


def train_plain(clock: Clock) -> None:
    """Train with a bare loop: compiled blocks, autocast, fused AdamW, clipping."""
    from torch.nn import functional as F

    from benchmarks.plain_llama import PlainLlama
    from torchtitan_like.models.dense.flavors import LLAMA3

    job = JOBS[clock.name]
    samples, seq_len = SHAPES.get(job.model, (1, 8192))
    args = replace(LLAMA3["debugmodel"], **sizes(job.model))
    clock.wait_for_card()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = PlainLlama(args, seq_len)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
    for layer in model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    data = torch.randint(args.vocab_size, (job.steps, samples, seq_len + 1))
    data = data.pin_memory() if DEVICE == "cuda" else data
    for tokens in data:
        tokens = tokens.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


SYSTEMS = {"torchtitan_like": train_ours, "TorchTitan": train_torchtitan, "plain": train_plain}


def sizes(model: str) -> dict[str, Any]:
    """Return the sizes of a model as numbers."""
    pairs = (pair.split("=") for pair in MODELS[model].split())
    return {key: float(value) if "." in value else int(value) for key, value in pairs}


# ---- all runs


def systems_of(name: str) -> list[str]:
    """Return the systems that train a job."""
    systems = ["torchtitan_like"]
    if name == SAVED:
        return systems
    if DEVICE == "cuda" and importlib.util.find_spec("torchtitan"):
        systems.append("TorchTitan")
    return systems + ["plain"] * JOBS[name].has_plain_loop


def start_run(pair: tuple[str, str], folder: Path, end: float) -> None:
    """Run a job in a new process, and print one line."""
    name, system = pair
    start = time.monotonic()
    if start > end - 20:
        print(f"{name}, {system}: not started, no time was left", flush=True)
        return
    log = folder / f"{name}.{system}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_jobs", "one", str(folder)]
    command += ["--only", name, "--system", system]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            code = process.wait(end - start)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    errors = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    reason = f": {errors[-1][-200:]}" if code and errors else ""
    seconds = time.monotonic() - start
    print(f"{name}, {system}: exit code {code} after {seconds:.0f} s{reason}", flush=True)


def read_result(folder: Path, name: str, system: str) -> dict[str, Any] | None:
    path = folder / f"{name}.{system}.json"
    return json.loads(path.read_text()) if path.exists() else None


def print_speed(folder: Path, names: Sequence[str]) -> None:
    """Print speed and memory of each run, and the steps during a save."""
    from torchtitan_like.models.spec import get_spec, resolve_args

    print("\n| job | system | ms a step | tokens/s | TFLOP/s | active GiB | reserved GiB ", end="")
    print("| torchtitan_like / TorchTitan, tokens/s |\n" + "|---" * 8 + "|")
    for name in names:
        job = JOBS[name]
        samples, seq_len = SHAPES.get(job.model, (1, 8192))
        model, flavor = FLAVORS.get(job.model, ("llama3", "debugmodel"))
        spec = get_spec(model)
        args = resolve_args(spec, flavor, sizes(job.model))
        results = {system: read_result(folder, name, system) for system in systems_of(name)}
        for system, result in results.items():
            if result is None:
                print(f"| {name} | {system} | failed | | | | | |")
                continue
            rate = 1e3 * samples * seq_len / result["ms"]
            teraflops = rate * spec.flops_per_token(args, seq_len) / 1e12
            other = results.get("TorchTitan") if system == "torchtitan_like" else None
            ratio = f"{other['ms'] / result['ms']:.3f}" if other else ""
            active, reserved = result["gib"]
            print(
                f"| {name} | {system} | {result['ms']:.1f} | {rate:,.0f} | {teraflops:.1f} "
                f"| {active:.2f} | {reserved:.2f} | {ratio} |"
            )
    if save := read_result(folder, SAVED, "torchtitan_like"):
        print(
            f"\nA checkpoint of {save['gb']:.1f} GB in the background took {save['seconds']:.1f} s. "
            f"A step took {save['during']:.1f} ms (mean {save['mean']:.1f}, longest "
            f"{save['longest']:.1f}) during it, and {save['before']:.1f} ms before "
            f"({percent(save['during'], save['before'])}, mean {percent(save['mean'], save['before'])})"
        )


def print_plans(folder: Path, names: Sequence[str], gpu: str, calibrated: Path) -> None:
    """Print what `titan plan` predicts with the data sheet and with the measured card."""
    from torchtitan_like.process_start import has_expandable_segments

    is_expandable = has_expandable_segments(os.environ)
    print(f"\nPlans with {gpu}, and with the rates that were measured here:\n")
    print(
        "| job | ms | error | calibrated ms | error | active GiB | error | reserved GiB | error |"
    )
    print("|---" * 9 + "|")
    for name in names:
        path = folder / f"{name}.pickle"
        result = read_result(folder, name, "torchtitan_like")
        if name == SAVED or result is None or not path.exists():
            continue
        option = JOBS[name].option
        planned = predict(path, option, gpu, is_expandable=is_expandable)
        if calibrated.exists():
            again = predict(path, option, str(calibrated), is_expandable=is_expandable)
            planned.insert(1, again[0])
        else:
            planned.insert(1, float("nan"))
        measured = [result["ms"], result["ms"], *result["gib"]]
        cells = (f"{p:.2f} | {percent(p, m)}" for p, m in zip(planned, measured, strict=True))
        print(f"| {name} | {' | '.join(cells)} |")


def gpu_name() -> str:
    """Return the shipped description of this GPU: of the same kind, with the nearest memory."""
    from torchtitan_like.plan.descriptions import names_in
    from torchtitan_like.plan.gpus import DEFAULT_GPU, FOLDER, load_gpu

    if DEVICE == "cpu":
        return DEFAULT_GPU
    device = torch.cuda.get_device_properties(0)
    same = [gpu for gpu in names_in(FOLDER) if gpu.split("-")[0] in device.name.lower()]
    gib = device.total_memory / 2**30
    return min(same or [DEFAULT_GPU], key=lambda gpu: abs(load_gpu(gpu).memory_gib - gib))


def calibrate(folder: Path, gpu: str) -> Path:
    """Measure the card, and return the path of its description."""
    command = [sys.executable, "-m", "benchmarks.calibrate", "-o", str(folder / "card.toml")]
    command += ["--seconds", str(CALIBRATION_SECONDS)]
    command += ["--gpu", gpu] if DEVICE == "cuda" else []
    subprocess.run(command, cwd=ROOT, timeout=8 * CALIBRATION_SECONDS)
    return folder / "card_device.toml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("plan", "run", "one"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of jobs")
    parser.add_argument("--seconds", type=float, default=300, help="of all runs")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(JOBS)
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"no such job: {unknown[0]}. Expected some of {', '.join(JOBS)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "one":
        clock = Clock(names[0], arguments.system, folder)
        SYSTEMS[arguments.system](clock)
        clock.write()
        os._exit(0)
    if arguments.what == "plan":
        for name in names:
            if name != SAVED:
                record(arguments_of(name), folder / f"{name}.pickle")
        return
    end = time.monotonic() + arguments.seconds
    gpu = gpu_name()
    calibrated = calibrate(folder, gpu)
    pairs = [(name, system) for name in names for system in systems_of(name)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(start_run, folder=folder, end=end), pairs))
    print_speed(folder, names)
    print_plans(folder, names, gpu, calibrated)
    missing = [pair for pair in pairs if read_result(folder, *pair) is None]
    sys.exit(len(missing))


if __name__ == "__main__":
    main()
