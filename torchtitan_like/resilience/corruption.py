"""Detect silent data corruption: compare replicas bitwise, and gradients computed twice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchtitan_like.distributed.world import HostGroup, World
from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.shards import local_shard

logger = logging.getLogger()

BLOCK = 1 << 22  # elements hashed at a time; temporary tensors take 64 MiB
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaError(RunFailure):
    """The weights of replicas differ. The step at which they diverged is not known."""

    exit_code = ExitCode.BAD_NUMBERS


class Replicas:
    """Compares the weights of data-parallel replicas.

    freq: steps between two comparisons. 0 disables them.
    named: this rank's weights by name. For DTensors, the local shard is compared.
    first_step: the step at which this process starts.
    """

    def __init__(
        self,
        freq: int,
        world: World,
        named: Iterable[tuple[str, torch.Tensor]],
        first_step: int = 0,
    ) -> None:
        self._freq = freq if world.dims.dp_replicate > 1 else 0
        self._world = world
        self._named = list(named)
        self._last_step = first_step

    def are_due(self, step: int) -> bool:
        """Return True if a multiple of `freq` steps has passed since the last comparison.

        Call it at log steps, at which the host waits for the device anyway.
        """
        return self._freq > 0 and step // self._freq > self._last_step // self._freq

    def check(self, step: int) -> None:
        """Raise ReplicaError on every rank if replicas differ. A collective.

        Does nothing without replicas or if `freq` is 0.
        """
        if not self._freq:
            return
        self._last_step = step
        hashes = torch.stack([bits_hash(tensor) for _, tensor in self._named]).cpu()
        replica_sets = self._world.dims.peers("dp_replicate")
        rank_hashes = self._world.step_group.gather(bits_hash(hashes)).tolist()
        if any(rank_hashes[r] != rank_hashes[ranks[0]] for ranks in replica_sets for r in ranks):
            # Gather by name only after a mismatch: over thousands of ranks this takes gigabytes.
            names = [name for name, _ in self._named]
            local_hashes = dict(zip(names, hashes.tolist(), strict=True))
            all_hashes = self._world.step_group.gather_objects(local_hashes)
            raise ReplicaError(
                f"Replicas of the weights differ at step {step}: "
                f"{'; '.join(differences(all_hashes, replica_sets))}. Expected equal bits. No "
                f"checkpoint is saved, and the last {self._freq} steps may be wrong. Check that "
                "rank's memory (ECC), and resume from the newest checkpoint without its machine"
            )


@torch.no_grad()
def bits_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of the local elements' bits (0-dim int64).

    Each element is multiplied by an odd number that depends on its index. A single flipped bit
    always changes the sum.
    """
    local = local_shard(tensor)
    bits = local.contiguous().view(INTEGERS[local.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK].to(torch.int64)
        indices = torch.arange(start, start + len(block), device=bits.device)
        total += (block * (2 * indices + 1)).sum()
    return total


def differences(
    rank_hashes: Sequence[Mapping[str, int]], replica_sets: Iterable[Sequence[int]]
) -> list[str]:
    """Describe which parameters differ, and on which ranks.

    rank_hashes: for each rank, the hashes by parameter name.
    replica_sets: sets of ranks whose hashes should be equal.
    The faulty ranks of a set differ from its majority. Without a majority, all ranks are named.
    """
    names_by_ranks: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for ranks in replica_sets:
        for name in rank_hashes[ranks[0]]:
            counts = Counter(rank_hashes[rank][name] for rank in ranks).most_common()
            if len(counts) == 1:
                continue
            expected, count = counts[0]
            has_majority = 2 * count > len(ranks)
            faulty = tuple(
                rank for rank in ranks if not has_majority or rank_hashes[rank][name] != expected
            )
            names_by_ranks.setdefault((faulty, has_majority), []).append(name)
    lines = []
    for (faulty, has_majority), names in names_by_ranks.items():
        plural = "s" if len(faulty) > 1 else ""
        suffix = "" if has_majority else " (no majority: one of them)"
        ranks_text = ", ".join(map(str, faulty))
        lines.append(f"{first_names(names)} on rank{plural} {ranks_text}{suffix}")
    return lines


def first_names(names: Sequence[str]) -> str:
    """Return the first five names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---- gradients, computed twice


# Passes that measure which gradients are computed by kernels that are not deterministic.
NUM_MEASURED = 4
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
