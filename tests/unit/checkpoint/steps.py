"""Write full checkpoints of tiny models for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.harness.runner import ROOT
from torchtitan_like.build import identify
from torchtitan_like.checkpoint.dcp_storage import ExtentWriter
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.checkpoint.step_folders import write_manifest
from torchtitan_like.config import dump_toml, load_config
from torchtitan_like.util.extents import write_file

MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16}


def make_step(
    folder: Path, sizes: dict[str, Any], assets: Path = ROOT / "tests/assets/tokenizer"
) -> Path:
    """Write a full checkpoint of a Llama with random weights and the tokenizer in `assets`."""
    folder.mkdir()
    options = {f"model.args.{key}": value for key, value in sizes.items()}
    options |= {"model.hf_assets_path": assets, "training.dtype": "float32"}
    config = load_config(
        [part for key, value in options.items() for part in (f"--{key}", str(value))]
    )
    identity = identify(config.model)
    torch.manual_seed(0)
    model = ModelState([identity.spec.build(identity.args)])
    weights = {n: torch.randn(t.shape) for n, t in model.state_dict().items()}
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {
        "optimizer.state.norm.weight.exp_avg": torch.ones(32),
        "optimizer.step": torch.tensor(7),
    }
    write_step(folder, state | {"train_state.json": "{}"}, dump_toml(config))
    return folder


def write_step(folder: Path, state: dict[str, Any], config: str) -> None:
    writer = ExtentWriter(folder, 0)
    dcp.save(state, storage_writer=writer, no_dist=True)
    records = writer.records | {"config.toml": write_file(folder / "config.toml", config.encode())}
    files = {name: dataclasses.asdict(record) for name, record in records.items()}
    write_manifest(folder, {"kind": "full", "step": 7, "seed": 1, "files": files, "config": config})
