"""Runs of TorchTitan 0.2 continue here. Its own classes wrote `tests/assets/torchtitan`.

`python -m tests.harness.torchtitan_run tests/assets/torchtitan` writes the folder again.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.parity import build, release
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT
from tests.harness.torchtitan_run import (
    ARGUMENTS,
    SAVED,
    STEPS,
    continue_run,
    logits_of,
    read_batches,
)
from torchtitan_like.build import identify
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.start import Start
from torchtitan_like.checkpoint.tools.convert import native_weights
from torchtitan_like.checkpoint.tools.open_checkpoint import open_checkpoint
from torchtitan_like.checkpoint.torchtitan import check_data_choice, read_step
from torchtitan_like.cli import main as titan
from torchtitan_like.config import load_config
from torchtitan_like.util.jsonl import read_rows

STORED = ROOT / "tests/assets/torchtitan"
SKIP = ("--training.skip_steps", f"[[1, {SAVED}]]")
# Sums are in another order than TorchTitan's, which changes 1e-6. Moments with wrongly ordered rows
# change the gradient norm by 1e-2.
TOLERANCE = 1e-5
needs_torchtitan = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="pip install -e .[interop]"
)
LAYOUTS = {
    "1 rank": (1, []),
    "FSDP over TP": (4, ["--parallelism.tensor_parallel_degree", "2"]),
    "pipeline over FSDP": (4, ["--parallelism.pipeline_parallel_degree", "2"]),
}


def expected(folder: Path = STORED) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return content


def resume_arguments(folder: Path, step: Path = STORED / f"step-{SAVED}") -> list[str]:
    return [
        *ARGUMENTS,
        *("--job.dump_folder", str(folder), "--data.cache_folder", str(folder.parent / "tokens")),
        *("--checkpoint.enable", "true", "--checkpoint.interval", "2"),
        *("--checkpoint.last_save_model_only", "false"),
        *("--checkpoint.initial_load_path", str(step)),
        *("--checkpoint.initial_load_model_only", "false"),
    ]


def train(argv: list[str]) -> tuple[int, int]:
    """Train to the end. Returns the position in the data and Adam's step, before the first step."""
    trainer = build(argv)
    position = trainer.progress.position
    steps = {
        int(value.item())
        for name, value in trainer.optim.optimizer.state_dict().items()
        if name.endswith(".step")
    }
    trainer.train()
    release(trainer)
    (step,) = steps
    return position, step


def check_losses(folder: Path, reference: Path = STORED) -> None:
    rows = list(read_rows(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(SAVED + 1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        for row, value in zip(rows, expected(reference)[key], strict=True):
            assert row[key] == pytest.approx(value, rel=TOLERANCE), (key, row["step"])
    assert rows[0]["n_tokens_seen"] == (SAVED + 1) * 4 * 16


NIGHTLY = ("pipeline over FSDP",)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name in LAYOUTS
    ],
)
def test_the_next_losses_equal_those_of_torchtitan(tmp_path: Path, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    argv = [*resume_arguments(tmp_path / "run"), *SKIP, *options]
    argv += ["--training.local_batch_size", str(4 if ranks == 1 else 2)]
    for _, adam_step in run_ranks(train, ranks, argv):
        assert adam_step == SAVED
    check_losses(tmp_path / "run")
    # Its own steps are native, and the same command continues from them.
    assert (tmp_path / f"run/checkpoint/step-{STEPS}/manifest.json").exists()


def test_logits_equal_those_of_torchtitans_model() -> None:
    identity = identify(load_config(ARGUMENTS).model)
    weights = native_weights(open_checkpoint(STORED / f"step-{SAVED}"), identity)
    model = identity.spec.build(identity.args)
    model.load_state_dict(weights)
    logits = model(torch.tensor(expected()["tokens"]))
    torch.testing.assert_close(logits, torch.tensor(expected()["logits"]), rtol=0, atol=1e-5)


def start_error(argv: list[str]) -> str:
    try:
        trainer = build(argv)
    except CheckpointError as error:
        return str(error)
    release(trainer)
    return "no error"


def test_data_need_a_choice() -> None:
    start = Start("resume", 3, Path("step-3"), "", format="dcp")
    for skip_steps, excluded in (([], ["model"]), ([[2, 3]], [])):
        with pytest.raises(CheckpointError, match=r"skip_steps '\[\[1, 3\]\]'.*from_loading data"):
            check_data_choice(start, skip_steps, excluded)
    check_data_choice(start, [[1, 3]], [])
    check_data_choice(start, [], ["dataloader"])


def test_a_run_may_start_the_data_anew(tmp_path: Path) -> None:
    argv = [*resume_arguments(tmp_path / "run"), "--checkpoint.exclude_from_loading", "dataloader"]
    assert run_ranks(train, 1, argv) == [(0, SAVED)]


def test_resume_without_a_choice_is_refused(tmp_path: Path) -> None:
    (message,) = run_ranks(start_error, 1, resume_arguments(tmp_path / "run"))
    assert "has a dataloader state of TorchTitan, which cannot be loaded" in message
    assert not list(tmp_path.glob("run/checkpoint/step-*"))


def copy_step(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a copy of the stored step with a changed state."""
    state = open_checkpoint(STORED / f"step-{SAVED}").read_all()
    change(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), no_dist=True)
    return folder


def _wq(state: dict[str, Any]) -> str:
    return next(name for name in state if name.endswith("layers.0.attention.wq.weight.exp_avg"))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no moment": (lambda s: s["optimizer"].pop(_wq(s["optimizer"])), "1 missing: layers.0.attent"),
    "another Adam step": (
        lambda s: s["optimizer"]["state.norm.weight.step"].fill_(2),
        r"Adam's steps are \[2.0, 3.0\]. Expected 3",
    ),
    "another position": (
        lambda s: s["lr_scheduler"].update(last_epoch=2),
        "lr_scheduler.last_epoch is 2. Expected 3",
    ),
    "no progress": (lambda s: s.pop("train_state"), "has no number train_state.step"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("change", CHANGES)
def test_incomplete_checkpoints_are_refused(tmp_path: Path, change: str) -> None:
    apply, words = CHANGES[change]
    step = copy_step(tmp_path / "step-3", apply)
    (message,) = run_ranks(start_error, 1, [*resume_arguments(tmp_path / "run", step), *SKIP])
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(message)


def test_positions_of_the_loader_are_not_unpickled(tmp_path: Path) -> None:
    """TorchTitan stores pickles in bytes. They are read by no start."""
    step = STORED / f"step-{SAVED}"
    names = open_checkpoint(step).object_names
    assert "dataloader.dp_rank_0" in names and read_step(step) == SAVED
    copy = shutil.copytree(step, tmp_path / "step-3")
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if i.fqn == "dataloader.dp_rank_0")
    info = metadata.storage_data[index]
    content = bytearray((copy / info.relative_path).read_bytes())
    content[info.offset : info.offset + info.length] = bytes(info.length)
    (copy / info.relative_path).write_bytes(content)
    (result,) = run_ranks(start_error, 1, [*resume_arguments(tmp_path / "run", copy), *SKIP])
    assert result == "no error"


@pytest.mark.nightly
@needs_torchtitan
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_released_torchtitan_loads_a_converted_step(tmp_path: Path) -> None:
    """A native step loads only after a conversion, with the logits of this program's model."""
    assert run_ranks(train, 1, [*resume_arguments(tmp_path / "run"), *SKIP])
    step = tmp_path / f"run/checkpoint/step-{STEPS}"
    tokens = torch.tensor(expected()["tokens"])
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        logits_of(step, tokens)
    assert titan(["ckpt", "export", str(step), str(tmp_path / "converted"), "--to", "dcp"]) == 0
    identity = identify(load_config(ARGUMENTS).model)
    model = identity.spec.build(identity.args)
    model.load_state_dict(native_weights(open_checkpoint(step), identity))
    theirs = logits_of(tmp_path / "converted", tokens)
    torch.testing.assert_close(theirs, model(tokens), rtol=0, atol=1e-5)


MIDDLE = 4  # a native step of a resumed run, before the decay


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run from the stored step to the end, with its native steps."""
    folder = tmp_path_factory.mktemp("native") / "run"
    assert run_ranks(train, 1, [*resume_arguments(folder), *SKIP])
    return folder


def convert_run(step: Path, out: Path, *options: str) -> int:
    return titan(["ckpt", "export", str(step), str(out), "--to", "torchtitan", *options])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_converted_run_has_all_states_and_continues_here(native: Path, tmp_path: Path) -> None:
    """Weights and moments are in TorchTitan's order, and return to ours without a change."""
    step = native / f"checkpoint/step-{MIDDLE}"
    assert convert_run(step, tmp_path / "step-4", "--data-ranks", "2") == 0
    state = open_checkpoint(tmp_path / "step-4").read_all()
    rows = {row["step"]: row for row in read_rows(native / "metrics.jsonl")}
    assert state["train_state"] == {"step": 4, "ntokens_seen": rows[4]["n_tokens_seen"] // 2}
    assert state["lr_scheduler"]["last_epoch"] == 4
    stored = open_checkpoint(STORED / f"step-{SAVED}").read_all()
    assert state["optimizer"].keys() == stored["optimizer"].keys()
    assert state.keys() | {"dataloader"} == stored.keys()
    group = {key: state["optimizer"][f"param_groups.norm.weight.{key}"] for key in ("lr", "betas")}
    assert group == {"lr": pytest.approx(rows[5]["lr"], rel=1e-12), "betas": (0.9, 0.95)}
    # TorchTitan's import of this program reads the folder, except for the absent data loader.
    dcp.save(
        state | {"dataloader": {"world_size": 2}},
        storage_writer=dcp.FileSystemWriter(tmp_path / "with-loader", thread_count=1),
        no_dist=True,
    )
    argv = resume_arguments(tmp_path / "run", tmp_path / "with-loader")
    argv += ["--training.skip_steps", f"[[1, {MIDDLE}]]"]
    assert run_ranks(train, 1, argv) == [(0, MIDDLE)]
    again = list(read_rows(tmp_path / "run/metrics.jsonl"))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in again] == [rows[row["step"]][key] for row in again]


REFUSED = {
    "weights only": ([], "has no optimizer and progress of this program"),
    "dtype": (["--dtype", "bfloat16"], "--dtype does not apply to"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", REFUSED)
def test_conversions_that_lose_states_are_refused(
    case: str, native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = REFUSED[case]
    step = native / f"checkpoint/step-{MIDDLE}"
    source = STORED / f"step-{SAVED}" if case == "weights only" else step
    assert convert_run(source, tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            'name = "Lion"',
            'The run has optimizer.name = "Lion", which TorchTitan 0.2 cannot resume',
        ),
        ('no_weight_decay = ["*norm*"]', "The run has optimizer.no_weight_decay"),
    ],
)
def test_optimizers_without_a_counterpart_are_refused(
    setting: str, words: str, native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    text = (native / "config.toml").read_text()
    section, _, rest = text.partition("[optimizer]\n")
    kept = [
        line for line in rest.splitlines() if not line.startswith(setting.split(" =")[0] + " =")
    ]
    config.write_text("\n".join([f"{section}[optimizer]", setting, *kept]))
    step = native / f"checkpoint/step-{MIDDLE}"
    assert convert_run(step, tmp_path / "out", "--config", str(config)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.nightly
@needs_torchtitan
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_released_torchtitan_continues_a_converted_run(native: Path, tmp_path: Path) -> None:
    """Its checkpointer loads all states; its next losses, norms and rates equal this program's."""
    assert convert_run(native / f"checkpoint/step-{MIDDLE}", tmp_path / "step-4") == 0
    result = continue_run(tmp_path / "step-4", read_batches(tmp_path))
    rows = {row["step"]: row for row in read_rows(native / "metrics.jsonl")}
    assert (result["step"], result["tokens"]) == (MIDDLE, rows[MIDDLE]["n_tokens_seen"])
    for key in ("loss", "grad_norm", "lr"):
        values = [rows[step][key] for step in range(MIDDLE + 1, STEPS + 1)]
        assert result[key] == pytest.approx(values, rel=TOLERANCE), key


@pytest.mark.nightly
@needs_torchtitan
def test_released_torchtitan_writes_the_same_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.harness.torchtitan_run", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ)
    step = tmp_path / f"step-{SAVED}"
    assert run_ranks(train, 1, [*resume_arguments(tmp_path / "run", step), *SKIP]) == [(0, SAVED)]
    check_losses(tmp_path / "run", tmp_path)
