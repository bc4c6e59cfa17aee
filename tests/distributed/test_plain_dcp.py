"""Plain torch reads native steps of every layout, without code of this program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.parity import build, options, release
from tests.harness.rank_pool import run_ranks
from tests.harness.runner import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVING = {
    "checkpoint.enable": "true",
    "checkpoint.last_save_model_only": "false",
    "training.steps": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {"training.local_batch_size": 8}),
    "FSDP": (4, {"training.local_batch_size": 2}),
    "FSDP over TP, tied": (
        4,
        {
            "training.local_batch_size": 4,
            "parallelism.tensor_parallel_degree": 2,
            "model.args.enable_weight_tying": "true",
        },
    ),
    "pipeline over FSDP, background": (
        4,
        {
            "training.local_batch_size": 4,
            "parallelism.pipeline_parallel_degree": 2,
            "checkpoint.async_mode": "async",
        },
    ),
}


def train(argv: list[str]) -> dict[str, Any]:
    """Train and save, and return the full live state of this rank by flat name."""
    trainer = build(argv)
    trainer.train()
    state = {}
    for key, stateful in trainer.states.items():
        for name, value in stateful.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            is_tensor = isinstance(whole, torch.Tensor)
            state[f"{key}.{name}"] = whole.detach().clone() if is_tensor else whole
    release(trainer)
    return state


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Return a step of a real run, and the state that the run had."""
    ranks, changes = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("plain") / "run"
    states = run_ranks(train, ranks, options(str(folder), "float32", **SAVING, **changes))
    state = {name: value for rank in states for name, value in rank.items()}
    return folder / "checkpoint/step-2", state


def load_with_reader(step: Path, out: Path) -> dict[str, Any]:
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else ""
        for name, entry in entries.items()
    }
    dcp.load(state, storage_reader=FileSystemReader(step))
    return state


def load_with_torch_save(step: Path, out: Path) -> dict[str, Any]:
    dcp_to_torch_save(step, out / "step.pt")
    return dict(torch.load(out / "step.pt", weights_only=True))


@pytest.mark.parametrize("load", [load_with_reader, load_with_torch_save])
def test_torch_reads_the_full_state_bit_for_bit(
    saved: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    load: Callable[[Path, Path], dict[str, Any]],
) -> None:
    step, expected = saved
    state = load(step, tmp_path)
    assert state.keys() == expected.keys() and len(state) > 30
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert state[name].dtype == value.dtype, name
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value, name
    assert json.loads(state["train_state.json"])["step"] == 2


def test_torch_reads_a_part_of_the_state(saved: tuple[Path, dict[str, Any]]) -> None:
    step, expected = saved
    name = "optimizer.state.layers.1.feed_forward.w2.weight.exp_avg"
    state = {name: torch.empty_like(expected[name])}
    dcp.load(state, checkpoint_id=step)
    assert torch.equal(state[name], expected[name]) and state[name].any()


def load_sharded(step: str, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Load one tensor with plain torch, sharded by columns over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    tensor = zeros(shape, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(1)])
    dcp.load({name: tensor}, checkpoint_id=step)
    return tensor.full_tensor()


def test_torch_reads_on_another_layout(saved: tuple[Path, dict[str, Any]]) -> None:
    step, expected = saved
    name = "model.layers.0.attention.wk.weight"
    for tensor in run_ranks(load_sharded, 2, str(step), name, tuple(expected[name].shape)):
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("saved", ["FSDP over TP, tied"], indirect=True)
def test_the_documented_script_runs_without_this_program(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    step, expected = saved
    guide = (ROOT / "docs/guides/checkpoint.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    script = script.replace("outputs/checkpoint/step-500", str(step))
    check = 'import sys\nassert not any(name.startswith("torchtitan_like") for name in sys.modules)'
    command = [sys.executable, "-W", "ignore", "-c", f"{script}\n{check}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    weight = torch.load(tmp_path / "step-500.pt", weights_only=True)["model.norm.weight"]
    assert torch.equal(weight, expected["model.norm.weight"])
    assert run.stdout == f"{weight.dtype} {tuple(weight.shape)}\n"


def test_torchtitan_finds_none_of_its_weights_in_a_native_step(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    """Rows are in another order there. Its names lack the prefix, and so its load fails."""
    step, expected = saved
    theirs = [name.removeprefix("model.") for name in expected if name.startswith("model.")]
    assert len(theirs) > 10
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    assert not entries.keys() & set(theirs)
    state = {name: torch.zeros_like(expected[f"model.{name}"]) for name in theirs}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict"):
        dcp.load(state, checkpoint_id=step)
