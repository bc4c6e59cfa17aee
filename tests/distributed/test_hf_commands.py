"""`titan ckpt export` of steps and of shards, on one and on several ranks."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.distributed.parity import build, options, release
from tests.distributed.test_hf_export import ROWS, full_state, hash_files, load, write_torch_shards
from tests.harness.extents import verify_file
from tests.harness.rank_pool import run_ranks
from tests.unit.checkpoint.steps import write_step
from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.step_folders import file_records, read_manifest
from torchtitan_like.checkpoint.tools.export_step import export_step
from torchtitan_like.cli import main as titan
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.stored_config import identify_step


def train(argv):
    """Train for one step and return the full weights."""
    trainer = build(argv)
    trainer.train()
    state = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for n, p in trainer.parts[0].state_dict().items()
    }
    release(trainer)
    return state


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a published model-only step, and its weights."""
    folder = tmp_path_factory.mktemp("run") / "run"
    changes = {"training.steps": 1, "checkpoint.enable": "true", "training.local_batch_size": 4}
    state = run_ranks(train, 2, options(str(folder), "float32", **changes))[0]
    return folder / "checkpoint/step-1", state


@lru_cache
def world_group():
    return HostGroup(list(range(dist.get_world_size())), timedelta(seconds=20))


def export_together(step, out):
    export_step(
        Path(step),
        Path(out),
        with_checkpoint_errors(world_group()),
        identify=lambda path: identify_step(path, ""),
        shard_gb=0.0001,
    )


def test_transformers_loads_an_exported_step(tmp_path, step, capsys):
    transformers = pytest.importorskip("transformers")
    path, state = step
    assert titan(["ckpt", "export", str(path), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert "is complete" in capsys.readouterr().out
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert torch.equal(model.lm_head.weight, state["output.weight"].bfloat16())
    assert torch.equal(
        model.model.layers[1].mlp.down_proj.weight,
        state["layers.1.feed_forward.w2.weight"].bfloat16(),
    )
    manifest = read_manifest(tmp_path / "hf")
    assert (manifest["kind"], manifest["step"]) == ("hf", 1)
    files = file_records(manifest)
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
    } <= files.keys()
    assert "original/tokenizer.model" in files and "tokenizer.model" not in files
    present = {path for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    names = {path.relative_to(tmp_path / "hf").as_posix() for path in present}
    assert files.keys() | {"manifest.json"} == names
    for name, record in files.items():
        verify_file(tmp_path / "hf" / name, record)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "expected no staging folder"


def test_export_does_not_depend_on_the_number_of_ranks(tmp_path, step):
    path, state = step
    assert titan(["ckpt", "export", str(path), str(tmp_path / "one"), "--shard-gb", "0.0001"]) == 0
    for ranks in (2, 4):
        out = tmp_path / f"ranks-{ranks}"
        run_ranks(export_together, ranks, str(path), str(out))
        assert hash_files(out) == hash_files(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    assert load(tmp_path / "one").keys() >= {"lm_head.weight"} and len(
        load(tmp_path / "one")
    ) == len(state)


def test_export_without_dtype_keeps_the_dtype_of_each_tensor(tmp_path, step):
    path, state = step
    mixed = {f"model.{name}": t if "norm" in name else t.bfloat16() for name, t in state.items()}
    (tmp_path / "step-7").mkdir()
    write_step(tmp_path / "step-7", mixed, (path / "config.toml").read_text())
    assert titan(["ckpt", "export", str(tmp_path / "step-7"), str(tmp_path / "hf")]) == 0
    exported = load(tmp_path / "hf")
    assert {t.dtype for name, t in exported.items() if "norm" in name} == {torch.float32}
    assert {t.dtype for name, t in exported.items() if "norm" not in name} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_beyond_float16_are_reported(tmp_path, caplog):
    """bfloat16 has the range of float32 and needs no check."""
    state = {
        "layers.0.w": torch.tensor([65504.0, -1.0]),
        "one": torch.tensor([[-7e4]]),
        "none": torch.zeros(0, 4),
    }
    for dtype in (torch.bfloat16, torch.float16):
        write_export(
            tmp_path / str(dtype), state, rows=ROWS, tied=(), dtype=dtype, group=HostGroup.alone()
        )
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == (dtype == torch.float16)
    assert warnings[0].startswith(
        "1 tensors overflow to infinity in float16: one. Expected numbers up to 65504"
    )


@pytest.mark.parametrize("case", ["no step", "exists"])
def test_invalid_exports_are_rejected(tmp_path, step, capsys, case):
    path, _ = step
    source, words = {
        "no step": (tmp_path, "is not a checkpoint of a supported format"),
        "exists": (path, "exists already"),
    }[case]
    (tmp_path / "out").mkdir()
    assert titan(["ckpt", "export", str(source), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_shards_are_merged_as_an_index_says(tmp_path, capsys):
    run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", None)
    index = {hf_name: f"file-{i % 2}" for i, (_, hf_name) in enumerate(ROWS)}
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": index | {"tied": "file-1"}}))
    arguments = [
        str(tmp_path / "shards"),
        str(tmp_path / "out"),
        "--mapping",
        str(tmp_path / "index.json"),
    ]
    assert titan(["ckpt", "export", *arguments]) == 2
    assert "the folder lacks 1 tensors (tied)" in capsys.readouterr().err
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": index}))
    assert titan(["ckpt", "export", *arguments, "--num-threads", "2"]) == 0
    assert "out is complete" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    merged = load(tmp_path / "out")
    assert all(torch.equal(merged[hf_name], full_state()[name]) for name, hf_name in ROWS)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("step", ["--mapping", "x"], "--mapping does not apply to"),
        ("step", ["--to", "pt", "--ema"], "--ema does not apply to"),
        ("shards", ["--dtype", "float32"], "--dtype does not apply to"),
        ("shards", ["--data-ranks", "2"], "--data-ranks does not apply to"),
    ],
)
def test_options_of_other_cases_are_refused(tmp_path, step, capsys, source, options, message):
    run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", None)
    path = step[0] if source == "step" else tmp_path / "shards"
    assert titan(["ckpt", "export", str(path), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_steps_and_shards_are_exported_under_torchrun(tmp_path, step, repo_root):
    """Run the commands in another folder; they write the bytes of a single process."""
    path, _ = step
    run_ranks(write_torch_shards, 2, str(tmp_path / "shards"), "rows", None)
    sources = {"step": str(path), "shards": str(tmp_path / "shards")}
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    started = {
        name: subprocess.Popen(
            [*launch, "-m", "torchtitan_like", "ckpt", "export", source, f"{name}-2"],
            cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, source in sources.items()
    }  # fmt: skip
    for name in sources:
        output, _ = started[name].communicate(timeout=120)
        assert started[name].returncode == 0, output
        assert titan(["ckpt", "export", sources[name], str(tmp_path / f"{name}-1")]) == 0
        assert hash_files(tmp_path / f"{name}-2") == hash_files(tmp_path / f"{name}-1")
    process = [*launch, "-m", "torchtitan_like", "ckpt", "export", str(path), "m.pt", "--to", "pt"]
    refused = subprocess.run(process, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and not (tmp_path / "m.pt").exists()
    assert refused.stderr.count("is written by one process") == 1


def test_export_works_without_posix_fadvise(tmp_path, monkeypatch):
    """macOS has no posix_fadvise."""
    monkeypatch.delattr("os.posix_fadvise")
    write_export(
        tmp_path,
        {"w": torch.ones(3)},
        rows=(("w", "w"),),
        tied=(),
        dtype=None,
        group=HostGroup.alone(),
    )
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [1, 1, 1]
