"""The detector names the first module that has an inf or a nan."""

import logging

import pytest
import torch
from torch import nn

from torchtitan_like.config.sections_run import Debug
from torchtitan_like.monitor.overflow import (
    NonFiniteError,
    OverflowDetector,
    abs_min_max,
    detect_overflow,
)

NUM_MODULES = 10  # the model, and three blocks of three modules each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(self.first(x)) ** 2
        return result


def build(fqn: str = "", value: float = 0.0) -> nn.Sequential:
    """Build a model whose weights are 0.1, except one element of the weight ``fqn``."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(0.1)
            weight[0, 0] = value if name == fqn else 0.1
    return model


def watch(
    model: nn.Module, position: tuple[int, int] = (7, 2), **settings: object
) -> OverflowDetector:
    return OverflowDetector([model], Debug.model_validate(settings), lambda: position)


@pytest.mark.parametrize(
    ("fqn", "value", "first", "num_before"),
    [
        ("0.first.weight", torch.inf, "0.first (Linear), weight", 0),
        ("2.second.weight", -torch.nan, "2.second (Linear), weight", 7),
        ("1.second.weight", 3e38, "1.second (Linear), output 0", 4),
        (
            "1.first.weight",
            1e25,
            "1 (Block), output 0",
            5,
        ),  # squared after the block's last submodule
    ],
)
def test_the_error_names_the_first_non_finite_module(
    fqn: str, value: float, first: str, num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(fqn, value)
    watch(model)
    inputs = torch.full((2, 4), 10.0)
    with pytest.raises(NonFiniteError) as caught:
        model(inputs)
    assert str(caught.value) == f"step 7, micro-batch 2: the first inf or nan is in {first}"
    assert f"The last {num_before + 1} of {num_before + 1} modules" in caplog.text


def test_measurements_on_a_device_are_evaluated_later_with_the_same_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`evaluate` reads the device and raises. Later steps do not change the result."""
    position, model = [7, 2], build("1.second.weight", 3e38)
    detector = OverflowDetector([model], Debug(), lambda: (position[0], position[1]))
    detector._is_on_device = True
    model(torch.full((2, 4), 10.0))
    position[:] = [8, 0]
    model(torch.full((2, 4), 10.0))
    assert caplog.messages == []
    with pytest.raises(
        NonFiniteError, match="step 7, micro-batch 2: .* is in 1.second .Linear., output 0"
    ):
        detector.evaluate()
    assert "The last 5 of 5 modules" in caplog.text
    detector.evaluate()


def test_the_requested_number_of_modules_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the abs min and max of the weights, inputs and outputs of each module."""
    model = build("2.second.weight", torch.inf)
    watch(model, detect_overflow_frames=3)
    with pytest.raises(NonFiniteError):
        model(torch.tensor([[1.0, -1.0, 0.5, 0.0]]))
    summary, last, *frames = caplog.messages[-1].splitlines()
    assert last == "The last 3 of 8 modules, abs min and max:"
    assert [line for line in frames if not line.startswith(" ")] == [
        "1 (Block)",
        "2.first (Linear)",
        "2.second (Linear)",
    ]
    assert [line.split("  ")[-1] for line in frames if line.startswith(" ")] == [
        "input 0", "output 0", "weight", "input 0", "output 0", "weight",
    ]  # fmt: skip
    # The input of block 1 is the output of block 0.
    assert frames[1].strip() == "4.00e-04  1.00e+00  input 0"


def test_finite_values_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = build(), build()
    detector = watch(model)
    inputs = torch.rand(2, 4)
    model(inputs).sum().backward()
    plain(inputs).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)  # type: ignore[arg-type]
    assert caplog.messages == []
    detector.close()
    model(torch.full((2, 4), torch.nan))


def test_a_step_is_traced_and_the_run_ends_after_the_given_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model, position = build(), [1, 0]
    settings = Debug(detect_overflow=True, trace_batch_nums=[2], abort_after_batch_num=2)
    OverflowDetector([model], settings, lambda: (position[0], position[1]))
    for position[0] in (1, 2):
        model(torch.ones(1, 4))
    assert len(caplog.messages) == NUM_MODULES
    assert caplog.messages[0].startswith(
        "Step 2, micro-batch 0: 0.first (Linear)\n    1.00e-01  1.00e-01  weight\n"
    )
    position[0] = 3
    with pytest.raises(RuntimeError, match="abort_after_batch_num = 2 ends the run"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
)
def test_a_single_tensor_can_be_checked(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    good = torch.tensor([0.5, -2.0, 1.0]).to(dtype)
    assert abs_min_max(good).tolist() == [0.5, 2.0] and abs_min_max(good[:0]).tolist() == [0.0, 0.0]
    assert not detect_overflow(good, "x") and caplog.messages == []
    assert abs_min_max(torch.tensor([1e300], dtype=torch.float64)).tolist() == [1e300, 1e300]
    bad = torch.tensor([0.5, torch.nan]).to(dtype)
    assert detect_overflow(bad, "x")
    assert caplog.messages == ["x has an inf or nan: abs min nan, abs max nan, (2,)"]
