"""Are the weights of all data-parallel replicas the same, bit for bit? A flipped bit would go unnoticed otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchtitan_like.distributed.world import World

BLOCK = 1 << 22  # elements hashed at a time: what is made of them on the way takes 64 MiB
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaError(Exception):
    """Replicas differ: some of the weights are not what training made of them, and nobody can say since when."""


class Replicas:
    """Compares the weights of data-parallel replicas; a collective.

    freq: steps between two comparisons, 0: never. first_step: where this process starts. named:
    this rank's weights by name, of DTensors the local shard.
    """

    def __init__(
        self,
        freq: int,
        world: World,
        named: Iterable[tuple[str, torch.Tensor]],
        first_step: int = 0,
    ) -> None:
        self._freq = freq if world.dims.dp_replicate > 1 else 0
        self._world, self._named, self._compared_at = world, list(named), first_step

    def are_due(self, step: int) -> bool:
        """Whether a multiple of ``freq`` steps has passed since the last comparison.

        Ask at log steps only: the host waits for the device there anyway.
        """
        return self._freq > 0 and step // self._freq > self._compared_at // self._freq

    def check(self, step: int) -> None:
        """Raise ReplicaError on every rank if replicas differ.

        Does nothing without replicas or with ``freq`` 0.
        """
        if not self._freq:
            return
        self._compared_at = step
        hashes = torch.stack([bits_hash(tensor) for _, tensor in self._named]).cpu()
        sets = self._world.dims.peers("dp_replicate")
        of_all = self._world.step_group.gather(bits_hash(hashes)).tolist()
        if any(of_all[rank] != of_all[ranks[0]] for ranks in sets for rank in ranks):
            # Only now by name: of thousands of ranks that takes gigabytes.
            mine = {
                name: value for (name, _), value in zip(self._named, hashes.tolist(), strict=True)
            }
            found = differences(self._world.step_group.gather_objects(mine), sets)
            raise ReplicaError(
                f"At step {step} replicas of the weights differ: {'; '.join(found)}. Nothing is saved. Start again from the "
                f"newest checkpoint, without the machine of that rank, and look at its memory (ECC). The last {self._freq} "
                "steps may have been wrong"
            )


@torch.no_grad()
def bits_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum over the bits of this rank's elements, each times an odd number of its place: one flipped bit always
    changes it. 0-dim int64.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    bits = local.detach().contiguous().view(INTEGERS[local.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, len(bits), BLOCK):
        block = bits[begin : begin + BLOCK].to(torch.int64)
        places = torch.arange(begin, begin + len(block), device=bits.device)
        total += (block * (2 * places + 1)).sum()
    return total


def differences(of_ranks: Sequence[Mapping[str, int]], sets: Iterable[Sequence[int]]) -> list[str]:
    """Which parameters differ among ranks that should hold the same, and on which ranks: those that the majority
    contradicts, or all of them where there is none.
    """
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for ranks in sets:
        for name in of_ranks[ranks[0]]:
            ((common, count), *others) = Counter(
                of_ranks[rank][name] for rank in ranks
            ).most_common()
            if others:
                has_majority = 2 * count > len(ranks)
                odd = tuple(
                    rank for rank in ranks if not has_majority or of_ranks[rank][name] != common
                )
                found.setdefault((odd, has_majority), []).append(name)
    return [
        f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''} on rank{'s' * (len(odd) > 1)} "
        + ", ".join(map(str, odd))
        + ("" if has_majority else " (no majority: one of them)")
        for (odd, has_majority), names in found.items()
    ]
