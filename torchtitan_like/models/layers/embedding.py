"""Token embedding."""

from __future__ import annotations

from torch import nn


class Embedding(nn.Embedding):
    """(batch, seq) int64 token ids -> (batch, seq, dim).

    The init table sets its weights. NOTE: torch's `reset_parameters` would draw a normal on the
    meta device. That imports torch's compiler: 800 modules and one second of every start.
    """

    def reset_parameters(self) -> None:
        """Leave the memory unchanged."""
