"""A short training run lowers the loss.

Parity tests would also pass if labels did not match their tokens.
"""

import numpy as np
import pytest

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks

STEPS = 64


def train(argv):
    """Return the training losses and validation losses of a run."""
    trainer = build(argv)
    rows, validated = [], []
    trainer.metrics.observers.append(rows.extend)
    write = trainer.metrics.validation
    trainer.metrics.validation = lambda step, mean, *rest: (
        validated.append(mean),
        write(step, mean, *rest),
    )
    trainer.train()
    release(trainer)
    return [row["loss"] for row in rows], validated


def unigram_entropy(tokens):
    """Return the entropy of the token frequencies in nats per token."""
    shares = np.bincount(tokens) / len(tokens)
    return -sum(share * np.log(share) for share in shares if share)


@pytest.mark.nightly
def test_two_ranks_learn_the_next_token(tmp_path):
    """One small block reaches a lower loss than the unigram entropy.

    The larger model of ./run_train.sh reaches 5.0.
    """
    argv = options(str(tmp_path / "run"), "float32", **{
        "model.args.dim": 64, "model.args.n_layers": 1, "model.args.n_kv_heads": 4,
        "training.dataset": "shakespeare", "training.seq_len": 128, "training.steps": STEPS,
        "training.local_batch_size": 8, "training.global_batch_size": 16,
        "optimizer.lr": 2e-2, "lr_scheduler.warmup_steps": 10, "data.mask_document_starts": "false",
        "validation.enable": "true", "validation.dataset": "shakespeare_validation",
        "validation.freq": STEPS, "validation.steps": 20, "validation.seq_len": 128,
        "validation.local_batch_size": 8,
    })  # fmt: skip
    index = argv.index("--training.dataset_path")
    losses, validated = run_ranks(train, 2, argv[:index] + argv[index + 2 :], timeout=120)[0]
    corpus = next(
        file for file in (tmp_path / "tokens").rglob("*.bin") if "validation" not in str(file)
    )
    assert unigram_entropy(np.fromfile(corpus, np.uint16)) > 6.0
    assert losses[0] > 7.5 and validated[0] > 7.5
    assert np.mean(losses[-10:]) < 5.8 and validated[-1] < 5.8, (losses[-10:], validated)
