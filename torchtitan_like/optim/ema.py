"""The exponential moving average (EMA) of the weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_like.util.shards import local_shard
from torchtitan_like.util.units import GIB

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import EMA


class AveragedWeights:
    """Averages the weights over the steps that update them, in float32 (float64 weights: float64).

    After the n-th update, the average a moves toward the weights w:

        a += (1 - d) (w - a),    d = decay, or with warm-up min(decay, (1 + n) / (10 + n))

    Without warm-up this is `torch.optim.swa_utils.get_ema_multi_avg_fn(decay)`. The warm-up is the
    one of `num_updates` in TensorFlow's `ExponentialMovingAverage`: after few updates, the average
    contains little of the weights it started from. A step whose update is skipped changes nothing.

    named: the trained parameters by canonical name; tied ones appear once. Each average has the
    placements and the device of its parameter. All are zero until `start` or `load_state_dict`.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], section: EMA) -> None:
        self._decay = section.decay
        self._has_warmup = section.warmup
        self._weights = dict(named)
        self._averages = {
            name: torch.zeros_like(
                weight,
                dtype=torch.promote_types(weight.dtype, torch.float32),
                requires_grad=False,
            )
            for name, weight in self._weights.items()
        }
        device = next(iter(self._weights.values())).device
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def start(self) -> None:
        """Start from the current weights, with no updates so far."""
        for name, weight in self._weights.items():
            local_shard(self._averages[name]).copy_(local_shard(weight))
        self._num_updates.zero_()

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Add the current weights unless `skip` (0-dim, 0 or 1) is 1. Does not wait for the device.

        Call it after the optimizer's step.
        """
        is_added = skip.ne(1)
        self._num_updates.add_(is_added)
        amount = torch.full((), 1 - self._decay, dtype=torch.float64, device=skip.device)
        if self._has_warmup:  # 1 - (1 + n) / (10 + n)
            amount = torch.maximum(amount, 9 / (10 + self._num_updates.double()))
        amount = amount * is_added
        dtypes = {average.dtype for average in self._averages.values()}
        amounts = {dtype: amount.to(dtype) for dtype in dtypes}
        for name, weight in self._weights.items():
            average = local_shard(self._averages[name])
            average.lerp_(local_shard(weight).to(average.dtype), amounts[average.dtype])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters the averages, and then their own values back.

        Meanwhile, a copy of this rank's shards of the weights takes memory.
        """
        shards = {name: local_shard(weight) for name, weight in self._weights.items()}
        own = {name: shard.clone() for name, shard in shards.items()}
        try:
            for name, shard in shards.items():
                shard.copy_(local_shard(self._averages[name]))
            yield
        finally:
            for name, shard in shards.items():
                shard.copy_(own[name])

    def summary(self) -> dict[str, Any]:
        """Return the settings of the average."""
        return {"decay": self._decay, "warmup": self._has_warmup}

    def describe(self) -> str:
        """Return a line for the log, with the memory of this rank's shards."""
        shards = [local_shard(average) for average in self._averages.values()]
        num_bytes = sum(shard.numel() * shard.element_size() for shard in shards)
        warmup = ", warm-up min(decay, (1 + n) / (10 + n))" if self._has_warmup else ""
        return (
            f"EMA of the weights: decay {self._decay:g}{warmup}, {len(shards)} tensors, "
            f"{num_bytes / GIB:.2f} GiB on this rank"
        )

    def named_averages(self) -> dict[str, Tensor]:
        """Return the live averages by `average.<parameter>`."""
        return {f"average.{name}": average for name, average in self._averages.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live tensors. Their names do not depend on the topology."""
        return {"num_updates": self._num_updates, **self.named_averages()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy a loaded state into the live one. Tensors that were read in place are skipped."""
        for name, tensor in self.state_dict().items():
            if state_dict[name] is not tensor:
                tensor.copy_(state_dict[name])
