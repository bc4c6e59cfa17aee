"""Generation and prompts: greedy tokens, the seed, the tokenizer's ids, and why a text ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import outside_model  # registers its model
from tests.harness.runner import ROOT
from tests.unit.cli.test_data_tiny import llama2
from tests.unit.models.families import DEEPSEEK_V3, GPT_OSS, LLAMA4, SIGMOID
from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.inference.generation import (
    Continuation,
    Sampling,
    choose_token,
    decode_continuation,
    encode_prompt,
    generate,
    uniform_number,
)
from torchtitan_like.inference.load_model import LoadedModel
from torchtitan_like.models import get_spec, resolve_args

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
    "deepseek_v3": ("deepseek_v3", "debugmodel", DEEPSEEK_V3.sizes),
    "deepseek_v3 with MTP": (
        "deepseek_v3",
        "debugmodel",
        {**DEEPSEEK_V3.sizes, **SIGMOID, "num_mtp_layers": 1},
    ),
    "gpt_oss": ("gpt_oss", "debugmodel", GPT_OSS.sizes),
    "gpt_oss with documents": (
        "gpt_oss",
        "debugmodel",
        {**GPT_OSS.sizes, "attn_mask_type": "block_causal"},
    ),
    "llama4": ("llama4", "debugmodel", LLAMA4.sizes),
    "llama4 with documents": (
        "llama4",
        "debugmodel",
        {**LLAMA4.sizes, "attn_mask_type": "block_causal"},
    ),
    "a model from outside": (outside_model.SPEC.name, "tiny", VOCAB),
}
PROMPT = list(range(30, 67))  # beyond windows and chunks
WARM = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)


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


def run(model: nn.Module, prompt: list[int], **options: Any) -> Continuation:
    defaults: dict[str, Any] = {"num_tokens": 8, "sampling": Sampling(), "context": 64}
    return generate(model, prompt, **(defaults | options))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_tokens_are_the_most_likely_ones(family: str) -> None:
    """One forward pass over the whole text has each of its tokens as the most likely one."""
    model = build(family)
    ids, reason = run(model, PROMPT)
    assert reason == "length" and len(ids) == 8
    logits = model(torch.tensor([[*PROMPT, *ids]]))[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == ids


def test_samples_depend_on_the_seed() -> None:
    model = build("llama3")
    first = run(model, PROMPT, sampling=WARM)
    assert run(model, PROMPT, sampling=WARM) == first
    assert run(model, PROMPT, sampling=replace(WARM, seed=4)) != first


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_ids_that_the_tokenizer_lacks_are_not_sampled(sampling: Sampling) -> None:
    model = build("llama3")
    plain = {*run(model, PROMPT, sampling=sampling).ids}
    known = set(range(64)) - {min(plain), max(plain)}
    sampled = {*run(model, PROMPT, sampling=sampling, known_ids=known).ids}
    assert sampled and sampled <= known and not plain <= known


class Counter(nn.Module):
    """Predicts the next integer after each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens + 1, 100).float()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"end_ids": [5]}, ([3, 4], "eos")),
        ({}, ([3, 4, 5, 6], "length")),
        ({"context": 4}, ([3, 4], "context")),
    ],
)
def test_each_text_ends_for_its_own_reason(options: Any, expected: Any) -> None:
    assert run(Counter(), [1, 2], num_tokens=4, **options) == expected


# ---- prompts


def test_prompts_start_with_bos_where_training_did() -> None:
    tokenizer = load_tokenizer(ROOT / "tests/assets/tokenizer")
    loaded = LoadedModel(nn.Linear(1, 1), tokenizer, tokenizer.bos_id, frozenset(), 64)
    text = tokenizer.encode("To be")
    assert encode_prompt(loaded, "To be") == [tokenizer.bos_id, *text]
    without = replace(loaded, bos_id=None)
    assert encode_prompt(without, "To be") == text
    with pytest.raises(TokenizerError, match="the prompt is empty.* give a --prompt"):
        encode_prompt(without, "")
    with pytest.raises(TokenizerError, match="'To be' has .* Expected fewer than .* 2 tokens"):
        encode_prompt(replace(loaded, context=2), "To be")


def test_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    """Llama 2's decoder removes one space from the start of every text."""
    llama2().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    prompt, tokens = tokenizer.encode("To be"), tokenizer.encode("To be or not")
    assert tokens[: len(prompt)] == prompt and tokenizer.decode(tokens[len(prompt) :]) == "or not"
    assert decode_continuation(tokenizer, prompt, tokens[len(prompt) :]) == " or not"
    assert decode_continuation(tokenizer, prompt, []) == ""


# ---- sampling


def frequencies(logits: Tensor, sampling: Sampling, num_samples: int = 4000) -> Tensor:
    uniform = [(i + 0.5) / num_samples for i in range(num_samples)]
    tokens = torch.tensor([choose_token(logits, sampling, number) for number in uniform])
    return torch.bincount(tokens, minlength=logits.shape[-1]) / num_samples


LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(0.7), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=2), [1, 3]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3]),
        # The probabilities are 0.64, 0.24, 0.09, 0.03.
        (Sampling(1.0, top_p=0.6), [1]),
        (Sampling(1.0, top_p=0.7), [1, 3]),
        (Sampling(1.0, top_k=3, top_p=0.99), [1, 2, 3]),
        (Sampling(0.0), [1]),
    ],
)
def test_tokens_have_their_probabilities(sampling: Sampling, allowed: list[int]) -> None:
    """Evenly spaced numbers reproduce each probability up to the spacing of 1 / 4000."""
    scaled = LOGITS / (sampling.temperature or 1.0)
    expected = torch.full_like(scaled, -torch.inf)
    expected[allowed] = scaled[allowed]
    actual = frequencies(LOGITS, sampling)
    torch.testing.assert_close(actual, expected.softmax(-1), rtol=0, atol=1 / 4000)


def test_random_numbers_are_uniform_and_a_function_of_their_arguments() -> None:
    numbers = torch.tensor(
        [[uniform_number(seed, token) for token in range(100)] for seed in range(100)],
        dtype=torch.float64,
    )
    assert numbers.unique().numel() == 10_000
    assert 0 <= numbers.min() and numbers.max() < 1
    # Standard deviations of the mean and of a row's mean: 0.0029 and 0.029. Five of them.
    assert abs(numbers.mean() - 0.5) < 0.015 and (numbers.mean(0) - 0.5).abs().max() < 0.15
    assert uniform_number(7, 3) == numbers[7, 3] != uniform_number(8, 3)


def test_largest_random_number_chooses_a_possible_token() -> None:
    token = choose_token(torch.zeros(5), Sampling(1.0, top_p=0.5), 1 - 2.0**-52)
    assert 0 <= token < 5
