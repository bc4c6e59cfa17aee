"""`titan data tokenize` writes the same files as the token cache, even after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_like.cli import main
from torchtitan_like.cli.data_commands import FORMATS
from torchtitan_like.data.text.documents import find_corpus
from torchtitan_like.data.text.file_lists import ENDINGS
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.data.tokens.encoding import TokenPolicy
from torchtitan_like.data.tokens.token_cache import CacheFolders, entry_of
from torchtitan_like.data.tokens.tokenizing import cached_tokens

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"
SMALL_PIECE = 500  # bytes, so that the corpus has tens of pieces


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(3):
        texts = [f"{part}.{number} to be or not to be" for number in range(20)]
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return folder


def tokenize(source: Path, output: Path, *options: str) -> int:
    return main(
        [
            "data",
            "tokenize",
            str(source),
            "--tokenizer",
            str(ASSETS),
            "--output",
            str(output),
            *options,
        ]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The command with small pieces. After PAUSE_AFTER pieces, it prints "paused" and waits.
RUNNER = """
import os, sys
from torchtitan_like.data.tokens import token_file
from torchtitan_like.data.text import documents
documents.PIECE_BYTES = documents.BLOCK_BYTES = {piece_bytes}
append = token_file.Staging.append
def append_and_pause(self, piece):
    append(self, piece)
    if str(self.num_pieces) == os.environ.get("PAUSE_AFTER"):
        print("paused", flush=True)
        sys.stdin.readline()
token_file.Staging.append = append_and_pause
from torchtitan_like.cli import main
if __name__ == "__main__":
    sys.exit(main(["data", "tokenize", *sys.argv[1:]]))
"""


def start(
    corpus: Path, output: Path, root: Path, *options: str, **environment: str
) -> subprocess.Popen[str]:
    script = corpus.parent / "runner.py"  # a file, because spawned workers import it
    script.write_text(RUNNER.format(piece_bytes=SMALL_PIECE))
    command = [
        sys.executable,
        str(script),
        str(corpus),
        "--tokenizer",
        str(ASSETS),
        "--output",
        str(output),
        *options,
    ]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_formats_equal_the_formats_of_a_source() -> None:
    assert FORMATS == ("auto", *ENDINGS)


def test_output_equals_the_token_cache_of_a_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(corpus, tmp_path / "out tokens") == 0
    tokenizer = load_tokenizer(ASSETS)
    policy = TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    inputs = find_corpus(str(corpus))
    cached = cached_tokens(
        inputs, policy, entry_of(inputs, "own", policy), CacheFolders(None, "unused")
    )
    assert contents(tmp_path / "out tokens") == contents(cached.folder)
    printed = capsys.readouterr().out
    assert "is complete: 60 documents" in printed
    snippet = f'[data.sources.out-tokens]\npath = "{tmp_path / "out tokens"}"\nformat = "tokens"\n'
    assert printed.endswith(snippet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out tokens"]


def test_a_killed_command_resumes_to_the_same_bytes(
    corpus: Path, tmp_path: Path, repo_root: Path
) -> None:
    with start(corpus, tmp_path / "one", repo_root, "--workers", "1") as process:
        first, _ = process.communicate("", timeout=100)
    assert (
        process.returncode == 0 and "tokenized: 60 documents" in first and " tokens/s" in first
    ), first
    with start(corpus, tmp_path / "two", repo_root, "--workers", "2", PAUSE_AFTER="3") as process:
        assert process.stdout is not None
        assert any(line == "paused\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "two").exists()
    with start(corpus, tmp_path / "two", repo_root, "--workers", "2") as process:
        again, _ = process.communicate("", timeout=100)
    assert process.returncode == 0 and "continuing after 3 of " in again, again
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not (tmp_path / ".two.building").exists()


def test_only_one_process_writes_a_folder(
    corpus: Path, tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(corpus, tmp_path / "out", repo_root, "--workers", "1", PAUSE_AFTER="1") as process:
        assert process.stdout is not None
        assert any(line == "paused\n" for line in process.stdout)
        assert tokenize(corpus, tmp_path / "out") == 2
        assert f"another process is writing {tmp_path / 'out'}" in capsys.readouterr().err
        process.communicate("\n", timeout=100)
    assert process.returncode == 0


def test_a_complete_folder_is_reused_and_never_overwritten(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize(corpus, tmp_path / "out") == 0
    before = contents(tmp_path / "out")
    capsys.readouterr()
    assert tokenize(corpus, tmp_path / "out") == 0
    assert "tokenizing" not in capsys.readouterr().out
    assert tokenize(corpus, tmp_path / "out", "--no-bos") == 2
    assert (
        "it was built from other data or with other settings. Delete the folder"
        in capsys.readouterr().err
    )
    assert contents(tmp_path / "out") == before
    assert tokenize(tmp_path / "corpus" / "0.jsonl", corpus) == 2
    assert "exists already and has no meta.json" in capsys.readouterr().err


def test_without_bos_and_eos_only_the_text_is_tokenized(corpus: Path, tmp_path: Path) -> None:
    assert tokenize(corpus, tmp_path / "out", "--no-bos", "--no-eos") == 0
    texts = [f"{part}.{number} to be or not to be" for part in range(3) for number in range(20)]
    expected = [token for text in texts for token in load_tokenizer(ASSETS).encode(text)]
    assert (tmp_path / "out" / "tokens.bin").read_bytes() == b"".join(
        t.to_bytes(2, "little") for t in expected
    )


def test_several_inputs_are_read_in_the_order_given(corpus: Path, tmp_path: Path) -> None:
    files = [str(corpus / f"{part}.jsonl") for part in (2, 0)]
    options = ["--tokenizer", str(ASSETS), "--output", str(tmp_path / "out")]
    assert main(["data", "tokenize", *files, *options, "--no-bos", "--no-eos"]) == 0
    texts = [f"{part}.{number} to be or not to be" for part in (2, 0) for number in range(20)]
    expected = [token for text in texts for token in load_tokenizer(ASSETS).encode(text)]
    assert (tmp_path / "out" / "tokens.bin").read_bytes() == b"".join(
        t.to_bytes(2, "little") for t in expected
    )


def test_bad_records_are_skipped_as_in_a_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (corpus / "1.jsonl").open("a") as file:
        file.write("{oops\n")
    assert tokenize(corpus, tmp_path / "out") == 2
    assert "1.jsonl, line 21: malformed JSON" in capsys.readouterr().err
    assert tokenize(corpus, tmp_path / "out", "--on-bad-record", "skip") == 0
    assert "60 documents, 1 bad records skipped" in capsys.readouterr().out
    tokenizer, inputs = load_tokenizer(ASSETS), find_corpus(str(corpus), on_bad_record="skip")
    policy = TokenPolicy(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
    cached = cached_tokens(
        inputs, policy, entry_of(inputs, "own", policy), CacheFolders(None, "unused")
    )
    assert contents(tmp_path / "out") == contents(cached.folder)


FAULTS = {
    "no data": (["{tmp}/nowhere"], "no data at"),
    "an object store": (["s3://bucket/text"], "data at s3:// cannot be read"),
    "no tokenizer": (["{tmp}/corpus", "--tokenizer", "{tmp}"], "no tokenizer at"),
    "given twice": (["{tmp}/corpus", "{tmp}/corpus/0.jsonl"], "0.jsonl is given twice"),
    "formats": (["{tmp}/corpus", "{tmp}/a.txt"], "inputs of several formats: jsonl"),
    "no field": (["{tmp}/corpus", "--text-field", "body"], 'no field "body"'),
    "no BOS": (
        ["{tmp}/corpus", "--tokenizer", "{tmp}/plain"],
        "has no BOS token. Expected one: give --no-bos",
    ),
}


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_workers_must_be_above_0(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["corpus", "--tokenizer", "assets", "--output", "out", "--workers", workers]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "tokenize", *arguments])
    message = (
        f"argument --workers: it is '{workers}'. Expected an integer from 1 to 10^18: correct it\n"
    )
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize("name", FAULTS)
def test_errors_return_2(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options, message = FAULTS[name]
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_bytes((ASSETS / "tokenizer.json").read_bytes())
    (tmp_path / "plain" / "tokenizer_config.json").write_text('{"bos_token": null}')
    arguments = ["--tokenizer", str(ASSETS), "--output", str(tmp_path / "out")]
    assert (
        main(["data", "tokenize", *arguments, *(part.format(tmp=tmp_path) for part in options)])
        == 2
    )
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
