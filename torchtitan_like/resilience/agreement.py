"""The agreement of a step: one int64 vector per rank, summed over all ranks.

The all-reduce overlaps with the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_like.distributed.world import HostGroup, PendingSum
from torchtitan_like.resilience.requests import Request, decode_requests


class StepAgreement(NamedTuple):
    """One rank's contribution, or the sum over all ranks, which is equal on every rank.

    num_valid_tokens: labels of the step, counted once per data shard.
    digest_low, digest_high: 32-bit halves of the data digest. Their sums over ranks fit in int64.
    request_counts: the number of ranks that send each `Request`.
    """

    num_valid_tokens: int
    digest_low: int
    digest_high: int
    request_counts: tuple[int, ...]

    @classmethod
    def of_rank(
        cls, num_valid_tokens: int, data_digest: int, request_counts: Sequence[int]
    ) -> StepAgreement:
        """Return one rank's contribution. data_digest: unsigned, 64 bits."""
        low = data_digest & 0xFFFFFFFF
        return cls(num_valid_tokens, low, data_digest >> 32, tuple(request_counts))

    @classmethod
    def decode(cls, vector: Sequence[int]) -> StepAgreement:
        """Read the vector that `encode` wrote, or a sum of such vectors."""
        num_valid_tokens, digest_low, digest_high, *counts = vector
        return cls(num_valid_tokens, digest_low, digest_high, tuple(counts))

    def encode(self) -> list[int]:
        """Return the int64 vector for the wire."""
        return [self.num_valid_tokens, self.digest_low, self.digest_high, *self.request_counts]

    @property
    def data_digest(self) -> int:
        """The sum of the ranks' data digests modulo 2**64."""
        return (self.digest_low + (self.digest_high << 32)) % 2**64

    @property
    def requests(self) -> list[Request]:
        """The requests of any rank, in the order of `Request`."""
        return decode_requests(self.request_counts)


@dataclass(frozen=True)
class PendingAgreement:
    """The all-reduce of an agreement in progress."""

    total: PendingSum

    def wait(self) -> StepAgreement:
        """Block until every rank has contributed."""
        return StepAgreement.decode(self.total.wait())


def send(local: StepAgreement, group: HostGroup) -> PendingAgreement:
    """Start the all-reduce of every rank's contribution. A collective of `group`."""
    return PendingAgreement(group.sum_async(local.encode()))
