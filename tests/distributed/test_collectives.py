"""Kinds, counts, elements and dtypes of the collectives of one step, by layout and option."""

from collections import Counter

import pytest
import torch

from tests.distributed.parity import build, options, release
from tests.distributed.traffic import Sent, Traffic
from tests.harness.rank_pool import run_ranks
from torchtitan_like.train import Trainer


def make_step(trainer: Trainer) -> None:
    step = trainer.progress.step + 1
    fetched = trainer.fetch(step)
    trainer.train_step(step, fetched, fetched.agreement.wait())


def record_second_step(argv):
    """Return the collectives of more than one float and the number of host reads in step 2.

    The first step also initializes. Collectives of one element are bookkeeping or norms.
    """
    trainer = build(argv)
    make_step(trainer)
    fetched = trainer.fetch(2)
    sums = fetched.agreement.wait()
    with Traffic() as traffic:
        trainer.train_step(2, fetched, sums)
    release(trainer)
    norm = [sent for sent in traffic.sent if sent.dtype == torch.float64]
    assert norm == [Sent("all_reduce", torch.float64, 1)] * (trainer.world.size > 1), (
        "expected one all-reduce for the gradient norm"
    )
    return [
        sent for sent in traffic.sent if sent.elements > 1 and sent.dtype.is_floating_point
    ], traffic.num_host_reads


def collectives(tmp_path, world_size, **overrides):
    first, *others = run_ranks(
        record_second_step, world_size, options(str(tmp_path / "run"), "float32", **overrides)
    )
    assert all(kinds(log) == kinds(first[0]) for log, _ in others)
    return first[0]


def kinds(log):
    return Counter(kind for kind, _, _ in log)


REPLICATE = {"parallelism.data_parallel_replicate_degree": 2}
# Parameter groups: one for each of the two blocks, one for the head, one for the embedding.
GROUPS = 4


@pytest.mark.parametrize(
    ("world_size", "overrides", "expected"),
    [
        (1, {}, {}),
        (2, REPLICATE, {"all_reduce": GROUPS}),
        (
            2,
            {"parallelism.fsdp_reshard_after_forward": "always"},
            {"all_gather": 2 * GROUPS, "reduce_scatter": GROUPS},
        ),
        (
            2,
            {"parallelism.fsdp_reshard_after_forward": "never"},
            {"all_gather": GROUPS, "reduce_scatter": GROUPS},
        ),
    ],
    ids=["one", "ddp", "fsdp-always", "fsdp-never"],
)
def test_collectives_of_a_layout(tmp_path, world_size, overrides, expected):
    local = {"training.local_batch_size": 8 // world_size}
    assert kinds(collectives(tmp_path, world_size, **local, **overrides)) == expected


TP = {"parallelism.tensor_parallel_degree": 2}


def fsdp(block, embedding, head):
    """Return the expected collectives of FSDP with their elements.

    Forward gathers all groups; backward gathers the resharded blocks again.
    """
    return {("all_gather", block): 4, ("reduce_scatter", block): 2} | {
        (kind, size): 1 for kind in ("all_gather", "reduce_scatter") for size in (embedding, head)
    }


def tp(tokens):
    """Return the expected collectives of TP with their elements.

    Each block gathers and scatters hidden states twice in forward and twice in backward. Embedding
    and head together add one of each per direction. The five norms reduce their gradients. The loss
    reduces the largest logit of each token, then two sums.
    """
    hidden = {(kind, tokens * 32): 10 for kind in ("all_gather", "reduce_scatter")}
    return hidden | {
        ("all_reduce", 32): 5,
        ("all_reduce", tokens): 1,
        ("all_reduce", 2 * tokens): 1,
    }


# A block of width 32 has 12,352 parameters, 64 of them in norms. Embedding and head have 2,048 x 32
# each, the final norm has 32.
SENT = {
    "fsdp": (2, {}, fsdp(12352, 65536, 65568)),
    "hsdp": (4, REPLICATE, fsdp(12352, 65536, 65568) | {
        ("all_reduce", 12352 // 2): 2,
        ("all_reduce", 65536 // 2): 1,
        ("all_reduce", 65568 // 2): 1}),
    "tp": (2, TP, tp(8 * 32)),
    "fsdp-tp": (4, TP, fsdp(6144 + 64, 32768, 32768 + 32) | tp(4 * 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_elements_of_a_layout(tmp_path, name):
    """All collectives are in float32."""
    world_size, layout, expected = SENT[name]
    data_ranks = world_size // (2 if layout is TP else 1)
    log = collectives(
        tmp_path, world_size, **{"training.local_batch_size": 8 // data_ranks}, **layout
    )
    assert Counter((kind, size) for kind, _, size in log) == expected
    assert {sent.dtype for sent in log} == {torch.float32}


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(2, id="ddp"), pytest.param(4, id="hsdp", marks=pytest.mark.nightly)],
)
def test_accumulation_adds_no_all_reduce(tmp_path, world_size):
    """Replicas exchange gradients once a step: 8 micro-batches send the bytes of one."""
    logs = [
        [entry for entry in collectives(
            tmp_path, world_size, **REPLICATE,
            **{"training.local_batch_size": 1,
               "training.global_batch_size": world_size * num_micro},
        ) if entry[0] == "all_reduce"]
        for num_micro in (1, 8)
    ]  # fmt: skip
    assert logs[0] == logs[1] and len(logs[0]) == GROUPS


@pytest.mark.parametrize(
    ("world_size", "overrides", "reduce_dtype"),
    [
        (2, {}, "float32"),
        (2, REPLICATE, "float32"),
        (2, {}, "bfloat16"),
        (4, REPLICATE, "bfloat16"),
    ],
    ids=["fsdp", "ddp", "fsdp-reduce-bf16", "hsdp-reduce-bf16"],
)
def test_mixed_precision_gathers_bfloat16_and_reduces_in_the_set_dtype(
    tmp_path, world_size, overrides, reduce_dtype
):
    """`mixed_precision_reduce` sets the dtype of reductions: float32 or bfloat16."""
    precision = {
        "training.mixed_precision_param": "bfloat16",
        "training.local_batch_size": 8 // world_size,
    }
    precision["training.mixed_precision_reduce"] = reduce_dtype
    dtypes = {}
    for kind, dtype, _ in collectives(tmp_path, world_size, **overrides, **precision):
        dtypes.setdefault(kind, set()).add(dtype)
    assert dtypes.pop("all_gather", {torch.bfloat16}) == {torch.bfloat16}
    assert set().union(*dtypes.values()) == {getattr(torch, reduce_dtype)}


@pytest.mark.parametrize(
    "overrides",
    [{}, {"training.local_batch_size": 1}, {"optimizer.early_step_in_backward": "true"}],
    ids=["plain", "accumulation", "in-backward"],
)
def test_step_reads_no_device_value_on_the_host(tmp_path, overrides):
    """The fused optimizer skips non-finite updates on the device. Other optimizers cannot."""
    argv = options(
        str(tmp_path / "run"), "float32", **{"training.local_batch_size": 4, **overrides}
    )
    assert [reads for _, reads in run_ranks(record_second_step, 2, argv)] == [0, 0]
