"""Scores equal the scores of one text at a time, with tokens and windows computed directly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.runner import ROOT
from torchtitan_like.data.errors import DataError, TokenizerError
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.inference.generation import Sampling, generate
from torchtitan_like.inference.loading import LoadedModel
from torchtitan_like.inference.scoring import Scorer, windows_of
from torchtitan_like.models import get_spec, resolve_args

ASSETS = ROOT / "tests/assets/tokenizer"
CONTEXT = 16
TEXTS = ["To be, or not to be, that is the question", "A", "Whether 'tis nobler in the mind " * 3]
PAIRS = [("To be, or not", " to be"), ("To be, or not ", "to be"), ("", "To be"), ("A", "B" * 9)]
PAIRS += [(TEXTS[2], " to suffer"), (" ", "A")]


def build() -> nn.Module:
    """Return a small Llama with large weights, so that every token has an effect."""
    spec = get_spec("llama3")
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16}
    args = resolve_args(spec, "debugmodel", sizes | {"max_seq_len": 32})
    with torch.device("meta"):
        model = spec.build(args).to(torch.float32)
    materialize(model, torch.device("cpu"))
    initialize(model, spec.init_table(args), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    tokenizer = load_tokenizer(ASSETS)
    assert tokenizer.eos_id is not None
    end_ids = frozenset({tokenizer.eos_id})
    cpu = torch.device("cpu")
    return LoadedModel(build(), tokenizer, ASSETS, tokenizer.bos_id, end_ids, CONTEXT, 1, cpu)


@torch.no_grad()
def direct_score(model: nn.Module, context: list[int], target: list[int]) -> tuple[float, bool]:
    """Score one pair, which is at most one token longer than the context."""
    ids = (context + target)[-CONTEXT - 1 :]
    log_probs = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[-len(target) :]
    total = sum(log_probs[i, token].item() for i, token in enumerate(target))
    return total, log_probs.argmax(-1).tolist() == target


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_equal_those_of_single_texts(loaded: LoadedModel, batch_size: int) -> None:
    """In batches of texts of different lengths; also of a text that is longer than the context."""
    encode = loaded.tokenizer.encode
    assert loaded.bos_id is not None
    whole = encode("To be, or not to be")
    expected_ids = [
        (encode("To be, or not"), whole[len(encode("To be, or not")) :]),
        (encode("To be, or not"), whole[len(encode("To be, or not")) :]),
        ([loaded.bos_id], encode("To be")),
        (encode("A"), encode("A" + "B" * 9)[len(encode("A")) :]),
        (
            encode(TEXTS[2].rstrip()),
            encode(TEXTS[2] + " to suffer")[len(encode(TEXTS[2].rstrip())) :],
        ),
        ([loaded.bos_id], encode(" A")),
    ]
    scorer = Scorer(loaded, batch_size)
    assert [scorer.encode_pair(*pair) for pair in PAIRS] == expected_ids
    for score, ids in zip(scorer.log_likelihoods(PAIRS), expected_ids, strict=True):
        log_likelihood, is_greedy = direct_score(loaded.model, *ids)
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-5)
        assert score.is_greedy == is_greedy


def test_most_likely_continuation_is_greedy(loaded: LoadedModel) -> None:
    context = loaded.tokenizer.encode("To be")
    (best,) = generate(loaded.model, [context], num_tokens=4, sampling=Sampling(), context=CONTEXT)
    other = [*best.ids[:-1], (best.ids[-1] + 1) % 2000]
    scores = Scorer(loaded, 2).score([(context, best.ids), (context, other)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_rolling_score_predicts_each_token_once(loaded: LoadedModel) -> None:
    scores = Scorer(loaded, 3).rolling_log_likelihoods([*TEXTS, ""])
    assert loaded.bos_id is not None
    for text, score in zip(TEXTS, scores, strict=False):
        ids = loaded.tokenizer.encode(text)
        windows = windows_of(ids, loaded.bos_id, CONTEXT)
        assert [token for _, target in windows for token in target] == ids
        expected = sum(direct_score(loaded.model, *window)[0] for window in windows)
        assert score == pytest.approx(expected, abs=1e-5)
    assert scores[-1] == 0


def test_windows_have_as_much_context_as_fits() -> None:
    """The example in the documentation of lm-eval, with a prefix of -1."""
    assert windows_of(range(10), -1, 4) == [
        ([-1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]


@pytest.mark.parametrize("until", ["e", ["zzz", "e"], [], None])
def test_generation_ends_before_a_stop_string(loaded: LoadedModel, until: object) -> None:
    scorer = Scorer(loaded, 2)
    options = {"until": until, "max_gen_toks": 8}
    texts = scorer.generate_until([(text, options) for text in TEXTS])
    for prompt, text in zip(TEXTS, texts, strict=True):
        ids = loaded.tokenizer.encode(prompt)[8 - CONTEXT :]
        (best,) = generate(loaded.model, [ids], num_tokens=8, sampling=Sampling(), context=CONTEXT)
        expected = loaded.tokenizer.decode(best.ids)
        assert text == (expected.partition("e")[0] if until else expected)


def test_requests_with_different_options_keep_their_order(loaded: LoadedModel) -> None:
    scorer = Scorer(loaded, 2)
    options: list[dict[str, Any]] = [{"max_gen_toks": 4}, {"max_gen_toks": 8}]
    requests = [(text, options[i % 2]) for i, text in enumerate(TEXTS)]
    together = scorer.generate_until(requests)
    assert together == [scorer.generate_until([request])[0] for request in requests]
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 2.0}
    assert scorer.generate_until([(TEXTS[0], sampled)]) != [together[0]]


def test_impossible_requests_are_rejected(loaded: LoadedModel) -> None:
    scorer = Scorer(loaded, 2)
    with pytest.raises(DataError, match=r"generation options \['num_beams'\]. Expected some of"):
        scorer.generate_until([("A", {"num_beams": 2})])
    with pytest.raises(DataError, match="generates 16 tokens. Expected fewer than .* 16"):
        scorer.generate_until([("A", {"max_gen_toks": 16})])
    with pytest.raises(TokenizerError, match="has 0 tokens. Expected 1 to 16"):
        scorer.log_likelihoods([("A", "")])
    with pytest.raises(TokenizerError, match="Expected 1 to 16"):
        scorer.log_likelihoods([("A", TEXTS[2])])
    assert Scorer(loaded, 2, context=8).context == 8
    assert Scorer(loaded, 2, context=99).context == CONTEXT


# ---- special tokens

PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|begin_of_text|>": {
            "id": "<|begin_of_text|>",
            "ids": [2046],
            "tokens": ["<|begin_of_text|>"],
        }
    },
}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("processor", [None, PROCESSOR])
def test_bos_is_added_where_transformers_adds_it(
    loaded: LoadedModel, tmp_path: Path, processor: Any, adds_bos: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    content = json.loads((ASSETS / "tokenizer.json").read_text()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((ASSETS / "tokenizer_config.json").read_text())
    config["add_bos_token"] = adds_bos  # which transformers ignores for this class
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    scorer = Scorer(replace(loaded, tokenizer=load_tokenizer(tmp_path)), 1)
    for text in ("To be", "To be<|end_of_text|> or", ""):
        assert scorer.encode(text) == theirs.encode(text)
    with_bos = "<|begin_of_text|>To be"
    assert scorer.encode(with_bos) == theirs.encode(with_bos, add_special_tokens=False)
    ids = theirs.encode("To be<|end_of_text|> or")
    assert scorer.tokenizer.decode(ids, with_specials=False) == theirs.decode(
        ids, skip_special_tokens=True
    )


def test_tiktoken_file_adds_bos_and_skips_special_tokens(tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode_with_specials("To be", adds_specials=True)
    assert ids == [tokenizer.bos_id, *tokenizer.encode("To be")]
    assert tokenizer.decode(ids, with_specials=False) == "To be"
