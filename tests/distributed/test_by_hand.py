"""What a step sends is what the same layout sends that is written by hand with torch's own calls: kinds, numbers, elements."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import tensor_parallel as benchmark
from tests.distributed.traffic import Traffic
from tests.harness.rank_pool import run_ranks

# The benchmark's model, but smaller.
SEQ, VOCAB, LAYERS = 64, 512, 2
TOKENS = benchmark.BATCH * SEQ


def traffic(kind):
    """Of a second step, when nothing is set up any more: (ours, by hand)."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard" if kind == "fsdp" else "tp",))
    args = replace(benchmark.ARGS, n_layers=LAYERS, vocab_size=VOCAB, max_seq_len=SEQ)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(VOCAB, (2, benchmark.BATCH, SEQ), generator=generator)
    seen = []
    for side in (benchmark.ours, benchmark.by_hand):
        with patch.multiple(benchmark, SEQ=SEQ, VOCAB=VOCAB, ARGS=args):
            step = side(kind, mesh)
        step(tokens, labels)
        with Traffic() as counted:
            step(tokens, labels)
        seen.append(counted.sizes())
    return seen


# By hand the loss sums three numbers per token (the highest logit, the sum, the label's logit) in as many messages.
OWN_LOSS = {("all_reduce", TOKENS): 1, ("all_reduce", 2 * TOKENS): 1}
LOSS_BY_HAND = {("all_reduce", TOKENS): 3}
# By hand the embedding is gathered again for its backward, which reads nothing of it; ours belongs to the outermost group.
EMBEDDING = {("all_gather", VOCAB * benchmark.ARGS.dim): 1}


@pytest.mark.parametrize("kind", ["tp + sp", "tp", "fsdp"])
def test_what_is_sent(kind):
    for ours, by_hand in run_ranks(traffic, 2, kind, timeout=120):
        if kind.startswith("tp"):
            ours, by_hand = ours - Counter(OWN_LOSS), by_hand - Counter(LOSS_BY_HAND)
        else:
            by_hand = by_hand - Counter(EMBEDDING)
        assert ours == by_hand and ours.total() > 0
