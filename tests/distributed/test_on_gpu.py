"""What only a CUDA device shows: runs of the tiny model, offloading, memory figures and snapshots, NCCL's time-outs."""

import os
import pickle
from datetime import timedelta

import pytest
import torch

from tests.distributed.parity import options
from tests.harness.ports import free_ports
from tests.harness.runner import run_trainer
from torchtitan_like.distributed.dims import ParallelDims
from torchtitan_like.distributed.world import join_world, launched_as
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.monitor.memory import GIB, build_memory_monitor
from torchtitan_like.optim.loss import chunked_cross_entropy

pytestmark = pytest.mark.gpu
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
EXACT = ("step", "n_tokens_seen", "num_valid_tokens", "loss", "grad_norm", "data_digest_chain", "skipped")


def needs(num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs; torch sees {torch.cuda.device_count()}")


def trained(folder, ranks=1, env=None, **overrides):
    """The run of a process of its own."""
    argv = options(str(folder), "float32", **{"training.local_batch_size": 8 // ranks, **overrides})
    run = run_trainer(argv, ranks, folder, env=env)
    assert run.returncode == 0, run.tail
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    return run


def exact(run):
    return [[row[key] for key in EXACT] for row in run.metrics]


def assert_close(run, other, limit):
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in run.metrics] == pytest.approx([row[key] for row in other.metrics], rel=limit), key
    assert [row["data_digest"] for row in run.metrics] == [row["data_digest"] for row in other.metrics]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_cpu_and_repeats_exactly(tmp_path, ranks):
    """On two ranks with FSDP."""
    needs(ranks)
    fixed = {"debug.deterministic": "true"}
    first, second = (trained(tmp_path / name, ranks, **fixed) for name in ("first", "second"))
    assert "CUDA capacity: " in first.stdout and ("Applied FSDP" in first.stdout) == (ranks == 2)
    assert exact(first) == exact(second)
    assert_close(first, trained(tmp_path / "cpu", ranks, NO_GPU), limit=1e-3)


def test_offloaded_parameters_train_the_same(tmp_path):
    offloaded = trained(tmp_path / "offloaded", **{"training.enable_cpu_offload": "true"})
    assert "Applied CPU offloading to the model" in offloaded.stdout
    assert_close(offloaded, trained(tmp_path / "plain"), limit=1e-4)


def test_memory_is_measured_and_its_history_written(tmp_path):
    snapshots = {"profiling.enable_memory_snapshot": "true", "profiling.profile_freq": 3}
    run = trained(tmp_path / "run", **snapshots)
    assert all(row["memory_gib"] > 0 for row in run.metrics)
    (path,) = (tmp_path / "run").glob("*/iteration_*/rank0_memory_snapshot.pickle")
    assert path.parent.name == "iteration_3"
    assert pickle.loads(path.read_bytes())["segments"]


def test_peaks_are_reset_at_each_log_line():
    monitor = build_memory_monitor(torch.device("cuda", torch.cuda.current_device()))
    before = monitor.read().scalars["memory/max_active(GiB)"]
    kept = torch.empty(GIB // 8, dtype=torch.uint8, device="cuda")
    reading = monitor.read()
    assert reading.scalars["memory/max_active(GiB)"] - before == pytest.approx(1 / 8, rel=0.01)
    assert reading.gib >= reading.scalars["memory/max_active(GiB)"] and 0 < reading.percent < 100
    del kept
    assert monitor.read().scalars["memory/max_active(GiB)"] - before == pytest.approx(1 / 8, rel=0.01)
    monitor.reset()
    assert monitor.read().scalars["memory/max_active(GiB)"] == pytest.approx(before, abs=1e-3)


def peak_mib(loss, tokens):
    """Of forward and backward, above what was there."""
    hidden, weight = (
        torch.zeros(n, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (tokens, 32000)
    )
    labels = torch.zeros(tokens, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss(hidden, weight, labels).backward()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_a_chunked_loss_needs_a_part_of_the_memory():
    """2,048 x 32,000 logits are 125 MiB as bf16, 250 as fp32. cuBLAS's workspaces come with the first product."""
    plain, chunked = (
        [peak_mib(loss, tokens) for tokens in (16, 2048)][1] for loss in (cross_entropy_sum, chunked_cross_entropy(32))
    )
    assert plain > 250 and chunked < plain / 2


def timeouts(rank, port):
    """In one of two processes: every group of training, on both kinds of device, and that of checkpoints."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = "2"
    long, short = timedelta(seconds=300), timedelta(seconds=17)
    # Two groups: `tp` is the default one, `dp_shard`, of one rank, is the mesh's own.
    world = join_world(launched_as(), ParallelDims(2, tp=2), long, long, needs_mesh=True, agree=lambda gather: None)

    def read(groups):
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return {(backend.name(), backend.options._timeout) for backend in backends}

    torch.distributed.all_reduce(torch.ones(1, device=world.device), group=world.group("tp"))
    assert read(world._training_groups) == {("nccl", long), ("gloo", long)}
    world.tighten_timeouts(short)
    assert read(world._training_groups) == {("nccl", short), ("gloo", short)}
    assert read([world.checkpoint_group.group]) == {("gloo", long)}
    world.leave()


def test_time_outs_of_nccl_are_tightened():
    needs(2)
    [port] = free_ports(1)
    torch.multiprocessing.spawn(timeouts, (port,), nprocs=2)
