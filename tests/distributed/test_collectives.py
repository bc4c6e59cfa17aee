"""What each layout and option puts on the wire in a step: kinds, counts, elements and types of its collectives."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from torchtitan_like.train import Trainer


class OperatorLog(TorchDispatchMode):
    """Notes each collective of more than one float (what is not bookkeeping or a norm), and each value the host reads."""

    def __init__(self):
        super().__init__()
        self.collectives = []  # (kind, dtype of what is sent, elements of its largest tensor)
        self.num_host_reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = max(tensor.numel() for tensor in tensors)
            if size > 1 and tensors[0].is_floating_point():
                self.collectives.append((kind_of(str(function)), str(tensors[-1].dtype), size))
        self.num_host_reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def kind_of(name):
    return next(kind for kind in ("reduce_scatter", "allgather", "allreduce") if kind in name)


def make_step(trainer: Trainer) -> None:
    step = trainer.progress.step + 1
    fetched = trainer._fetch(step)
    trainer.train_step(step, fetched, fetched.agreement.wait())


def log_of_a_step(argv):
    """(collectives, host reads) of the second step, on each rank: the first one also initialises."""
    trainer = build(argv)
    make_step(trainer)
    fetched = trainer._fetch(2)
    sums = fetched.agreement.wait()
    with OperatorLog() as log:
        trainer.train_step(2, fetched, sums)
    release(trainer)
    return log.collectives, log.num_host_reads


def collectives(tmp_path, world_size, **overrides):
    first, *others = run_ranks(log_of_a_step, world_size, options(str(tmp_path / "run"), "float32", **overrides))
    assert all(kinds(log) == kinds(first[0]) for log, _ in others)
    return first[0]


def kinds(log):
    return Counter(kind for kind, _, _ in log)


REPLICATE = {"parallelism.data_parallel_replicate_degree": 2}
# The model has two blocks: one group of parameters each, one for the head, one for the embedding.
GROUPS = 4


@pytest.mark.parametrize(
    ("world_size", "overrides", "expected"),
    [
        (1, {}, {}),
        (2, REPLICATE, {"allreduce": GROUPS}),
        # Forward gathers all; backward gathers again what was freed: the blocks.
        (2, {}, {"allgather": 2 * GROUPS - 2, "reduce_scatter": GROUPS}),
        (2, {"parallelism.fsdp_reshard_after_forward": "always"}, {"allgather": 2 * GROUPS, "reduce_scatter": GROUPS}),
        (2, {"parallelism.fsdp_reshard_after_forward": "never"}, {"allgather": GROUPS, "reduce_scatter": GROUPS}),
        (4, REPLICATE, {"allgather": 2 * GROUPS - 2, "reduce_scatter": GROUPS, "allreduce": GROUPS}),
    ],
    ids=["one", "ddp", "fsdp", "fsdp-always", "fsdp-never", "hsdp"],
)
def test_collectives_of_a_layout(tmp_path, world_size, overrides, expected):
    local = {"training.local_batch_size": 8 // world_size}
    assert kinds(collectives(tmp_path, world_size, **local, **overrides)) == expected


@pytest.mark.parametrize(("world_size", "layout"), [(2, REPLICATE), (4, REPLICATE)], ids=["ddp", "hsdp"])
def test_accumulation_adds_no_all_reduce(tmp_path, world_size, layout):
    """Replicas exchange gradients once a step: 8 micro-batches send the bytes of one."""
    logs = [
        [entry for entry in collectives(
            tmp_path, world_size, **layout,
            **{"training.local_batch_size": 1, "training.global_batch_size": world_size * num_micro},
        ) if entry[0] == "allreduce"]
        for num_micro in (1, 8)
    ]  # fmt: skip
    assert logs[0] == logs[1] and len(logs[0]) == GROUPS


@pytest.mark.parametrize(
    ("world_size", "overrides", "reduced"),
    [
        (2, {}, "float32"),
        (2, REPLICATE, "float32"),
        (4, REPLICATE, "float32"),
        (2, {}, "bfloat16"),
        (4, REPLICATE, "bfloat16"),
    ],
    ids=["fsdp", "ddp", "hsdp", "fsdp-narrow", "hsdp-narrow"],
)
def test_mixed_precision_gathers_narrow_and_reduces_wide(tmp_path, world_size, overrides, reduced):
    """Unless it is told to reduce narrow as well."""
    narrow = {"training.mixed_precision_param": "bfloat16", "training.local_batch_size": 8 // world_size}
    narrow["training.mixed_precision_reduce"] = reduced
    dtypes = {}
    for kind, dtype, _ in collectives(tmp_path, world_size, **overrides, **narrow):
        dtypes.setdefault(kind, set()).add(dtype)
    assert dtypes.pop("allgather", {"torch.bfloat16"}) == {"torch.bfloat16"}
    assert set().union(*dtypes.values()) == {f"torch.{reduced}"}


@pytest.mark.parametrize(
    "overrides",
    [{}, {"training.local_batch_size": 1}, {"optimizer.early_step_in_backward": "true"}],
    ids=["plain", "accumulation", "in-backward"],
)
def test_the_host_reads_nothing_in_a_step(tmp_path, overrides):
    """With the fused optimizer; the others have no gate of their own for bad numbers, and say so at start."""
    argv = options(str(tmp_path / "run"), "float32", **{"training.local_batch_size": 4, **overrides})
    assert [reads for _, reads in run_ranks(log_of_a_step, 2, argv)] == [0, 0]
