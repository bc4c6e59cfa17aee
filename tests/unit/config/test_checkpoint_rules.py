"""Settings of [checkpoint] that contradict each other, and combinations that are valid."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from torchtitan_like.config import ConfigError, load_config

HF_LAST, FULL_LAST = "--last_save_in_hf", "--no_last_save_model_only"
SEED, ON = "--create_seed_checkpoint", "--enable"

# tests/unit/check/test_every_rule.py has an example of each rule. These are others.
CONTRADICTIONS = [
    ("--start scratch --initial_load_in_hf", "start", "or remove them"),
    ("--start warm --initial_load_path=", "start", "set checkpoint.initial_load_path"),
    ("--start warm --initial_load_path x --load_step 5", "load_step", "or remove load_step"),
    (f"{SEED} --start warm --initial_load_path x", "start", "remove one of the two settings"),
    (f"{SEED} --initial_load_in_hf", "initial_load_path", "remove one of the two settings"),
    ("--keep_latest_k 1", "keep_latest_k", ""),
    ("--interval 0", "interval", ""),
    ("--interval_minutes -1", "interval_minutes", ""),
    ("--hf_shard_gb 0", "hf_shard_gb", ""),
    ("--export_dtype int8", "export_dtype", ""),
    ("--exclude_from_loading weights", "exclude_from_loading", ""),
]


def arguments(line: str) -> list[str]:
    return [word.replace("--", "--checkpoint.", 1) for word in line.split()]


@pytest.mark.parametrize(("line", "key", "remedy"), CONTRADICTIONS)
def test_contradictions_are_refused(line: str, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments(f"{ON} {line}"))
    keys = [problem.key for problem in caught.value.problems]
    assert f"checkpoint.{key}" in keys
    (problem,) = [
        problem for problem in caught.value.problems if problem.key == f"checkpoint.{key}"
    ]
    assert remedy in problem.remedy and "\n" not in str(problem)


def save_settings() -> Iterator[tuple[str, bool]]:
    """Yield arguments for async x HF x weights-only x dtype x exports, and if they are valid."""
    choices = (
        ("disabled", "async", "async_with_pinned_mem"),
        ("", HF_LAST),
        ("", FULL_LAST),
        ("", "bfloat16"),
        (0, 5),
    )
    for mode, hf, full, dtype, hf_interval in product(*choices):
        export = f"--export_dtype {dtype}" * bool(dtype)
        line = f"{ON} --async_mode {mode} {hf} {full} {export} --hf_interval {hf_interval}"
        yield line, not full or not (hf or (dtype and not hf_interval))


@pytest.mark.parametrize(("line", "is_valid"), list(save_settings()))
def test_combinations_of_save_settings(line: str, is_valid: bool) -> None:
    if is_valid:
        assert load_config(arguments(line)).checkpoint.enable
    else:
        with pytest.raises(ConfigError):
            load_config(arguments(line))


@pytest.mark.parametrize(
    "line",
    [
        "--start warm --initial_load_in_hf",
        "--start warm --initial_load_path x --exclude_from_loading optimizer",
        "--initial_load_path x --no_initial_load_model_only",
        "--initial_load_in_hf --initial_load_in_hf_quantized",
        "--start resume --load_step 5",
        "--load_step 5 --initial_load_path x",
        f"{ON} --load_only --load_step 5",
        f"{ON} --load_only {HF_LAST} --async_mode async",
        f"{ON} {SEED} --start scratch",
        f"{ON} {SEED} --async_mode async",
        "--interval 10 --keep_every 20 --interval_minutes 2.5",
        f"--export_dtype float16 --hf_interval 10 {FULL_LAST}",
        "--folder /absolute/folder",
        "--start scratch --initial_load_path=",
        f"{ON} --load_only {HF_LAST} {FULL_LAST}",
        f"{ON} --load_only --export_dtype bfloat16 {FULL_LAST}",
        f"{ON} --load_only --interval 10 --keep_every 25",
        f"{ON} --start resume --initial_load_path gs://bucket/step-5",
        f"{ON} --start resume --initial_load_in_hf_quantized",
        f"{ON} --start resume --initial_load_upcycle",
    ],
)
def test_valid_combinations_are_accepted(line: str) -> None:
    load_config(arguments(line))
