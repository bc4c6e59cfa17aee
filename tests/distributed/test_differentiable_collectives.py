"""Differentiable collectives give the values and gradients of a single-process computation."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.rank_pool import run_ranks
from torchtitan_like.distributed import collectives

SHAPE = (2, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """A collective and its definition as a function of the list of all ranks' inputs.

    `has_equal_inputs`: all ranks have the same input. `has_equal_losses`: all ranks compute the
    same loss from the result, so the reference counts one of them.
    """

    call: Any
    definition: Any
    has_equal_inputs: bool = False
    has_equal_losses: bool = False


CASES = {
    "copy_to": Case(collectives.copy_to, lambda xs: [xs[0]] * len(xs), has_equal_inputs=True),
    "reduce_from": Case(
        collectives.reduce_from, lambda xs: [sum(xs)] * len(xs), has_equal_losses=True
    ),
    "add_once": Case(
        lambda x, g: collectives.reduce_from(collectives.add_once(x, g), g),
        lambda xs: [xs[0]] * len(xs),
        has_equal_inputs=True,
        has_equal_losses=True,
    ),
    "gather_along 0": Case(
        lambda x, g: collectives.gather_along(x, 0, g), lambda xs: [torch.cat(xs)] * len(xs)
    ),
    "gather_along 1": Case(
        lambda x, g: collectives.gather_along(x, 1, g), lambda xs: [torch.cat(xs, 1)] * len(xs)
    ),
    "scatter_sum_along 0": Case(
        lambda x, g: collectives.scatter_sum_along(x, 0, g), lambda xs: sum(xs).chunk(len(xs))
    ),
    "scatter_sum_along 1": Case(
        lambda x, g: collectives.scatter_sum_along(x, 1, g), lambda xs: sum(xs).chunk(len(xs), 1)
    ),
    "gather_whole": Case(
        lambda x, g: collectives.gather_whole(x, 3, g),
        lambda xs: [torch.cat(xs, 3)] * len(xs),
        has_equal_losses=True,
    ),
    "all_to_all_heads_seq": Case(
        collectives.all_to_all_heads_seq,
        lambda xs: [
            torch.cat([x.chunk(len(xs), 1)[rank] for x in xs], 2) for rank in range(len(xs))
        ],
    ),
    "all_to_all_seq_heads": Case(
        collectives.all_to_all_seq_heads,
        lambda xs: [
            torch.cat([x.chunk(len(xs), 2)[rank] for x in xs], 1) for rank in range(len(xs))
        ],
    ),
}


def value_and_gradient_errors(name, backend):
    """Return the largest errors of value and gradient of a function around the collective."""
    case, rank, size = CASES[name], dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    xs = [
        torch.randn(SHAPE, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(size)
    ]
    xs = [xs[0]] * size if case.has_equal_inputs else xs
    expected = [y.sin() for y in case.definition([x * 2 for x in xs])]
    grads = [
        torch.randn(expected[0].shape, generator=generator, dtype=torch.float64)
        for _ in range(size)
    ]
    grads = [grads[0]] * size if case.has_equal_losses else grads
    num_counted = 1 if case.has_equal_losses else size
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
def test_value_and_gradient_equal_one_process(name, backend):
    for errors in run_ranks(value_and_gradient_errors, 2, name, backend):
        assert max(errors) <= 1e-14


def chain_collectives(backend):
    """Chain all collectives in one function; return its value and gradient."""
    group = dist.group.WORLD

    def function(x):
        x = collectives.copy_to(x * 2, group)
        x = collectives.gather_along(
            collectives.scatter_sum_along(x.sin(), 2, group).cos(), 2, group
        )
        x = collectives.gather_whole(
            collectives.scatter_sum_along(collectives.reduce_from(x, group).sin(), 1, group).cos(),
            1,
            group,
        )
        return collectives.all_to_all_seq_heads(
            collectives.all_to_all_heads_seq(x.sin(), group).cos(), group
        ).sum()

    x = torch.linspace(0, 1, 384, dtype=torch.float64).view(SHAPE).requires_grad_()
    torch._dynamo.reset()
    value = (torch.compile(function, backend=backend, fullgraph=True) if backend else function)(x)
    return value.item(), torch.autograd.grad(value, x)[0]


@pytest.mark.nightly  # test_simple_fsdp.py compiles collectives with Inductor in every run
def test_inductor_gives_the_values_of_eager_mode():
    for eager, compiled in zip(
        run_ranks(chain_collectives, 2, ""),
        run_ranks(chain_collectives, 2, "inductor", timeout=300),
        strict=True,
    ):
        assert compiled[0] == pytest.approx(eager[0], rel=1e-13)
        torch.testing.assert_close(compiled[1], eager[1], rtol=1e-12, atol=1e-13)


class Copies(TorchDispatchMode):
    """Counts the tensor copies outside of collectives."""

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
def test_change_of_layout_costs_one_copy(name, expected):
    """Collectives concatenate along the first dimension; other dimensions need a copy."""
    assert run_ranks(num_copies, 2, name) == [expected] * 2


def error_of_uneven_split(name):
    try:
        CASES[name].call(torch.zeros(3, 3, 3, 3), dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["scatter_sum_along 1", "all_to_all_heads_seq"])
def test_uneven_split_is_rejected(name):
    for message in run_ranks(error_of_uneven_split, 2, name):
        assert "2 ranks cannot share dimension 1 of a tensor (3, 3, 3, 3)" in (message or "")
