"""A start detects any damage to a file of a published step and names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.damage import DAMAGES, all_damages, copy_steps, flip, list_files, start_one_rank
from tests.faults.kills import Chain
from tests.faults.shim import Rule

OLD, NEW = 2, 4
SHORT = {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 0}


@pytest.fixture(scope="module")
def steps(reference: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of a run of 2 ranks with two full steps."""
    folder = tmp_path_factory.mktemp("steps") / "outputs"
    chain = Chain(reference.starter, reference.faults, folder, reference.reference)
    chain.run(
        checkpoint__interval=2,
        training__steps=NEW,
        checkpoint__hf_interval=NEW,
        checkpoint__hf_shard_gb=2e-5,
    )
    return folder / "checkpoint"


FILES = ["manifest.json", ".metadata", "config.toml", "shard-00000.bin", "shard-00001.bin"]


def test_list_of_files_is_complete(steps: Path) -> None:
    assert sorted(FILES) == list_files(steps / f"step-{NEW}")


@pytest.mark.parametrize("name", FILES)
def test_damage_is_detected_named_and_skipped(steps: Path, tmp_path: Path, name: str) -> None:
    draw, run = random.Random(name), tmp_path / "run"
    intact = start_one_rank(steps.parent, steps / f"step-{OLD}", load_step=OLD)
    assert intact.step == OLD
    wrong = []
    for description, damage in all_damages(draw, num_flips=8):
        folder = copy_steps(steps, run, [OLD, NEW])
        damage(folder / f"step-{NEW}" / name)
        loaded = start_one_rank(run, steps / f"step-{OLD}")
        if (loaded.step, loaded.content) != (OLD, intact.content) or name not in loaded.output:
            wrong.append(
                f"{name}, {description}: started at {loaded.step}, output: {loaded.output}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FILES)
def test_damage_to_the_only_step_is_an_error(steps: Path, tmp_path: Path, name: str) -> None:
    draw, run = random.Random(f"only {name}"), tmp_path / "run"
    wrong = []
    for description, damage in all_damages(draw, num_flips=8):
        folder = copy_steps(steps, run, [NEW])
        damage(folder / f"step-{NEW}" / name)
        loaded = start_one_rank(run, steps / f"step-{OLD}")
        if loaded.step is not None or name not in loaded.output:
            wrong.append(
                f"{name}, {description}: started at {loaded.step}, output: {loaded.output}"
            )
    assert not wrong, "\n".join(wrong)


def test_damaged_export_is_rejected(steps: Path, tmp_path: Path) -> None:
    """A removed manifest is not tested: such an export is a valid folder of safetensors."""
    like, draw, wrong = steps / f"step-{OLD}", random.Random(5), []
    export = steps / f"hf/step-{NEW}"
    load_settings = {"initial_load_path": str(tmp_path / "export"), "initial_load_in_hf": True}
    names = list_files(export)
    assert {"manifest.json", "config.json", "tokenizer.json", "model.safetensors.index.json"} < set(
        names
    )
    for name in ["", *names]:
        for description, damage in (
            all_damages(draw, num_flips=3) if name else [("intact", lambda path: None)]
        ):
            if (name, description) == ("manifest.json", "removed"):
                continue
            shutil.rmtree(tmp_path / "export", ignore_errors=True)
            shutil.copytree(export, tmp_path / "export")
            damage(tmp_path / "export" / name)
            loaded = start_one_rank(tmp_path / "run", like, **load_settings)
            if (loaded.step is None) != bool(name) or name not in loaded.output:
                wrong.append(
                    f"{name}, {description}: started at {loaded.step}, output: {loaded.output}"
                )
    assert not wrong, "\n".join(wrong)


def test_every_rank_of_the_trainer_skips_a_damaged_step(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=6)
    flip(chain.folder / "checkpoint/step-6/shard-00001.bin", 0.7, 3)
    DAMAGES["removed"](chain.folder / "checkpoint/step-4/config.toml")
    run = chain.starter.start(chain.argv(**SHORT, training__steps=8), 2, chain.folder).wait()
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    for words in ("step-6/shard-00001.bin", "step-4/config.toml", "at step 2"):
        assert run.has_output(words), run.tail
    assert len(chain.check_rows("after damage")) == 8


def test_unreadable_sector_is_damage(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=4)
    chain.faults.set(Rule("read", "*/step-4/shard-00000.bin", "EIO", hits=0))
    run = chain.starter.start(chain.argv(**SHORT, training__steps=6), 2, chain.folder).wait()
    assert run.exit == {"reason": "done", "code": 0, "step": 6}, run.tail
    assert run.has_output("step-4/shard-00000.bin") and run.has_output("at step 2"), run.tail
    assert len(chain.check_rows("after damage")) == 6


def test_trainer_does_not_start_anew_after_damage(chain: Chain) -> None:
    chain.run(training__steps=1)
    DAMAGES["one byte short"](chain.folder / "checkpoint/step-1/.metadata")
    run = chain.starter.start(chain.argv(), 2, chain.folder).wait()
    assert run.exit is not None and run.exit["code"] == 74, run.tail
    assert run.has_output("step-1/.metadata"), run.tail


def test_leftover_folders_are_no_checkpoints(chain: Chain) -> None:
    chain.run(**SHORT, training__steps=4)
    folder = chain.folder / "checkpoint"
    leftovers = [
        folder / name for name in ("step-9.tmp-0badcafe", ".trash-1", "step-8.superseded-0badcafe")
    ]
    for path in leftovers:
        shutil.copytree(folder / "step-4", path)
    (folder / "step-x").write_text("a file, no step")
    run = chain.run(**SHORT, training__steps=8)
    assert run.exit == {"reason": "done", "code": 0, "step": 8}, run.tail
    assert [path.exists() for path in leftovers] == [False, False, True], (
        "superseded steps must be kept"
    )
