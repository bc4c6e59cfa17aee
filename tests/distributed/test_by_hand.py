"""A step sends the same collectives as a handwritten version of the same layout."""

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
    """Count the collectives of the second step: (trainer, handwritten)."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard" if kind == "fsdp" else "tp",))
    args = replace(benchmark.ARGS, n_layers=LAYERS, vocab_size=VOCAB, max_seq_len=SEQ)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(VOCAB, (2, benchmark.BATCH, SEQ), generator=generator)
    counts = []
    for build_step in (benchmark.trainer_step, benchmark.handwritten_step):
        with patch.multiple(benchmark, SEQ=SEQ, VOCAB=VOCAB, ARGS=args):
            step = build_step(kind, mesh)
        step(tokens, labels)
        with Traffic() as traffic_mode:
            step(tokens, labels)
        counts.append(traffic_mode.sizes())
    return counts


# Per token, the loss reduces the largest logit, the sum of exponentials and the label's logit.
# The handwritten loss sends them in three messages, the trainer in two.
OWN_LOSS = {("all_reduce", TOKENS): 1, ("all_reduce", 2 * TOKENS): 1}
LOSS_BY_HAND = {("all_reduce", TOKENS): 3}
# The handwritten version gathers the embedding again for its backward, which does not read it.
# The trainer puts it into the outermost FSDP group.
EMBEDDING = {("all_gather", VOCAB * benchmark.ARGS.dim): 1}


@pytest.mark.parametrize("kind", ["tp + sp", "tp", "fsdp"])
def test_traffic_equals_the_handwritten_layout(kind):
    for actual, expected in run_ranks(traffic, 2, kind, timeout=120):
        if kind.startswith("tp"):
            actual, expected = actual - Counter(OWN_LOSS), expected - Counter(LOSS_BY_HAND)
        else:
            expected = expected - Counter(EMBEDDING)
        assert actual == expected and actual.total() > 0
