"""The start of a run for every combination of settings and steps on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoint.folders import CONFIG, make_steps, one_rank
from torchtitan_like.checkpoint.errors import DamagedError, SettingsError
from torchtitan_like.checkpoint.start import Start, decide_start, format_of
from torchtitan_like.checkpoint.step_folders import supersede_later
from torchtitan_like.checkpoint.verification import REMEDY
from torchtitan_like.config.sections_checkpoint import Checkpoint
from torchtitan_like.util.run_directory import MANIFEST

LAST_STEP = 20
ASSETS = Path("nowhere")


def section(**changes: Any) -> Checkpoint:
    """Build the section without the rules over several keys: decide_start must not rely on them."""
    return Checkpoint.model_construct(**{**Checkpoint(enable=True).model_dump(), **changes})


def path(name: str) -> dict[str, Any]:
    """Set `initial_load_path` to a name in `ELSEWHERE`, or to a missing folder."""
    return {"initial_load_path": name}


ELSEWHERE = {"FULL": "3", "WEIGHTS": "4w", "HF": "5H", "DCP": "6D", "META": "7M", "EXPORT": "8h", "TORN": "9?",
             "GARBLED": "12m", "LATE": "30", "LOST": "13hx"}  # fmt: skip
WHOLE_RUN = {"initial_load_model_only": False}

STARTS = [
    # settings, steps on disk, (kind, step, format) of the first choice, steps of further choices
    ({}, [], ("scratch", 0, "native"), []),
    ({"enable": False}, ["5"], ("scratch", 0, "native"), []),
    # the newest full step, then older ones
    ({}, ["5", "10"], ("resume", 10, "native"), [5]),
    ({}, ["5", "10", "15?"], ("resume", 10, "native"), [5]),
    ({}, ["5", "10w"], ("resume", 5, "native"), []),
    ({}, ["5", "7", "10h"], ("resume", 7, "native"), [5]),
    ({}, ["5", "10H"], ("resume", 5, "native"), []),
    ({}, ["0", "5"], ("resume", 5, "native"), [0]),
    ({"start": "resume"}, ["5"], ("resume", 5, "native"), []),
    ({"load_only": True}, ["5"], ("resume", 5, "native"), []),
    # damaged steps are skipped
    ({}, ["5", "10", "15!"], ("resume", 10, "native"), [5]),
    ({}, ["5", "10!", "15"], ("resume", 15, "native"), [5]),
    ({}, ["5", "10m", "15!"], ("resume", 5, "native"), []),
    ({}, ["5", "20!"], ("resume", 5, "native"), []),
    ({}, ["5", "10e"], ("resume", 5, "native"), []),
    ({}, ["5", "10hx"], ("resume", 5, "native"), []),
    # the run is finished
    ({}, ["5", "20w"], ("resume", 20, "native"), []),
    ({}, ["20w"], ("resume", 20, "native"), []),
    ({}, ["5", "20h"], ("resume", 20, "native"), []),
    ({}, ["5", "25"], ("resume", 25, "native"), []),
    # a step chosen by number, without a fallback
    ({"load_step": 5}, ["5", "20w"], ("resume", 5, "native"), []),
    ({"load_step": 5}, ["3", "5", "10"], ("resume", 5, "native"), []),
    # initial_load_path
    (path("FULL"), [], ("warm", 0, "native"), []),
    (path("WEIGHTS"), [], ("warm", 0, "native"), []),
    (path("HF"), [], ("warm", 0, "hf"), []),
    (path("EXPORT"), [], ("warm", 0, "hf"), []),
    (path("DCP"), [], ("warm", 0, "dcp"), []),
    (path("META"), [], ("warm", 0, "pt"), []),
    (path("HF") | {"initial_load_in_hf": True}, [], ("warm", 0, "hf"), []),
    (path("FULL"), ["9?"], ("warm", 0, "native"), []),
    (path("FULL"), ["5"], ("resume", 5, "native"), []),
    (path("FULL") | {"exclude_from_loading": ["optimizer"]}, [], ("warm", 0, "native"), []),
    (path("FULL") | {"start": "warm"}, [], ("warm", 0, "native"), []),
    (path("FULL") | WHOLE_RUN, [], ("resume", 3, "native"), []),
    (path("FULL") | WHOLE_RUN, ["5"], ("resume", 5, "native"), []),
    (
        path("FULL") | WHOLE_RUN | {"exclude_from_loading": ["model"]},
        [],
        ("resume", 3, "native"),
        [],
    ),
    # weights in the folder hf_assets_path
    ({"initial_load_in_hf": True}, [], ("warm", 0, "hf"), []),
    ({"initial_load_in_hf": True, "start": "warm"}, [], ("warm", 0, "hf"), []),
    # the user's step-0
    ({}, ["0H"], ("warm", 0, "hf"), []),
    ({}, ["0D"], ("warm", 0, "dcp"), []),
    ({}, ["0M"], ("warm", 0, "pt"), []),
    ({}, ["0w"], ("warm", 0, "native"), []),
    ({"initial_load_in_hf": True}, ["0H"], ("warm", 0, "hf"), []),
    ({}, ["0H", "5"], ("resume", 5, "native"), []),
    # new weights
    ({"start": "scratch"}, [], ("scratch", 0, "native"), []),
    ({"start": "scratch"}, ["9?"], ("scratch", 0, "native"), []),
    ({"create_seed_checkpoint": True}, [], ("scratch", 0, "native"), []),
    ({}, ["0"], ("resume", 0, "native"), []),
]

REFUSED = [
    # settings, steps on disk, message of the error
    ({}, ["10w"], "step-10, a checkpoint of this program.*set checkpoint.initial_load_path"),
    ({}, ["10H"], "step-10, Hugging Face safetensors.*Expected a full checkpoint to resume from"),
    (
        path("FULL"),
        ["10w"],
        "step-10, a checkpoint of this program.*Expected a full checkpoint to resume from",
    ),
    (
        path("FULL"),
        ["10H"],
        "step-10, Hugging Face safetensors.*Expected a full checkpoint to resume from",
    ),
    (
        {},
        ["1000D"],
        "torch.distributed.checkpoint folder of another program.*Expected a full checkpoint to resume from",
    ),
    ({}, ["0H", "10H"], "only weights \\(newest: step-10"),
    ({}, ["5x"], "step-5/manifest.json is missing.*Move them away"),
    ({}, ["5!"], "step-5/shard-00000.bin has 50 bytes. Expected 100.*Move them away"),
    ({}, ["5!", "10m", "15w"], "step-10/manifest.json is damaged.*step-5/shard-00000.bin"),
    (path("FULL"), ["5!"], "no undamaged full checkpoint"),
    ({"start": "resume"}, ["5!"], "no undamaged full checkpoint"),
    # remains after a program deleted old files
    ({}, ["5e"], "step-5 is empty except for config.toml.*Move them away"),
    ({}, ["0e"], "step-0 is empty except for config.toml.*Move them away"),
    ({}, ["5e", "10w"], "step-5 is empty except for config.toml.*Move them away"),
    (path("FULL"), ["5e"], "step-5 is empty except for config.toml.*Move them away"),
    ({"start": "scratch"}, ["5e"], "Choose another job.dump_folder"),
    (
        {},
        ["10hx"],
        "step-10/manifest.json is missing. Expected it, because config.toml marks.*Move them away",
    ),
    (
        path("LOST"),
        [],
        "step-13/manifest.json is missing. Expected it, because config.toml marks.*without config.toml",
    ),
    ({"load_step": 7}, ["5", "10"], "full checkpoint .5, 10.. Set load_step"),
    ({"load_step": 7}, [], "full checkpoint .none.. Set load_step"),
    ({"load_step": 10}, ["5", "10w"], "step-10 has only weights"),
    ({"load_step": 10}, ["5", "10H"], "step-10 has only weights \\(Hugging Face safetensors\\)"),
    ({"load_step": 10}, ["5", "10!"], "Set load_step to another one"),
    ({"load_step": 10}, ["5", "10m"], "manifest.json is damaged"),
    ({"start": "resume"}, [], "holds no full checkpoint"),
    ({"start": "resume"}, ["0H"], "holds no full checkpoint"),
    (path("nowhere"), [], "is not a checkpoint.*Give the full path of a step"),
    (path("TORN"), [], "is not a checkpoint.*Give the full path of a step"),
    (path("GARBLED"), [], "manifest.json is damaged"),
    (path("FULL") | {"start": "warm"}, ["5"], "Choose another job.dump_folder"),
    (path("FULL") | {"start": "warm"}, ["0H"], "Choose another job.dump_folder"),
    (path("FULL") | {"exclude_from_loading": ["model"]}, [], "loads only the weights. Remove it"),
    (
        path("FULL") | {"initial_load_in_hf": True},
        [],
        "holds a checkpoint of this program. Expected Hugging Face",
    ),
    (path("DCP") | {"initial_load_in_hf": True}, [], "holds a torch.distributed.checkpoint folder"),
    ({"initial_load_in_hf": True}, ["0D"], "holds a torch.distributed.checkpoint folder"),
    (path("HF") | WHOLE_RUN, [], "only weights \\(Hugging Face safetensors\\)"),
    (path("WEIGHTS") | WHOLE_RUN, [], "initial_load_model_only = true"),
    (path("DCP") | WHOLE_RUN, [], r"\.metadata cannot be read"),
    (path("LATE") | WHOLE_RUN, [], "is at step 30. Expected a step before training.steps = 20"),
    (path("FULL"), ["0H"], "two sources of weights"),
    ({"start": "scratch"}, ["5"], "Choose another job.dump_folder"),
    ({"start": "scratch"}, ["5m"], "Choose another job.dump_folder"),
    ({"start": "scratch"}, ["0H"], "Choose another job.dump_folder"),
    ({"create_seed_checkpoint": True}, ["0"], "create_seed_checkpoint = true starts a new run"),
    ({"create_seed_checkpoint": True}, ["5w"], "create_seed_checkpoint = true starts a new run"),
]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the steps of `ELSEWHERE` and, in `assets`, a model's weights."""
    folder = tmp_path_factory.mktemp("elsewhere")
    make_steps(folder, *ELSEWHERE.values())
    make_steps(folder / "assets", "0H")
    return folder


@pytest.fixture
def decide(tmp_path: Path, elsewhere: Path) -> Any:
    def decide(options: dict[str, Any], on_disk: list[str]) -> Any:
        make_steps(tmp_path, *on_disk)
        name = options.get("initial_load_path")
        if name in ELSEWHERE:
            number = ELSEWHERE[name].rstrip("whmxHDM?")
            options = options | {"initial_load_path": str(elsewhere / f"step-{number}")}
        assets = elsewhere / "assets" / "step-0"
        return decide_start(section(**options), tmp_path, LAST_STEP, assets)

    return decide


@pytest.mark.parametrize(("options", "on_disk", "first", "others"), STARTS)
def test_the_start_is_chosen(
    decide: Any, options: Any, on_disk: list[str], first: Any, others: list[int]
) -> None:
    start, *further = decide(options, on_disk)
    assert (start.kind, start.step, start.format) == first
    assert start.seed == (7 if start.kind == "resume" else None)
    assert [(other.kind, other.step) for other in further] == [("resume", step) for step in others]
    if start.kind == "resume":
        assert all(choice.manifest["config"] == CONFIG for choice in (start, *further))


@pytest.mark.parametrize(("options", "on_disk", "message"), REFUSED)
def test_a_start_is_refused(decide: Any, options: Any, on_disk: list[str], message: str) -> None:
    """Another start could only help against damage, and has its own exit code."""
    with pytest.raises((SettingsError, DamagedError), match=message):
        decide(options, on_disk)


@pytest.mark.parametrize("on_disk", [["5!"], ["5m"]])
def test_damage_is_distinguished_from_other_errors(decide: Any, on_disk: list[str]) -> None:
    with pytest.raises(DamagedError):
        decide({}, on_disk)


def test_unused_steps_are_logged(decide: Any) -> None:
    (start, *_) = decide({}, ["5", "10!"])
    assert str(start).endswith(f"shard-00000.bin has 50 bytes. Expected 100: {REMEDY}")


def test_a_finished_run_is_extended_from_its_newest_full_step(tmp_path: Path) -> None:
    """A weights-only checkpoint at the old last step is renamed, not resumed."""
    make_steps(tmp_path, "5", "10w")
    assert decide_start(section(), tmp_path, 10, ASSETS)[0].step == 10
    (start,) = decide_start(section(), tmp_path, 20, ASSETS)
    assert (start.kind, start.step) == ("resume", 5)
    assert [folder.name for folder in supersede_later(tmp_path, start.step, "x")] == [
        "step-10.superseded-x"
    ]


@pytest.mark.parametrize(
    ("on_disk", "config", "expected"),
    [
        (["3", "5", "10", "15"], CONFIG, [15, 10, 5]),
        (["3", "5"], CONFIG, [5]),
        (["5", "10", "20w"], CONFIG, [20]),  # the run is finished
        (["5", "10", "15m"], CONFIG, [10, 5]),
        (["5", "15m"], CONFIG, [5]),
        (["5", "10", "15"], "another", [5]),  # steps of an earlier run are ignored
    ],
)
def test_a_run_with_load_step_continues_when_restarted(
    tmp_path: Path, on_disk, config, expected
) -> None:
    """torchrun and Slurm repeat the same command with load_step; later steps belong to this run."""
    make_steps(tmp_path, *on_disk)
    starts = decide_start(section(load_step=5), tmp_path, LAST_STEP, ASSETS, config)
    assert [start.step for start in starts] == expected


def test_the_format_of_a_folder_is_detected(tmp_path: Path) -> None:
    make_steps(tmp_path, "1", "2w", "3h", "4H", "5D", "6M", "7?", "8m")
    formats = [format_of(tmp_path / f"step-{number}") for number in range(1, 8)]
    assert formats == ["native", "native", "hf", "hf", "dcp", "pt", None]
    assert format_of(tmp_path / "nowhere") is None
    with pytest.raises(DamagedError):
        format_of(tmp_path / "step-8")
    (tmp_path / "step-1" / MANIFEST).unlink()
    with pytest.raises(DamagedError, match="step-1/manifest.json is missing"):
        format_of(tmp_path / "step-1")


def test_only_one_list_of_files_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of ranks a manifest has 40 MB, and every rank receives the start."""
    make_steps(tmp_path / "checkpoint", "5", "10", "15")
    fallbacks, loaded = [], []

    def load(start: Start, **_: Any) -> None:
        assert start.manifest is not None
        loaded.append((start.step, "files" in start.manifest, start.manifest["config"]))
        if start.step > 5:
            raise DamagedError("a hash differs")

    monkeypatch.setattr("torchtitan_like.checkpoint.checkpointer.load_states", load)
    with closing(one_rank(tmp_path)) as checkpointer:
        monkeypatch.setattr(checkpointer, "_identity", SimpleNamespace(hf_assets=tmp_path))
        starts = checkpointer.find_start(LAST_STEP)
        assert [start.manifest is None for start in starts] == [False, True, True]
        checkpointer.load(starts, {}, on_fallback=fallbacks.append)
    assert loaded == [(step, True, CONFIG) for step in (15, 10, 5)]
    assert [(start.step, start.seed, "files" in start.manifest) for start in fallbacks] == [
        (10, 7, True),
        (5, 7, False),
    ]
