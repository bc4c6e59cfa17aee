"""A stored checkpoint loads with its original content.

An earlier state of the code wrote `tests/assets/checkpoints/v3/step-3`.
`python -m tests.faults.test_golden FOLDER` writes a new step to FOLDER with the same command, on
2 replicas.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.damage import start_one_rank
from tests.faults.trainer import ASSETS, Starter
from tests.harness.runner import ROOT, trainer_command, trainer_environment
from torchtitan_like.checkpoint.step_folders import FORMAT_VERSION
from torchtitan_like.cli import main as titan
from torchtitan_like.util.jsonl import read_rows

GOLDEN = ASSETS / "v3/step-3"
# Hash of all names and values in the step: weights, optimizer, schedule, data position, progress.
CONTENT = "0b066b578ec5bd7cbc3d9ec9c2101725"
LOSSES = (3.8, 4.4)  # range of the following steps
# Digests of the data of the following steps, equal on any machine.
DIGESTS = [
    "63e45a53091fa7fa",
    "21ca791dedbe9716",
    "a835e67325420df0",
    "8232de389ea3df5c",
    "de94fe9a87e90db1",
]
LAST_CHAIN = "b42b7748c37d57a5"
# Relative paths, so that the step does not depend on the machine.
ARGUMENTS = """
    --job.config_file train_configs/debug_model.toml --job.dump_folder outputs
        --job.description golden --model.hf_assets_path tests/assets/checkpoints/tokenizer
        --model.args.dim 4 --model.args.n_layers 1 --model.args.n_heads 1
        --model.args.multiple_of 4 --model.args.vocab_size 32 --model.args.max_seq_len 64
        --model.args.enable_weight_tying true
        --training.dataset_path tests/assets/checkpoints/text.jsonl --training.seq_len 16
        --training.global_batch_size 4 --training.local_batch_size 2 --training.steps 3
        --lr_scheduler.total_steps 8 --lr_scheduler.warmup_steps 2 --validation.enable false
        --metrics.log_freq 1 --metrics.enable_tensorboard false --checkpoint.enable true
        --debug.seed 7
    --parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 1
""".split()


def test_the_stored_checkpoint_has_the_current_format() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    assert manifest["format_version"] == FORMAT_VERSION
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 100_000


def test_stored_checkpoint_has_its_original_content(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "checkpoint" / "step-3")
    loaded = start_one_rank(tmp_path, GOLDEN)
    assert loaded.step == 3, loaded.output
    assert loaded.content == CONTENT


def test_run_resumes_from_a_stored_checkpoint(fork_server: Starter, tmp_path: Path) -> None:
    """Two ranks wrote the checkpoint; one rank resumes."""
    outputs = tmp_path / "outputs"
    shutil.copytree(GOLDEN, outputs / "checkpoint" / "step-3")
    changes = [
        f"--job.dump_folder={outputs}",
        "--training.steps=8",
        "--training.local_batch_size=4",
        "--parallelism.data_parallel_replicate_degree=1",
    ]
    run = fork_server.start([*ARGUMENTS, *changes], 1, outputs).wait()
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    rows = read_rows(outputs / "metrics.jsonl")
    assert [row["data_digest"] for row in rows] == DIGESTS
    assert rows[-1]["data_digest_chain"] == LAST_CHAIN
    assert rows[-1]["n_tokens_seen"] == 8 * 64
    low, high = LOSSES
    assert all(low < row["loss"] < high for row in rows)


def test_commands_read_a_stored_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert titan(["ckpt", "show", str(GOLDEN)]) == 0
    assert f"format_version: {FORMAT_VERSION}" in capsys.readouterr().out
    assert titan(["ckpt", "verify", str(GOLDEN)]) == 0
    assert "intact" in capsys.readouterr().out
    for to in ("native", "hf", "dcp", "pt"):
        copy = tmp_path / to
        assert titan(["ckpt", "export", str(GOLDEN), str(copy), "--to", to]) == 0
        capsys.readouterr()
        titan(["ckpt", "diff", str(GOLDEN), str(copy)])
        assert "11 of 11 common tensors are equal bit for bit" in capsys.readouterr().out, to


def make(folder: Path) -> None:
    """Save a step with the current code into `folder`."""
    work = folder / "work"
    shutil.copytree(ROOT / "tests/assets/checkpoints", work / "tests/assets/checkpoints")
    shutil.copytree(ROOT / "train_configs", work / "train_configs")
    subprocess.run(
        trainer_command(ARGUMENTS, 2, work / "outputs"),
        cwd=work,
        env=trainer_environment(),
        check=True,
    )
    shutil.move(work / "outputs/checkpoint/step-3", folder / "step-3")
    shutil.rmtree(work)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
