"""What comes before a run."""

import os

import pytest
import torch

from torchtitan_like.launch import look_for_device
from torchtitan_like.preflight import load_checked


@pytest.mark.parametrize(("option", "seen"), [("--debug.launch_blocking", "1"), ("--debug.no_launch_blocking", "0")])
def test_waiting_for_kernels_is_set_before_anybody_asks_for_a_gpu(
    option: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads its environment once."""
    asked = []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(os.environ["CUDA_LAUNCH_BLOCKING"]))
    load_checked(["--training.steps=1000", option], 1, training=True, device_type=look_for_device)
    assert asked == [seen]
