"""Prompts of text and messages, and stop strings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness.runner import ROOT
from tests.unit.cli.test_data_tiny import llama2
from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.inference import completion
from torchtitan_like.inference.completion import (
    Prompt,
    complete,
    decode_continuation,
    encode_prompts,
    read_prompts,
)
from torchtitan_like.inference.generation import Continuation, Sampling
from torchtitan_like.inference.loading import LoadedModel

ASSETS = ROOT / "tests/assets/tokenizer"


@pytest.fixture
def loaded() -> LoadedModel:
    tokenizer = load_tokenizer(ASSETS)
    return LoadedModel(
        nn.Linear(1, 1),
        tokenizer,
        ASSETS,
        tokenizer.bos_id,
        frozenset(),
        64,
        1,
        torch.device("cpu"),
    )


def test_prompts_are_read_from_json_lines() -> None:
    message = {"role": "user", "content": "Hi"}
    lines = ['{"prompt": "To be"}\n', "\n", json.dumps({"messages": [message]}) + "\n"]
    assert read_prompts(lines, "file") == [Prompt("To be"), Prompt("", (message,))]
    assert (
        Prompt("Hi").as_message() == Prompt("", (message,)) == Prompt("", (message,)).as_message()
    )


@pytest.mark.parametrize(
    "line",
    ["To be", '{"text": "x"}', '{"prompt": 1}', '{"messages": []}', '{"messages": ["Hi"]}', "[]"]
    + ['{"prompt": "x", "messages": [{"role": "user"}]}'],
)
def test_lines_that_are_no_prompt_are_rejected(line: str) -> None:
    with pytest.raises(DataError, match='^file, line 2 is not .*Expected {"prompt"'):
        read_prompts(['{"prompt": "x"}', line], "file")


def test_prompts_start_with_bos_where_training_did(loaded: LoadedModel) -> None:
    text = loaded.tokenizer.encode("To be")
    assert encode_prompts(loaded, [Prompt("To be")]) == [[loaded.bos_id, *text]]
    without = replace(loaded, bos_id=None)
    assert encode_prompts(without, [Prompt("To be")]) == [text]
    with pytest.raises(TokenizerError, match="prompt 2 is empty"):
        encode_prompts(without, [Prompt("To be"), Prompt("")])
    with pytest.raises(TokenizerError, match="prompt 1 has .* Expected fewer than .* 2 tokens"):
        encode_prompts(replace(loaded, context=2), [Prompt("To be")])
    with pytest.raises(TokenizerError, match="has no chat template"):
        encode_prompts(loaded, [Prompt("Hi").as_message()])


def test_text_ends_before_the_first_stop_string(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_ids = loaded.tokenizer.encode(" or not to be, that is the question")

    def generate(model, prompts, *, num_tokens, is_stopped, **_unused):  # type: ignore[no-untyped-def]
        end = next((n for n in range(1, num_tokens) if is_stopped(0, new_ids[:n])), num_tokens)
        return [Continuation(new_ids[:end], "stop" if end < num_tokens else "length")]

    monkeypatch.setattr(completion, "generate", generate)
    prompt = encode_prompts(loaded, [Prompt("To be")])
    options = {"num_tokens": len(new_ids), "sampling": Sampling()}
    whole = complete(loaded, prompt, **options).completions[0]  # type: ignore[arg-type]
    assert (whole.text, whole.finish_reason) == (" or not to be, that is the question", "length")
    done = complete(loaded, prompt, stop=["question", ", t"], **options)  # type: ignore[arg-type]
    cut = done.completions[0]
    assert (cut.text, cut.finish_reason) == (" or not to be", "stop")
    assert cut.num_tokens == done.num_tokens < whole.num_tokens
    assert done.tokens_per_second == done.num_tokens / done.seconds


def test_continuation_keeps_its_leading_space(tmp_path: Path) -> None:
    """Llama 2's decoder removes one space from the start of every text."""
    llama2().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    prompt, tokens = tokenizer.encode("To be"), tokenizer.encode("To be or not")
    assert tokens[: len(prompt)] == prompt and tokenizer.decode(tokens[len(prompt) :]) == "or not"
    assert decode_continuation(tokenizer, prompt, tokens[len(prompt) :]) == " or not"
    assert decode_continuation(tokenizer, prompt, []) == ""
