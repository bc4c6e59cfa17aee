"""Compare the weights of data-parallel replicas bitwise, to detect silent data corruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from torchtitan_like.distributed.world import World
from torchtitan_like.util.exit_codes import ExitCode, RunFailure
from torchtitan_like.util.shards import local_shard

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
