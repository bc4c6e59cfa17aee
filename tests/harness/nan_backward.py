"""Make the third backward pass of a process non-finite.

For `experimental.custom_import = "tests.harness.nan_backward"`.
"""

from __future__ import annotations

from typing import Any

import torch

NON_FINITE_CALL = 3

_backward = torch.Tensor.backward
_num_calls = 0


def backward(self: torch.Tensor, gradient: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """As `torch.Tensor.backward`, with a gradient of NaN in call `NON_FINITE_CALL`."""
    global _num_calls
    _num_calls += 1
    if _num_calls == NON_FINITE_CALL:
        gradient = gradient * torch.nan
    _backward(self, gradient, *args, **kwargs)


torch.Tensor.backward = backward  # type: ignore[assignment]
