"""Modules and files named in a stored config, bundle or manifest are used only on request."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trainer import ASSETS
from tests.harness.extents import record_file
from tests.harness.runner import ROOT
from torchtitan_like import replay
from torchtitan_like.checkpoint.errors import DamagedError
from torchtitan_like.checkpoint.step_folders import is_inside, read_manifest, write_manifest
from torchtitan_like.cli import main as titan
from torchtitan_like.config import ConfigError, dump_toml, load_stored_config
from torchtitan_like.models import spec
from torchtitan_like.monitor import log
from torchtitan_like.util.exit_codes import WRONG_INPUT, ExitCode

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
GOLDEN = ASSETS / "v3/step-3"
MODULE = "module_of_a_checkpoint"
FLAG = "--experimental.custom_import"


@pytest.fixture(autouse=True)
def remove_module() -> Iterator[None]:
    """Remove the imported module after each test."""
    yield
    sys.modules.pop(MODULE, None)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a step whose config names a module in the step, and make it the current folder."""
    step = write_step(tmp_path / "run/checkpoint/step-3", f'custom_import = "{MODULE}"')
    (step / f"{MODULE}.py").write_text(
        "from pathlib import Path\nPath(__file__ + '.imported').touch()\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(step)
    return step


def write_step(step: Path, experimental: str, name: str = "llama3") -> Path:
    shutil.copytree(GOLDEN, step)
    config = (step / "config.toml").read_text()
    config = config.replace('custom_import = ""', experimental)
    config = config.replace('name = "llama3"', f'name = "{name}"')
    config = config.replace('"tests/', f'"{ROOT}/tests/')
    return seal(step, config)


def seal(step: Path, config: str, **changes: Any) -> Path:
    """Write the config, and a manifest with the current hashes."""
    (step / "config.toml").write_text(config)
    manifest = read_manifest(step)
    assert manifest is not None
    files = {name: dataclasses.asdict(record_file(step / name)) for name in manifest["files"]}
    (step / "manifest.json").unlink()
    write_manifest(step, {**manifest, "config": config, "files": files, **changes})
    return step


TOOLS: dict[str, Callable[[Path, Path], list[str]]] = {
    "export": lambda step, out: ["ckpt", "export", str(step), str(out)],
    "export to pt": lambda step, out: ["ckpt", "export", str(step), str(out), "--to", "pt"],
    "export --config": lambda step, out: ["ckpt", "export", str(step), str(out),
                                          "--config", str(step / "config.toml")],
    "generate": lambda step, out: ["generate", str(step), "--num-tokens", "1"],
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_module_of_a_stored_config_is_not_imported(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    """The current folder is not added to sys.path either."""
    assert titan(TOOLS[tool](stored, tmp_path / "out")) == 0
    assert f"Not imported: {MODULE}" in capsys.readouterr().err
    assert MODULE not in sys.modules and str(stored) not in sys.path and "" not in sys.path
    assert not list(stored.glob("*.imported"))


@pytest.mark.parametrize("tool", TOOLS)
def test_error_for_an_unknown_model_names_its_module_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    step = write_step(tmp_path / "step-3", f'custom_import = "{MODULE}"', name="user_model")
    argv = TOOLS[tool](step, tmp_path / "out")
    assert titan(argv) == 2
    message = capsys.readouterr().err
    assert f"names the module '{MODULE}'" in message and f"{FLAG} {MODULE}" in message
    assert titan([*argv, FLAG, MODULE]) == 2  # the module does not exist yet
    assert f"No module named '{MODULE}'" in capsys.readouterr().err
    (tmp_path / f"{MODULE}.py").write_text(
        "import dataclasses\nfrom torchtitan_like.models.spec import get_spec, register\n"
        "try:\n    get_spec('user_model')\nexcept KeyError:\n"
        "    register(dataclasses.replace(get_spec('llama3'), name='user_model'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spec, "_registered", dict(spec._registered))
    assert titan([*argv, FLAG, MODULE]) == 0, capsys.readouterr().err


NAMES = ["optimizer.name", "lr_scheduler.name", "loss.name", "model.converters", "metrics.observers",
         "data.sources.a.format", "validation.sources.a.processor"]  # fmt: skip


@pytest.mark.parametrize("key", NAMES)
def test_code_that_a_stored_config_names_is_not_imported(
    stored: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    """Although the module is on Python's path."""
    monkeypatch.syspath_prepend(stored)
    monkeypatch.setattr(log, "init_logger", lambda: None)
    settings = [f"--{key}={MODULE}:run", "--experimental.custom_import="]
    if ".sources." in key:
        settings.append(f"--{key.rpartition('.')[0]}.path=x")
    file = stored / "config.toml"
    seal(stored, dump_toml(load_stored_config(file, settings)))
    bundle, out = write_bundle(stored.parents[1]), tmp_path / "out"
    commands = [
        *(TOOLS[tool](stored, out) for tool in ("export", "export to pt", "generate")),
        ["data", "show", str(stored), "--step", "1"],
        ["run", "replay", str(bundle)],
        ["ckpt", "export", str(stored), str(out), "--to", "torchtitan"],
    ]
    for argv in commands:
        assert titan(argv) != 0
        message = capsys.readouterr().err
        assert "because its import runs code" in message and f"{FLAG} {MODULE}" in message
    assert MODULE not in sys.modules and not list(stored.glob("*.imported"))


def write_bundle(run: Path, **changes: Any) -> Path:
    path = run / "attempts/1/bad-steps/step-4.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (run / "attempts/1/config.toml").exists():
        shutil.copy(run / "checkpoint/step-3/config.toml", run / "attempts/1/config.toml")
    checkpoint = {
        "kind": "resume",
        "path": "checkpoint/step-3",
        "is_start": False,
        "is_pinned": True,
    }
    bundle = {
        "step": 4, "samples": [[12, 15]], "seed": 7, "global_batch_size": 4, "loss": "nan",
        "grad_norm": "nan", "data_digest": "0", "rank_losses": {"0": "nan"},
        "config": "attempts/1/config.toml", "checkpoint": checkpoint,
    }  # fmt: skip
    path.write_text(json.dumps(bundle | changes))
    return path


@pytest.fixture
def replay_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    monkeypatch.setattr(log, "init_logger", lambda: None)
    monkeypatch.setattr(replay, "replay_step", lambda config, bundle: pytest.fail("replayed"))

    def run(bundle: Path, *settings: str) -> str:
        assert titan(["run", "replay", str(bundle), *settings]) in (
            WRONG_INPUT,
            ExitCode.BAD_CONFIG,
        )
        return capsys.readouterr().err

    return run


def test_replay_imports_no_module_of_the_run(
    stored: Path, replay_error: Callable[..., str]
) -> None:
    message = replay_error(write_bundle(stored.parents[1]))
    assert f"The run imports the module {MODULE}" in message and f"{FLAG} {MODULE}" in message
    assert MODULE not in sys.modules and str(stored) not in sys.path
    assert f"No module named '{MODULE}'" in replay_error(
        write_bundle(stored.parents[1]), FLAG, MODULE
    )


def test_replay_imports_code_of_the_named_module(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is no change of the settings: the run has imported it for the name only."""
    (stored / f"{MODULE}.py").write_text("def run(step, total_steps, settings): return 1.0")
    monkeypatch.syspath_prepend(stored)
    changes = [f"--lr_scheduler.name={MODULE}:run", f"{FLAG}="]
    seal(stored, dump_toml(load_stored_config(stored / "config.toml", changes)))
    run = stored.parents[1]
    bundle = json.loads(write_bundle(run).read_text())
    resolved = replay.resolve_replay(bundle, run, tmp_path, [FLAG, MODULE])
    assert resolved.config.lr_scheduler.name == f"{MODULE}:run" and MODULE in sys.modules
    assert resolved.config.experimental.custom_import == ""


@pytest.mark.parametrize(
    "outside", ["../config.toml", "{tmp}/config.toml", "attempts/1/../../../config.toml"]
)
def test_bundle_cannot_name_files_outside_its_run(
    tmp_path: Path, replay_error: Callable[..., str], outside: str
) -> None:
    run = tmp_path / "run"
    step = write_step(run / "checkpoint/step-3", 'custom_import = ""')
    shutil.copy(step / "config.toml", tmp_path / "config.toml")
    outside = outside.format(tmp=tmp_path)
    message = replay_error(write_bundle(run, config=outside))
    assert "as the run's settings. Expected a file in" in message
    outside_checkpoint = {"kind": "warm", "path": outside, "is_start": True, "is_pinned": False}
    message = replay_error(write_bundle(run, checkpoint=outside_checkpoint))
    assert "Expected a path in" in message and "--checkpoint.initial_load_path" in message


def test_stored_config_cannot_extend_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.toml").write_text("[debug]\nseed = 3\n")
    step = shutil.copytree(GOLDEN, tmp_path / "step-3")
    seal(step, f'extends = "{tmp_path}/other.toml"\n' + (step / "config.toml").read_text())
    with pytest.raises(ConfigError, match="no `extends` in a stored configuration"):
        load_stored_config(step / "config.toml")
    for tool in ("export", "export to pt", "generate"):
        assert titan(TOOLS[tool](step, tmp_path / "out")) == 2
        assert "no `extends`" in capsys.readouterr().err
    assert titan(["data", "show", str(step), "--step", "1"]) == 2


@pytest.mark.parametrize(
    "name", ["../step-2/shard-00000.bin", "/etc/hostname", "", ".", "a/../../b", "a\0b"]
)
def test_manifest_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    step = shutil.copytree(GOLDEN, tmp_path / "step-3")
    manifest = read_manifest(step)
    assert manifest is not None
    (step / "manifest.json").unlink()
    write_manifest(
        step, {**manifest, "files": {**manifest["files"], name: {"size": 1, "extents": ["0"]}}}
    )
    with pytest.raises(DamagedError, match="names the file"):
        read_manifest(step)
    assert titan(["ckpt", "verify", str(step)]) == 1
    assert not is_inside(name)


def test_conversion_does_not_follow_links_out_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the Hub's cache, snapshots may contain links to the blobs folder next to them."""
    assert titan(["ckpt", "export", str(GOLDEN), str(tmp_path / "models/snapshots/1a2b")]) == 0
    model = tmp_path / "models/snapshots/1a2b"
    (model / "manifest.json").unlink()
    (model / "config.toml").unlink()
    (tmp_path / "models/blobs").mkdir()
    for file in ("model.safetensors", "config.json"):
        shutil.move(model / file, tmp_path / "models/blobs" / file)
        (model / file).symlink_to(f"../../blobs/{file}")
    argv = ["export", str(model), "--to", "hf"]
    assert titan(["ckpt", *argv, str(tmp_path / "good")]) == 0
    (tmp_path / "secret").write_text("private")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    assert titan(["ckpt", *argv, str(tmp_path / "bad")]) == 2
    assert "notes.txt is a link to" in capsys.readouterr().err and not (tmp_path / "bad").exists()
