"""Where a run starts from, for every combination of what is asked and what is on disk."""

from types import SimpleNamespace

import pytest

from torchtitan_like.checkpoint.start import CheckpointError, decide_start
from torchtitan_like.checkpoint.step_folders import (
    publish,
    published_steps,
    remove_stale_stages,
    retain_latest,
    supersede_later,
    write_manifest,
)


def section(**changes):
    defaults = {"enable": True, "start": "auto", "load_step": -1, "initial_load_path": None, "exclude_from_loading": []}
    return SimpleNamespace(**{**defaults, **changes})


def make_steps(folder, *names):
    """Names such as "5" (full), "7w" (weights only), "9?" (torn: no manifest)."""
    for name in names:
        step = folder / f"step-{name.rstrip('w?')}"
        step.mkdir(parents=True)
        if not name.endswith("?"):
            kind = "weights" if name.endswith("w") else "full"
            write_manifest(step, {"kind": kind, "step": int(name.rstrip("w")), "seed": 7})


LAST_STEP = 20
WARM = "WARM"  # stands for the path of a valid step elsewhere

CASES = [
    # what is asked, what is on disk, (kind, step) or the words of the error
    ({}, [], ("scratch", 0)),
    ({"enable": False}, ["5"], ("scratch", 0)),
    ({}, ["5", "10"], ("resume", 10)),
    ({}, ["5", "10", "15?"], ("resume", 10)),
    ({}, ["5", "10w"], ("resume", 5)),
    ({}, ["10w"], "holds weights alone"),
    ({}, ["5", "20w"], ("resume", 20)),
    ({}, ["20w"], ("resume", 20)),
    ({}, ["5", "25"], ("resume", 25)),
    ({"load_step": 5}, ["5", "20w"], ("resume", 5)),
    ({"initial_load_path": WARM}, ["10w"], ("warm", 0)),
    ({"load_step": 5}, ["5", "10"], ("resume", 5)),
    ({"load_step": 7}, ["5", "10"], "full checkpoints: 5, 10"),
    ({"load_step": 7}, [], "full checkpoints: none"),
    ({"load_step": 10}, ["5", "10w"], "no full checkpoint of that step"),
    ({"start": "resume"}, [], "holds no full checkpoint"),
    ({"start": "resume"}, ["5"], ("resume", 5)),
    ({"initial_load_path": WARM}, [], ("warm", 0)),
    ({"initial_load_path": WARM}, ["9?"], ("warm", 0)),
    ({"initial_load_path": WARM}, ["5"], ("resume", 5)),
    ({"initial_load_path": "nowhere"}, [], "not a checkpoint"),
    ({"start": "warm", "initial_load_path": WARM}, [], ("warm", 0)),
    ({"start": "warm", "initial_load_path": WARM}, ["5"], "Choose another job.dump_folder"),
    ({"initial_load_path": WARM, "exclude_from_loading": ["model"]}, [], "loads the weights and nothing else"),
    ({"initial_load_path": WARM, "exclude_from_loading": ["optimizer"]}, [], ("warm", 0)),
    ({"start": "warm"}, [], "needs checkpoint.initial_load_path"),
    ({"start": "scratch"}, [], ("scratch", 0)),
    ({"start": "scratch"}, ["5"], "Choose another job.dump_folder"),
]


@pytest.mark.parametrize(("asked", "on_disk", "expected"), CASES)
def test_start(tmp_path, asked, on_disk, expected):
    make_steps(tmp_path / "elsewhere", "3")
    make_steps(tmp_path / "here", *on_disk)
    if asked.get("initial_load_path") == WARM:
        asked = {**asked, "initial_load_path": str(tmp_path / "elsewhere" / "step-3")}
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            decide_start(section(**asked), tmp_path / "here", LAST_STEP)
        return
    start = decide_start(section(**asked), tmp_path / "here", LAST_STEP)
    assert (start.kind, start.step) == expected
    assert start.seed == (7 if start.kind == "resume" else None)


@pytest.mark.parametrize(
    ("on_disk", "keep", "left"),
    [
        (["1", "2", "3", "4"], 2, [3, 4]),
        (["1", "2", "3", "4"], 0, [1, 2, 3, 4]),
        (["1", "2", "3w", "4w"], 2, [2, 3, 4]),
        (["0", "1", "2", "3"], 2, [0, 2, 3]),
        (["1", "2", "3?", "4"], 2, [2, 4]),
    ],
)
def test_retention_counts_complete_steps_and_keeps_the_newest_full_one(tmp_path, on_disk, keep, left):
    make_steps(tmp_path, *on_disk)
    retain_latest(tmp_path, keep)
    assert [s.step for s in published_steps(tmp_path)] == left
    assert not list(tmp_path.glob(".trash-*"))


def test_a_published_step_is_never_overwritten(tmp_path):
    make_steps(tmp_path, "5")
    staged = tmp_path / "step-5.tmp-x"
    staged.mkdir()
    with pytest.raises(FileExistsError, match="never overwritten"):
        publish(staged, tmp_path / "step-5")


def test_steps_beyond_the_start_are_kept_under_another_name(tmp_path):
    make_steps(tmp_path, "5", "10", "15")
    supersede_later(tmp_path, 5, "abc")
    assert [s.step for s in published_steps(tmp_path)] == [5]
    assert {p.name for p in tmp_path.iterdir()} == {"step-5", "step-10.superseded-abc", "step-15.superseded-abc"}


def test_only_unfinished_things_are_removed(tmp_path):
    make_steps(tmp_path, "5")
    for name in ("step-10.tmp-x", ".trash-1"):
        (tmp_path / name).mkdir()
    remove_stale_stages(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"step-5"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 5}'])
def test_a_broken_manifest_is_no_checkpoint(tmp_path, text):
    make_steps(tmp_path, "5")
    (tmp_path / "step-5" / "manifest.json").write_text(text)
    assert published_steps(tmp_path) == []
