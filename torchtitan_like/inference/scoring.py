"""Log-likelihoods and continuations of texts, as lm-evaluation-harness defines them.

Its backend `hf` has the same tokens on an export of the same weights: special tokens in a text
are recognized, the tokenizer's own rule decides about BOS (`Tokenizer.encode_with_specials`), and
texts that are too long lose their first tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.inference.completion import before_stop
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.inference.loading import LoadedModel
from torchtitan_like.models.layers.head import OutputHead

# Defaults of lm-evaluation-harness and of transformers.
NUM_TOKENS = 256
TOP_K = 50
_GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class Score(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the
    most likely one."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Scores texts with a model, `batch_size` at a time.

    context: maximum number of tokens of the model's input; None: of the model.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int, context: int | None = None) -> None:
        self.tokenizer = loaded.tokenizer
        self.model = loaded.model
        self.device = loaded.device
        self.end_ids = loaded.end_ids
        self.batch_size = batch_size
        self.context = min(context or loaded.context, loaded.context)

    # ---- tokens

    @property
    def prefix_id(self) -> int:
        """The token before a text without context: BOS, else EOS. Raises TokenizerError."""
        tokenizer = self.tokenizer
        prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if prefix is None:
            raise TokenizerError(
                f"{tokenizer.path} has neither BOS nor EOS. Expected one of them before the first "
                "token of a text: name it in tokenizer_config.json"
            )
        return prefix

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with ids that the tokenizer adds, except a second BOS."""
        bos_id = self.tokenizer.bos_id
        has_bos = bos_id is not None and text.startswith(self.tokenizer.decode([bos_id]))
        return self.tokenizer.encode_with_specials(text, adds_specials=not has_bos)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of its continuation.

        The continuation's ids follow the context's ids in the joined text. Blanks at the end
        of the context belong to the continuation.
        """
        if not context:
            ids = self.tokenizer.encode_with_specials(continuation)
            if ids[:1] == [self.prefix_id]:
                return ids[:1], ids[1:]
            return [self.prefix_id], ids
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        context_ids = self.encode(stripped)
        target = self.encode(stripped + continuation)[len(context_ids) :]
        return context_ids or [self.prefix_id], target

    # ---- scores

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation). Raises TokenizerError for an empty continuation."""
        return self.score([self.encode_pair(*pair) for pair in pairs])

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each whole text.

        A text longer than the context is divided into windows. Each token is predicted once, with
        as many tokens before it as fit the last window.
        """
        windows = [windows_of(self.encode(text), self.prefix_id, self.context) for text in texts]
        scores = iter(self.score([window for of_text in windows for window in of_text]))
        return [sum(next(scores).log_likelihood for _ in of_text) for of_text in windows]

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Score the continuation of each pair (ids of the context, ids of the continuation).

        The first tokens of a context that is too long are dropped. Raises TokenizerError for a
        continuation without tokens, or with more than the model's context.
        """
        for _, continuation in pairs:
            if not 0 < len(continuation) <= self.context:
                raise TokenizerError(
                    f"a continuation has {len(continuation):,} tokens. Expected 1 to "
                    f"{self.context:,}, the model's context: correct the task"
                )
        scores: dict[int, Score] = {}
        by_length = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        for start in range(0, len(pairs), self.batch_size):
            indices = by_length[start : start + self.batch_size]
            of_batch = self._score_batch([pairs[index] for index in indices])
            scores.update(zip(indices, of_batch, strict=True))
        return [scores[index] for index in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        rows = [[*context, *target][-self.context - 1 :] for context, target in pairs]
        length = max(map(len, rows)) - 1
        # Attention is causal: padding behind a text changes nothing.
        tokens = torch.tensor([row[:-1] + [0] * (length + 1 - len(row)) for row in rows])
        is_scored = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (ids, (_, target)) in enumerate(zip(rows, pairs, strict=True)):
            is_scored[row, len(ids) - 1 - len(target) : len(ids) - 1] = True
        is_scored = is_scored.to(self.device)
        with selected_hidden(self.model, lambda hidden: hidden[is_scored]):
            logits: Tensor = self.model(tokens.to(self.device))
        targets = torch.tensor([i for _, target in pairs for i in target], device=self.device)
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        of_targets = log_probs.gather(-1, targets[:, None]).squeeze(-1)
        is_best = log_probs.argmax(-1) == targets
        sizes = [len(target) for _, target in pairs]
        return [
            Score(float(values.double().sum()), bool(best.all()))
            for values, best in zip(of_targets.split(sizes), is_best.split(sizes), strict=True)
        ]

    # ---- continuations

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue each text with its options: until, max_gen_toks, do_sample, temperature, ...

        Raises DataError for other options.
        """
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, (_, options) in enumerate(requests):
            groups.setdefault(repr(sorted(options.items())), []).append(index)
        for indices in groups.values():
            contexts = [requests[index][0] for index in indices]
            of_group = self._generate_group(contexts, requests[indices[0]][1])
            texts.update(zip(indices, of_group, strict=True))
        return [texts[index] for index in range(len(requests))]

    def _generate_group(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        if unknown := options.keys() - _GENERATION_KEYS:
            raise DataError(
                f"a task has the generation options {sorted(unknown)}. Expected some of "
                f"{sorted(_GENERATION_KEYS)}: set generation_kwargs of the task"
            )
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        num_tokens = int(options.get("max_gen_toks", NUM_TOKENS))
        if num_tokens >= self.context:
            raise DataError(
                f"a task generates {num_tokens:,} tokens. Expected fewer than the model's context "
                f"of {self.context:,}: set max_gen_toks in generation_kwargs of the task"
            )
        encoded = [self.encode(text) or [self.prefix_id] for text in contexts]
        prompts = [ids[num_tokens - self.context :] for ids in encoded]
        continuations = generate(
            self.model,
            prompts,
            num_tokens=num_tokens,
            sampling=_sampling(options),
            context=self.context,
            end_ids=self.end_ids,
            known_ids=self.tokenizer.known_ids(),
            is_stopped=self._stops_at(stop),
            batch_size=self.batch_size,
        )
        decode = self.tokenizer.decode
        return [before_stop(decode(ids, with_specials=False), stop) for ids, _ in continuations]

    def _stops_at(self, stop: Sequence[str]) -> Callable[[int, list[int]], bool]:
        def is_stopped(index: int, ids: list[int]) -> bool:
            if not stop:
                return False
            text = self.tokenizer.decode(ids)
            return any(string in text for string in stop)

        return is_stopped


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Return how to sample. Without `do_sample`, a temperature above 0 samples."""
    temperature = float(options.get("temperature", 0.0))
    do_sample = options.get("do_sample")
    if do_sample is None:
        do_sample = temperature > 0
    if not do_sample:
        return Sampling()
    return Sampling(
        float(options.get("temperature", 1.0)),
        int(options.get("top_k", TOP_K)) or None,
        float(options.get("top_p", 1.0)),
    )


def windows_of(
    ids: Sequence[int], prefix_id: int, context: int
) -> list[tuple[list[int], list[int]]]:
    """Divide a text into pairs (context, continuation) that fit into the model's context.

    The first window predicts up to `context` tokens after the prefix. Each later one predicts the
    next `context` tokens. The last window has fewer new tokens, and all tokens before them that fit.
    """
    windows = []
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        before = [prefix_id] if start == 0 else list(ids[end - context - 1 : start])
        windows.append((before, list(ids[start:end])))
    return windows


@contextmanager
def selected_hidden(model: nn.Module, select: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Compute logits only for some hidden states: of all tokens, they would need too much memory.

    select: maps the head's input (batch, seq, dim) to the hidden states of which the model returns
    logits.
    """
    head = next(module for module in model.modules() if isinstance(module, OutputHead))
    hook = head.register_forward_pre_hook(lambda _, inputs: (select(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()
