"""Deeply nested, endless or malformed files cause an error message in bounded time."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.errors import CheckpointError, DamagedError
from torchtitan_like.checkpoint.hf.load import config_differences
from torchtitan_like.checkpoint.hf.safetensors_file import read_header
from torchtitan_like.checkpoint.hf.safetensors_source import open_safetensors
from torchtitan_like.cli import main as titan
from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.data.data_errors import TokenizerError
from torchtitan_like.data.text.tokenizer import load_tokenizer
from torchtitan_like.launcher.outcome import Start, report_end
from torchtitan_like.monitor import log
from torchtitan_like.util.exit_codes import CRASH, WRONG_INPUT

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed")]
GOLDEN = ASSETS / "v3/step-3"
NESTED = "[" * 200_000
NESTED_OBJECT = '{"a":' * 200_000
SECONDS = 30.0  # limit of CPU time; a test usually takes 3 s


@pytest.fixture(autouse=True)
def bounded() -> Any:
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


TOML: dict[str, tuple[str, str]] = {
    "nested arrays": (f"a = {NESTED}", "nested too deeply"),
    "an integer of 10^6 digits": ("[training]\nsteps = " + "9" * 10**6, "valid TOML"),
    "20,000 unknown keys": (
        "[training]\n" + "".join(f"unknown_{i} = {i}\n" for i in range(20_000)),
        "... and 19,800 more",
    ),
    "20,000 unknown sections": (
        "".join(f"[section{i}]\n" for i in range(20_000)),
        "... and 19,800 more",
    ),
}


@pytest.mark.parametrize("case", TOML)
def test_malformed_or_endless_config_is_rejected(tmp_path: Path, case: str) -> None:
    text, words = TOML[case]
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(["--job.config_file", str(tmp_path / "a.toml")])
    assert words in str(refused.value)


def test_many_sources_are_read(tmp_path: Path) -> None:
    sources = "".join(f'[data.sources.s{i}]\npath = "{i}"\n' for i in range(20_000))
    (tmp_path / "a.toml").write_text(sources)
    config = load_config(["--job.config_file", str(tmp_path / "a.toml")])
    assert len(config.data.sources) == 20_000


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("setting", ["extends", "job.config_file"])
def test_config_that_is_no_regular_file_is_rejected(
    tmp_path: Path, kind: str, setting: str
) -> None:
    path = tmp_path / "base.toml"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](
        path
    )
    (tmp_path / "a.toml").write_text(f'extends = "{path}"\n')
    with pytest.raises(
        ConfigError, match="a readable file .(it is a device or a pipe|Is a directory)"
    ):
        load_config(
            ["--job.config_file", str(path if setting != "extends" else tmp_path / "a.toml")]
        )


def header(content: Any, data: bytes = b"") -> bytes:
    text = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor_header(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


HEADERS = {
    "nested": header(NESTED),
    "nested objects": header(NESTED_OBJECT),
    "float offsets": header(tensor_header(data_offsets=[0.0, 4.0]), bytes(4)),
    "10^6 dimensions": header(tensor_header(shape=[1] * 10**6), bytes(4)),
    "metadata that is a list": header({"__metadata__": [], **tensor_header()}, bytes(4)),
    "a huge integer": header(
        '{"a":{"dtype":"F32","shape":[' + "9" * 10**5 + '],"data_offsets":[0,4]}}', bytes(4)
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_invalid_safetensors_header_is_rejected(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[case])
    with pytest.raises(DamagedError, match="has an invalid header"):
        read_header(tmp_path / "model.safetensors")
    assert titan(["ckpt", "show", str(tmp_path)]) == 1


def test_pipe_instead_of_weights_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DamagedError, match="is not a regular file"):
        open_safetensors(tmp_path, quantized=False)


@pytest.mark.parametrize("file", ["", ".", "..", "../model.safetensors", "/etc/hostname", "a\0b"])
def test_index_cannot_name_files_outside_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(tensor_header(), bytes(4)))
    index = tmp_path / "model.safetensors.index.json"
    for text in (json.dumps({"weight_map": {"a": file}}), NESTED, NESTED_OBJECT):
        index.write_text(text)
        with pytest.raises(DamagedError, match="is not an index"):
            open_safetensors(tmp_path, quantized=False)


@pytest.mark.parametrize("text", [NESTED, NESTED_OBJECT, "[]", "3", ""])
def test_malformed_config_json_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(tensor_header(), bytes(4)))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DamagedError, match="config.json is not valid"):
        config_differences(tmp_path, {})
    with pytest.raises(CheckpointError, match="config.json is not valid"):
        open_safetensors(tmp_path, quantized=False)


def test_malformed_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(NESTED)
    with pytest.raises(TokenizerError, match="cannot be read as JSON: it is nested too deeply"):
        load_tokenizer(tmp_path)


BUNDLE = {
    "step": 4, "samples": [[12, 15]], "seed": 7, "global_batch_size": 4, "loss": "nan",
    "grad_norm": 1.0, "data_digest": "0", "rank_losses": {"0": "nan"},
    "config": "attempts/1/config.toml",
    "checkpoint": {"kind": "resume", "path": "checkpoint/step-3", "is_start": False,
                   "is_pinned": True},
}  # fmt: skip
BUNDLES = {
    "nested": (NESTED, "nested too deeply"),
    "no checkpoint": (
        json.dumps({**BUNDLE, "checkpoint": None}),
        "checkpoint is None. Expected dict",
    ),
    "no path": (
        json.dumps({**BUNDLE, "checkpoint": {"kind": "warm"}}),
        "checkpoint.is_start is None. Expected bool",
    ),
    "a number as config": (json.dumps({**BUNDLE, "config": 3}), "config is 3. Expected str"),
    "a text as step": (json.dumps({**BUNDLE, "step": "4"}), "step is '4'. Expected int"),
    "no loss": (json.dumps({k: v for k, v in BUNDLE.items() if k != "loss"}), "it has no loss"),
}


@pytest.mark.parametrize("case", BUNDLES)
def test_malformed_bundle_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.setattr(log, "init_logger", lambda: None)
    text, words = BUNDLES[case]
    path = tmp_path / "attempts/1/bad-steps/step-4.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert titan(["run", "replay", str(path)]) == WRONG_INPUT
    assert words in capsys.readouterr().err


def test_malformed_exit_json_counts_as_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit.json").write_text(NESTED)
    config = load_config(["--job.dump_folder", str(tmp_path)])
    assert report_end(config, 0, None, Start(0.0, 1, "command", ["titan"])) == CRASH
    assert (
        "exit.json is malformed: it is nested too deeply. Expected reason, code and step: "
        "remove it. Look for the end of the run in the logs"
    ) in capsys.readouterr().err


CONFIGS: dict[str, Callable[[Path], Any]] = {
    "nested": lambda path: path.write_text(f"a = {NESTED}"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("case", CONFIGS)
def test_invalid_stored_config_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    step = shutil.copytree(GOLDEN, tmp_path / "step-3")
    CONFIGS[case](step / "config.toml")
    assert titan(["ckpt", "export", str(step), str(tmp_path / "out")]) == 2
    assert "config.toml" in capsys.readouterr().err and not (tmp_path / "out").exists()
