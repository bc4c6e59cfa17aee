"""Compute the same gradients twice and compare them, to detect kernels and devices that fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.resilience.replicas import bits_hash, first_names
from torchtitan_like.util.shards import local_shard

logger = logging.getLogger()

NUM_MEASURED = (
    4  # passes that measure which gradients are computed by kernels that are not deterministic
)
MOST_NOISE = 0.05  # of a gradient's norm; more is an error, not rounding
NOISE_MARGIN = 10.0  # later differences of the norm may be this many times the measured one
LEAST_BOUND = 1e-3  # of a gradient's norm, for kernels that are not deterministic


class WrongGradientsError(Exception):
    """Two passes over the same samples gave different gradients. No weight was updated.

    by_rank: the names of the parameters whose gradients differ, by rank.
    """

    def __init__(self, step: int, by_rank: dict[int, list[str]]) -> None:
        self.by_rank = by_rank
        places = [f"{first_names(names)} on rank {rank}" for rank, names in by_rank.items()]
        super().__init__(
            f"Two passes of step {step} over the same samples gave different gradients: "
            f"{'; '.join(places[:8])}{' ...' if len(places) > 8 else ''}. Expected equal bits: a "
            "kernel, a GPU or its memory has failed. The update of the step was not made. Check "
            "the machine of the rank (titan node check), and start again without it"
        )


class GradientCheck:
    """Compares passes over a micro-batch by the bits of each local gradient.

    A pass leaves 16 bytes for each parameter: a 64-bit hash, computed on the device, and a norm.
    Gradients are not copied; the hash takes temporary tensors of 64 MiB.

    On a GPU, the first step measures by `NUM_MEASURED` passes which gradients differ between
    passes, because their kernels add in no fixed order. Their norms may then differ by a bound.

    freq: steps between two checks; 0: never. named: this rank's parameters by name.
    first_step: of this process. measures: False on devices whose kernels are all deterministic.
    """

    def __init__(
        self,
        freq: int,
        group: HostGroup,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        first_step: int,
        measures: bool,
    ) -> None:
        self._freq = freq
        self._group = group
        self._named = named
        self._measured_step = first_step if measures and freq else 0
        self._bounds: dict[str, float] = {}  # of the gradients that differ between passes
        self._passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def num_passes(self, step: int) -> int:
        """Return the number of passes over the step's first micro-batch to compare; 0: none."""
        if step == self._measured_step:
            return NUM_MEASURED
        return 2 if self._freq and step % self._freq == 0 else 0

    @torch.no_grad()
    def add_pass(self) -> None:
        """Keep the hashes and norms of the gradients of a pass. Does not wait for the device."""
        gradients = [local_shard(p if p.grad is None else p.grad) for _, p in self._named]
        hashes = torch.stack([bits_hash(gradient) for gradient in gradients])
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        self._passes.append((hashes, torch.stack(norms)))

    def compare(self, step: int) -> None:
        """Compare the passes of a step. A collective, which waits for the device.

        Raises WrongGradientsError on every rank if a gradient of any rank differs.
        """
        hashes = torch.stack([hashes for hashes, _ in self._passes]).cpu()
        norms = torch.stack([norms for _, norms in self._passes]).cpu()
        self._passes = []
        is_equal = (hashes == hashes[0]).all(0).tolist()
        scale = norms.amax(0).clamp(min=torch.finfo(torch.float64).tiny)
        spread = ((norms.amax(0) - norms.amin(0)) / scale).nan_to_num(nan=torch.inf).tolist()
        differing = {
            name: value
            for (name, _), equal, value in zip(self._named, is_equal, spread, strict=True)
            if not equal
        }
        if step == self._measured_step:
            self._measure(differing)
        wrong = [name for name, value in differing.items() if value > self._bounds.get(name, -1.0)]
        if not any(self._group.sum_async([len(wrong)]).wait()):
            return
        by_rank = {rank: w for rank, w in enumerate(self._group.gather_objects(wrong)) if w}
        raise WrongGradientsError(step, by_rank)

    def _measure(self, differing: dict[str, float]) -> None:
        """Set the bounds of gradients that differ by rounding, and log them."""
        self._bounds = {
            name: max(LEAST_BOUND, NOISE_MARGIN * spread)
            for name, spread in differing.items()
            if spread <= MOST_NOISE
        }
        if self._bounds:
            num = len(self._named)
            logger.info(
                f"Gradient check: {num - len(differing)} of {num} gradients are equal in "
                f"{NUM_MEASURED} passes. The kernels of the others are not deterministic: their norms "
                f"may differ by at most {max(self._bounds.values()):.1e} of themselves"
            )
