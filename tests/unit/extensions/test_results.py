"""Results of user code that break a protocol end the run with an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan_like.build import _token_loss
from torchtitan_like.extensions.user_code import ExtensionError, build_optimizer, convert
from torchtitan_like.optim.schedule import UserSchedule

Groups = list[dict[str, Any]]


def groups() -> Groups:
    parameters = [(name, nn.Parameter(torch.ones(2))) for name in ("a", "b")]
    group = {"params": parameters, "lr": 1e-3, "peak_lr": 1e-3, "group": "", "weight_decay": 0.1}
    return [group]


def number(groups: Groups, settings: Any) -> Any:
    return 3


def without_keys(groups: Groups, settings: Any) -> Any:
    return torch.optim.SGD([p for group in groups for _, p in group["params"]])


def without_parameters(groups: Groups, settings: Any) -> Any:
    return torch.optim.SGD([{**groups[0], "params": groups[0]["params"][:1]}])


def with_number(groups: Groups, settings: Any) -> Any:
    optimizer = torch.optim.SGD(groups)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["n"] = 1
    return optimizer


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("number", "it is int, not a torch.optim.Optimizer"),
        ("without_keys", "has lost peak_lr, group"),
        ("without_parameters", "it has 1 parameters of the 2 given ones"),
        ("with_number", "its state 'n' is int, not a tensor"),
    ],
)
def test_an_optimizer_of_another_form_is_refused(build: str, message: str) -> None:
    with pytest.raises(ExtensionError, match=message):
        build_optimizer(f"{__name__}:{build}", groups(), {})


def late(groups: Groups, settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=0.9)


def test_state_that_appears_in_a_step_is_refused() -> None:
    optimizer = build_optimizer(f"{__name__}:late", groups(), {})
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    with pytest.raises(ExtensionError, match=r"adds the state momentum_buffer in a step"):
        optimizer.step()


@pytest.mark.parametrize("factor", [-1.0, float("nan"), True, None])
def test_a_factor_that_is_no_finite_number_is_refused(factor: Any) -> None:
    with pytest.raises(ExtensionError, match=r"for step 3 of 1,000. Expected a finite number >= 0"):
        UserSchedule("own", lambda step, total_steps, settings: factor, 1000, {}).factor(3)


def reduced(logits: Tensor, labels: Tensor, settings: Any) -> Tensor:
    return logits.sum()


def test_a_reduced_loss_is_refused() -> None:
    loss = _token_loss(f"{__name__}:reduced", {})
    assert loss is not None
    with pytest.raises(ExtensionError, match=r"returns \(\) for logits \(6, 4\).*do not reduce"):
        loss(torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))


def without_weight(model: nn.Module, settings: Any) -> None:
    model.weight = None


def test_a_converter_that_changes_saved_tensors_is_refused() -> None:
    with pytest.raises(ExtensionError, match=r"changes 1 saved tensors, such as weight"):
        convert(f"{__name__}:without_weight", nn.Linear(2, 2, bias=False), {})
