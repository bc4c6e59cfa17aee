"""The loss over a sharded vocabulary equals plain cross-entropy in value and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness.rank_pool import run_ranks
from torchtitan_like.models.layers.head import cross_entropy_sum
from torchtitan_like.optim.loss import VocabShards, chunked_cross_entropy

DIM = 32


class Record(TorchDispatchMode):
    """Records collectives as (kind, elements), and the bytes of the largest tensor storage."""

    def __init__(self):
        super().__init__()
        self.collectives, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            *_, sent = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.collectives.append((func.overloadpacket.__name__, sent.numel()))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def make_inputs(tokens, vocab, dtype, ignored, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(tokens, DIM, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    weight = scale * torch.randn(vocab, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight.to(dtype).requires_grad_(), labels


def relative_error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def local_rows(weight, shards):
    """Return this rank's rows of the weight as a leaf tensor."""
    return weight.detach()[shards.offset : shards.offset + shards.size].clone().requires_grad_()


def value_and_gradients(value, hidden, rows, shards):
    """Return value, summed gradient of hidden, and this rank's gradient of the weight."""
    d_hidden = hidden.grad.clone()
    dist.all_reduce(d_hidden, group=shards.group)
    return value.detach(), d_hidden, rows.grad


def relative_errors(case):
    """Return the relative errors of value and of both gradients.

    Also check that the value without gradients is equal.
    """
    tokens, vocab, dtype, ignored, chunk_mib, backend, gathers = case
    hidden, weight, labels = make_inputs(tokens, vocab, dtype, ignored)
    plain = cross_entropy_sum(hidden, weight, labels)
    (plain * 0.37).backward()
    shards = VocabShards(dist.group.WORLD, vocab)
    expected = plain.detach(), hidden.grad, weight.grad[shards.offset : shards.offset + shards.size]
    hidden.grad, rows = None, local_rows(weight, shards)
    loss = chunked_cross_entropy(chunk_mib, backend, shards, gathers_logits=gathers)
    value = loss(hidden, rows, labels)
    (value * 0.37).backward()
    with torch.no_grad():
        value_without_gradient = loss(hidden, rows, labels)
    assert value_without_gradient == value and not value_without_gradient.requires_grad
    actual = value_and_gradients(value, hidden, rows, shards)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        assert tensor.dtype == expected_tensor.dtype and tensor.shape == expected_tensor.shape
    return [
        relative_error(tensor, expected_tensor)
        for tensor, expected_tensor in zip(actual, expected, strict=True)
    ]


F32, F64 = torch.float32, torch.float64
# (tokens, vocab, dtype, fraction of ignored labels, chunk_mib, compile backend, gathered logits)
CASES = {
    "even": (300, 4096, F64, 0.2, 1, None, False),
    "one chunk": (300, 4096, F64, 0.2, 0, None, False),
    "uneven": (300, 4099, F64, 0.2, 1, None, False),
    "a rank without entries": (30, 5, F64, 0.2, 0, None, False),
    "all ignored": (30, 71, F64, 1.0, 0, None, False),
    "one token": (1, 71, F64, 0.0, 1, None, False),
    "gathered": (300, 4099, F64, 0.2, 1, None, True),
    "gathered, a rank without entries": (30, 5, F64, 0.2, 0, None, True),
    "compiled": (100, 71, F64, 0.2, 0, "aot_eager", False),
    "gathered and compiled": (100, 71, F64, 0.2, 0, "aot_eager", True),
    "fp32": (300, 4099, F32, 0.2, 1, None, False),
    "fp32 gathered": (300, 4099, F32, 0.2, 1, None, True),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_plain_cross_entropy(name, world_size):
    case = CASES[name]
    limit = 1e-12 if case[2] == F64 else 1e-6
    assert all(
        error <= limit
        for errors in run_ranks(relative_errors, world_size, case)
        for error in errors
    )


def bf16_errors(vocab):
    """Return the errors of loss and gradients for bf16 inputs: sharded, and on one rank.

    The reference computes the same inputs in float64.
    """
    hidden, weight, labels = make_inputs(48, vocab, torch.bfloat16, 0.2, scale=5.0)
    shards = VocabShards(dist.group.WORLD, vocab)
    rows = local_rows(weight, shards)
    value = chunked_cross_entropy(1, None, shards)(hidden, rows, labels)
    value.backward()
    sharded = value_and_gradients(value, hidden, rows, shards)
    local_slice = slice(shards.offset, shards.offset + shards.size)
    hidden.grad = None
    value = chunked_cross_entropy(1)(hidden, weight, labels)
    value.backward()
    one_rank = value.detach(), hidden.grad, weight.grad[local_slice]
    float64_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = (hidden @ weight.t()).double().detach()  # the reference loss uses the rounded logits
    exact_value = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    cross_entropy_sum(*float64_inputs, labels).backward()
    exact = exact_value, float64_inputs[0].grad, float64_inputs[1].grad[local_slice]
    return [
        [relative_error(x, y) for x, y in zip(results, exact, strict=True)]
        for results in (sharded, one_rank)
    ]


def test_bf16_errors_are_close_to_one_rank():
    """The loss has an error of at most 1e-6. The summed gradient is rounded once more per rank."""
    for sharded, one_rank in run_ranks(bf16_errors, 2, 32000):
        assert sharded[0] <= 1e-6 and one_rank[0] <= 1e-6
        assert sharded[1] <= 1.5 * one_rank[1]
        assert sharded[2] <= 1.1 * one_rank[2]


def record_loss(gathers):
    hidden, weight, labels = make_inputs(300, 4096, F32, 0.2)
    shards = VocabShards(dist.group.WORLD, 4096)
    rows = local_rows(weight, shards)
    with Record() as record:
        chunked_cross_entropy(1, None, shards, gathers_logits=gathers)(
            hidden, rows, labels
        ).backward()
    return record.collectives, record.bytes


def test_loss_sends_three_numbers_per_token():
    """1 MiB of fp32 holds 2048 logits of 128 tokens on each rank, so 300 tokens need 3 chunks."""
    for collectives, peak_bytes in run_ranks(record_loss, 2, False):
        assert collectives == 3 * [("allreduce_", 100), ("allreduce_", 200)]
        assert peak_bytes <= 100 * 2048 * 4


def test_gathered_logits_are_chunked_too():
    """1 MiB of fp32 holds 4096 logits of 64 tokens, so 300 tokens need 5 chunks."""
    for collectives, peak_bytes in run_ranks(record_loss, 2, True):
        assert collectives == 5 * [("allgather_", 60 * 2048)]
        assert peak_bytes <= 60 * 4096 * 4


def loss_with_nonfinite_hidden(bad):
    hidden, weight, labels = make_inputs(30, 71, F32, 0.0)
    with torch.no_grad():
        hidden[7] = bad
    shards = VocabShards(dist.group.WORLD, 71)
    return chunked_cross_entropy(0, None, shards)(hidden, local_rows(weight, shards), labels).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_logits_give_a_nonfinite_loss_on_every_rank(bad):
    assert not any(torch.tensor(run_ranks(loss_with_nonfinite_hidden, 2, bad)).isfinite())


def losses_of_distant_logits():
    """Return the sharded and the plain loss if all logits of the first rank are -inf."""
    hidden, weight, labels = make_inputs(30, 8, F64, 0.0)
    hidden = torch.ones(30, 1, dtype=F64)
    weight = torch.tensor([-torch.inf] * 4 + [1000.0, 2000.0, -1000.0, 0.0]).double().unsqueeze(1)
    shards = VocabShards(dist.group.WORLD, 8)
    labels = 4 + labels % 4
    expected = cross_entropy_sum(hidden, weight, labels)
    return chunked_cross_entropy(0, None, shards)(
        hidden, local_rows(weight, shards), labels
    ).item(), expected.item()


def test_distant_logits_neither_overflow_nor_vanish():
    for actual, expected in run_ranks(losses_of_distant_logits, 2):
        assert actual == expected > 0


def error_of_invalid_label(gathers):
    hidden, weight, labels = make_inputs(30, 71, F32, 0.0)
    labels[7] = 71
    shards = VocabShards(dist.group.WORLD, 71)
    try:
        chunked_cross_entropy(0, None, shards, gathers_logits=gathers)(
            hidden, local_rows(weight, shards), labels
        )
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("gathers", [False, True])
def test_invalid_label_is_an_error_on_every_rank(gathers):
    """Otherwise ranks without the label would wait for the others."""
    for message in run_ranks(error_of_invalid_label, 2, gathers):
        assert "out of bounds" in (message or "")


def has_gradients(case):
    hidden, weight, labels = make_inputs(30, 71, F32, 0.2)
    shards = VocabShards(dist.group.WORLD, 71)
    rows = local_rows(weight, shards).requires_grad_(case != "frozen weight")
    hidden.requires_grad_(case != "first layer frozen")
    with torch.set_grad_enabled(case != "no grad"):
        total = chunked_cross_entropy(0, None, shards)(hidden, rows, labels)
    if case != "no grad":
        total.backward()
    return hidden.grad is not None, rows.grad is not None


@pytest.mark.parametrize(("case", "expected"), [
    ("train", (True, True)), ("frozen weight", (True, False)),
    ("first layer frozen", (False, True)), ("no grad", (False, False)),
])  # fmt: skip
def test_only_requested_gradients_are_computed(case, expected):
    assert run_ranks(has_gradients, 2, case) == [expected] * 2
