"""Files and arguments are merged into one configuration."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator

from torchtitan_like.config import ConfigError, JobConfig, dump_toml, load_config
from torchtitan_like.config.arguments import last_value
from torchtitan_like.config.fields import Setting, all_settings
from torchtitan_like.config.layers import Layer, leaves, parse_toml
from torchtitan_like.config.loader import CommandLine, build_config

ARGUMENTS: list[tuple[str, str, Any]] = [
    ("--training.steps 3", "training.steps", 3),
    ("--training.steps=3", "training.steps", 3),
    ("--training.local-batch-size 3", "training.local_batch_size", 3),
    ("--lr-scheduler.warmup-steps 3", "lr_scheduler.warmup_steps", 3),
    ("--training.global_batch_size -1", "training.global_batch_size", -1),
    ("--optimizer.lr 1e-3", "optimizer.lr", 1e-3),
    ("--optimizer.lr 1", "optimizer.lr", 1.0),
    ("--checkpoint.enable", "checkpoint.enable", True),
    ("--checkpoint.enable=true", "checkpoint.enable", True),
    ("--checkpoint.enable=True", "checkpoint.enable", True),
    ("--checkpoint.enable=false", "checkpoint.enable", False),
    ("--checkpoint.enable --checkpoint.enable false", "checkpoint.enable", False),
    ("--checkpoint.enable --checkpoint.no_enable", "checkpoint.enable", False),
    ("--checkpoint.enable --checkpoint.no-enable", "checkpoint.enable", False),
    ("--checkpoint.enable_checkpoint", "checkpoint.enable", True),
    ("--checkpoint.no_enable_checkpoint", "checkpoint.enable", False),
    ("--checkpoint.exclude_from_loading lr_scheduler,dataloader",
     "checkpoint.exclude_from_loading", ["lr_scheduler", "dataloader"]),
    ("--optimizer.no_weight_decay *norm*,*.bias", "optimizer.no_weight_decay", ["*norm*", "*.bias"]),
    ("--model.converters=", "model.converters", []),
    ("--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,norm,output --training.steps 3",
     "parallelism.module_fqns_per_model_part", [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]),
    ("--training.dataset_path x --training.dataset_path None", "training.dataset_path", None),
    ("--parallelism.context_parallel_load_balancer None", "parallelism.context_parallel_load_balancer", None),
    ("--training.dataloader.num_workers 2", "training.dataloader.num_workers", 2),
    ("--training.batch_ramp 8,4,100 --training.global_batch_size 16", "training.batch_ramp", [8, 4, 100]),
    ("--training.skip_steps 11,15 20,20", "training.skip_steps", [[11, 15], [20, 20]]),
    ("--training.skip_steps 2,3 --training.skip_steps=", "training.skip_steps", []),
    ("--training.skip_steps [[2,3]]", "training.skip_steps", [[2, 3]]),
    ("--training.skip_steps [[2, 3], [5, 6]] --training.steps 9", "training.skip_steps", [[2, 3], [5, 6]]),
    ("--training.batch_ramp=[8,4,100] --training.global_batch_size 16", "training.batch_ramp", [8, 4, 100]),
    ("--optimizer.no_weight_decay [no]*,*norm*", "optimizer.no_weight_decay", ["[no]*", "*norm*"]),
    ('--optimizer.no_weight_decay ["*norm*","*.bias"]', "optimizer.no_weight_decay", ["*norm*", "*.bias"]),
    ("--data.sources.a.path x --data.sources.a.weight-from 10,0.5 20,3", "data.sources.a.weight_from", [[10, 0.5], [20, 3]]),
    ("--data.sources.my-wiki.path x", "data.sources.my-wiki.path", "x"),
    ("--data.sources.my-wiki.path x --data.sources.my-wiki.max-epochs 2", "data.sources.my-wiki.max_epochs", 2),
    ("--model.args.dim 256", "model.args.dim", 256),
    ("--model.args.depth_init false", "model.args.depth_init", False),
    ("--model.args.init_std sqrt(1/(3h))", "model.args.init_std", "sqrt(1/(3h))"),
    ("--model.args.depth_init False", "model.args.depth_init", False),
    ("--model.args.depth_init=True", "model.args.depth_init", True),
    ("--model.args.depth_init --training.steps 3", "model.args.depth_init", True),
    ("--model.args.n_kv_heads None", "model.args.n_kv_heads", None),
    ("--activation_checkpoint.selective_ac_option 2", "activation_checkpoint.selective_ac_option", "2"),
    ("--job.print_config", "job.print_config", True),
]  # fmt: skip


@pytest.mark.parametrize(("line", "key", "value"), ARGUMENTS)
def test_arguments_are_parsed(line: str, key: str, value: Any) -> None:
    loaded = load_config(line.split(" ")).value_of(key)
    assert (loaded, type(loaded)) == (value, type(value))


ALIASES: list[tuple[str, str, Any]] = [
    ("[checkpoint]\nenable_checkpoint = true", "checkpoint.enable", True),
    (
        "[checkpoint]\nlast_save_model_weights_only = false",
        "checkpoint.last_save_model_only",
        False,
    ),
    (
        "[checkpoint]\ninitial_load_model_weights_only = false",
        "checkpoint.initial_load_model_only",
        False,
    ),
    ("[checkpoint]\nlast_save_in_safetensors_format = true", "checkpoint.last_save_in_hf", True),
    ("[training]\nbatch_size = 4", "training.local_batch_size", 4),
    ("[training]\ncompile = true", "compile.enable", True),
    ("[experimental]\ncontext_parallel_degree = 2", "parallelism.context_parallel_degree", 2),
    (
        '[experimental]\npipeline_parallel_schedule = "GPipe"',
        "parallelism.pipeline_parallel_schedule",
        "GPipe",
    ),
    ("[training]\ntensor_parallel_degree = 2", "parallelism.tensor_parallel_degree", 2),
    ("[float8]\nemulate = true", "quantize.linear.float8.emulate", True),
    ('[model]\nconverters = ["float8"]', "model.converters", ["quantize.linear.float8"]),
]


@pytest.mark.parametrize(("toml", "key", "value"), ALIASES)
def test_older_names_are_accepted_with_a_notice(
    toml: str, key: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "old.toml").write_text(toml)
    config = load_config(["--job.config_file", str(tmp_path / "old.toml")])
    assert config.value_of(key) == value
    (notice,) = config.notices
    assert notice.severity == "warning" and "\n" not in str(notice)
    assert notice.origin.endswith("old.toml")


def test_precedence_and_origin(tmp_path: Path) -> None:
    """Command line > file > extended file (relative to the file that extends it) > default."""
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/root.toml").write_text(
        "[training]\nsteps = 1\nseq_len = 1\ngc_freq = 1\n[model.args]\ndim = 1"
    )
    (tmp_path / "bases/base.toml").write_text(
        'extends = "root.toml"\n[training]\nsteps = 2\nseq_len = 2'
    )
    (tmp_path / "top.toml").write_text(
        'extends = "bases/base.toml"\n[training]\nsteps = 3\n[model.args]\nn_layers = 3'
    )
    top = str(tmp_path / "top.toml")
    config = load_config(["--job.config_file", top, "--training.local_batch_size", "4"])
    assert (config.training.steps, config.training.seq_len, config.training.gc_freq) == (3, 2, 1)
    assert config.model.args == {"dim": 1, "n_layers": 3}
    assert config.origin_of("training.steps") == top
    assert config.origin_of("training.gc_freq") == str(tmp_path / "bases/root.toml")
    assert config.origin_of("training.local_batch_size") == "command line"
    assert config.origin_of("training.max_norm") == "default"
    assert load_config(["--job.config_file", top, "--training.steps", "5"]).training.steps == 5


def test_a_config_of_the_package_can_be_extended(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('extends = "debug_model.toml"\n[training]\nsteps = 3')
    config = load_config(["--job.config_file", str(tmp_path / "my.toml")])
    assert (config.training.steps, config.model.flavor) == (3, "debugmodel")
    # A file in the same folder takes precedence.
    (tmp_path / "debug_model.toml").write_text("[training]\nseq_len = 7")
    assert load_config(["--job.config_file", str(tmp_path / "my.toml")]).training.seq_len == 7


def test_a_path_may_start_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~` is expanded on loading, so that checks, files and logs have the same path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text(
        '[job]\ndump_folder = "~/outputs"\n[data.sources.a]\npath = "~/a.jsonl"'
    )
    (tmp_path / "top.toml").write_text(
        'extends = "~/base.toml"\n[checkpoint]\ninitial_load_path = "~/other"'
    )
    config = load_config(
        ["--job.config_file=~/top.toml", "--data.cache_folder=~/cache", "--model.hf_assets_path=~"]
    )
    assert config.job.dump_folder == str(tmp_path / "outputs")
    assert config.data.sources["a"].path == str(tmp_path / "a.jsonl")
    assert config.checkpoint.initial_load_path == str(tmp_path / "other")
    assert (config.data.cache_folder, config.model.hf_assets_path) == (
        str(tmp_path / "cache"),
        str(tmp_path),
    )
    assert "~" not in dump_toml(config)
    path_settings = [
        setting
        for setting in all_settings()
        if setting.kind is str and setting.path[-1].endswith(("path", "folder", "csv"))
    ]
    assert len(path_settings) > 10 and all(
        AfterValidator(expanduser) in _metadata(setting) for setting in path_settings
    )


def _metadata(setting: Setting) -> list[Any]:
    inner = [part for kind in get_args(setting.field.annotation) for part in get_args(kind)]
    return [*setting.field.metadata, *inner]


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "top.toml").write_text("[training]\nsteps = 5", encoding="utf-8-sig")
    assert load_config(["--job.config_file", str(tmp_path / "top.toml")]).training.steps == 5


def test_nan_is_not_reported_as_a_renamed_value() -> None:
    for name in ("optimizer.lr", "lr_scheduler.lr_min"):
        with pytest.raises(ConfigError) as caught:
            load_config([f"--{name}", "nan"])
        assert not [
            problem
            for problem in caught.value.problems
            if "is read as" in str(problem) or "another value" in str(problem)
        ]


def test_a_config_file_key_inside_a_file_is_warned_about(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('[job]\nconfig_file = "other.toml"')
    (notice,) = load_config(["--job.config_file", str(tmp_path / "one.toml")]).notices
    assert notice.origin.endswith("one.toml") and 'write `extends = "..."`' in str(notice)


def test_none_unsets_a_value_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[lr_scheduler]\ntotal_steps = 5")
    (tmp_path / "top.toml").write_text(
        'extends = "base.toml"\n[lr_scheduler]\ntotal_steps = "None"'
    )
    assert (
        load_config(["--job.config_file", str(tmp_path / "top.toml")]).lr_scheduler.total_steps
        is None
    )


def test_integers_are_numbers_and_nothing_else_is_converted(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[optimizer]\nlr = 1\n[training]\nmax_norm = 2")
    config = load_config(["--job.config_file", str(tmp_path / "x.toml")])
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (1.0, float)
    with pytest.raises(ConfigError):
        build_config([Layer("x", [(("training", "steps"), True)])])


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config([])
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 3  # type: ignore[misc]


def _values(setting: Setting) -> st.SearchStrategy[Any]:
    """Return a strategy for values of one key. Values of several keys may conflict."""
    text = st.text(min_size=1, max_size=8)
    by_kind = {
        bool: st.booleans(),
        int: st.integers(2, 10**6),
        float: st.floats(1e-9, 0.99),
        str: st.just("op") if setting.path[-1] == "selective_ac_option" else text,
        list[str]: st.lists(text, max_size=3),
        list[list[str]]: st.lists(st.lists(text, max_size=3), max_size=2),
        list[int]: st.just([2, 2, 9]),
        list[list[int]]: st.just([[3, 4], [9, 9]]),
        list[list[int | float]]: st.just([[3, 0.5], [9, 2]]),
    }
    if setting.is_free:
        scalar = st.one_of(
            st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), text
        )
        return st.dictionaries(
            text, st.one_of(scalar, st.lists(scalar, max_size=3)), min_size=1, max_size=3
        )
    if setting.name_of is not None and not setting.choices:  # only user code has names
        return st.none() if setting.optional else st.just([])
    if setting.choices:
        choice = st.sampled_from(setting.choices)
        values: st.SearchStrategy[Any] = (
            st.lists(choice, max_size=2) if isinstance(setting.default, list) else choice
        )
    else:
        values = by_kind[setting.kind]
    return st.one_of(st.none(), values) if setting.optional else values


SETTINGS = [
    setting
    for setting in all_settings()
    if not setting.is_named_tables and setting.key != "job.config_file"
]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    chosen = draw(
        st.lists(st.sampled_from(SETTINGS), max_size=12, unique_by=lambda setting: setting.path)
    )
    tables = {setting.path[:-1] for setting in chosen if "<name>" in setting.path}
    required = {("optimizer", "groups", "<name>"): ("parameters", ["*"])}
    leaves = [(_named(setting.path), draw(_values(setting))) for setting in chosen]
    for table in sorted(tables):
        key, value = required.get(table, ("path", "x"))
        leaves.append(((*_named(table), key), value))
    return Layer("drawn", leaves)


def _named(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("my-source" if part == "<name>" else part for part in path)


@given(layers())
def test_dumped_toml_loads_as_the_same_configuration(layer: Layer) -> None:
    config = _build_valid_part(layer)
    text = dump_toml(config)
    again = build_config([Layer("dumped", list(leaves(parse_toml(text))))])
    assert again.model_dump() == config.model_dump()
    assert dump_toml(again) == text


def _build_valid_part(layer: Layer) -> JobConfig:
    try:
        return build_config([layer])
    except ConfigError as error:
        assert error.partial is not None
        return error.partial


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--job.config_file a.toml --job.config-file=b.toml", "b.toml"),
        ("--job.config_file a.toml --job.config_file", "a.toml"),
        ("--job.config_file --training.steps 5", None),
        ("--training.steps 5", None),
        ("", None),
    ],
)
def test_the_last_value_of_a_flag_is_found_without_parsing_the_others(
    line: str, expected: str | None
) -> None:
    assert last_value(line.split(), ("job", "config_file")) == expected


def test_a_flag_without_a_value_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", "--training.steps", "5"])
    assert [problem.key for problem in caught.value.problems] == ["job.config_file"]


def test_a_module_that_fails_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n    file.write('x')\n1 / 0"
    )
    command_line = CommandLine([f"--experimental.custom_import={tmp_path / 'own.py'}"])
    first, second = command_line.import_extensions(), command_line.import_extensions()
    assert first == second and "ZeroDivisionError" in str(first[0])
    assert (tmp_path / "imports").read_text() == "x"


def test_settings_override_a_loaded_configuration(tmp_path: Path) -> None:
    """Its files are not read again."""
    file = tmp_path / "mine.toml"
    file.write_text('extends = "debug_model.toml"\n[data.sources.mine]\npath = "a"\n')
    words = ["--job.config_file", str(file), "--training.steps", "5"]
    base, whole = load_config(words), load_config([*words, "--optimizer.lr", "1"])
    file.unlink()
    again = CommandLine(["--optimizer.lr", "1"], base=base).load()
    assert dump_toml(again) == dump_toml(whole)
    named = {"job.config_file": "command line"}
    assert again._origins | named == whole._origins
    without = CommandLine([], base=base.with_defaults(["data"])).load()
    assert without.data.sources == {} and not without.is_set("data.sources")
