"""Generation: batches equal single prompts, random numbers depend on the seed, texts end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.models.test_kv_cache import FAMILIES, build
from torchtitan_like.inference.generation import (
    Continuation,
    Sampling,
    choose_tokens,
    generate,
    uniform_numbers,
)

PROMPTS = [[5, 6, 7], [1], list(range(20)), [8, 9, 10], list(range(30, 67))]
WARM = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)


def run(model: nn.Module, prompts: list[list[int]], **options: Any) -> list[Continuation]:
    defaults: dict[str, Any] = {"num_tokens": 8, "sampling": Sampling(), "context": 64}
    return generate(model, prompts, **(defaults | options))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_batch_equals_single_prompts_and_whole_forward_passes(family: str) -> None:
    model = build(family)
    together = run(model, PROMPTS, batch_size=5)
    assert together == run(model, PROMPTS, batch_size=2)
    assert together == [run(model, [prompt])[0] for prompt in PROMPTS]
    for prompt, continuation in zip(PROMPTS, together, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert continuation == Continuation(ids[len(prompt) :], "length")


def test_samples_depend_on_the_seed_and_not_on_the_batch() -> None:
    model = build("llama3")
    first = run(model, PROMPTS, sampling=WARM)
    assert run(model, PROMPTS, sampling=WARM, batch_size=2) == first
    assert run(model, PROMPTS, sampling=Sampling(1.0, 20, 0.9, seed=4)) != first
    same = run(model, [[1, 2], [1, 2]], sampling=WARM)
    assert same[0] != same[1], "equal prompts get different samples"


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_ids_that_the_tokenizer_lacks_are_not_sampled(sampling: Sampling) -> None:
    model = build("llama3")
    plain = {id_ for ids, _ in run(model, PROMPTS, sampling=sampling) for id_ in ids}
    known = set(range(64)) - {min(plain), max(plain)}
    sampled = {
        id_ for ids, _ in run(model, PROMPTS, sampling=sampling, known_ids=known) for id_ in ids
    }
    assert sampled and sampled <= known and not plain <= known


class Counter(nn.Module):
    """Predicts the next integer after each token; `core` makes it look like a model."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.core = lambda q, k, v, mask: q
        self.weight = nn.Parameter(torch.zeros(1))
        self.inputs: list[list[list[int]]] = []

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.inputs.append(tokens.tolist())
        x = tokens[:, None, :, None].float()
        self.attention.core(x, x, x, None)
        return torch.nn.functional.one_hot(tokens + 1, 100).float()


@pytest.mark.parametrize(
    ("options", "expected", "num_rows"),
    [
        ({"end_ids": [5]}, [([3, 4], "eos"), ([13, 14, 15, 16], "length")], [2, 2, 1]),
        (
            {"is_stopped": lambda index, ids: index == 0 and ids[-1] == 4},
            [([3, 4], "stop"), ([13, 14, 15, 16], "length")],
            [2, 1, 1],
        ),
        ({"context": 4}, [([3, 4], "context"), ([13], "context")], [1]),
    ],
)
def test_each_text_ends_for_its_own_reason(
    options: Any, expected: Any, num_rows: list[int]
) -> None:
    model = Counter()
    assert run(model, [[1, 2], [10, 11, 12]], num_tokens=4, **options) == expected
    assert model.inputs[:2] == [[[1, 2]], [[10, 11, 12]]]
    assert [len(tokens) for tokens in model.inputs[2:]] == num_rows, "ended rows are removed"


# ---- sampling


def frequencies(logits: Tensor, sampling: Sampling, num_samples: int = 4000) -> Tensor:
    uniform = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    tokens = choose_tokens(logits.expand(num_samples, -1), sampling, uniform)
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
    numbers = torch.stack([uniform_numbers(7, range(100), token) for token in range(100)])
    assert numbers.unique().numel() == 10_000
    assert 0 <= numbers.min() and numbers.max() < 1
    # Standard deviations of the mean and of a row's mean: 0.0029 and 0.029. Five of them.
    assert abs(numbers.mean() - 0.5) < 0.015 and (numbers.mean(0) - 0.5).abs().max() < 0.15
    assert torch.equal(numbers[3, 5:9], uniform_numbers(7, [5, 6, 7, 8], 3))
    assert not torch.equal(numbers[0], uniform_numbers(8, range(100), 0))


def test_largest_random_number_chooses_a_possible_token() -> None:
    largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    token = choose_tokens(torch.zeros(1, 5), Sampling(1.0, top_p=0.5), largest)
    assert 0 <= token.item() < 5
