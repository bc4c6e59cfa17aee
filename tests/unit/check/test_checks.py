"""Checks that need several packages report the right errors and warnings."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from torchtitan_like.check import check_config, load_checked, offload_memory
from torchtitan_like.config import ConfigError, Problem, load_config
from torchtitan_like.util.host import HostMemory

TEXT = "torchtitan_like/data/corpus/shakespeare_validation.jsonl"


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def check(line: str, world_size: int | None = 1, **options: object) -> list[Problem]:
    options.setdefault("training", True)
    return check_config(load_config(line.split()), world_size, **options)  # type: ignore[arg-type]


def keys(problems: list[Problem], severity: str) -> list[str]:
    return [problem.key for problem in problems if problem.severity == severity]


def test_the_defaults_have_no_problem() -> None:
    assert check("--training.steps 1000", 4) == []


MOE = "--model.name qwen3 --model.flavor debugmodel_moe --parallelism.expert_parallel_degree 2"
UNAVAILABLE = [
    ("--model.converters quantize.linear.mx", "model.converters"),
    ("--model.converters quantize.linear.float8,quantize.grouped_mm.float8", "model.converters"),
    (f"{MOE} --model.converters quantize.grouped_mm.mx", "model.converters"),
    (f"{MOE} --parallelism.expert_parallel_comm_backend deepep",
     "parallelism.expert_parallel_comm_backend"),
    ("--memory_estimation.enable --memory_estimation.disable_fake_mode",
     "memory_estimation.disable_fake_mode"),
    ("--job.custom_config_module my.module", "job.custom_config_module"),
    ("--experimental.custom_args_module my.module", "experimental.custom_args_module"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "key"), UNAVAILABLE)
def test_unavailable_features_are_refused_only_in_training(line: str, key: str) -> None:
    arguments = f"--training.steps 1000 {line}"
    (problem,) = [each for each in check(arguments, 2) if each.severity == "error"]
    assert problem.key == key and "not available yet" in problem.expected and problem.remedy
    checked = check(arguments, 2, training=False)
    assert keys(checked, "error") == []
    assert any(problem.key == key and problem.remedy for problem in checked)


def test_each_key_is_reported_once() -> None:
    """A key that two checks refuse is reported once: expert parallelism on a dense model."""
    (problem,) = check("--training.steps 1000 --parallelism.expert_parallel_degree 2", 2)
    assert (
        problem.key == "parallelism.expert_parallel_degree"
        and "llama3 has no experts" in problem.expected
    )


WARNINGS = [
    ("--training.steps 1000 --training.dataloader.pin_memory", "training.dataloader.pin_memory", "either way"),
    ("--training.steps 1000 --training.dataloader.num_workers 1 --training.dataloader.persistent_workers",
     "training.dataloader.persistent_workers", "as long as the run"),
    ("--training.steps 1000 --compile.components loss", "compile.components", "it needs compile.enable = true"),
    ("--training.steps 1000 --checkpoint.initial_load_path x", "checkpoint.initial_load_path", "checkpoint.enable"),
    ("--training.steps 1000 --checkpoint.enable --checkpoint.hf_shard_gb 1", "checkpoint.hf_shard_gb",
     "it needs checkpoint.last_save_in_hf = true or checkpoint.hf_interval > 0"),
    ("--training.steps 1000 --checkpoint.enable --checkpoint.no_enable_ft_dataloader_checkpoints",
     "checkpoint.enable_ft_dataloader_checkpoints", "fault_tolerance.enable = true"),
    ("--training.steps 1000 --checkpoint.enable --checkpoint.no_initial_load_model_only",
     "checkpoint.initial_load_model_only", "it needs checkpoint.initial_load_path"),
    ("--training.steps 1000 --validation.freq 5", "validation.freq", "it needs validation.enable = true"),
    ("--training.steps 1000 --parallelism.pipeline_parallel_schedule GPipe", "parallelism.pipeline_parallel_schedule",
     "parallelism.pipeline_parallel_degree > 1"),
    ("--training.steps 1000 --activation_checkpoint.memory_budget 0.3", "activation_checkpoint.memory_budget",
     'activation_checkpoint.mode = "memory_budget"'),
    (f"--training.steps 1000 --data.sources.a.path {TEXT} --training.dataset c4", "training.dataset",
     "[data.sources] names the dataset"),
    ("--training.steps 1000 --checkpoint.enable --ema.enable --ema.validation", "ema.validation",
     "it needs validation.enable = true"),
    ("--training.steps 1000 --ema.decay 0.99", "ema.decay", "it needs ema.enable = true"),
    ("--training.steps 1000 --training.dataloader.pin_memory", "training.dataloader.pin_memory", "has no effect"),
    ("--training.steps 1000 --debug.trace_batch_nums 3", "debug.trace_batch_nums", "it needs debug.detect_overflow = true"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "key", "part"), WARNINGS)
def test_settings_cause_warnings(line: str, key: str, part: str) -> None:
    (warning,) = check(line)
    assert (warning.severity, warning.key) == ("warning", key)
    assert part in str(warning)


@pytest.mark.parametrize(
    "flags", ["", "--model.name qwen3 --model.flavor 0.6B --model.args.n_layers 6"]
)
def test_patterns_without_weight_decay_match_a_parameter(flags: str) -> None:
    """Tied weights are one parameter with the name of the first."""
    line = f"--training.steps 1000 --model.args.vocab_size 2048 --model.args.enable_weight_tying true {flags}"
    assert (
        check(f"{line} --optimizer.no_weight_decay *norm*,layers.5.*,tok_embeddings.weight") == []
    )
    for pattern in ("*norms*", "layers.6.*", "output.*", "*.bias"):
        (problem,) = check(f"{line} --optimizer.no_weight_decay *norm*,{pattern}")
        assert (problem.severity, problem.key) == ("error", "optimizer.no_weight_decay")
        assert (
            f'"{pattern}" matches none of tok_embeddings.weight, layers.0.att' in problem.expected
        )


def test_patterns_of_groups_match_parameters_once() -> None:
    line = "--training.steps 1000 --model.args.vocab_size 2048 --optimizer.groups.a.parameters"
    other = "--optimizer.groups.b.parameters"
    assert check(f"{line} *norm* {other} output.*,layers.5.*wq*") == []
    (problem,) = check(f"{line} *norms* {other} output.*")
    assert problem.key == "optimizer.groups.a.parameters"
    assert '"*norms*" matches none of tok_embeddings.weight' in problem.expected
    (problem,) = check(f"{line} *norm* {other} layers.0.*")
    assert problem.key == "optimizer.groups.b.parameters"
    assert 'layers.0.attention_norm.weight is in "a" too' in problem.expected


@pytest.mark.parametrize("table", ["data", "validation"])
def test_unknown_dataset_formats_are_refused(table: str, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    for name in ("a.md", "tables/a.csv"):
        (tmp_path / name).touch()
    line = "--training.steps 1000 --validation.enable --validation.dataset shakespeare_validation"
    section = "training" if table == "data" else table
    for name, message in (
        ("a.md", "unknown format of"),
        ("tables", "a folder without files of a known"),
    ):
        for key in (f"{section}.dataset_path", f"{table}.sources.a.path"):
            problem, *_ = check(f"{line} --{key} {tmp_path / name}")
            assert (problem.severity, problem.key) == ("error", key)
            assert message in problem.expected and ".jsonl .json .ndjson" in problem.expected
    named = f"{line} --{table}.sources.a.path {tmp_path}/a.md --{table}.sources.a.format"
    assert keys(check(f"{named} text"), "error") == keys(check(f"{named} tokens"), "error") == []


def test_a_file_may_contain_settings_of_a_feature_that_it_disables(tmp_path: Path) -> None:
    """Only settings in a later layer are reported."""
    file = tmp_path / "x.toml"
    file.write_text('[training]\nsteps = 1000\n[compile]\nenable = false\nbackend = "eager"')
    line = f"--job.config_file {file}"
    assert check(line) == []
    assert keys(check(f"{line} --compile.components loss"), "warning") == ["compile.components"]


def test_token_files_do_not_need_bos_and_eos(tmp_path: Path) -> None:
    """The path of a Megatron pair is the common prefix of the two files."""
    shutil.copy("tests/assets/tokenizer/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": null}')
    for suffix in (".bin", ".idx"):
        (tmp_path / f"wiki{suffix}").write_text("x")
    file = tmp_path / "x.toml"
    file.write_text(
        f'[training]\nsteps = 1000\n[data.sources.wiki]\npath = "{tmp_path}/wiki"\nformat = "tokens"\n'
    )
    line = f"--job.config_file {file} --model.hf_assets_path {tmp_path}"
    assert check(line) == []
    assert keys(check(f"{line} --data.sources.wiki.format text"), "error") == [
        "model.hf_assets_path", "data.sources.wiki.path",
    ]  # fmt: skip
    (warning,) = check(f"{line} --data.no_add_eos")
    assert (warning.severity, warning.key) == (
        "warning",
        "data.add_eos",
    ) and "has no effect" in str(warning)
    assert keys(check(f"{line} --data.on_bad_record skip"), "warning") == ["data.on_bad_record"]
    text = f"--validation.enable --validation.dataset_path {TEXT}"
    assert keys(check(f"{line} --data.no_add_bos --data.no_add_eos {text}"), "warning") == []


def test_settings_without_effect_on_weight_decay_and_schedule_warn(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        "training.steps = 1000\noptimizer.weight_decay = 0.0\nlr_scheduler.decay_ratio = 0.0\n"
    )
    line = f"--job.config_file {file} --optimizer.no_weight_decay *norm*"
    line += " --lr_scheduler.decay_type cosine --lr_scheduler.min_lr_factor 0.1"
    names = ["optimizer.no_weight_decay", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"]
    assert keys(check(line), "warning") == names
    assert check(f"{line} --optimizer.weight_decay 0.1 --lr_scheduler.decay_ratio 0.1") == []


def test_mixture_settings_have_no_effect_in_validation() -> None:
    line = f"--training.steps 1000 --validation.enable --validation.sources.a.path {TEXT}"
    assert check(f"{line} --validation.sources.a.weight 1.0") == []
    options = "--validation.sources.a.weight 2 --validation.sources.a.weight_from 9,3 --validation.sources.a.max_epochs 1"
    names = [f"validation.sources.a.{name}" for name in ("weight", "weight_from", "max_epochs")]
    assert keys(check(f"{line} {options}"), "warning") == names


@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        ("token_dtype uint16", "token_dtype", 'it needs data.sources.a.format = "tokens"'),
        (
            "text_field body --data.sources.a.format tokens",
            "text_field",
            'it needs data.sources.a.format other than "tokens": token files contain no text',
        ),
    ],
)
def test_settings_of_other_formats_have_no_effect(line: str, key: str, reason: str) -> None:
    problems = check(f"--training.steps 1000 --data.sources.a.path {TEXT} --data.sources.a.{line}")
    (warning,) = [problem for problem in problems if problem.has_no_effect]
    assert warning.key == f"data.sources.a.{key}"
    assert warning.expected == f"has no effect in this run: {reason}"


def test_hub_paths_need_a_revision_and_a_text_format() -> None:
    line = "--training.steps 1000 --data.sources.a.path hf://datasets/owner/name@v1/*.parquet"
    assert check(line) == []
    (problem,) = check(line.replace("@v1", ""))
    assert (
        problem.key == "data.sources.a.path"
        and "hf://datasets/OWNER/NAME@REVISION/PATTERN" in str(problem)
    )
    (problem,) = check(f"{line} --data.sources.a.format tokens")
    assert problem.key == "data.sources.a.path" and "download them" in problem.remedy


def test_hub_datasets_are_checked_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = "--training.steps 1000 --training.dataset c4 --validation.enable --validation.dataset"
    assert check(f"{line} c4_validation") == []
    (problem,) = check(f"{line} c4")
    assert (
        problem.key == "validation.dataset"
        and "one of shakespeare, shakespeare_validation, c4_test, c4_val" in str(problem)
    )


@pytest.mark.parametrize(
    ("switch", "line", "needs"),
    [
        ("keep_latest_k = 0", "--checkpoint.keep_every 500", "nothing is deleted"),
        ("load_only = true", "--checkpoint.async_mode async", "the run saves no checkpoints"),
        ("load_only = true", "--checkpoint.hf_interval 5", "the run saves no checkpoints"),
        (
            'start = "resume"',
            "--checkpoint.initial_load_path .",
            "there must be a checkpoint of this run",
        ),
        ("load_step = 5", "--checkpoint.initial_load_path .", "that step of this run is loaded"),
        ('start = "scratch"', "--checkpoint.verify full", "nothing is loaded"),
        (
            "create_seed_checkpoint = true",
            "--checkpoint.exclude_from_loading optimizer",
            "nothing is loaded",
        ),
        (
            'start = "warm"\ninitial_load_path = "."',
            "--checkpoint.allow_change model.*",
            "no run is resumed",
        ),
    ],
)
def test_checkpoint_settings_without_effect_warn(
    tmp_path: Path, switch: str, line: str, needs: str
) -> None:
    (tmp_path / "checkpoint/step-5").mkdir(parents=True)
    file = tmp_path / "x.toml"
    file.write_text(f"[training]\nsteps = 1000\n[checkpoint]\nenable = true\n{switch}")
    (warning,) = check(f"--job.config_file {file} --job.dump_folder {tmp_path} {line}")
    assert (warning.severity, warning.key) == ("warning", line.split()[0][2:]) and needs in str(
        warning
    )


@pytest.mark.parametrize(
    ("line", "world_size", "is_valid"),
    [
        ("--training.local_batch_size 2 --training.global_batch_size 16", 4, True),
        ("--training.local_batch_size 2 --training.global_batch_size 12", 4, False),
        ("--training.local_batch_size 2 --training.global_batch_size 12", None, True),
        ("--training.local_batch_size 5 --training.global_batch_size 12", None, False),
        ("--parallelism.data_parallel_replicate_degree 2 --training.global_batch_size 32", 4, True),
    ],
)
def test_the_global_batch_size_must_be_divisible(
    line: str, world_size: int | None, is_valid: bool
) -> None:
    problems = check(f"--training.steps 1000 {line}", world_size)
    assert keys(problems, "error") == ([] if is_valid else ["training.global_batch_size"])


def test_the_remedy_for_a_batch_size_names_two_sizes() -> None:
    (problem,) = check(
        "--training.steps 1000 --training.local_batch_size 2 --training.global_batch_size 30", 4
    )
    assert problem.remedy == "set it to 24 or 32, or change training.local_batch_size"


def test_context_parallelism_needs_a_divisible_sequence_length() -> None:
    line = "--training.steps 1000 --parallelism.context_parallel_degree 2 --training.seq_len 30"
    (problem,) = check(line, 2, training=False)[:1]
    assert problem.key == "training.seq_len" and "1 x 2 x 2 (head and tail) = 4" in problem.expected
    unbalanced = check(
        f"{line} --parallelism.context_parallel_load_balancer None", 2, training=False
    )
    assert keys(unbalanced, "error") == []


def test_offload_needs_a_gpu() -> None:
    line = "--training.steps 1000 --training.enable_cpu_offload"
    assert keys(check(line, 2, device_type="cpu"), "error") == ["training.enable_cpu_offload"]
    assert check(line, 2, device_type="cuda") == check(line, 2) == []


def test_offload_must_fit_into_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8B model in float32 on 8 ranks of one node needs 8.03e9 x 16 bytes = 119.7 GiB."""
    line = "--training.steps 1000 --training.enable_cpu_offload --model.flavor 8B"
    line += " --model.hf_assets_path tests/assets/tokenizer"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")

    def severities(total: int, available: int, device_type: str = "cuda") -> list[str]:
        memory = HostMemory(total * 2**30, available * 2**30)
        monkeypatch.setattr(offload_memory, "host_memory", lambda: memory)
        problems = check(line, 8, device_type=device_type)
        return [
            p.severity
            for p in problems
            if p.key == "training.enable_cpu_offload" and "119.66 GiB" in str(p)
        ]

    assert severities(128, 120) == []
    assert severities(128, 119) == ["warning"]
    assert severities(119, 100) == ["error"]
    assert severities(119, 100, None) == []  # the check may run on a laptop
    (problem,) = [p for p in check(line, 8, device_type="cuda") if p.severity == "error"]
    text = "8 ranks x (parameters 3.74 + gradients 3.74 + optimizer states 7.48 GiB)"
    assert text in str(problem) and "has 119.00 GiB" in str(problem)
    assert check(line, 16, device_type="cuda") == []  # two nodes


def test_attention_without_a_kernel_for_the_dtype_is_refused() -> None:
    line = (
        "--training.steps 1000 --model.args.attn_type flex --model.args.attn_mask_type block_causal"
    )
    (problem,) = check(f"{line} --training.mixed_precision_param float64", device_type="cuda")
    assert problem.key == "model.args" and "no kernel for float64" in problem.expected
    assert check(line, device_type="cuda") == check(line) == []


def test_an_attention_backend_that_the_run_cannot_use_is_refused() -> None:
    backend, ring = "training.attention_backend", "parallelism.context_parallel_rotate_method"
    line = f"--training.steps 1000 --{backend} cudnn"
    assert check(line, device_type="cuda") == []
    (on_cpu,) = check(line, device_type="cpu")
    (in_ring,) = check(
        f"{line} --parallelism.context_parallel_degree 2 --{ring} alltoall", 2, device_type="cuda"
    )
    (masked,) = check(
        f"--training.steps 1000 --{backend} flash --model.args.attn_mask_type block_causal",
        device_type="cuda",
    )
    assert [on_cpu.key, in_ring.key, masked.key] == [backend] * 3


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--model.flavor debugmodel_flex_attn", "model.flavor"),
        ("--model.flavor debugmodel_varlen_attn", "model.flavor"),
        ("--model.args.attn_type flex --model.args.attn_mask_type block_causal", "model.args"),
    ],
)
def test_gpu_kernels_are_replaced_on_cpu_with_a_warning(flags: str, key: str) -> None:
    (warning,) = check(f"--training.steps 1000 {flags}", device_type="cpu")
    assert (warning.severity, warning.key) == ("warning", key)
    assert "scaled_dot_product_attention with the same block_causal mask" in str(warning)
    assert check(f"--training.steps 1000 {flags}", device_type="cuda") == []


def test_compiling_on_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--training.steps 1000 --compile.enable"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert keys(check(line, device_type="cpu"), "error") == ["compile.enable"]
    assert (
        check(line, device_type="cuda")
        == check(f"{line} --compile.backend eager", device_type="cpu")
        == []
    )


def test_the_default_tokenizer_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check("--training.steps 1000") == []


def test_a_missing_tokenizer_is_an_error_in_training_and_a_warning_in_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--training.steps 1000 --model.hf_assets_path ./nowhere"
    (problem,) = check(line)
    assert problem.key == "model.hf_assets_path" and problem.severity == "error"
    assert str(tmp_path) in problem.expected and "titan download" in problem.remedy
    (warning,) = check(line, training=False)
    assert warning.severity == "warning"


def test_a_run_with_checkpoints_needs_no_initial_checkpoint(tmp_path: Path) -> None:
    line = f"--training.steps 1000 --job.dump_folder {tmp_path} --checkpoint.enable --checkpoint.initial_load_path missing"
    assert keys(check(line), "error") == ["checkpoint.initial_load_path"]
    (tmp_path / "checkpoint/step-5").mkdir(parents=True)
    assert check(line) == []


def test_load_step_must_exist(tmp_path: Path) -> None:
    (tmp_path / "checkpoint/step-5").mkdir(parents=True)
    line = f"--training.steps 1000 --job.dump_folder {tmp_path} --checkpoint.enable --checkpoint.load_step"
    assert check(f"{line} 5") == []
    (problem,) = check(f"{line} 6")
    assert problem.key == "checkpoint.load_step" and "holds the steps 5" in problem.expected


def test_pinned_memory_without_a_gpu_warns() -> None:
    line = "--training.steps 1000 --checkpoint.enable --checkpoint.async_mode async_with_pinned_mem"
    (warning,) = check(line, device_type="cpu")
    assert (warning.severity, warning.key) == ("warning", "checkpoint.async_mode")
    assert check(line, device_type="cuda") == check(line) == []


def test_launch_blocking_warns() -> None:
    line = "--training.steps 1000 --debug.launch_blocking"
    for device, part in (
        ("cpu", "has no effect in this run: there is no GPU"),
        ("cuda", "makes the run much slower"),
    ):
        (warning,) = check(line, device_type=device)
        assert (warning.severity, warning.key) == (
            "warning",
            "debug.launch_blocking",
        ) and part in warning.expected


def test_initial_load_in_hf_needs_weights_in_the_assets(tmp_path: Path) -> None:
    """Without an initial_load_path, initial_load_in_hf loads the weights in hf_assets_path."""
    line = f"--training.steps 1000 --job.dump_folder {tmp_path} --checkpoint.enable --checkpoint.initial_load_in_hf"
    (problem,) = check(line)
    assert (
        problem.key == "checkpoint.initial_load_in_hf"
        and "tests/assets/tokenizer" in problem.expected
    )
    (tmp_path / "checkpoint/step-5").mkdir(parents=True)
    assert check(line) == []


def test_a_seed_checkpoint_needs_a_single_rank() -> None:
    line = "--training.steps 1000 --checkpoint.enable --checkpoint.create_seed_checkpoint"
    assert check(line, 1) == check(line, None) == []
    (problem,) = check(line, 2)
    assert problem.key == "checkpoint.create_seed_checkpoint" and "NGPU=1" in problem.remedy


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("optimizer.lr", None),
        ("model.*", None),
        ("*", None),
        ("model.args.dim", None),
        ("data.sources.wiki.weight", None),
        ("data.sources.*.weight", None),
        ("optimizer.lrr", 'did you mean "optimizer.lr"?'),
        ("xyz.*", 'for example "optimizer.lr" or "model.*"'),
    ],
)
def test_patterns_of_allow_change_must_match_a_setting(pattern: str, remedy: str | None) -> None:
    problems = check(
        f"--training.steps 1000 --checkpoint.enable --checkpoint.allow_change {pattern}"
    )
    assert [problem.remedy for problem in problems] == ([] if remedy is None else [remedy])


def test_save_config_file_must_not_be_a_folder(tmp_path: Path) -> None:
    line = f"--training.steps 1000 --job.dump_folder {tmp_path} --job.save_config_file"
    assert keys(check(f"{line} ."), "error") == ["job.save_config_file"]
    assert check(f"{line} config.json") == []


def test_the_dump_folder_must_not_be_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = check(f"--training.steps 1000 --job.dump_folder {tmp_path}/file/outputs")
    assert problem.key == "job.dump_folder" and "is a file" in problem.expected


def test_a_custom_import_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_model.py").write_text("raise RuntimeError('half written')")
    monkeypatch.syspath_prepend(tmp_path)
    argv = "--own.key 1 --experimental.custom_import my_broken_model".split()
    argv += ["--optimizer.name", "my_broken_model:Own"]
    with pytest.raises(ConfigError) as error:
        load_checked(argv, 1, training=True)
    (problem,) = error.value.problems  # its section and optimizer are not reported
    assert problem.key == "experimental.custom_import"
    assert "RuntimeError: half written, at line 1 of" in problem.expected


def test_the_compile_backend_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    # The launcher checks before torch is imported: the registry is empty at that time.
    monkeypatch.delitem(sys.modules, "torch._dynamo.backends.registry", raising=False)
    (problem,) = check("--training.steps 1000 --compile.enable --compile.backend inductr")
    assert problem.key == "compile.backend" and problem.remedy == 'did you mean "inductor"?'
    assert "or one that experimental.custom_import registers" in str(problem)
    (problem,) = check(
        "--training.steps 1000 --compile.enable --compile.backend nonsense", training=False
    )
    assert problem.severity == "error" and "torch._dynamo.register_backend" in problem.remedy
    assert check("--training.steps 1000 --compile.enable --compile.backend aot_eager") == []
    assert keys(check("--training.steps 1000 --compile.enable --compile.backend ts"), "error") == [
        "compile.backend"
    ]
    # Without compile.enable the backend is not used.
    assert keys(check("--training.steps 1000 --compile.backend nonsense"), "error") == []


def test_the_package_of_a_compile_backend_must_be_installed() -> None:
    """torch imports it only in the first step."""
    line = "--training.steps 1000 --compile.enable --compile.backend tvm"
    (problem,) = check(line)
    assert (problem.key, problem.severity) == (
        "compile.backend",
        "error",
    ) and "the package tvm" in problem.expected
    (problem,) = check(line, training=False)
    assert problem.severity == "warning"


def test_a_custom_import_may_register_a_compile_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.backends import registry

    (tmp_path / "my_backend.py").write_text(
        "from torch._dynamo import register_backend\n\n"
        "@register_backend\ndef nonsense(graph, inputs):\n    return graph.forward\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.list_backends()  # torch registers its own backends now, not in the copies below
    for name in ("_BACKENDS", "_COMPILER_FNS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    line = "--training.steps 1000 --compile.enable --compile.backend nonsense"
    assert keys(check(line), "error") == ["compile.backend"]
    argv = f"{line} --experimental.custom_import my_backend".split()
    assert load_checked(argv, 1, training=True)[1] == []


PARETO = "activation_checkpoint.visualize_memory_budget_pareto"


@pytest.mark.parametrize(
    ("key", "line", "package"),
    [
        ("metrics.enable_tensorboard", "", "tensorboard"),
        ("metrics.enable_wandb", "", "wandb"),
        (PARETO, "--compile.enable --activation_checkpoint.mode memory_budget", "matplotlib"),
    ],
)
def test_settings_need_their_packages(
    key: str, line: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run imports these packages only in the first step."""
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    (problem,) = check(f"--{key} {line} --training.steps 1000")
    assert (
        problem.key == key
        and f"package {package}" in problem.expected
        and "pip install" in problem.remedy
    )


@pytest.mark.parametrize(
    ("release", "severity", "message"),
    [
        ((2, 10), "error", "torch 2.11 or newer; torch 2.10 is installed"),
        ((2, 11), "", ""),
        ((2, 14), "", ""),
        ((2, 15), "warning", "torch 2.15 is newer than the newest tested release, 2.14"),
    ],
)
def test_untested_torch_releases_are_reported(
    release: tuple[int, int], severity: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_like.check.context.installed_torch_release", lambda: release)
    problems = check("--training.steps 1000")
    assert [problem.severity for problem in problems] == [severity] * bool(severity)
    assert all(message in str(problem) for problem in problems)
    assert check("--training.steps 1000", training=False) == []


@pytest.mark.parametrize("name", ["NCCL_ALGO", "NCCL_PROTO"])
def test_a_fixed_nccl_algorithm_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "Tree")
    line = "--training.steps 1000"
    (warning,) = check(line, device_type="cuda")
    assert warning.severity == "warning" and f"{name}=Tree is set" in str(warning)
    assert "docs/guides/nccl.md" in warning.remedy
    assert (
        check(line, device_type="cpu")
        == check(f"{line} --debug.deterministic", device_type="cuda")
        == []
    )


def test_the_nccl_guide_documents_each_variable(repo_root: Path) -> None:
    page = (repo_root / "docs/guides/nccl.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert {"`0`", "`1`", "`2` (default)"} <= rows, "NCCL_CROSS_NIC"
    assert {"Ring", "Tree", "CollNet (SHARP)", "NVLS (NVLink SHARP)"} <= rows
    assert "Leave NCCL_ALGO and NCCL_PROTO alone" in page
    assert "docs/guides/nccl.md" in (repo_root / "README.md").read_text()
