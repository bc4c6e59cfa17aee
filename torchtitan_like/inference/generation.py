"""Continue token sequences with a model: batches, sampling, and the end of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_like.models.layers.kv_cache import CachedModel
from torchtitan_like.util.splitmix import mix64

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    temperature: divides the logits; 0 always takes the most likely token.
    top_k: choose among the `top_k` most likely tokens; None: among all.
    top_p: of these, choose among the fewest most likely tokens with this probability together
        (nucleus sampling, arXiv:1904.09751).
    seed: prompt i gets the same tokens for the same seed, in any batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class Continuation(NamedTuple):
    """The new tokens of a sequence.

    finish_reason: "eos": the model ended the text (`ids` does not contain that token); "stop": the
        caller did; "length": `num_tokens` are reached; "context": the model's context is full.
    """

    ids: list[int]
    finish_reason: FinishReason


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    sampling: Sampling,
    context: int,
    end_ids: Collection[int] = (),
    known_ids: Collection[int] | None = None,
    is_stopped: Callable[[int, list[int]], bool] = lambda index, ids: False,
    batch_size: int = 8,
) -> list[Continuation]:
    """Sample up to `num_tokens` ids after each prompt.

    prompts: at least one token each, and fewer than `context`.
    context: maximum number of tokens of a prompt and its continuation.
    end_ids: tokens that end a text.
    known_ids: the only tokens to sample; None: any. A vocabulary may be larger than its tokenizer.
    is_stopped: receives the index of a prompt and its new ids after each token; True ends the text.
    batch_size: prompts that are computed together; prompts of similar length share a batch.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    reasons: dict[int, FinishReason] = {}

    def add(index: int, token: int) -> FinishReason | None:
        if token in end_ids:
            return "eos"
        ids[index].append(token)
        if is_stopped(index, ids[index]):
            return "stop"
        if len(ids[index]) == num_tokens:
            return "length"
        return "context" if len(prompts[index]) + len(ids[index]) == context else None

    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(prompts), batch_size):
        indices = by_length[start : start + batch_size]
        capacity = min(context, len(prompts[indices[-1]]) + num_tokens)
        with CachedModel(model, len(indices), capacity) as cached:
            logits = _prefill(cached, [prompts[index] for index in indices])
            unknown = torch.zeros(logits.shape[-1], dtype=torch.bool)
            if known_ids is not None:
                unknown[:] = True
                unknown[[token for token in known_ids if token < len(unknown)]] = False
            reasons |= _continue(cached, logits, indices, sampling, add, unknown.to(logits.device))
    return [Continuation(ids[index], reasons[index]) for index in range(len(prompts))]


def _continue(
    cached: CachedModel,
    logits: Tensor,
    indices: list[int],
    sampling: Sampling,
    add: Callable[[int, int], FinishReason | None],
    unknown: Tensor,
) -> dict[int, FinishReason]:
    """Choose tokens until all texts have ended. Return why, by index of the prompt.

    logits: after the prompts (rows, vocab). indices: the prompt of each row. add: appends a token
    to a prompt, and returns why the text ends, if it does. unknown: (vocab,), True for
    tokens that are not sampled.
    """
    reasons: dict[int, FinishReason] = {}
    for token_index in count():
        uniform = uniform_numbers(sampling.seed, indices, token_index)
        tokens = choose_tokens(logits.masked_fill(unknown, -torch.inf), sampling, uniform)
        remaining = []
        for row, (index, token) in enumerate(zip(indices, tokens.tolist(), strict=True)):
            reason = add(index, token)
            if reason is None:
                remaining.append(row)
            else:
                reasons[index] = reason
        if not remaining:
            break
        if len(remaining) < len(indices):
            cached.keep(remaining)
            indices = [indices[row] for row in remaining]
            tokens = tokens[remaining]
        logits = cached.append(tokens[:, None])
    return reasons


def _prefill(cached: CachedModel, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Append prompts, sorted by length, to the rows. Return the last logits (rows, vocab)."""
    device = next(cached.model.parameters()).device
    logits = []
    first_row = 0
    for _, group in groupby(prompts, len):
        tokens = torch.tensor(list(group), device=device)
        logits.append(cached.append(tokens, first_row))
        first_row += tokens.shape[0]
    return torch.cat(logits)


def choose_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Return the next token of each row, int64 (rows,).

    logits: (rows, vocab). uniform: float64 (rows,) in [0, 1), which decide between the tokens.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    num_candidates = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    candidates = logits.double().topk(num_candidates, dim=-1)
    probabilities = (candidates.values / sampling.temperature).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    threshold = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= threshold).sum(-1, keepdim=True)
    return candidates.indices.gather(-1, chosen).squeeze(-1)


def uniform_numbers(seed: int, prompt_indices: Sequence[int], token_index: int) -> Tensor:
    """Return a random number in [0, 1) for a token of each prompt: float64 (prompts,) on the CPU.

    They are a function of the arguments.
    """
    key = mix64(np.array([seed % 2**64], dtype=np.uint64))
    of_prompts = mix64(key + np.array(prompt_indices, dtype=np.uint64))
    bits = mix64(of_prompts + np.array([token_index], dtype=np.uint64))
    # 52 bits: the product with a sum of probabilities is then always below the sum.
    return torch.from_numpy((bits >> np.uint64(12)).astype(np.float64) * 2.0**-52)
