"""Bits per byte are of the labels that have bytes; the loss is of all labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models.layers.head import LossWithTokens
from torchtitan_like.resilience.agreement import Requests, StepAgreement, send
from torchtitan_like.validation import DatasetLoss, losses_of_datasets

EOS = 0
BYTES = torch.tensor([0, 1, 3, 2])  # of each token


def loss_of(batches: list[list[list[int]]], bytes_of_token: torch.Tensor) -> DatasetLoss:
    """Return the loss of batches of labels (rows, seq), where a label's loss is 1 + its id."""

    def evaluate(labels: torch.Tensor) -> LossWithTokens:
        tokens = torch.where(labels == -100, 0.0, 1.0 + labels).flatten()
        return LossWithTokens(tokens.sum(), tokens)

    class Feed:
        def shard(self, labels: list[list[int]]) -> Any:
            tensor = torch.tensor(labels)[None]
            return tensor, tensor, None

        def run(self, model: Any, batch: Any, local: Any, micro: int) -> Any:
            return model(local[1][micro])

    group = HostGroup.alone()
    [(_, loss)] = losses_of_datasets(
        {"text": batches},  # type: ignore[dict-item]
        evaluate,
        Feed(),  # type: ignore[arg-type]
        bytes_of_token,
        group.gather,
        lambda: send(StepAgreement.of_rank(0, 0, Requests().counts()), group),
    )
    return loss


def test_tokens_without_bytes_count_in_the_loss_only() -> None:
    loss = loss_of([[[1, 2, EOS], [3, -100, EOS]], [[2, EOS, 1], [EOS, EOS, -100]]], BYTES)
    text = [2, 3, 4, 3, 2]  # of the labels 1, 2, 3, 2, 1
    assert loss.num_tokens == 10
    assert loss.loss == pytest.approx((sum(text) + 5 * 1) / 10)
    assert loss.bits_per_byte == pytest.approx(sum(text) / math.log(2) / (1 + 3 + 2 + 3 + 1))


def test_unknown_bytes_give_no_bits() -> None:
    assert loss_of([[[1, EOS]]], torch.zeros(4, dtype=torch.int64)).bits_per_byte is None
