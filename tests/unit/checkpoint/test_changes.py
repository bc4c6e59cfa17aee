"""On resume, allowed changes of settings are logged and all refused ones are in one error."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from torchtitan_like.checkpoint.changes import (
    RESOLVED,
    Change,
    affected_state,
    check_changes,
    diff_settings,
    warm_differences,
)
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.config import JobConfig, dump_toml, load_config
from torchtitan_like.config.base import Affected
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.layers import by_key
from torchtitan_like.resolved import resolve_layout

KEYS = [setting.key for setting in all_settings()]


def compare_runs(before: str, now: str, stored: Any = None, current: Any = None) -> Any:
    """Compare two runs by their command lines. stored, current: their resolved values."""
    toml, config = dump_toml(load_config(before.split())), load_config(now.split())
    return diff_settings(toml, by_key(config.model_dump()), stored or {}, current or {})


def warm_changes(stored: dict[str, Any], now: str, tokenizer: str) -> list[Change]:
    """Compare a manifest with a run of this command line."""
    run = resolve_layout(load_config(now.split()), 1)
    return warm_differences(stored, run.settings, run.args, tokenizer)


def keys(changes: list[Any]) -> list[str]:
    return [change.key for change in changes]


def test_every_setting_affects_a_known_state() -> None:
    assert {affected_state(key) for key in KEYS} == set(get_args(Affected))
    assert affected_state("model.args.dim") == "model"
    assert affected_state("data.sources.a.path") == "nothing"
    with pytest.raises(KeyError):
        affected_state("sectoin.key")


def test_resolved_settings_exist() -> None:
    assert set(RESOLVED) <= set(KEYS)


def test_the_same_settings_do_not_differ() -> None:
    line = "--model.args.dim 64 --data.sources.a.path README.md --lr_scheduler.decay_ratio None"
    assert compare_runs(line, line) == ([], [])
    assert check_changes(compare_runs(line, line)) is None


REFUSED = [
    "--model.flavor 8B",
    "--model.args.dim 64",
    "--model.converters quantize.linear.float8",
    "--experimental.custom_import my_models",
    "--training.dtype bfloat16",
    "--training.mixed_precision_param float32",
    "--training.max_norm 2",
    "--optimizer.lr 1e-3",
    "--optimizer.no_weight_decay *norm*",
    "--optimizer.groups.a.parameters *norm*",
    "--lr_scheduler.warmup_steps 10",
    "--lr_scheduler.total_steps 10",
    "--debug.matmul_precision high",
]


@pytest.mark.parametrize("line", REFUSED)
def test_changes_that_affect_the_result_are_refused(line: str) -> None:
    key = line.split()[0][2:]
    for before, now in ((line, ""), ("", line)):
        changes = compare_runs(before, now)
        assert keys(changes.refused) == [key] and not changes.harmless
        with pytest.raises(
            CheckpointError, match=rf'{key} .* -> .*checkpoint.allow_change = \["{key}"\]'
        ):
            check_changes(changes)


HARMLESS = [
    "--training.steps 20 --lr_scheduler.total_steps 10000",  # the same horizon as before
    "--training.local_batch_size 4",
    "--training.dataset_path /elsewhere/text.jsonl",
    "--model.hf_assets_path /elsewhere",
    "--data.cache_folder /cache",
    # The data fingerprint covers these keys.
    "--training.seq_len 1024",
    "--training.dataset shakespeare",
    "--data.shuffle false",
    "--data.add_bos false",
    "--optimizer.implementation foreach",
    "--parallelism.data_parallel_replicate_degree 2",
    "--activation_checkpoint.mode full",
    "--compile.enable",
    "--checkpoint.interval 7",
    "--metrics.log_freq 1",
    "--job.dump_folder /elsewhere",
    "--validation.enable",
    "--debug.deterministic",
    "--loss.chunk_mib 0",
    "--comm.train_timeout_seconds 9",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_other_changes_are_logged(line: str) -> None:
    changes = compare_runs("", line)
    assert not changes.refused
    assert keys(changes.harmless) == [line.split()[0][2:]]
    assert str(check_changes(changes)).startswith(
        f"Changed since the checkpoint: {line.split()[0][2:]} "
    )


def test_a_stored_name_of_another_version_is_compared() -> None:
    stored = '[optimizer]\nname = "Sophia"'
    (change,) = diff_settings(stored, by_key(JobConfig().model_dump()), {}, {}).refused
    assert str(change) == 'optimizer.name "Sophia" -> "AdamW"'


def test_the_average_may_start_or_end_but_not_change() -> None:
    off, on, other = "", "--ema.enable", "--ema.enable --ema.decay 0.9 --ema.no_warmup"
    for before, now in ((off, other), (other, off)):
        changes = compare_runs(before, now)
        assert not changes.refused
        assert keys(changes.harmless) == ["ema.enable", "ema.decay", "ema.warmup"]
    assert keys(compare_runs(on, other).refused) == ["ema.decay", "ema.warmup"]
    excluded = f"{other} --checkpoint.exclude_from_loading ema"
    assert not compare_runs(on, excluded).refused


def test_all_refused_changes_are_reported_together() -> None:
    changes = compare_runs(
        "--optimizer.lr 1e-3 --metrics.log_freq 1",
        "--training.max_norm 2 --lr_scheduler.decay_type sqrt",
    )
    assert sorted(keys(changes.refused)) == [
        "lr_scheduler.decay_type",
        "optimizer.lr",
        "training.max_norm",
    ]
    with pytest.raises(CheckpointError) as caught:
        check_changes(changes)
    for message in (
        "optimizer.lr 0.001 -> 0.0008; ",
        'decay_type "linear" -> "sqrt"; ',
        "training.max_norm 1.0 -> 2.",
    ):
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("--checkpoint.allow_change optimizer.lr,lr_scheduler.warmup_steps", ["model.flavor"]),
        ("--checkpoint.allow_change *", []),
        ("--checkpoint.allow_change opt*.*,model.flavor", ["lr_scheduler.warmup_steps"]),
        (
            "--checkpoint.exclude_from_loading optimizer",
            ["lr_scheduler.warmup_steps", "model.flavor"],
        ),
        ("--checkpoint.exclude_from_loading optimizer,lr_scheduler", ["model.flavor"]),
    ],
)
def test_allow_change_and_states_that_are_not_loaded_limit_the_refusal(
    line: str, refused: list[str]
) -> None:
    changes = compare_runs(
        "", f"--optimizer.lr 1 --lr_scheduler.warmup_steps 64 --model.flavor 8B {line}"
    )
    assert sorted(keys(changes.refused)) == refused
    assert {"optimizer.lr", "lr_scheduler.warmup_steps", "model.flavor"} - set(refused) <= set(
        keys(changes.harmless)
    )


@pytest.mark.parametrize(
    ("before", "now", "stored", "current", "refused"),
    [
        # only the resulting global batch size counts
        ("--training.global_batch_size 16", "--training.local_batch_size 4", 16, 16, []),
        ("", "", 16, 32, ["training.global_batch_size"]),
        (
            "--training.global_batch_size 16",
            "--training.global_batch_size 32",
            16,
            32,
            ["training.global_batch_size"],
        ),
        ("", "--training.global_batch_size 16", None, 16, []),  # the first format lacks it
        (
            "--training.global_batch_size 8",
            "--training.global_batch_size 16",
            None,
            16,
            ["training.global_batch_size"],
        ),
    ],
)
def test_another_global_batch_size_is_refused(
    before: str, now: str, stored: int | None, current: int, refused: list[str]
) -> None:
    summary = {} if stored is None else {"global_batch_size": stored}
    assert (
        keys(compare_runs(before, now, summary, {"global_batch_size": current}).refused) == refused
    )


@pytest.mark.parametrize(
    ("now", "refused"), [("", []), ("--debug.seed 7", []), ("--debug.seed 8", ["debug.seed"])]
)
@pytest.mark.parametrize("before", ["", "--debug.seed 7"])
def test_another_seed_is_refused(before: str, now: str, refused: list[str]) -> None:
    """An unset seed means the seed of the checkpoint."""
    assert keys(compare_runs(before, now, {"seed": 7}).refused) == refused


def test_a_seed_checkpoint_fixes_only_the_model() -> None:
    """A single rank saves a seed checkpoint before training."""
    line = "--optimizer.lr 1 --debug.seed 8 --model.flavor 8B"
    changes = compare_runs(
        "", line, {"step": 0, "seed": 7, "global_batch_size": 8}, {"global_batch_size": 64}
    )
    assert keys(changes.refused) == ["model.flavor"]
    assert sorted(keys(changes.harmless)) == [
        "debug.seed",
        "optimizer.lr",
        "training.global_batch_size",
    ]
    assert len(compare_runs("", line, {"step": 1, "seed": 7}).refused) == 3


def test_settings_of_other_versions_are_compared() -> None:
    """Old names are translated, missing settings have their default, unknown ones are ignored."""
    now = by_key(load_config(["--training.local_batch_size", "4"]).model_dump())
    stored = (
        "[training]\nbatch_size = 4\n[model]\nmystery = 5\nflavor = 'debugmodel'\n[future]\nx = 1"
    )
    assert diff_settings(stored, now, {}, {}) == ([], [])


@pytest.mark.parametrize("text", ["[training", "x = "])
def test_an_invalid_stored_configuration_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not valid TOML"):
        diff_settings(text, by_key(JobConfig().model_dump()), {}, {})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--training.steps 100", "--training.steps 200 --lr_scheduler.total_steps 100"),
        ("--training.steps 100 --lr_scheduler.total_steps 200", "--training.steps 200"),
    ],
)
def test_the_default_horizon_may_be_set_explicitly(before: str, now: str) -> None:
    """An unset horizon equals training.steps."""
    assert keys(compare_runs(before, now).refused) == []


def test_another_horizon_is_refused() -> None:
    changes = compare_runs(
        "--training.steps 100", "--training.steps 200 --lr_scheduler.total_steps 150"
    )
    assert keys(changes.refused) == ["lr_scheduler.total_steps"]


def test_a_horizon_that_grows_with_the_steps_is_accepted_and_logged() -> None:
    """The learning rates differ from an uninterrupted run with the longer horizon."""
    changes = compare_runs("--training.steps 100", "--training.steps 200")
    assert (
        sorted(keys(changes.harmless)) == ["lr_scheduler.total_steps", "training.steps"]
        and not changes.refused
    )
    assert changes.accepted() == ["lr_scheduler.total_steps 100 -> 200"]
    fixed = "--lr_scheduler.total_steps 100 --training.steps"
    assert compare_runs(f"{fixed} 100", f"{fixed} 200").accepted() == []


def test_skipped_steps_are_accepted_and_logged() -> None:
    """An uninterrupted run would have read these samples."""
    changes = compare_runs("", "--training.skip_steps [[5,8]]")
    assert not changes.refused
    assert changes.accepted() == ["training.skip_steps [] -> [[5, 8]]"]


def test_settings_of_float8_are_compared_where_one_of_the_runs_uses_it() -> None:
    converter = "--model.converters quantize.linear.float8"
    recipe = "--quantize.linear.float8.recipe_name rowwise"
    assert not compare_runs("", recipe).refused
    for before, now in ((converter, f"{converter} {recipe}"), (f"{converter} {recipe}", "")):
        assert "quantize.linear.float8.recipe_name" in keys(compare_runs(before, now).refused)


@pytest.mark.parametrize("excluded", ["dataloader", "train_state"])
@pytest.mark.parametrize("line", ["--training.global_batch_size 16", ""])
def test_the_batch_size_may_change_if_the_data_position_is_not_loaded(
    excluded: str, line: str
) -> None:
    """A batch size that follows from the layout (-1) is compared too."""
    resolved = {"global_batch_size": 32}, {"global_batch_size": 16}
    changes = compare_runs("", line, *resolved)
    assert keys(changes.refused) == ["training.global_batch_size"]
    changes = compare_runs("", f"{line} --checkpoint.exclude_from_loading {excluded}", *resolved)
    assert not changes.refused
    assert changes.reordered() == ["training.global_batch_size 32 -> 16"]
    assert not compare_runs("", "--checkpoint.exclude_from_loading dataloader").reordered()


def test_accepted_changes_that_affect_the_result_are_listed() -> None:
    now = "--optimizer.lr 1 --metrics.log_freq 7 --checkpoint.allow_change optimizer.lr"
    assert compare_runs("", now).accepted() == ["optimizer.lr 0.0008 -> 1.0"]


@pytest.mark.parametrize(
    ("before", "now", "differences"),
    [
        ("", "--optimizer.lr 0.1", []),
        ("[model.args]\nn_heads = 16", "--model.args.n_heads 8", ["model.args.n_heads"]),
        ("[model.args]\nn_heads = 16", "", []),  # the value of the flavor
        ("[model.args]\nrope_theta = 500.0", "", ["model.args.rope_theta"]),
        ("[model.args]\nunknown = 3\ndim = 8", "--model.args.dim 64", ["model.args.dim"]),
        ('[model]\nname = "gone"', "", ["model.name"]),
        ('[training]\ndtype = "bfloat16"', "", []),  # the load converts, and logs it
        (
            "[quantize.linear.float8]\nemulate = true",
            "",
            ["quantize.linear.float8.emulate"],
        ),
    ],
)
def test_a_warm_start_names_what_the_weights_were_trained_with(
    before: str, now: str, differences: list[str]
) -> None:
    assert keys(warm_changes({"config": before}, now, "a")) == differences


def test_a_warm_start_names_another_tokenizer() -> None:
    stored = {"config": "", "data": {"fingerprint": {"tokenizer": "a"}}}
    assert warm_changes(stored, "", "a") == []
    assert keys(warm_changes(stored, "", "b")) == ["tokenizer"]
