"""Tests on CUDA devices: training, offloading, memory metrics and snapshots, NCCL timeouts."""

import os
import pickle
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch

from tests.distributed.parity import options
from tests.exact_runs import read_step
from tests.harness.ports import free_ports
from tests.harness.runner import run_trainer
from torchtitan_like.distributed.determinism import seed_device
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.world import join_world, launched_as
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.monitor.memory import build_memory_monitor
from torchtitan_like.optim.loss import chunked_cross_entropy
from torchtitan_like.util.cuda_graphs import CapturedPass
from torchtitan_like.util.units import GIB

pytestmark = pytest.mark.gpu
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
EXACT = (
    "step",
    "n_tokens_seen",
    "num_valid_tokens",
    "loss",
    "grad_norm",
    "data_digest_chain",
    "skipped",
)


def skip_without_gpus(num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs; torch sees {torch.cuda.device_count()}")


def train(folder, ranks=1, env=None, **overrides):
    """Run a trainer process."""
    argv = options(str(folder), "float32", **{"training.local_batch_size": 8 // ranks, **overrides})
    run = run_trainer(argv, ranks, folder, env=env)
    assert run.returncode == 0, run.tail
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    return run


def exact_metrics(run):
    return [[row[key] for key in EXACT] for row in run.metrics]


def assert_close(run, other, limit):
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in run.metrics] == pytest.approx(
            [row[key] for row in other.metrics], rel=limit
        ), key
    assert [row["data_digest"] for row in run.metrics] == [
        row["data_digest"] for row in other.metrics
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_cpu_and_repeats_exactly(tmp_path, ranks):
    """Runs on two ranks use FSDP."""
    skip_without_gpus(ranks)
    fixed = {"debug.deterministic": "true"}
    first, second = (train(tmp_path / name, ranks, **fixed) for name in ("first", "second"))
    assert "CUDA capacity: " in first.stdout and ("Applied FSDP" in first.stdout) == (ranks == 2)
    assert exact_metrics(first) == exact_metrics(second)
    assert_close(first, train(tmp_path / "cpu", ranks, NO_GPU), limit=1e-3)


EXPERTS = {
    "model.name": "qwen3",
    "model.flavor": "debugmodel_moe",
    **{f"model.args.{name}": None for name in ("dim", "n_heads", "n_kv_heads", "multiple_of")},
}
GRAPHED = {
    "dense": {},
    "accumulation": {"training.global_batch_size": 32},
    "per_op": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "activation_checkpoint.preserve_rng_state": "false",
    },
    "experts": EXPERTS,
    "compiled": {"compile.enable": "true"},
}


@pytest.mark.parametrize("name", GRAPHED)
def test_cuda_graphs_change_no_number(tmp_path, name):
    """Steps 3 to 5 are graphs. The files of the last checkpoint have the weights and averages."""
    if name == "experts" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("grouped_mm reads the numbers of rows on the host of other GPUs")
    settings = {
        "training.mixed_precision_param": "bfloat16",
        "debug.deterministic": "true",
        "checkpoint.enable": "true",
        "checkpoint.last_save_model_only": "false",
        **GRAPHED[name],
    }
    eager = train(tmp_path / "eager", **settings)
    graphs = train(tmp_path / "graphs", **settings, **{"compile.cuda_graphs": "true"})
    num_graphs = 2 if name == "accumulation" else 1
    assert graphs.stdout.count("as a CUDA graph") == num_graphs
    assert exact_metrics(graphs) == exact_metrics(eager)
    steps = [read_step(run.dump_folder / "checkpoint/step-5") for run in (eager, graphs)]
    assert steps[0]["files"] and steps[0]["files"] == steps[1]["files"]


def test_cuda_graphs_without_determinism_give_close_results(tmp_path):
    graphs = train(tmp_path / "graphs", **{"compile.cuda_graphs": "true"})
    assert_close(graphs, train(tmp_path / "eager"), limit=1e-4)


class _Loss(NamedTuple):
    loss: torch.Tensor


def test_replays_draw_from_the_seed_of_their_micro_batch():
    weight = torch.ones(1000, device="cuda", requires_grad=True)

    def compute(x, divide):
        loss = divide(torch.nn.functional.dropout(x * weight, 0.5).sum())
        loss.backward()
        return _Loss(loss.detach())

    def run(function):
        values = []
        for step in range(5):
            weight.grad = None
            for micro in range(2):
                seed_device(2 * step + micro, weight.device)
                x = torch.full((1000,), float(step + micro + 1), device="cuda")
                values.append(function(x, num_valid=3 + step).loss.item())
            values.append(weight.grad.tolist())
        return values

    eager = run(lambda x, num_valid: compute(x, lambda total: total / num_valid))
    assert run(CapturedPass(compute, [weight])) == eager


def test_cpu_offload_gives_close_results(tmp_path):
    offloaded = train(tmp_path / "offloaded", **{"training.enable_cpu_offload": "true"})
    assert "Applied CPU offloading to the model" in offloaded.stdout
    assert_close(offloaded, train(tmp_path / "plain"), limit=1e-4)


def test_metrics_contain_memory_and_snapshots_are_written(tmp_path):
    snapshots = {"profiling.enable_memory_snapshot": "true", "profiling.profile_freq": 3}
    run = train(tmp_path / "run", **snapshots)
    assert all(row["memory_gib"] > 0 for row in run.metrics)
    (path,) = (tmp_path / "run").glob("*/iteration_*/rank0_memory_snapshot.pickle")
    assert path.parent.name == "iteration_3"
    assert pickle.loads(path.read_bytes())["segments"]


def test_peaks_are_reset_at_each_log_line():
    monitor = build_memory_monitor(torch.device("cuda", torch.cuda.current_device()))
    before = monitor.read().scalars["memory/max_active(GiB)"]
    tensor = torch.empty(GIB // 8, dtype=torch.uint8, device="cuda")
    reading = monitor.read()
    assert reading.scalars["memory/max_active(GiB)"] - before == pytest.approx(1 / 8, rel=0.01)
    assert reading.gib >= reading.scalars["memory/max_active(GiB)"] and 0 < reading.percent < 100
    del tensor
    assert monitor.read().scalars["memory/max_active(GiB)"] - before == pytest.approx(
        1 / 8, rel=0.01
    )
    monitor.reset()
    assert monitor.read().scalars["memory/max_active(GiB)"] == pytest.approx(before, abs=1e-3)


def peak_mib(loss, tokens):
    """Return the peak of forward and backward, without the memory allocated before, in MiB."""
    hidden, weight = (
        torch.zeros(n, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n in (tokens, 32000)
    )
    labels = torch.zeros(tokens, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(hidden, weight, labels).backward()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_chunked_loss_reduces_peak_memory():
    """2,048 x 32,000 logits take 125 MiB in bf16 and 250 MiB in fp32.

    The first product allocates cuBLAS's workspaces.
    """
    plain, chunked = (
        [peak_mib(loss, tokens) for tokens in (16, 2048)][1]
        for loss in (cross_entropy_sum, chunked_cross_entropy(32))
    )
    assert plain > 250 and chunked < plain / 2


def check_timeouts(rank, port):
    """Check the timeouts of all training groups and of the checkpoint group in one process."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ["WORLD_SIZE"] = "2"
    long, short = timedelta(seconds=300), timedelta(seconds=17)
    # Two groups: `tp` is the default group; the mesh creates `dp_shard` with one rank.
    world = join_world(
        launched_as(), ParallelDims(2, tp=2), long, long, needs_mesh=True, agree=lambda gather: None
    )

    def read(groups):
        backends = [
            group._get_backend(device) for group in groups for device in group._device_types
        ]
        return {(backend.name(), backend.options._timeout) for backend in backends}

    torch.distributed.all_reduce(torch.ones(1, device=world.device), group=world.group("tp"))
    assert read(world._training_groups) == {("nccl", long), ("gloo", long)}
    world.tighten_timeouts(short)
    assert read(world._training_groups) == {("nccl", short), ("gloo", short)}
    assert read([world.checkpoint_group.group]) == {("gloo", long)}
    world.leave()


def test_nccl_timeouts_are_shortened_after_the_first_step():
    skip_without_gpus(2)
    [port] = free_ports(1)
    torch.multiprocessing.spawn(check_timeouts, (port,), nprocs=2)
