"""A model with a cache of keys and values computes the logits that it computes without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import outside_model  # registers its model
from tests.unit.models import (
    test_deepseek_v3,
    test_gpt_oss,
    test_llama4,
)
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.layers import kv_cache
from torchtitan_like.models.layers.kv_cache import CachedModel

VOCAB = {"vocab_size": 96, "max_seq_len": 64}
SMALL = {**VOCAB, "dim": 64, "n_layers": 2, "n_heads": 4}
# family: (name, flavor, sizes). Windows and chunks are shorter than the sequences.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {**SMALL, "n_kv_heads": 2, "multiple_of": 16}),
    "llama3 with documents": (
        "llama3",
        "debugmodel",
        {**SMALL, "n_kv_heads": 2, "multiple_of": 16, "attn_mask_type": "block_causal"},
    ),
    "qwen3": ("qwen3", "debugmodel", {**SMALL, "n_kv_heads": 2, "hidden_dim": 96}),
    "qwen3 with experts": (
        "qwen3",
        "debugmodel_moe",
        {**SMALL, "n_kv_heads": 2, "num_experts": 8, "top_k": 2, "moe_inter_dim": 32},
    ),
    "deepseek_v3": ("deepseek_v3", "debugmodel", test_deepseek_v3.SMALL),
    "deepseek_v3 with MTP": (
        "deepseek_v3",
        "debugmodel",
        {**test_deepseek_v3.SMALL, **test_deepseek_v3.SIGMOID, "num_mtp_layers": 1},
    ),
    "gpt_oss": ("gpt_oss", "debugmodel", test_gpt_oss.SMALL),
    "gpt_oss with documents": (
        "gpt_oss",
        "debugmodel",
        {**test_gpt_oss.SMALL, "attn_mask_type": "block_causal"},
    ),
    "llama4": ("llama4", "debugmodel", test_llama4.SMALL),
    "llama4 with documents": (
        "llama4",
        "debugmodel",
        {**test_llama4.SMALL, "attn_mask_type": "block_causal"},
    ),
    "a model from outside": (outside_model.SPEC.name, "tiny", VOCAB),
}
LENGTHS = (3, 3, 20, 37)  # of the rows, beyond windows and chunks
NUM_NEW = 6


def build(family: str) -> nn.Module:
    """Return a model with large random weights, so that every token has an effect."""
    name, flavor, sizes = FAMILIES[family]
    spec = get_spec(name)
    args = resolve_args(spec, flavor, sizes)
    with torch.device("meta"):
        model = spec.build(args).to(torch.float32)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def random_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(96, (length + NUM_NEW,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cached_logits_equal_those_of_whole_sequences(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths; the longest prompt is read in several chunks."""
    monkeypatch.setattr(kv_cache, "MAX_TOKENS", 16)
    model = build(family)
    rows = random_rows()
    expected = [model(row[None])[0] for row in rows]
    if getattr(model, "attention_mask", None) is not None:
        monkeypatch.setattr(model, "attention_mask", pytest.fail)  # rows need no mask
    with CachedModel(model, len(rows), capacity=max(map(len, rows))) as cached:
        after_prompts = torch.cat(
            [
                cached.append(torch.stack([rows[0][:3], rows[1][:3]]), 0),
                cached.append(rows[2][None, :20], 2),
                cached.append(rows[3][None, :37], 3),
            ]
        )
        logits = [after_prompts]
        for i in range(NUM_NEW):
            new = [row[length + i] for row, length in zip(rows, LENGTHS, strict=True)]
            logits.append(cached.append(torch.stack(new)[:, None]))
    for row, (length, of_row) in enumerate(zip(LENGTHS, expected, strict=True)):
        actual = torch.stack([each[row] for each in logits])
        scale = of_row.abs().max()
        # Rounding: sums over keys and batches have another order.
        torch.testing.assert_close(
            actual, of_row[length - 1 :], rtol=0, atol=1e-5 * max(1.0, scale.item())
        )
    assert torch.equal(model(rows[3][None])[0], expected[3]), "the seams are restored"


@torch.no_grad()
def test_rows_that_ended_are_removed() -> None:
    model = build("llama3")
    rows = random_rows()
    with CachedModel(model, 3, capacity=64) as cached:
        cached.append(rows[0][None, :3], 0)
        cached.append(rows[2][None, :20], 1)
        cached.append(rows[3][None, :37], 2)
        cached.keep([0, 2])
        new = torch.stack([rows[0][3], rows[3][37]])[:, None]
        logits = cached.append(new)
    expected = torch.stack([model(rows[0][None, :4])[0, -1], model(rows[3][None, :38])[0, -1]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_model_without_a_core_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="Linear has no attention module with the attribute `core`"
    ):
        CachedModel(nn.Linear(2, 2), 1, 8)
