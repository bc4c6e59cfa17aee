"""That training teaches: equal numbers on all layouts would also be equal if labels and tokens did not belong together."""

import numpy as np

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks

STEPS = 64


def train(argv):
    """(training losses, validation losses), from metrics of this run alone."""
    trainer = build(argv)
    rows, validated = [], []
    trainer.metrics.observers.append(rows.extend)
    write = trainer.metrics.validation
    trainer.metrics.validation = lambda step, mean, *rest: (validated.append(mean), write(step, mean, *rest))
    trainer.train()
    release(trainer)
    return [row["loss"] for row in rows], validated


def entropy_of_frequencies(tokens):
    """Nats per token of who knows how frequent each token is, and nothing of its neighbours."""
    shares = np.bincount(tokens) / len(tokens)
    return -sum(share * np.log(share) for share in shares if share)


def test_two_ranks_learn_the_next_token(tmp_path):
    """One small block gets below the loss of token frequencies. ./run_train.sh, whose model is larger, reaches 5.0."""
    argv = options(str(tmp_path / "run"), "float32", **{
        "model.args.dim": 64, "model.args.n_layers": 1, "model.args.n_kv_heads": 4, "training.dataset": "shakespeare",
        "training.seq_len": 128, "training.local_batch_size": 8, "training.global_batch_size": 16, "training.steps": STEPS,
        "optimizer.lr": 2e-2, "lr_scheduler.warmup_steps": 10, "data.mask_document_starts": "false",
        "validation.enable": "true", "validation.dataset": "shakespeare_validation", "validation.freq": STEPS,
        "validation.steps": 20, "validation.seq_len": 128, "validation.local_batch_size": 8,
    })  # fmt: skip
    where = argv.index("--training.dataset_path")
    losses, validated = run_ranks(train, 2, argv[:where] + argv[where + 2 :], timeout=120)[0]
    corpus = next(file for file in (tmp_path / "tokens").rglob("*.bin") if "validation" not in str(file))
    assert entropy_of_frequencies(np.fromfile(corpus, np.uint16)) > 6.0
    assert losses[0] > 7.5 and validated[0] > 7.5
    assert np.mean(losses[-10:]) < 5.8 and validated[-1] < 5.8, (losses[-10:], validated)
