"""Token embedding."""

from __future__ import annotations

from torch import nn


class Embedding(nn.Embedding):
    """(batch, seq) int64 token ids -> (batch, seq, dim).

    Its weights come from the init table alone. NOTE: torch's own `reset_parameters` would draw a normal on the meta
    device, which imports torch's compiler: 800 modules and a second of every start.
    """

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""
