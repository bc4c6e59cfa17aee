"""No command runs code that a checkpoint names. Each reads every checkpoint of `malice.PLACES`.

Python's audit hook reports each class that an unpickler looks up: only listed names may appear.
"""

from __future__ import annotations

import itertools
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.damage import start_here
from tests.faults.malice import PAYLOADS, PLACES, write_module
from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.unpickle import METADATA_GLOBALS
from torchtitan_like.cli import main as titan

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
    ),
]
GOLDEN = ASSETS / "v2/step-3"
_seen: list[str] | None = None  # what an audit hook has reported, while `watched` is in use


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event == "pickle.find_class" and arguments not in METADATA_GLOBALS:
        _seen.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def audit() -> None:
    sys.addaudithook(_audit)  # cannot be removed again


@pytest.fixture
def watched(audit: None) -> Iterator[list[str]]:
    global _seen
    _seen = []
    yield _seen
    _seen = None


def resume(path: Path, folder: Path) -> str:
    """Load a step as a run does that is started again; what it said."""
    target = folder / "run/checkpoint/step-3"
    target.parent.mkdir(parents=True)
    target.symlink_to(path)
    return start_here(folder / "run", GOLDEN).output


def warm(path: Path, folder: Path) -> str:
    return start_here(folder / "warm", GOLDEN, start="warm", initial_load_path=str(path)).output


def _command(*words: str) -> Callable[[Path, Path], str]:
    def run(path: Path, folder: Path) -> str:
        code = titan([word.format(path=path, out=folder / "out", golden=GOLDEN) for word in words])
        return f"code {code}"

    return run


COMMANDS: dict[str, Callable[[Path, Path], str]] = {
    "resume": resume,
    "warm": warm,
    "show": _command("ckpt", "show", "{path}"),
    "verify": _command("ckpt", "verify", "{path}"),
    "ls": _command("ckpt", "ls", "{path}"),
    "diff": _command("ckpt", "diff", "{path}", "{golden}",
                     "--config", "{golden}/config.toml"),
    "convert --to pt": _command("ckpt", "convert", "{path}", "{out}", "--to", "pt",
                                "--config", "{golden}/config.toml"),
    "convert --to hf": _command("ckpt", "convert", "{path}", "{out}", "--to", "hf",
                                "--config", "{golden}/config.toml"),
    "generate": _command("generate", "{path}", "--num-tokens", "1"),
    "export": _command("ckpt", "export", "{path}", "{out}"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAYLOADS)
def test_the_calls_are_made_by_a_free_unpickler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else the tests below could not fail."""
    monkeypatch.syspath_prepend(tmp_path)
    marker = tmp_path / "marker"
    write_module(marker)
    content = pickle.loads(pickle.dumps(PAYLOADS[name](marker)))
    if hasattr(content, "wait"):
        content.wait()
    assert marker.exists()


@pytest.mark.parametrize(
    ("place", "payload"), list(zip(PLACES, itertools.cycle(PAYLOADS), strict=False))
)
def test_no_command_makes_the_calls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    watched: list[str],
    place: str,
    payload: str,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    marker = tmp_path / "marker"
    write_module(marker)
    path = PLACES[place](tmp_path / "evil", PAYLOADS[payload](marker))
    asked = (
        rf"it asks for (\S+\.)?{payload.rsplit('.', 1)[-1]}, which"  # torch leaves out "builtins."
    )
    refusals = []
    for name, command in COMMANDS.items():
        output = command(path, tmp_path / name.replace(" ", "")) + "".join(capsys.readouterr())
        assert not marker.exists() and not watched, f"{name} has run it: {watched}"
        assert "Traceback" not in output and "crashed" not in output, f"{name}: {output}"
        if re.search(asked, output) and "--trust-pickle" in output:
            refusals.append(name)
    assert refusals, "no command names the class"
