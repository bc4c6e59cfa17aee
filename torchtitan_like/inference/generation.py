"""Generate text with a model, one prompt after the other.

Each token is computed from the whole text before it, without a cache of keys and values. This works
for every model. To serve a model, export it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.inference.load_model import LoadedModel
from torchtitan_like.util.splitmix import mix64

FinishReason = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    temperature: divides the logits; 0 always takes the most likely token.
    top_k: choose among the `top_k` most likely tokens; None: among all.
    top_p: of these, choose among the fewest most likely tokens with this probability together
        (nucleus sampling, arXiv:1904.09751).
    seed: the same prompt and seed give the same tokens.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class Continuation(NamedTuple):
    """The new tokens of a sequence.

    finish_reason: "eos": the model ended the text (`ids` does not contain that token); "length":
        `num_tokens` are reached; "context": the model's context is full.
    """

    ids: list[int]
    finish_reason: FinishReason


class Completion(NamedTuple):
    """What the model adds to a prompt. text: without the end token."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason


def complete(
    loaded: LoadedModel, prompt: str, *, num_tokens: int, sampling: Sampling
) -> Completion:
    """Continue a text. Raises TokenizerError if the prompt is empty or fills the context."""
    tokenizer = loaded.tokenizer
    prompt_ids = encode_prompt(loaded, prompt)
    continuation = generate(
        loaded.model,
        prompt_ids,
        num_tokens=num_tokens,
        sampling=sampling,
        context=loaded.context,
        end_ids=loaded.end_ids,
        known_ids=tokenizer.known_ids(),
    )
    new_ids, reason = continuation
    text = decode_continuation(tokenizer, prompt_ids, new_ids)
    return Completion(text, len(prompt_ids), len(new_ids), reason)


def complete_all(
    loaded: LoadedModel, prompts: Sequence[str], *, num_tokens: int, sampling: Sampling
) -> list[Completion]:
    """Continue several texts. Each has the next seed, so equal prompts get different texts."""
    completions = []
    for number, prompt in enumerate(prompts):
        own = replace(sampling, seed=sampling.seed + number)
        completions.append(complete(loaded, prompt, num_tokens=num_tokens, sampling=own))
    return completions


def encode_prompt(loaded: LoadedModel, prompt: str) -> list[int]:
    """Return the ids of a prompt, with BOS if the model was trained with it.

    Raises TokenizerError for a prompt without tokens, or without room in the model's context.
    """
    bos = [] if loaded.bos_id is None else [loaded.bos_id]
    ids = bos + loaded.tokenizer.encode(prompt)
    if not ids:
        raise TokenizerError(
            "the prompt is empty. Expected text, because the model was trained without a "
            "beginning-of-text token: give a --prompt"
        )
    if len(ids) >= loaded.context:
        raise TokenizerError(
            f"the prompt {prompt[:30]!r} has {len(ids):,} tokens. Expected fewer than the model's "
            f"context of {loaded.context:,} tokens: shorten it"
        )
    return ids


def decode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
    """Return the text of `new_ids` after `prompt`.

    Both are decoded together: some tokenizers drop the space at the start of a text.
    """
    before = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *new_ids])
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(new_ids)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    sampling: Sampling,
    context: int,
    end_ids: Collection[int] = (),
    known_ids: Collection[int] | None = None,
) -> Continuation:
    """Sample up to `num_tokens` ids after a prompt.

    prompt: at least one token, and fewer than `context`.
    context: maximum number of tokens of the prompt and its continuation.
    end_ids: tokens that end a text.
    known_ids: the only tokens to sample; None: any. A vocabulary may be larger than its tokenizer.
    """
    device = next(model.parameters()).device
    ids = list(prompt)
    new_ids: list[int] = []
    while True:
        logits = model(torch.tensor([ids], device=device))[0, -1]
        if known_ids is not None:
            logits = _without_unknown(logits, known_ids)
        token = choose_token(logits, sampling, uniform_number(sampling.seed, len(new_ids)))
        if token in end_ids:
            return Continuation(new_ids, "eos")
        ids.append(token)
        new_ids.append(token)
        if len(new_ids) == num_tokens:
            return Continuation(new_ids, "length")
        if len(ids) == context:
            return Continuation(new_ids, "context")


def _without_unknown(logits: Tensor, known_ids: Collection[int]) -> Tensor:
    """Return logits (vocab,) with -inf for all other tokens than `known_ids`."""
    is_known = torch.zeros(logits.shape, dtype=torch.bool)
    is_known[[token for token in known_ids if token < len(is_known)]] = True
    return logits.masked_fill(~is_known.to(logits.device), -torch.inf)


def choose_token(logits: Tensor, sampling: Sampling, uniform: float) -> int:
    """Return the next token.

    logits: (vocab,). uniform: a number in [0, 1), which decides between the tokens.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    num_candidates = min(sampling.top_k or len(logits), len(logits))
    candidates = logits.double().topk(num_candidates)
    probabilities = (candidates.values / sampling.temperature).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    chosen = (cumulative <= uniform * cumulative[-1]).sum()
    return int(candidates.indices[chosen])


def uniform_number(seed: int, token_index: int) -> float:
    """Return a random number in [0, 1) for a token. It is a function of the arguments."""
    key = mix64(mix64(np.array([seed % 2**64], dtype=np.uint64)))
    bits = mix64(key + np.array([token_index], dtype=np.uint64))
    # 52 bits: the product with a sum of probabilities is then always below the sum.
    return float((bits >> np.uint64(12)).astype(np.float64)[0] * 2.0**-52)
