"""Complete texts and conversations: prompts, stop strings, and decoded continuations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.chat_template import ChatTemplate
from torchtitan_like.data.text.tokenizer import Tokenizer
from torchtitan_like.inference.generation import FinishReason, Sampling, generate
from torchtitan_like.inference.loading import LoadedModel
from torchtitan_like.util.reading import parse_json


class Prompt(NamedTuple):
    """A text to continue, or the messages of a conversation to answer; the other one is empty."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()

    def as_message(self) -> Prompt:
        """Return a text as a user's message. Messages are unchanged."""
        return self if self.messages else Prompt("", ({"role": "user", "content": self.text},))


class Completion(NamedTuple):
    """What the model adds to a prompt.

    text: without the stop string or the end token. num_tokens: generated, including the tokens of a stop
    string. finish_reason: see `Continuation`.
    """

    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True)
class Completions:
    """The completions of prompts, in their order, and the seconds that generating them took."""

    completions: list[Completion]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all prompts per second, with the time to read the prompts."""
        return self.num_tokens / self.seconds


def read_prompts(lines: Sequence[str], name: str) -> list[Prompt]:
    """Read one prompt from each line of JSON: {"prompt": text} or {"messages": [...]}.

    A message is {"role": ..., "content": ...}. Raises DataError with the name and the line.
    """
    return [
        _parse_prompt(line, f"{name}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_prompt(line: str, location: str) -> Prompt:
    expected = 'Expected {"prompt": "text"} or {"messages": [{"role": ..., "content": ...}]}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{location} is not JSON: {error}. {expected}: correct it") from error
    text = row.get("prompt") if isinstance(row, dict) else None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(text, str) and messages is None:
        return Prompt(text)
    if (
        text is None
        and isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        return Prompt("", tuple(messages))
    raise DataError(f"{location} is not a prompt: {line.strip()[:60]}. {expected}: correct it")


def encode_prompts(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of each prompt, with BOS where the model was trained with it.

    A chat template writes its own BOS. Raises TokenizerError for a prompt without tokens, for one
    that leaves no room in the model's context, and for messages without a template.
    """
    tokenizer = loaded.tokenizer
    template = ChatTemplate(loaded.assets) if any(prompt.messages for prompt in prompts) else None
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        if prompt.messages:
            assert template is not None
            ids = tokenizer.encode_with_specials(template.render(prompt.messages))
        else:
            bos = [] if loaded.bos_id is None else [loaded.bos_id]
            ids = bos + tokenizer.encode(prompt.text)
        _check_length(len(ids), loaded.context, number)
        encoded.append(ids)
    return encoded


def _check_length(num_ids: int, context: int, number: int) -> None:
    if num_ids == 0:
        raise TokenizerError(
            f"prompt {number} is empty. Expected text, because the model was trained without a "
            "beginning-of-text token: give a --prompt"
        )
    if num_ids >= context:
        raise TokenizerError(
            f"prompt {number} has {num_ids:,} tokens. Expected fewer than the model's context of "
            f"{context:,} tokens: shorten it"
        )


def complete(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    batch_size: int = 8,
) -> Completions:
    """Generate a continuation of each prompt.

    prompts: ids, see `encode_prompts`. stop: a text ends before the first of these strings.
    """
    tokenizer = loaded.tokenizer

    def is_stopped(index: int, ids: list[int]) -> bool:
        if not stop:
            return False
        text = decode_continuation(tokenizer, prompts[index], ids)
        return any(string in text for string in stop)

    start = time.perf_counter()
    continuations = generate(
        loaded.model,
        prompts,
        num_tokens=num_tokens,
        sampling=sampling,
        context=loaded.context,
        end_ids=loaded.end_ids,
        known_ids=tokenizer.known_ids(),
        is_stopped=is_stopped,
        batch_size=batch_size,
    )
    seconds = time.perf_counter() - start
    completions = []
    for prompt, (ids, reason) in zip(prompts, continuations, strict=True):
        text = before_stop(decode_continuation(tokenizer, prompt, ids), stop)
        completions.append(Completion(text, len(prompt), len(ids), reason))
    return Completions(completions, seconds)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first string of `stop` in it."""
    ends = [text.index(string) for string in stop if string in text]
    return text[: min(ends, default=len(text))]


def decode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Sequence[int]) -> str:
    """Return the text of `new_ids` after `prompt`.

    Both are decoded together: some tokenizers drop the space at the start of a text.
    """
    before = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *new_ids])
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(new_ids)
