"""The agreement vector of a step encodes tokens, data digest and requests exactly."""

from __future__ import annotations

import pytest

from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.resilience.agreement import Request, Requests, StepAgreement, send

DIGESTS = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]


def counts_of(*kinds: Request) -> list[int]:
    requests = Requests()
    for kind in kinds:
        requests.add(kind)
    return requests.take()


@pytest.mark.parametrize("digest", DIGESTS)
def test_decoding_inverts_encoding(digest: int) -> None:
    local = StepAgreement.of_rank(513, digest, counts_of(Request.KILL, Request.EXPORT))
    decoded = StepAgreement.decode(local.encode())
    assert decoded == local
    assert (decoded.num_valid_tokens, decoded.data_digest) == (513, digest)
    assert decoded.requests == [Request.KILL, Request.EXPORT]


def test_a_sum_over_many_ranks_is_exact_and_fits_int64() -> None:
    num_ranks = 10_000
    ranks = [
        StepAgreement.of_rank(
            7, DIGESTS[rank % len(DIGESTS)], counts_of(*([Request.SAVE] * (rank == 3)))
        )
        for rank in range(num_ranks)
    ]
    vector = [sum(column) for column in zip(*(rank.encode() for rank in ranks), strict=True)]
    assert max(vector) < 2**63
    total = StepAgreement.decode(vector)
    assert total.num_valid_tokens == 7 * num_ranks
    assert total.data_digest == sum(rank.data_digest for rank in ranks) % 2**64
    assert total.requests == [Request.SAVE]


def test_a_single_rank_receives_its_own_vector() -> None:
    local = StepAgreement.of_rank(5, 2**64 - 2, counts_of())
    assert send(local, HostGroup.alone()).wait() == local
