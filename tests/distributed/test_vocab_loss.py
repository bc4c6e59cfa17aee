"""The loss over a cut vocabulary is the plain one, in value and gradients, on any number of ranks and any cut."""

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
    """The collectives in order, as (kind, elements), and the bytes of the largest memory that a tensor holds."""

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


def problem(tokens, vocab, dtype, ignored, scale=2.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = scale * torch.randn(vocab, DIM, generator=generator, dtype=torch.float64) / DIM**0.5
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = -100
    return hidden, weight.to(dtype).requires_grad_(), labels


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def own(weight, shards):
    """This rank's rows, as a leaf."""
    return weight.detach()[shards.offset : shards.offset + shards.size].clone().requires_grad_()


def parts(value, hidden, rows, shards):
    """Value, whole gradient of hidden (the ranks' summed), and this rank's gradient of the weight."""
    d_hidden = hidden.grad.clone()
    dist.all_reduce(d_hidden, group=shards.group)
    return value.detach(), d_hidden, rows.grad


def errors(case):
    """Relative errors of value, hidden's and weight's gradients against the plain loss; then the value without gradients."""
    tokens, vocab, dtype, ignored, chunk_mib, backend, gathers = case
    hidden, weight, labels = problem(tokens, vocab, dtype, ignored)
    plain = cross_entropy_sum(hidden, weight, labels)
    (plain * 0.37).backward()
    shards = VocabShards(dist.group.WORLD, vocab)
    expected = plain.detach(), hidden.grad, weight.grad[shards.offset : shards.offset + shards.size]
    hidden.grad, rows = None, own(weight, shards)
    loss = chunked_cross_entropy(chunk_mib, backend, shards, gathers_logits=gathers)
    value = loss(hidden, rows, labels)
    (value * 0.37).backward()
    with torch.no_grad():
        alone = loss(hidden, rows, labels)
    assert alone == value and not alone.requires_grad
    ours = parts(value, hidden, rows, shards)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    return [relative(mine, theirs) for mine, theirs in zip(ours, expected, strict=True)]


F32, F64 = torch.float32, torch.float64
# (tokens, vocab, dtype, share of ignored labels, chunk_mib, compile backend, gathered logits)
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
    assert all(error <= limit for errors_ in run_ranks(errors, world_size, case) for error in errors_)


def bf16_errors(vocab):
    """Of loss and gradients for bf16 inputs, against float64 on the same: over ranks, and on one rank."""
    hidden, weight, labels = problem(48, vocab, torch.bfloat16, 0.2, scale=5.0)
    shards = VocabShards(dist.group.WORLD, vocab)
    rows = own(weight, shards)
    value = chunked_cross_entropy(1, None, shards)(hidden, rows, labels)
    value.backward()
    over_ranks = parts(value, hidden, rows, shards)
    mine = slice(shards.offset, shards.offset + shards.size)
    hidden.grad = None
    value = chunked_cross_entropy(1)(hidden, weight, labels)
    value.backward()
    on_one = value.detach(), hidden.grad, weight.grad[mine]
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = (hidden @ weight.t()).double().detach()  # the loss is that of the rounded logits
    exact_value = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    cross_entropy_sum(*wide, labels).backward()
    exact = exact_value, wide[0].grad, wide[1].grad[mine]
    return [[relative(x, y) for x, y in zip(some, exact, strict=True)] for some in (over_ranks, on_one)]


def test_bf16_is_as_exact_over_ranks_as_on_one():
    """The loss to 1e-6; gradients are roundings of the same numbers, of which the summed one has one more per rank."""
    for over_ranks, on_one in run_ranks(bf16_errors, 2, 32000):
        assert over_ranks[0] <= 1e-6 and on_one[0] <= 1e-6
        assert over_ranks[1] <= 1.5 * on_one[1]
        assert over_ranks[2] <= 1.1 * on_one[2]


def traffic(gathers):
    hidden, weight, labels = problem(300, 4096, F32, 0.2)
    shards = VocabShards(dist.group.WORLD, 4096)
    rows = own(weight, shards)
    with Record() as record:
        chunked_cross_entropy(1, None, shards, gathers_logits=gathers)(hidden, rows, labels).backward()
    return record.collectives, record.bytes


def test_three_numbers_per_token_are_sent():
    """300 tokens, 2 x 2048 logits each: 1 MiB of fp32 is 128 tokens on each rank, so there are 3 chunks of 100."""
    for collectives, most_bytes in run_ranks(traffic, 2, False):
        assert collectives == 3 * [("allreduce_", 100), ("allreduce_", 200)]
        assert most_bytes <= 100 * 2048 * 4


def test_gathered_logits_are_chunked_too():
    """1 MiB of fp32 is 64 tokens of all 4096 logits: 5 chunks of 60."""
    for collectives, most_bytes in run_ranks(traffic, 2, True):
        assert collectives == 5 * [("allgather_", 60 * 2048)]
        assert most_bytes <= 60 * 4096 * 4


def with_bad_hidden(bad):
    hidden, weight, labels = problem(30, 71, F32, 0.0)
    with torch.no_grad():
        hidden[7] = bad
    shards = VocabShards(dist.group.WORLD, 71)
    return chunked_cross_entropy(0, None, shards)(hidden, own(weight, shards), labels).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_give_a_non_finite_loss_on_every_rank(bad):
    assert not any(torch.tensor(run_ranks(with_bad_hidden, 2, bad)).isfinite())


def with_far_logits():
    """Entries that no rank but the last can have: everything on the first is -inf."""
    hidden, weight, labels = problem(30, 8, F64, 0.0)
    hidden = torch.ones(30, 1, dtype=F64)
    weight = torch.tensor([-torch.inf] * 4 + [1000.0, 2000.0, -1000.0, 0.0]).double().unsqueeze(1)
    shards = VocabShards(dist.group.WORLD, 8)
    labels = 4 + labels % 4
    expected = cross_entropy_sum(hidden, weight, labels)
    return chunked_cross_entropy(0, None, shards)(hidden, own(weight, shards), labels).item(), expected.item()


def test_logits_far_apart_neither_overflow_nor_vanish():
    for ours, expected in run_ranks(with_far_logits, 2):
        assert ours == expected > 0


def with_foreign_label(gathers):
    hidden, weight, labels = problem(30, 71, F32, 0.0)
    labels[7] = 71
    shards = VocabShards(dist.group.WORLD, 71)
    try:
        chunked_cross_entropy(0, None, shards, gathers_logits=gathers)(hidden, own(weight, shards), labels)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("gathers", [False, True])
def test_a_label_outside_the_vocabulary_is_an_error_on_every_rank(gathers):
    """Also on the ranks that would only miss it, which would otherwise wait for the others."""
    for message in run_ranks(with_foreign_label, 2, gathers):
        assert "out of bounds" in (message or "")


def needed(case):
    hidden, weight, labels = problem(30, 71, F32, 0.2)
    shards = VocabShards(dist.group.WORLD, 71)
    rows = own(weight, shards).requires_grad_(case != "frozen weight")
    hidden.requires_grad_(case != "first layer frozen")
    with torch.set_grad_enabled(case != "no grad"):
        total = chunked_cross_entropy(0, None, shards)(hidden, rows, labels)
    if case != "no grad":
        total.backward()
    return hidden.grad is not None, rows.grad is not None


@pytest.mark.parametrize(("case", "expected"), [
    ("train", (True, True)), ("frozen weight", (True, False)), ("first layer frozen", (False, True)),
    ("no grad", (False, False)),
])  # fmt: skip
def test_only_requested_gradients_are_computed(case, expected):
    assert run_ranks(needed, 2, case) == [expected] * 2
