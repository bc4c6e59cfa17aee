"""Differentiable collectives: values and gradients are those of one process that has all ranks' tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed import collectives as ours

SHAPE = (2, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """A collective, and what it does to the list of all ranks' inputs.

    alike: the ranks' inputs are one tensor. once: every rank does the same with the result, so that it counts once.
    """

    call: Any
    meaning: Any
    alike: bool = False
    once: bool = False


CASES = {
    "copy_to": Case(ours.copy_to, lambda xs: [xs[0]] * len(xs), alike=True),
    "reduce_from": Case(ours.reduce_from, lambda xs: [sum(xs)] * len(xs), once=True),
    "gather_along 0": Case(lambda x, g: ours.gather_along(x, 0, g), lambda xs: [torch.cat(xs)] * len(xs)),
    "gather_along 1": Case(lambda x, g: ours.gather_along(x, 1, g), lambda xs: [torch.cat(xs, 1)] * len(xs)),
    "scatter_sum_along 0": Case(lambda x, g: ours.scatter_sum_along(x, 0, g), lambda xs: sum(xs).chunk(len(xs))),
    "scatter_sum_along 1": Case(lambda x, g: ours.scatter_sum_along(x, 1, g), lambda xs: sum(xs).chunk(len(xs), 1)),
    "gather_whole": Case(lambda x, g: ours.gather_whole(x, 3, g), lambda xs: [torch.cat(xs, 3)] * len(xs), once=True),
    "all_to_all_heads_seq": Case(
        ours.all_to_all_heads_seq,
        lambda xs: [torch.cat([x.chunk(len(xs), 1)[rank] for x in xs], 2) for rank in range(len(xs))],
    ),
    "all_to_all_seq_heads": Case(
        ours.all_to_all_seq_heads,
        lambda xs: [torch.cat([x.chunk(len(xs), 2)[rank] for x in xs], 1) for rank in range(len(xs))],
    ),
}


def differences(name, backend):
    """Largest errors of value and gradient. Before and after it something is computed, as in a model."""
    case, rank, size = CASES[name], dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(SHAPE, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(size)]
    xs = [xs[0]] * size if case.alike else xs
    expected = [y.sin() for y in case.meaning([x * 2 for x in xs])]
    grads = [torch.randn(expected[0].shape, generator=generator, dtype=torch.float64) for _ in range(size)]
    grads = [grads[0]] * size if case.once else grads
    num_counted = 1 if case.once else size
    (expected_grad,) = torch.autograd.grad(expected[:num_counted], xs[rank], grads[:num_counted])

    def function(x):
        return case.call(x * 2, dist.group.WORLD).sin()

    torch._dynamo.reset()
    if backend:
        function = torch.compile(function, backend=backend, fullgraph=True)
    y = function(xs[rank])
    (grad,) = torch.autograd.grad(y, xs[rank], grads[rank])
    assert type(y) is torch.Tensor and type(grad) is torch.Tensor
    assert y.is_contiguous() and grad.is_contiguous()
    return (y - expected[rank]).abs().max().item(), (grad - expected_grad).abs().max().item()


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name, backend):
    for errors in run_ranks(differences, 2, name, backend):
        assert max(errors) <= 1e-14


def chain_of_all(backend):
    """All of them in one function: gradient with respect to its input."""
    group = dist.group.WORLD

    def function(x):
        x = ours.copy_to(x * 2, group)
        x = ours.gather_along(ours.scatter_sum_along(x.sin(), 2, group).cos(), 2, group)
        x = ours.gather_whole(ours.scatter_sum_along(ours.reduce_from(x, group).sin(), 1, group).cos(), 1, group)
        return ours.all_to_all_seq_heads(ours.all_to_all_heads_seq(x.sin(), group).cos(), group).sum()

    x = torch.linspace(0, 1, 384, dtype=torch.float64).view(SHAPE).requires_grad_()
    torch._dynamo.reset()
    value = (torch.compile(function, backend=backend, fullgraph=True) if backend else function)(x)
    return value.item(), torch.autograd.grad(value, x)[0]


@pytest.mark.nightly  # test_simple_fsdp.py compiles collectives with Inductor in every run
def test_inductor_computes_the_same():
    for eager, compiled in zip(
        run_ranks(chain_of_all, 2, ""), run_ranks(chain_of_all, 2, "inductor", timeout=300), strict=True
    ):
        assert compiled[0] == pytest.approx(eager[0], rel=1e-13)
        torch.testing.assert_close(compiled[1], eager[1], rtol=1e-12, atol=1e-13)


class Copies(TorchDispatchMode):
    """How many tensors are copied outside of collectives."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.overloadpacket.__name__ in ("clone", "copy_", "cat", "stack", "_to_copy")
        return func(*args, **(kwargs or {}))


def num_copies(name):
    case, x = CASES[name], torch.zeros(SHAPE, requires_grad=True)
    with Copies() as forward:
        y = case.call(x, dist.group.WORLD)
    with Copies() as backward:
        y.backward(torch.ones_like(y))
    return forward.num, backward.num


@pytest.mark.parametrize(("name", "expected"), [
    ("gather_along 0", (0, 0)), ("gather_along 1", (1, 1)), ("scatter_sum_along 1", (1, 1)),
    ("all_to_all_heads_seq", (2, 2)),
])  # fmt: skip
def test_a_layout_costs_one_copy(name, expected):
    """Ranks' pieces lie one behind the other on the wire; along the first dimension that is the layout itself."""
    assert run_ranks(num_copies, 2, name) == [expected] * 2


def error_of_uneven(name):
    try:
        CASES[name].call(torch.zeros(3, 3, 3, 3), dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["scatter_sum_along 1", "all_to_all_heads_seq"])
def test_ranks_share_equally_or_not_at_all(name):
    for message in run_ranks(error_of_uneven, 2, name):
        assert "2 ranks cannot share dimension 1 of a tensor (3, 3, 3, 3)" in (message or "")
