"""A module's code reads a view of its parameter. All other code reads the parameter."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtitan_like.distributed.views import on_local_parameters, to_local, view_parameter


def double(parameter):
    return to_local(parameter) * 2


def test_only_forward_reads_the_view():
    linear = nn.Linear(3, 2, bias=False)
    weight, x = linear.weight, torch.randn(4, 3)
    view_parameter(linear, "weight", double)
    torch.testing.assert_close(linear(x), F.linear(x, 2 * weight))
    assert dict(linear.named_parameters())["weight"] is weight
    assert linear.state_dict(keep_vars=True)["weight"] is weight
    assert type(linear).__name__ == "Linear" and isinstance(linear, nn.Linear)
    linear(x).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.sum(0).expand(2, 3))


def test_the_parameter_may_be_replaced():
    linear = nn.Linear(3, 2, bias=False)
    view_parameter(linear, "weight", double)
    linear._parameters["weight"] = torch.ones(2, 3)
    assert torch.equal(linear.weight, torch.full((2, 3), 2.0))
    linear.weight = nn.Parameter(torch.zeros(2, 3))
    assert torch.equal(linear._parameters["weight"], torch.zeros(2, 3)) and torch.equal(
        linear.weight, torch.zeros(2, 3)
    )


def test_the_last_view_is_applied_first():
    linear = nn.Linear(1, 1, bias=False)
    linear._parameters["weight"] = torch.ones(1, 1)
    view_parameter(linear, "weight", lambda x: x * 10)
    view_parameter(linear, "weight", lambda x: x + 1)
    assert linear.weight.item() == 20


def test_modules_of_one_class_share_the_new_class():
    one, other, third = (nn.Linear(1, 1) for _ in range(3))
    for module in (one, other):
        view_parameter(module, "weight", double)
        view_parameter(module, "bias", double)
    assert type(one) is type(other) is not type(third)


def test_a_copy_has_its_own_parameter():
    linear = nn.Linear(1, 1, bias=False)
    view_parameter(linear, "weight", double)
    twin = copy.deepcopy(linear)
    twin._parameters["weight"] = torch.ones(1, 1)
    assert twin.weight.item() == 2 and linear.weight.item() != 2


def test_a_failing_view_raises():
    """After an AttributeError, nn.Module would return the parameter itself."""
    linear = nn.Linear(1, 1)
    view_parameter(linear, "weight", lambda parameter: parameter.no_such_attribute)
    with pytest.raises(RuntimeError, match="cannot view parameter 'weight' of Linear"):
        _ = linear.weight


@pytest.mark.parametrize("name", ["bias", "nothing"])
def test_a_missing_parameter_is_refused(name):
    with pytest.raises(ValueError, match=f"Linear has no parameter '{name}'"):
        view_parameter(nn.Linear(1, 1, bias=False), name, double)


class Wrapped(torch.Tensor):
    """Replaces a DTensor: its local tensor is another tensor."""

    placements = ()

    def to_local(self):
        return self.as_subclass(torch.Tensor) * 1.0


def test_compiled_code_gets_local_tensors():
    block = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    view_parameter(block[0], "weight", double)
    parameter = block[0]._parameters["weight"] = nn.Parameter(torch.ones(1, 1).as_subclass(Wrapped))
    values = []

    def forward(x, *, fails=False):
        values.append(
            (
                type(block[0]._parameters["weight"]),
                block[0].weight.item(),
                block[1]._parameters["weight"],
            )
        )
        assert not fails
        return x * block[0].weight

    run = on_local_parameters(block, forward)
    run(torch.ones(1, 1)).sum().backward()
    assert values == [(torch.Tensor, 2.0, block[1].weight)]
    assert block[0]._parameters["weight"] is parameter and parameter.grad.item() == 2
    with pytest.raises(AssertionError):
        run(torch.ones(1, 1), fails=True)
    assert block[0]._parameters["weight"] is parameter


def test_equal_gradients_of_compiled_code_are_separate_tensors():
    """Clipping or accumulating one gradient must not change the other one."""
    block, grads = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    for module in block:
        module._parameters["bias"].register_hook(grads.append)
        view_parameter(module, "bias", to_local)

    class SameGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            return grad, grad

    on_local_parameters(
        block, lambda: SameGradient.apply(block[0].bias, block[1].bias)
    )().sum().backward()
    assert [grad.tolist() for grad in grads] == [[1.0, 1.0]] * 2
    assert grads[0].data_ptr() != grads[1].data_ptr()
