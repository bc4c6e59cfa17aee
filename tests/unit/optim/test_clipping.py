"""Gradient clipping computes the norm in float64 and divides all gradients once."""

import pytest
import torch

from torchtitan_like.optim import clipping
from torchtitan_like.optim.clipping import clipping_divisor, divide_gradients, gradient_norm


def parameters(*grads):
    result = []
    for grad in grads:
        p = torch.zeros_like(grad, requires_grad=True)
        p.grad = grad.clone()
        result.append(p)
    return result


def clip(clipped, max_norm):
    norm = gradient_norm(clipped)
    divide_gradients(clipped, clipping_divisor(norm, max_norm))
    return norm


@pytest.mark.parametrize(
    ("max_norm", "scale"), [(1.0, 0.2), (5.0, 1.0), (10.0, 1.0), (float("inf"), 1.0)]
)
def test_gradients_are_clipped_to_max_norm(max_norm, scale):
    clipped = parameters(torch.tensor([3.0]), torch.tensor([[4.0]]))
    assert clip(clipped, max_norm) == 5.0
    assert [p.grad.item() for p in clipped] == pytest.approx([3 * scale, 4 * scale], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_is_float64(dtype):
    grad = torch.full((4096,), 1 / 64).to(dtype)
    norm = gradient_norm(parameters(grad))
    assert norm.dtype == torch.float64
    # A bfloat16 sum of the 4,096 squares would stop growing far below 1.
    assert norm.item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e19, 1e38])
def test_the_norm_of_finite_gradients_does_not_overflow(dtype, size):
    """Squares of numbers above 1.8e19 overflow float32."""
    large = parameters(torch.full((6, 3), size).to(dtype), torch.full((2, 9), size).to(dtype))
    value = large[0].grad[0, 0].item()
    norm = clip(large, 6.0)
    assert norm.item() == pytest.approx(6 * value, rel=1e-12)
    assert [p.grad.double().unique().item() for p in large] == pytest.approx([1, 1], rel=1e-2)


def test_bfloat16_gradients_are_rounded_once():
    """1.0038 is 1 in bfloat16, so that nothing would be clipped."""
    values = torch.linspace(0.5, 2.0, 1000).bfloat16()
    (clipped,) = parameters(values)
    divide_gradients([clipped], torch.tensor(1.0038))
    assert torch.equal(clipped.grad, (values.float() / torch.tensor(1.0038)).bfloat16())
    assert not torch.equal(clipped.grad, values)


def test_a_divisor_beyond_float32_makes_gradients_zero():
    large = parameters(torch.full((36,), 1e38))
    assert clip(large, 1.0).item() == pytest.approx(6e38)
    assert large[0].grad.count_nonzero() == 0


@pytest.mark.parametrize("num", [1, clipping.CPU_CHUNK, 2 * clipping.CPU_CHUNK + 5])
def test_the_norm_covers_all_chunks_of_any_layout_in_memory(num):
    grad = torch.randn(num, 2, generator=torch.Generator().manual_seed(1)).T
    expected = grad.double().norm().item()
    assert gradient_norm(parameters(grad)).item() == pytest.approx(expected, rel=1e-12)


def test_a_non_finite_gradient_makes_the_norm_non_finite():
    assert not gradient_norm(parameters(torch.tensor([1.0, float("nan")]))).isfinite()


def test_parameters_without_any_gradient_are_an_error():
    with pytest.raises(ValueError, match=r"No parameter has a gradient.*backward\(\)"):
        gradient_norm([torch.zeros(1, requires_grad=True)])
