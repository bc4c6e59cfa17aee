"""Whatever happens to a file of a published step, a start sees it before training and names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.damage import DAMAGES, all_damages, copy_steps, files_of, flip, start_here
from tests.faults.kills import Chain
from tests.faults.shim import Rule

OLD, NEW = 2, 4
SHORT = {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 0}


@pytest.fixture(scope="module")
def steps(reference: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of a run of 2 ranks with two full steps."""
    folder = tmp_path_factory.mktemp("steps") / "outputs"
    chain = Chain(reference.starter, reference.faults, folder, reference.reference)
    chain.run(checkpoint__interval=2, training__steps=NEW, checkpoint__hf_interval=NEW, checkpoint__hf_shard_gb=2e-5)
    return folder / "checkpoint"


FILES = ["manifest.json", ".metadata", "config.toml", "shard-00000.bin", "shard-00001.bin"]


def test_these_are_all_files(steps: Path) -> None:
    assert sorted(FILES) == files_of(steps / f"step-{NEW}")


@pytest.mark.parametrize("name", FILES)
def test_damage_is_detected_named_and_skipped(steps: Path, tmp_path: Path, name: str) -> None:
    draw, run = random.Random(name), tmp_path / "run"
    intact = start_here(steps.parent, steps / f"step-{OLD}", load_step=OLD)
    assert intact.step == OLD
    wrong = []
    for what, damage in all_damages(draw, num_flips=8):
        folder = copy_steps(steps, run, [OLD, NEW])
        damage(folder / f"step-{NEW}" / name)
        loaded = start_here(run, steps / f"step-{OLD}")
        if (loaded.step, loaded.content) != (OLD, intact.content) or name not in loaded.output:
            wrong.append(f"{name}, {what}: started at {loaded.step}, and said: {loaded.output}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_only_step_is_refused(steps: Path, tmp_path: Path, name: str) -> None:
    draw, run = random.Random(f"only {name}"), tmp_path / "run"
    wrong = []
    for what, damage in all_damages(draw, num_flips=8):
        folder = copy_steps(steps, run, [NEW])
        damage(folder / f"step-{NEW}" / name)
        loaded = start_here(run, steps / f"step-{OLD}")
        if loaded.step is not None or name not in loaded.output:
            wrong.append(f"{name}, {what}: started at {loaded.step}, and said: {loaded.output}")
    assert not wrong, "\n".join(wrong)


def test_a_damaged_export_is_refused(steps: Path, tmp_path: Path) -> None:
    """Without its manifest, an export cannot be told from other safetensors: this damage is not tested."""
    like, draw, wrong = steps / f"step-{OLD}", random.Random(5), []
    export = steps / f"hf/step-{NEW}"
    where = {"initial_load_path": str(tmp_path / "export"), "initial_load_in_hf": True}
    names = files_of(export)
    assert {"manifest.json", "config.json", "tokenizer.json", "model.safetensors.index.json"} < set(names)
    for name in ["", *names]:
        for what, damage in all_damages(draw, num_flips=3) if name else [("intact", lambda path: None)]:
            if (name, what) == ("manifest.json", "removed"):
                continue
            shutil.rmtree(tmp_path / "export", ignore_errors=True)
            shutil.copytree(export, tmp_path / "export")
            damage(tmp_path / "export" / name)
            loaded = start_here(tmp_path / "run", like, **where)
            if (loaded.step is None) != bool(name) or name not in loaded.output:
                wrong.append(f"{name}, {what}: started at {loaded.step}, and said: {loaded.output}")
    assert not wrong, "\n".join(wrong)


def test_every_rank_of_the_trainer_skips_a_damaged_step(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=6)
    flip(chain.folder / "checkpoint/step-6/shard-00001.bin", 0.7, 3)
    DAMAGES["removed"](chain.folder / "checkpoint/step-4/config.toml")
    ended = chain.starter.start(chain.argv(**SHORT, training__steps=8), 2, chain.folder).wait()
    assert ended.exit == {"reason": "done", "code": 0, "step": 8}, ended.tail
    for words in ("step-6/shard-00001.bin", "step-4/config.toml", "at step 2"):
        assert ended.says(words), ended.tail
    assert len(chain.check_rows("after damage")) == 8


def test_a_sector_that_cannot_be_read_is_damage(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=4)
    chain.faults.set(Rule("read", "*/step-4/shard-00000.bin", "EIO", hits=0))
    ended = chain.starter.start(chain.argv(**SHORT, training__steps=6), 2, chain.folder).wait()
    assert ended.exit == {"reason": "done", "code": 0, "step": 6}, ended.tail
    assert ended.says("step-4/shard-00000.bin") and ended.says("at step 2"), ended.tail
    assert len(chain.check_rows("after damage")) == 6


def test_the_trainer_refuses_to_start_from_scratch(chain: Chain) -> None:
    chain.run(training__steps=1)
    DAMAGES["one byte short"](chain.folder / "checkpoint/step-1/.metadata")
    ended = chain.starter.start(chain.argv(), 2, chain.folder).wait()
    assert ended.exit is not None and ended.exit["code"] == 74, ended.tail
    assert ended.says("step-1/.metadata"), ended.tail


def test_leftover_folders_are_not_a_start(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=4)
    folder = chain.folder / "checkpoint"
    left = [folder / name for name in ("step-9.tmp-0badcafe", ".trash-1", "step-8.superseded-0badcafe")]
    for path in left:
        shutil.copytree(folder / "step-4", path)
    (folder / "step-x").write_text("a file, no step")
    ended = chain.run(**SHORT, training__steps=8)
    assert ended.exit == {"reason": "done", "code": 0, "step": 8}, ended.tail
    assert [path.exists() for path in left] == [False, False, True], "what a user may want is left alone"
