"""`titan data tiny` makes small tokenizers, datasets and models that behave like large ones."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.unit.data.test_documents import write_table
from torchtitan_like.checkpoint.tools.diff import tensor_difference
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.cli import main as titan
from torchtitan_like.config.dataset_names import DATASETS
from torchtitan_like.data.text import documents
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.tokenizing import cached_tokens

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"
TEXTS = [
    json.loads(line)["text"] for line in DATASETS["shakespeare"].file.read_text().splitlines()[:8]
]


def trained(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    """The only special token is an added token and the last entry of the vocabulary."""
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    content = json.loads(trained(models.BPE(), trainer, byte_level, decoders.ByteLevel()).to_str())
    content["model"]["vocab"]["<|endoftext|>"] = last = len(content["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [{"id": last, "content": "<|endoftext|>", "special": True, **flags}]
    return Tokenizer.from_str(json.dumps(content))


def llama2() -> Tokenizer:
    """BPE on characters with byte fallback. No pre-tokenizer splits the text into words."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=names[:3], show_progress=False)
    content = json.loads(trained(models.BPE(), trainer, pre_tokenizers.Metaspace(), None).to_str())
    entries = [*names, *(name for name in content["model"]["vocab"] if name not in names)]
    content["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    content["model"]["vocab"] = {name: number for number, name in enumerate(entries)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def bert() -> Tokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=1500, special_tokens=names[:5], show_progress=False
    )
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
        normalizer=normalizers.BertNormalizer(),
    )  # fmt: skip
    separator, first = (tokenizer.token_to_id(name) for name in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", separator), ("[CLS]", first))
    return tokenizer


def t5() -> Tokenizer:
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=1500,
        special_tokens=names,
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=list(ALPHABET),
    )
    tokenizer = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())
    tokenizer.add_special_tokens(["<extra_id_0>"])  # after all others, as in T5
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    return tokenizer


ALPHABET = "".join(map(chr, range(0x21, 0x7F)))
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "BPE": gpt2,
    "BPE on characters": llama2,
    "WordPiece": bert,
    "Unigram": t5,
}


def run(*arguments: object) -> int:
    return titan(["data", "tiny", *map(str, arguments)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_tokenizer_decodes_to_the_same_text_as_the_large_one(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    large = KINDS[kind]()
    large.save(str(tmp_path / "tokenizer.json"))
    assert run("tokenizer", tmp_path, tmp_path / "small", "--keep", 400) == 0, (
        capsys.readouterr().err
    )
    small = Tokenizer.from_file(str(tmp_path / "small" / "tokenizer.json"))
    assert small.get_vocab_size() == 400 < large.get_vocab_size()
    assert sorted(small.get_vocab().values()) == list(range(400))
    for text in ("Whether 'tis nobler in the mind", *TEXTS[:2]):
        ids = [one.encode(text, add_special_tokens=False).ids for one in (small, large)]
        assert small.decode(ids[0]) == large.decode(ids[1])
        assert len(ids[1]) <= len(ids[0]) < len(text), "fewer merges than the large one"
    specials = [token.content for _, token in sorted(large.get_added_tokens_decoder().items())]
    actual = [token.content for _, token in sorted(small.get_added_tokens_decoder().items())]
    assert actual == specials
    ends = [
        [token for token in one.encode("one two").tokens if token in specials]
        for one in (small, large)
    ]
    assert ends[0] == ends[1]
    for name in specials:
        number = small.token_to_id(name)
        assert small.encode(f"one {name} two", add_special_tokens=False).ids.count(number) == 1
        assert f"{name} {number}" in capsys.readouterr().out or name != specials[0]


def test_the_end_of_text_token_of_gpt2_stays_the_last_entry(tmp_path: Path) -> None:
    gpt2().save(str(tmp_path / "tokenizer.json"))
    assert run("tokenizer", tmp_path, tmp_path / "small", "--keep", 300) == 0
    small = load_tokenizer(tmp_path / "small")
    assert small.eos_id == 299 and small.vocab_size == 300
    assert small.decode(small.encode("Ünïcode 🙂")) == "Ünïcode 🙂"


def test_other_tokenizer_files_are_copied(tmp_path: Path) -> None:
    assert run("tokenizer", ASSETS, tmp_path / "small", "--keep", 300) == 0
    config = json.loads((tmp_path / "small" / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"].keys() == {"298", "299"}
    small, large = load_tokenizer(tmp_path / "small"), load_tokenizer(ASSETS)
    assert (small.bos_id, small.eos_id) == (298, 299)
    assert small.decode(small.encode(TEXTS[0])) == TEXTS[0] == large.decode(large.encode(TEXTS[0]))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """600 documents in 3 files and about 30 pieces. One in six is empty."""
    monkeypatch.setattr(documents, "PIECE_BYTES", 500)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 500)
    (tmp_path / "corpus").mkdir()
    for part in range(3):
        texts = [f"{part}.{number} ü" * bool(number % 6) for number in range(200)]
        lines = (json.dumps({"body": text}) + "\n" for text in texts)
        (tmp_path / "corpus" / f"{part}.jsonl").write_text("".join(lines))
    return tmp_path / "corpus"


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_documents_are_sampled_evenly_by_seed(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        options = ("--n", 100, "--text-field", "body", "--seed", seed)
        assert run("dataset", corpus, tmp_path / f"{name}.jsonl", *options) == 0, (
            capsys.readouterr().err
        )
        samples[name] = texts_of(tmp_path / f"{name}.jsonl")
    assert len(set(samples["one"])) == 100 and "" not in samples["one"]
    indices = [tuple(map(int, text.split()[0].split("."))) for text in samples["one"]]
    assert indices == sorted(indices), "expected the order of the source"
    counts = Counter((file, number // 50) for file, number in indices)
    assert len(counts) == 12 and max(counts.values()) <= 16, counts
    assert samples["again"] == samples["one"] != samples["other"]


def test_all_documents_of_a_small_source_are_used(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dataset", corpus, tmp_path / "all.jsonl", "--text-field", "body") == 0
    assert (
        len(set(texts_of(tmp_path / "all.jsonl"))) == 3 * 166
        and "(all there are)" in capsys.readouterr().out
    )


def test_sources_may_have_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "a.parquet", [f"row {number}" for number in range(50)])
    assert run("dataset", tmp_path / "a.parquet", tmp_path / "rows.jsonl", "--n", 7) == 0
    assert len(rows := texts_of(tmp_path / "rows.jsonl")) == 7 and all(
        row.startswith("row ") for row in rows
    )
    tokenizer, rows_corpus = (
        load_tokenizer(ASSETS),
        documents.find_corpus(str(tmp_path / "rows.jsonl")),
    )
    policy = TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    tokens = cached_tokens(rows_corpus, policy, entry_of(rows_corpus, "own", policy),
                           CacheFolders(str(tmp_path / "tokens"), "unused"))  # fmt: skip
    options = ("--format", "tokens", "--tokenizer", ASSETS)
    assert run("dataset", tokens.folder, tmp_path / "decoded.jsonl", *options) == 0
    assert texts_of(tmp_path / "decoded.jsonl") == rows
    assert run("dataset", tokens.folder, tmp_path / "four.jsonl", "--n", 4, *options) == 0
    assert len(four := texts_of(tmp_path / "four.jsonl")) == 4 and set(four) < set(rows)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [("llama3_8b", "LlamaForCausalLM"), ("qwen3_0.6b", "Qwen3ForCausalLM")],
)
def test_transformers_loads_a_tiny_model_of_the_family(
    tmp_path: Path, repo_root: Path, config: str, architecture: str
) -> None:
    transformers = pytest.importorskip("transformers")
    settings = ("--model.hf_assets_path", ASSETS, "--model.args.n_layers", 3)
    for name in ("one", "two"):
        assert (
            run("model", repo_root / f"train_configs/{config}.toml", tmp_path / name, *settings)
            == 0
        )
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1], "expected equal random weights"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "one", output_loading_info=True, dtype="auto"
    )
    assert type(model).__name__ == architecture and not any(report.values()), report
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (
        3,
        64,
        2048,
    )
    assert model.num_parameters() < 1_000_000
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    ids = tokenizer("To be, or not to be", return_tensors="pt")["input_ids"]
    loss = model(ids, labels=ids).loss.item()
    assert 5 < loss < 15, "an untrained model: log 2048 = 7.6"
    # step-0 has the same weights as a native checkpoint.
    step = tmp_path / "one/step-0"
    native = open_checkpoint(step)
    assert (
        native.format == "native"
        and native.manifest["kind"] == "weights"
        and len(native.stored) > 20
    )
    embedding = model.get_input_embeddings().weight.detach()
    assert tensor_difference(native.read("model.tok_embeddings.weight"), embedding) is None
    assert titan(["generate", str(step), "--prompt", "To be", "--num-tokens", "3"]) == 0
    # The printed command works in any folder: relative paths refer to the folder of the first call.
    command = (tmp_path / "one/make.sh").read_text()
    assert command.startswith(f"cd {shlex.quote(os.getcwd())} &&\n    titan data tiny model ")
    paths = shlex.join([f"{repo_root}/train_configs/{config}.toml", f"{tmp_path}/one"])
    assert f" {paths} --dtype float32 " in command


FAULTS: dict[str, tuple[list[str], str]] = {
    "no tokenizer": (["tokenizer", "{tmp}", "{tmp}/out"], "no tokenizer.json at"),
    "tiktoken": (
        ["tokenizer", "{assets}/tokenizer.model", "{tmp}/out"],
        "Expected the file, or its folder, not a tiktoken file",
    ),
    "too few": (
        ["tokenizer", "{assets}", "{tmp}/out", "--keep", "200"],
        "--keep is 200. Expected 258 or more",
    ),
    "another kind": (
        ["tokenizer", "{tmp}/word.json", "{tmp}/out"],
        "of the kind WordLevel. Expected BPE",
    ),
    "exists": (
        ["tokenizer", "{assets}", "{tmp}"],
        "exists already. Expected a new path, because",
    ),
    "no data": (["dataset", "{tmp}/none.jsonl", "{tmp}/out"], "no data at"),
    "no text": (["dataset", "{tmp}/empty.jsonl", "{tmp}/out"], "no text in"),
    "tokens": (["dataset", "{tmp}", "{tmp}/out", "--format", "tokens"], "Expected --tokenizer"),
    "unknown": (
        ["dataset", "{tmp}", "{tmp}/out", "--model.args.n", "3"],
        "does not know --model.args.n 3. Expected the options in",
    ),
    "no config": (["model", "{tmp}/none.toml", "{tmp}/out"], "none.toml"),
    "no such size": (
        ["model", "{debug}", "{tmp}/out", "--model.args.dim", "20"],
        "expected a multiple of",
    ),
    "no assets": (
        ["model", "{debug}", "{tmp}/out", "--model.hf_assets_path", "{tmp}"],
        "no tokenizer at",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_return_2_and_leave_no_file(
    tmp_path: Path,
    repo_root: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(repo_root)
    arguments, message = FAULTS[name]
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "word.json"))
    before = sorted(tmp_path.iterdir())
    paths = {
        "tmp": tmp_path,
        "assets": ASSETS,
        "debug": repo_root / "train_configs/debug_model.toml",
    }
    assert run(*(argument.format(**paths) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
