"""The gradient norm is computed wide and clips once."""

import pytest
import torch

from torchtitan_like.optim.clipping import clip_gradients


def parameters(*grads):
    made = []
    for grad in grads:
        p = torch.zeros_like(grad, requires_grad=True)
        p.grad = grad.clone()
        made.append(p)
    return made


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 0.2), (5.0, 1.0), (10.0, 1.0), (float("inf"), 1.0)])
def test_clips_to_max_norm(max_norm, scale):
    made = parameters(torch.tensor([3.0]), torch.tensor([[4.0]]))
    assert clip_gradients(made, max_norm) == 5.0
    assert [p.grad.item() for p in made] == pytest.approx([3 * scale, 4 * scale], rel=1e-5)


@pytest.mark.parametrize(("dtype", "norm_dtype"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64),
])  # fmt: skip
def test_the_norm_is_at_least_fp32(dtype, norm_dtype):
    grad = torch.full((4096,), 1 / 64).to(dtype)
    norm = clip_gradients(parameters(grad), 10.0)
    assert norm.dtype == norm_dtype
    assert norm.item() == pytest.approx(1.0, rel=1e-6)  # a bf16 sum of 4,096 squares would stall far below


def test_a_bad_number_shows_in_the_norm():
    assert not clip_gradients(parameters(torch.tensor([1.0, float("nan")])), 1.0).isfinite()


def test_no_gradient_at_all_is_an_error():
    with pytest.raises(ValueError, match="was backward run"):
        clip_gradients([torch.zeros(1, requires_grad=True)], 1.0)
