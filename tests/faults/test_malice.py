"""No command executes code from a checkpoint of `malice.LOCATIONS`.

Python's audit hook reports each class that an unpickler looks up. Only allowed names may appear.
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

from tests.faults.damage import start_one_rank
from tests.faults.malice import LOCATIONS, PAYLOADS, write_module
from tests.faults.trainer import ASSETS
from torchtitan_like.checkpoint.dcp_metadata import GLOBALS
from torchtitan_like.cli import main as titan

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings(
        "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
    ),
]
GOLDEN = ASSETS / "v3/step-3"
_audit_events: list[str] | None = None  # audited events, while the fixture `audit_events` is active


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    is_allowed = event != "pickle.find_class" or arguments in GLOBALS
    if _audit_events is not None and not is_allowed:
        _audit_events.append(f"{event} {arguments}")


@pytest.fixture(scope="module")
def audit() -> None:
    sys.addaudithook(_audit)  # hooks cannot be removed


@pytest.fixture
def audit_events(audit: None) -> Iterator[list[str]]:
    global _audit_events
    _audit_events = []
    yield _audit_events
    _audit_events = None


def resume(path: Path, folder: Path) -> str:
    """Resume from a step and return the output."""
    target = folder / "run/checkpoint/step-3"
    target.parent.mkdir(parents=True)
    target.symlink_to(path)
    return start_one_rank(folder / "run", GOLDEN).output


def warm_start(path: Path, folder: Path) -> str:
    """Start a new run from the weights of a checkpoint and return the output."""
    return start_one_rank(folder / "warm", GOLDEN, start="warm", initial_load_path=str(path)).output


def _command(*words: str) -> Callable[[Path, Path], str]:
    def run(path: Path, folder: Path) -> str:
        code = titan([word.format(path=path, out=folder / "out", golden=GOLDEN) for word in words])
        return f"code {code}"

    return run


COMMANDS: dict[str, Callable[[Path, Path], str]] = {
    "resume": resume,
    "warm": warm_start,
    "show": _command("ckpt", "show", "{path}"),
    "verify": _command("ckpt", "verify", "{path}"),
    "ls": _command("ckpt", "ls", "{path}"),
    "diff": _command("ckpt", "diff", "{path}", "{golden}",
                     "--config", "{golden}/config.toml"),
    "export --to pt": _command("ckpt", "export", "{path}", "{out}", "--to", "pt",
                                "--config", "{golden}/config.toml"),
    "export --config": _command("ckpt", "export", "{path}", "{out}",
                                "--config", "{golden}/config.toml"),
    "generate": _command("generate", "{path}", "--num-tokens", "1"),
    "export": _command("ckpt", "export", "{path}", "{out}"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAYLOADS)
def test_unrestricted_unpickler_executes_the_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Otherwise the next test could not fail."""
    monkeypatch.syspath_prepend(tmp_path)
    marker = tmp_path / "marker"
    write_module(marker)
    content = pickle.loads(pickle.dumps(PAYLOADS[name](marker)))
    if hasattr(content, "wait"):
        content.wait()
    assert marker.exists()


@pytest.mark.parametrize(
    ("location", "payload"), list(zip(LOCATIONS, itertools.cycle(PAYLOADS), strict=False))
)
def test_no_command_executes_a_payload(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    audit_events: list[str],
    location: str,
    payload: str,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    marker = tmp_path / "marker"
    write_module(marker)
    path = LOCATIONS[location](tmp_path / "evil", PAYLOADS[payload](marker))
    # torch omits "builtins.". A `.metadata` may refer to getattr, which is not called: the name
    # after it in this payload is refused.
    refused = {"builtins.getattr": "(getattr|import_module)"}.get(payload, payload.split(".")[-1])
    request = rf"it refers to (\S+\.)?{refused}, which"
    errors = []
    for name, command in COMMANDS.items():
        output = command(path, tmp_path / name.replace(" ", "")) + "".join(capsys.readouterr())
        assert not marker.exists() and not audit_events, (
            f"{name} executed the payload: {audit_events}"
        )
        assert "Traceback" not in output and "crashed" not in output, f"{name}: {output}"
        if re.search(request, output) and "--trust-pickle" in output:
            errors.append(name)
    assert errors, "no command names the class"
