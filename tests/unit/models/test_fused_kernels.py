"""Functions that are compiled on a GPU equal the same functions uncompiled.

On a CPU Inductor writes C++ instead of Triton code, from the same graph.
"""

import pytest
import torch

from torchtitan_like.models.layers import balance, grouped_linear, moe
from torchtitan_like.optim import balancing
from torchtitan_like.util import compile as compile_module

TOKENS, TOP_K, EXPERTS, DIM, HIDDEN = 37, 3, 8, 24, 40
ROWS = TOKENS * TOP_K


def number(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def routing(device):
    """Return logits (tokens, experts), the best experts (tokens, top_k) and their routes."""
    logits = number(TOKENS, EXPERTS, dtype=torch.float32).to(device)
    expert_ids = logits.topk(TOP_K).indices
    return (
        logits,
        expert_ids,
        moe.sort_by_expert(expert_ids, torch.ones_like(logits[:, :TOP_K]), EXPERTS),
    )


def losses(device, dtype, has_fractions, z_coeff, is_sigmoid):
    logits = routing(device)[0].view(1, TOKENS, EXPERTS)
    fractions = torch.linspace(0.5, 1.5, EXPERTS).to(device) if has_fractions else None
    scale = torch.tensor(0.01, device=device)
    return logits / 3, logits, fractions, scale, 1e-2, z_coeff, is_sigmoid


def combination(device, dtype):
    """Return rows (rows, dim), weights (tokens, top_k), tokens (tokens, dim) and routes."""
    logits, expert_ids, routes = routing(device)
    rows, tokens = number(ROWS, DIM, dtype=dtype), number(TOKENS, DIM, dtype=dtype)
    return rows.to(device), logits.gather(1, expert_ids), tokens.to(device), routes


def sums(device, dtype, is_weighted):
    rows, weights, _, routes = combination(device, dtype)
    return rows, routes.row_of_slot, weights if is_weighted else None


def combined(device, dtype):
    rows, weights, grad, routes = combination(device, dtype)
    return grad, rows, weights, *routes[1:4]


def weighted(device, dtype):
    _, weights, tokens, routes = combination(device, dtype)
    return tokens, weights, *routes[1:3]


def weight_gradients(device, dtype):
    grad, weights, tokens, routes = combination(device, dtype)
    return grad, tokens, weights, routes.token_of_row, routes.row_of_slot


def hidden(device, dtype, count):
    return tuple(number(ROWS + i, HIDDEN, dtype=dtype)[:ROWS].to(device) * 2 for i in range(count))


def sorted_ids(device):
    ids, slots = routing(device)[1].flatten().to(torch.uint8).sort(stable=True)
    return ids, slots, TOP_K, EXPERTS


def group_bias(device, dtype):
    ends = routing(device)[2].ends
    return *hidden(device, dtype, 1), number(EXPERTS, HIDDEN, dtype=dtype).to(device), ends


def choices(device):
    return torch.arange(3 * EXPERTS, device=device).view(3, EXPERTS) ** 2


BF16, FP32 = torch.bfloat16, torch.float32
# Function, its arguments on a device, and whether all bits are equal on a CPU. Others differ where
# C++ code contracts a product and a sum, approximates exp, or keeps float32 between operators.
CASES = {
    "sum of slots": (moe._sum_of_slots, lambda d: sums(d, BF16, True), True),
    "plain sum of slots": (moe._sum_of_slots, lambda d: sums(d, FP32, False), True),
    "gradients of combine": (moe._combine_gradients, lambda d: combined(d, BF16), False),
    "weighted rows": (moe._weighted_rows, lambda d: weighted(d, BF16), True),
    "gradients of weights": (moe._weight_gradients, lambda d: weight_gradients(d, BF16), False),
    "index rows": (moe._index_rows, sorted_ids, True),
    "swiglu": (moe._swiglu, lambda d: hidden(d, FP32, 2), False),
    "gradients of swiglu": (moe._swiglu_gradients, lambda d: hidden(d, FP32, 3), False),
    "swiglu in bfloat16": (moe._swiglu, lambda d: hidden(d, BF16, 2), False),
    "clamped swiglu": (moe._clamped_swiglu, lambda d: (*hidden(d, FP32, 2), 2.5, 1.7), False),
    "softmax": (moe._weigh, lambda d: (*routing(d)[:2], "softmax", True, 1.5), False),
    "softmax over all": (moe._weigh, lambda d: (*routing(d)[:2], "softmax", False, 1.5), False),
    "sigmoid": (moe._weigh, lambda d: (*routing(d)[:2], "sigmoid", True, 1.5), False),
    "bias of a group": (
        grouped_linear._add_bias_of_group,
        lambda d: group_bias(d, BF16),
        True,
    ),
    "balance loss": (
        balance._add_loss_gradients,
        lambda d: losses(d, FP32, True, 0.0, False),
        False,
    ),
    "all losses": (balance._add_loss_gradients, lambda d: losses(d, FP32, True, 0.1, True), False),
    "z loss": (balance._add_loss_gradients, lambda d: losses(d, FP32, False, 0.1, False), False),
    "load fractions": (balance.load_fractions, lambda d: (choices(d), FP32), True),
    "changes of biases": (balancing.bias_changes, lambda d: (choices(d), 1e-3), True),
}
DIFFERENTIABLE = (moe._weigh, moe._clamped_swiglu)


def outputs(function, args, source):
    """Return what a function returns and changes, and its gradients if it is differentiable."""
    args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    if source not in DIFFERENTIABLE:
        with torch.no_grad():
            out = function(*args)
        return [*(out if isinstance(out, tuple) else (out,)), *inputs]
    for tensor in inputs:
        tensor.requires_grad_()
    out = function(*args)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach() + 1)]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.nightly),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_function_equals_the_plain_one(name, device, monkeypatch):
    function, arguments, is_exact = CASES[name]
    args = arguments(device)
    expected = outputs(function.__wrapped__, args, function)
    if device == "cpu":
        monkeypatch.setattr(compile_module, "_are_on_gpu", lambda args: True)
        monkeypatch.setattr(compile_module, "_can_compile", lambda: True)
    torch._dynamo.reset()
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    actual = outputs(function, args, function)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations + 1
    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == reference.dtype and value.shape == reference.shape
        if is_exact and device == "cpu" or not value.is_floating_point():
            assert torch.equal(value, reference)
        else:
            limit = 2**-7 if value.dtype == torch.bfloat16 else 2e-6
            assert (value - reference).abs().max() <= limit * reference.abs().max()
