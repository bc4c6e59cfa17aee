"""Compare predicted step times and memory with published runs, and fit clusters to a few of them.

    python -m benchmarks.plan_published record   # dry runs, a few layers each; restartable
    python -m benchmarks.plan_published fit      # constants of clusters, to rows `fit`
    python -m benchmarks.plan_published table    # predicted and published tokens/s
    python -m benchmarks.plan_published rank     # is the layout predicted as fastest the fastest?
    python -m benchmarks.plan_published scope    # compared rows, and why others are not
    python -m benchmarks.plan_published memory   # predicted and published GiB

With `--split holdout`, `table` and `memory` compare held-out rows instead of those of the fit.

Rows are the facts of tests/assets/published_runs.csv, with their sources. A row is compared if a
TOML of this package expresses its settings. Times are extended from two depths, and from two
numbers of micro-batches: both are linear. TorchTitan's rows are dry-run with what its code of their
month did otherwise, and NeMo's rows are timed as NeMo runs: see `torchtitan_of_its_time`,
`float8_gathers` and `nemo_of_its_time`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.deepened import NUM_RECORDED, deepen
from benchmarks.fit_runs import Sample, fit
from benchmarks.float8_gathers import has_float8_gathers, with_float8_gathers
from benchmarks.nemo_of_its_time import as_nemo
from benchmarks.torchtitan_of_its_time import (
    checkpoint_settings,
    code_of,
    differences_of,
    with_states_in_first_update,
)
from torchtitan_like.check import load_checked
from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.distributed.schedule_view import Action, order_of
from torchtitan_like.distributed.stages import plan_stages
from torchtitan_like.models.spec import get_spec, resolve_args
from torchtitan_like.plan.allocator import Reserved, replay
from torchtitan_like.plan.clusters import (
    Cluster,
    load_cluster,
    typical_cluster,
    with_mean_factor,
)
from torchtitan_like.plan.dry_run import DryRun, ranks_of_stages, record_ranks
from torchtitan_like.plan.fusion import fused_memory
from torchtitan_like.plan.gpus import Gpu, load_gpu
from torchtitan_like.plan.record import Recording
from torchtitan_like.plan.timeline import message_seconds, pipeline_ends, play_all, step_time
from torchtitan_like.resolved import resolve_layout
from torchtitan_like.util.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests/assets/published_runs.csv"
Row = dict[str, str]

# Text in a row -> why it is not compared. The first that matches counts.
OUT_OF_SCOPE = [
    ("GraphTrainer", "another compiler of the whole graph"),
    ("compiler toolkit", "another compiler of the whole graph"),
    ("SimpleFSDP aot_eager", "another compiler of the whole graph"),
    ("deterministic = true", "deterministic kernels, whose speed is not modeled"),
    ("not stated (memory fits", "the number of GPUs is not stated"),
    ("number of GPUs not stated", "the number of GPUs is not stated"),
    ("activation checkpointing not stated", "activation checkpointing is not stated"),
    ("recalled from the paper", "recalled figures, not checked against the source"),
    ("mxfp8", "MXFP8"),
]


def out_of_scope(row: Row) -> str:
    """Return why a row is not compared; "" if it is."""
    if row["framework"] not in ("torchtitan", "NeMo/Megatron"):
        return "another framework"
    if not row["model"].startswith(("llama", "qwen3")):
        return "not a Llama or Qwen3"
    text = f"{row['precision']}|{row['note']}|{row['ac']}"
    return next((reason for key, reason in OUT_OF_SCOPE if key in text), "")


# ---- configurations

# Model -> model and flavor here, and arguments that differ from the flavor.
MODELS = {
    "llama3-8B": ("llama3", "8B", ""),
    "llama3-70B": ("llama3", "70B", ""),
    "llama3-405B": ("llama3", "405B", ""),
    "llama2-7B": ("llama3", "8B", "dim=4096 n_heads=32 n_kv_heads=32 ffn_dim_multiplier=1.0"),
    "llama2-13B": ("llama3", "8B", "dim=5120 n_heads=40 n_kv_heads=40 ffn_dim_multiplier=1.0"),
    "llama2-70B": ("llama3", "70B", ""),
    "qwen3-32B": ("qwen3", "32B", ""),
    "qwen3-1.7B": ("qwen3", "1.7B", ""),
}
ACTIVATION_CHECKPOINTS = {
    "none": "mode=none",
    "full": "mode=full",
    "selective op": "mode=selective selective_ac_option=op",
    "selective layer 2": "mode=selective selective_ac_option=2",
}
PRECISIONS = {
    "bf16": "",
    "fp8": "recipe_name=tensorwise",
    "fp8 tensorwise": "recipe_name=tensorwise",
    "fp8 tensorwise+fp8 all-gather": (
        "recipe_name=tensorwise enable_fsdp_float8_all_gather=true "
        "precompute_float8_dynamic_scale_for_fsdp=true"
    ),
    "fp8 rowwise": "recipe_name=rowwise",
}
RESHARD = {"= always": "always", "= never": "never"}


class Shape(NamedTuple):
    """What of a row is dry-run: layers, and micro-batches of a step."""

    layers: int
    micro_batches: int


def settings_of(row: Row, shape: Shape, *, is_whole: bool = False) -> list[str]:
    """Return the arguments of `titan plan` for a row with the layers and micro-batches of a shape.

    is_whole: with the row's pipeline, instead of one of two stages.
    """
    name, flavor, different = MODELS[row["model"]]
    pp = int(row["pp"])
    arguments = {word.partition("=")[0]: word.partition("=")[2] for word in different.split()}
    arguments |= {"n_layers": str(shape.layers), "vocab_size": row["vocab"]}
    if int(row["seq_len"]) > 40960:  # longer than some rotary tables
        arguments["max_seq_len"] = row["seq_len"]
    tables: dict[str, dict[str, str]] = {
        "model": {"name": name, "flavor": flavor},
        "model.args": arguments,
        "training": {
            "seq_len": row["seq_len"],
            "steps": "1000",
            "attention_backend": "flash",  # torch of these years did not choose cuDNN
        },
        "parallelism": {
            "data_parallel_replicate_degree": row["dp_replicate"],
            "data_parallel_shard_degree": row["dp_shard"],
            "tensor_parallel_degree": row["tp"],
            "context_parallel_degree": row["cp"],
            "pipeline_parallel_degree": str(pp if is_whole else min(pp, 2)),
        },
        "loss": {"chunk_mib": "501" if "8 chunks" in row["loss"] else "0"},
        "activation_checkpoint": (
            _words(ACTIVATION_CHECKPOINTS[row["ac"]]) | checkpoint_settings(row)
        ),
        "metrics": {"enable_tensorboard": "false"},
        "checkpoint": {"enable": "false"},
    }
    local = int(row["micro_batch"])
    if pp > 1:
        local *= shape.micro_batches
        tables["parallelism"] |= {
            "pipeline_parallel_schedule": row["schedule"] if is_whole else "1F1B",
            "pipeline_parallel_microbatch_size": row["micro_batch"],
        }
        num_stages = pp * int(row["vp"]) if is_whole else 2
        if shape.layers % num_stages == 0:
            tables["parallelism"] |= {
                "pipeline_parallel_first_stage_less_layers": "0",
                "pipeline_parallel_last_stage_less_layers": "0",
            }
            if is_whole:
                per_stage = str(shape.layers // num_stages)
                tables["parallelism"]["pipeline_parallel_layers_per_stage"] = per_stage
    tables["training"]["local_batch_size"] = str(local)
    if pp == 1:
        data_ranks = int(row["dp_shard"]) * int(row["dp_replicate"])
        tables["training"]["global_batch_size"] = str(local * data_ranks * shape.micro_batches)
    for text, policy in RESHARD.items():
        if text in row["note"]:
            tables["parallelism"]["fsdp_reshard_after_forward"] = policy
    # NeMo's layers are fused by Transformer Engine.
    if row["compile"] == "1" or row["framework"] != "torchtitan":
        tables["compile"] = {"enable": "true"}
        if row["async_tp"] == "1" and int(row["tp"]) > 1:
            tables["parallelism"]["enable_async_tensor_parallel"] = "true"
    if precision := PRECISIONS[row["precision"]]:
        tables["model"]["converters"] = "quantize.linear.float8"
        tables["quantize.linear.float8"] = {"filter_fqns": "output", **_words(precision)}
    base = ["--job.config_file", str(ROOT / "torchtitan_like/train_configs/llama3_8b.toml")]
    pairs = [
        (f"--{table}.{key}", value) for table in tables for key, value in tables[table].items()
    ]
    return base + [word for pair in pairs for word in pair]


def _words(text: str) -> dict[str, str]:
    return {word.partition("=")[0]: word.partition("=")[2] for word in text.split()}


def micro_batches(row: Row) -> int:
    """Return the micro-batches of a row's step: of the pipeline, or accumulated."""
    if int(row["pp"]) > 1:
        return int(row["local_batch"]) // int(row["micro_batch"])
    samples = int(row["dp_shard"]) * int(row["dp_replicate"]) * int(row["micro_batch"])
    return int(row["global_batch"]) // samples


def shapes_of(row: Row) -> list[Shape]:
    """Return the smaller shapes from which a row's time is extended."""
    if int(row["pp"]) > 1:
        return [Shape(2, 2), Shape(4, 2)]
    numbers = [1] if micro_batches(row) == 1 else [2, 3]
    return [Shape(depth, count) for depth in (2, 4) for count in numbers]


def world_size(row: Row) -> int:
    """Return the ranks of a row's dry run, which has at most two pipeline ranks."""
    pp = int(row["pp"])
    return int(row["gpus"]) * min(pp, 2) // pp


# ---- dry runs


_configs: dict[tuple[str, Shape], JobConfig] = {}


def load(row: Row, shape: Shape) -> JobConfig:
    """Return the configuration. Raises ConfigError if this package cannot express it."""
    key = row["id"], shape
    if key not in _configs:
        with contextlib.redirect_stdout(sys.stderr):
            _configs[key], _ = load_checked(
                settings_of(row, shape), world_size(row), training=False, device_type="cuda"
            )
    return _configs[key]


def recordings(row: Row, shape: Shape, cache: Path, *, may_run: bool = True) -> list[DryRun]:
    """Return the dry runs of a row, from the cache if they are there.

    Raises KeyError if they are not and `may_run` is False.
    """
    described = f"{world_size(row)} {settings_of(row, shape)[2:]} {_code_key(row)}"
    path = cache / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.pickle"
    if not path.exists():
        if not may_run:
            raise KeyError("not recorded: run the command `record`")
        config = load(row, shape)
        num_ranks = world_size(row)
        ranks = ranks_of_stages(resolve_layout(config, num_ranks).dims)
        start = time.monotonic()
        with code_of(row):
            recorded = record_ranks(config, num_ranks, ranks, num_steps=1)
        print(f"{row['id']} {shape}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(list(recorded.values())))
        os.replace(partial, path)
    runs: list[DryRun] = pickle.loads(path.read_bytes())
    if row["framework"] != "torchtitan":
        return [replace(run, recording=as_nemo(run.recording)) for run in runs]
    if has_float8_gathers(row):
        return [replace(run, recording=with_float8_gathers(run.recording)) for run in runs]
    return runs


def _code_key(row: Row) -> list[str]:
    """Return what tells the code of a row's dry run from that of others with the same settings."""
    return [difference.what for difference in differences_of(row)]


# ---- clusters


# Of the comparison only: what `titan plan` should not take for the rate of a GPU.
NODES_2025 = str(ROOT / "benchmarks/clusters/h100-nodes-2025.toml")
_BY_GPU = {
    "A100": ("a100-64", "a100-80g"),
    "H200": ("h200-whitefiber", "h200-141g"),
    "B200": ("default", "b200-180g"),
}


def cluster_of(row: Row) -> tuple[str, str]:
    """Return the names of a row's cluster and GPU. Rows of one cluster have similar software, too."""
    if row["gpu"] in _BY_GPU:
        return _BY_GPU[row["gpu"]]
    if row["framework"] == "NeMo/Megatron":
        return "dgx-h100", "h100-80g"
    if row["date"] < "2025-08":
        return "grand-teton-h100", "h100-96g"
    return NODES_2025 if int(row["gpus"]) > 8 else "h100-hosts-2025", "h100-96g"


class Fit(NamedTuple):
    """The constants of a cluster that are fitted, and the rows to which they are fitted."""

    constants: tuple[str, ...]
    rows: tuple[str, ...]


# Chosen by what the rows have in common with others, before their errors were known.
FITS = {
    "grand-teton-h100": Fit(
        ("matmul_factor", "async_tp_hidden"),
        ("titan202412-8B-128-compile", "log822-8B-8-reshard-always", "asyncTP-8B-64-bf16-1"),
    ),
    "h100-hosts-2025": Fit(
        ("matmul_factor",),
        ("log1690-q32B-8-bs2-c", "log1881-8B-8-tp1-FSDP2", "log1625-8B-8"),
    ),
    NODES_2025: Fit(
        ("matmul_factor",),
        ("log1881-8B-64-tp1-FSDP2", "log1690-q32B-32-tp8-bs16"),
    ),
    "h200-whitefiber": Fit(("matmul_factor",), ("trainy-8B-h200-64",)),
    "a100-64": Fit(
        ("matmul_factor",),
        (
            "titan-a100-llama3-70B-full-bs1",
            "titan-a100-llama2-13B-selectiveop-bs2",
            "titan-a100-llama3-8B-selectivelayer2-bs1",
        ),
    ),
    "dgx-h100": Fit(
        ("matmul_factor", "async_tp_hidden"),
        ("nemo-8B-8-bf16", "nemo-70B-128-bf16", "nemo-405B-1152-bf16"),
    ),
}
# Held-out rows whose published values were known while the model was written. They are listed and
# do not count.
KNOWN = (
    "titan202412-8B-128-eager",
    "titan202412-8B-128-compile-fp8",
    "asyncTP-70B-256-tensorwise-0",
    "titan202412-405B-512-1F1B",
    "titan202412-405B-512-cp1-32k",
    "titan-405B-128-bf16-0-2024-10",
    "log1690-q32B-16-bs4",
)
# Held-out rows whose published memory was known while the emulation was written.
KNOWN_MEMORY = (
    "titan202412-8B-8-compile",
    "titan202412-8B-128-eager",
    "titan202412-70B-256-tp8-tp",
    "titan202412-405B-512-1F1B",
    "log1690-q32B-16-bs4",
    "log1690-q32B-32-tp8-bs32",
    "log1690-q32B-64-tp8-bs32",
)


def seconds_of(row: Row, cluster: Cluster, cache: Path) -> float:
    """Return the predicted seconds of a row's step, extended to all layers and micro-batches."""
    gpu = load_gpu(cluster_of(row)[1])
    if int(row["pp"]) > 1:
        return pipeline_seconds(row, gpu, cluster, cache)
    shapes = shapes_of(row)
    seconds = {}
    for shape in shapes:
        runs = recordings(row, shape, cache, may_run=False)
        seconds[shape] = step_time(runs, load(row, shape), gpu, cluster).seconds
    numbers = sorted({shape.micro_batches for shape in shapes})
    at_number = {
        number: _extend(
            {shape.layers: s for shape, s in seconds.items() if shape.micro_batches == number},
            int(row["layers"]),
        )
        for number in numbers
    }
    return _extend(at_number, micro_batches(row))


def pipeline_seconds(row: Row, gpu: Gpu, cluster: Cluster, cache: Path) -> float:
    """Return the seconds of a row with a pipeline, from two stages of one and of two layers.

    The actions of the row's own schedule take the time of their layers; the first stage's and the
    last stage's also that of the embedding and of the output layer.
    """
    pp, stages = int(row["pp"]), int(row["pp"]) * int(row["vp"])
    per_stage, per_rank = int(row["layers"]) / stages, int(row["layers"]) / pp
    actions: dict[tuple[int, str, int], float] = {}  # (rank, kind, layers)
    outside: dict[tuple[int, int], float] = {}
    message = 0.0
    for shape in shapes_of(row):
        runs = recordings(row, shape, cache, may_run=False)
        layers = shape.layers // 2
        message = max(message_seconds(run.recording, gpu, cluster) for run in runs)
        for rank, played in enumerate(play_all(runs, load(row, shape), gpu, cluster)):
            # The first action of a kind may wait for weights, which happens once in a step.
            for kind in "FB":
                actions[rank, kind, layers] = min(
                    seconds for action, seconds in played.actions if action.kind == kind
                )
            inside = sum(actions[rank, action.kind, layers] for action, _ in played.actions)
            outside[rank, layers] = played.seconds - inside

    def duration(action: Action) -> float:
        layer = actions[0, action.kind, 2] - actions[0, action.kind, 1]
        seconds = per_stage * layer
        if action.stage == 0:
            seconds += actions[0, action.kind, 1] - layer
        if action.stage == stages - 1:
            seconds += actions[1, action.kind, 1] - layer
        return seconds

    rests = [
        _extend({n: outside[rank == pp - 1, n] for n in (1, 2)}, per_rank) for rank in range(pp)
    ]
    order = order_of(row["schedule"], pp, int(row["vp"]), micro_batches(row))
    return max(pipeline_ends(order, duration, rests, message))


def _extend(seconds: dict[int, float], wanted: float) -> float:
    """Return the line through one or two points at `wanted`."""
    if len(seconds) == 1:
        return next(iter(seconds.values()))
    (x, y), (x2, y2) = sorted(seconds.items())
    return y + (y2 - y) / (x2 - x) * (wanted - x)


def published_seconds(row: Row) -> float:
    """Return a row's seconds of a step."""
    tokens = int(row["global_batch"]) * int(row["seq_len"]) / int(row["gpus"])
    return tokens / float(row["tps_per_gpu"])


def fit_cluster(name: str, rows: dict[str, Row], cache: Path) -> Cluster:
    """Return a cluster with the most likely constants. They start from those of default.toml."""
    chosen = [rows[identity] for identity in FITS[name].rows]
    assert all(row["split"] == "fit" for row in chosen), "a held-out row in a fit"
    samples = [
        Sample(row["id"], published_seconds(row), partial(seconds_of, row, cache=cache))
        for row in chosen
    ]
    return fit(samples, load_cluster(name), FITS[name].constants, load_cluster("default"))


# ---- commands


def select(rows: Sequence[Row], split: str, only: str) -> Iterator[Row]:
    """Yield the rows in scope that have a speed."""
    for row in rows:
        is_wanted = not only or row["id"] in only.split(",")
        if is_wanted and row["split"] == split and row["tps_per_gpu"] and not out_of_scope(row):
            yield row


def cluster_for(row: Row, which: str) -> Cluster:
    """Return the cluster with which a row is predicted.

    which: "own"; "typical", as `titan plan` without --cluster; "others", the same without the row's
    own cluster, from those with other GPUs if none is left.
    """
    own, gpu = cluster_of(row)
    if which == "own":
        return load_cluster(own)
    if which == "typical":
        return typical_cluster(gpu, int(row["gpus"]))
    fitted = [load_cluster(name) for name in FITS if name not in (own, NODES_2025)]
    return with_mean_factor([cluster for cluster in fitted if cluster.gpu == gpu] or fitted)


def print_table(rows: Sequence[Row], cache: Path, which: str) -> None:
    """Print predicted and published tokens/s of one GPU, and the errors' quantiles.

    which: see `cluster_for`.
    """
    fitted = {identity for fit in FITS.values() for identity in fit.rows}
    errors: dict[str, list[float]] = {"": [], " (fitted)": [], " (known)": []}
    print("| row | cluster | predicted | published | error |\n|---|---|---|---|---|")
    for row in rows:
        cluster = cluster_for(row, which)
        try:
            seconds = seconds_of(row, cluster, cache)
        except (ConfigError, RuntimeError, KeyError) as error:
            print(f"| {row['id']} | {cluster.key} | | | {str(error).splitlines()[0][:90]} |")
            continue
        error = published_seconds(row) / seconds - 1
        published = float(row["tps_per_gpu"])
        mark = " (known)" if row["id"] in KNOWN else ""
        mark = " (fitted)" if row["id"] in fitted and which == "own" else mark
        print(
            f"| {row['id']}{mark} | {cluster.key} | {published * (1 + error):,.0f} "
            f"| {published:,.0f} | {100 * error:+.1f} % |",
            flush=True,
        )
        errors[mark].append(abs(error))
    for mark, title in (("", "Unmarked"), (" (known)", "Known")):
        print_quantiles(title, errors[mark])


def whole_settings(row: Row, layers: int) -> list[str]:
    """Return the arguments of `titan plan` for a row with its own pipeline and so many layers."""
    return settings_of(row, Shape(layers, micro_batches(row)), is_whole=True)


def load_whole(row: Row, layers: int) -> JobConfig:
    """Return the configuration of `whole_settings`."""
    settings = whole_settings(row, layers)
    with contextlib.redirect_stdout(sys.stderr):
        config, _ = load_checked(settings, int(row["gpus"]), training=False, device_type="cuda")
    return config


def record_memory(row: Row, cache: Path) -> Recording:
    """Return the dry run of rank 0 with the code of a row's month, from the cache if it is there.

    Its stage has the layers that `deepen` repeats. Of a pipeline, rank 0 keeps the most
    micro-batches; one step is recorded.
    """
    pp = int(row["pp"])
    layers = NUM_RECORDED * pp
    described = f"memory {row['gpus']} {whole_settings(row, layers)[2:]} {_code_key(row)}"
    path = cache / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.pickle"
    if not path.exists():
        workspace = round(load_gpu(cluster_of(row)[1]).cublas_workspace_mib * MIB)
        options = {"matmul_workspace": workspace, "num_steps": 2 if pp == 1 else 1}
        config = load_whole(row, layers)
        with code_of(row):
            run = record_ranks(config, int(row["gpus"]), [0], **options)[0]
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(run.recording))
        os.replace(partial, path)
    recording = pickle.loads(path.read_bytes())
    assert isinstance(recording, Recording)
    return recording


def layers_of_rank_0(row: Row) -> int:
    """Return the layers of a row's first stage, without a pipeline of the model."""
    if row["pp"] == "1":
        return int(row["layers"])
    config = load_whole(row, int(row["layers"]))
    spec = get_spec(config.model.name)
    args = resolve_args(spec, config.model.flavor, config.model.args)
    names = plan_stages(spec, args, config.parallelism).fqns[0]
    return sum(name.startswith("layers.") for name in names)


def reserve(row: Row, cache: Path) -> Reserved:
    """Return what rank 0 of a row reserves, with all layers and micro-batches."""
    assert row["vp"] == "1", "several stages on a rank"
    recording = record_memory(row, cache)
    if row["compile"] == "1":
        recording = fused_memory(recording)
    if row["pp"] == "1":
        recording = with_states_in_first_update(recording)
    deep = deepen(recording, layers_of_rank_0(row))
    return replay(deep, is_expandable=row["allocator"] != "classic")


def print_memory(rows: Sequence[Row], cache: Path) -> None:
    """Print predicted and published memory of TorchTitan's rows, in GiB."""
    errors: dict[str, list[float]] = {"": [], " (known)": []}
    print("| row | compiled | active | published | reserved | published | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if not row["mem_reserved_gib"]:
            continue
        mark = " (known)" if row["id"] in KNOWN_MEMORY else ""
        is_compiled = "yes" if row["compile"] == "1" else "no"
        try:
            reserved = reserve(row, cache)
        except (ConfigError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[-1][:90]
            print(f"| {row['id']}{mark} | {is_compiled} | | | | | {reason} |", flush=True)
            continue
        predicted, published = reserved.num_bytes / GIB, float(row["mem_reserved_gib"])
        active = row["mem_active_gib"] and f"{float(row['mem_active_gib']):.2f}"
        relative = predicted / published - 1
        errors[mark].append(abs(relative))
        print(
            f"| {row['id']}{mark} | {is_compiled} | {reserved.active / GIB:.2f} | {active} "
            f"| {predicted:.2f} | {published:.2f} | {100 * relative:+.1f} % |",
            flush=True,
        )
    for mark, title in (("", "Unmarked"), (" (known)", "Known")):
        print_quantiles(title, errors[mark])


def print_quantiles(title: str, errors: Sequence[float]) -> None:
    """Print the median of relative errors, and how many are small."""
    if errors:
        shares = [sum(error <= limit for error in errors) for limit in (0.07, 0.10, 0.15)]
        print(
            f"\n{title}, {len(errors)} rows: median {100 * statistics.median(errors):.1f} %, "
            f"within 7 %: {shares[0]}, within 10 %: {shares[1]}, within 15 %: {shares[2]}"
        )


WORK = ("framework", "model", "seq_len", "gpus", "gpu_note", "date", "precision")
TOLERANCE = 0.06  # the same TOML is published with speeds that differ by it


def print_rankings(rows: Sequence[Row], cache: Path) -> None:
    """Print whether the layout predicted as fastest is the published fastest one, or close to it.

    A group has all rows of the same work (model, tokens of a sample, GPUs, precision, month).
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in WORK), []).append(row)
    print("| rows, published best first | predicted best | its speed |\n|---|---|---|")
    num_good, num_groups = 0, 0
    for group in groups.values():
        group.sort(key=lambda row: -float(row["tps_per_gpu"]))
        layouts = {tuple(settings_of(row, Shape(2, 2))) for row in group}
        if len(layouts) < 2:
            continue
        try:
            speeds = [
                published_seconds(row)
                / seconds_of(row, load_cluster(cluster_of(row)[0]), cache)
                * float(row["tps_per_gpu"])
                for row in group
            ]
        except KeyError:
            continue  # not all recorded
        best = group[speeds.index(max(speeds))]
        share = float(best["tps_per_gpu"]) / float(group[0]["tps_per_gpu"])
        num_groups += 1
        num_good += share >= 1 - TOLERANCE
        names = ", ".join(row["id"] for row in group)
        print(f"| {names} | {best['id']} | {100 * share:.0f} % of the best |", flush=True)
    print(f"\n{num_good} of {num_groups} groups within {100 * TOLERANCE:.0f} %")


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("record", "fit", "table", "scope", "memory", "rank"))
    parser.add_argument("--split", choices=("fit", "holdout"), default="fit")
    parser.add_argument("--rows", default="", help="ids, separated by commas")
    parser.add_argument(
        "--cluster",
        choices=("own", "typical", "others"),
        default="own",
        help="of `table`: the row's own, that of titan plan without --cluster, or without the own",
    )
    parser.add_argument("--cache", type=Path, default=ROOT / "outputs/plan_published")
    arguments = parser.parse_args()
    with ROWS.open() as file:
        rows = list(csv.DictReader(file))
    arguments.cache.mkdir(parents=True, exist_ok=True)
    chosen = list(select(rows, arguments.split, arguments.rows))
    if arguments.command == "scope":
        for row in rows:
            print(f"{row['id']}: {out_of_scope(row) or 'compared'}")
    elif arguments.command == "record":
        for row in sorted(chosen, key=lambda row: int(row["pp"])):
            for shape in shapes_of(row):
                try:
                    recordings(row, shape, arguments.cache)
                except (ConfigError, RuntimeError) as error:
                    print(f"{row['id']} {shape}: {error}", file=sys.stderr, flush=True)
                    break
    elif arguments.command == "fit":
        by_id = {row["id"]: row for row in rows}
        for name in FITS:
            if not arguments.rows or name in arguments.rows.split(","):
                print(fit_cluster(name, by_id, arguments.cache), flush=True)
    elif arguments.command == "memory":
        print_memory(chosen, arguments.cache)
    elif arguments.command == "rank":
        both = [row for split in ("fit", "holdout") for row in select(rows, split, arguments.rows)]
        print_rankings(both, arguments.cache)
    else:
        print_table(chosen, arguments.cache, arguments.cluster)


if __name__ == "__main__":
    main()
