"""The command lines of TorchTitan 0.2.2's feature tests, on CPU ranks.

Each row has the unchanged arguments of one of its tests. The base config has short sequences.
A CPU without bfloat16 instructions computes in float32, which is ten times faster there.
TorchTitan only requires exit code 0. These tests also require a falling loss and a log without
Python warnings, such as torch's deprecations.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.harness.runner import ROOT, RunResult
from tests.integration.forked import ForkedTrainer

BASE = "tests/integration/torchtitan_base.toml"
PP, TP = "--parallelism.pipeline_parallel_degree", "--parallelism.tensor_parallel_degree"
CP, SHARD = "--parallelism.context_parallel_degree", "--parallelism.data_parallel_shard_degree"
COPIES = "--parallelism.data_parallel_replicate_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
ROTATE = "--parallelism.context_parallel_rotate_method"
PER_STAGE = "--parallelism.pipeline_parallel_layers_per_stage"
AC, AC_OPTION = "--activation_checkpoint.mode", "--activation_checkpoint.selective_ac_option"
SAVE, COMPILE = "--checkpoint.enable", "--compile.enable"
ALL_THREE = f"{PP} 2 {SHARD} 2 {TP} 2"
FLOAT8 = "--quantize.linear.float8"
OFFLOAD = "--training.enable_cpu_offload --optimizer.early_step_in_backward"
WORKERS = "--training.dataloader"


COMPUTE = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
PRECISION = ("--training.mixed_precision_param", COMPUTE)
# A Python warning in a log, such as "torch/x.py:1: FutureWarning: ... is deprecated".
PYTHON_WARNING = re.compile(r"\.py:\d+: \w*Warning: |Warning: .*deprecated")


class Row(NamedTuple):
    """One feature test with the arguments of each run. {dump} is the dump folder.

    sizes: replace the sizes of the base config.
    """

    name: str
    runs: tuple[str, ...]
    ngpu: int = 4
    sizes: str = ""


ROWS = (
    Row("default", ("--profiling.enable_profiling --metrics.enable_tensorboard",)),
    Row("1d_compile", (COMPILE,)),
    Row("1d_compile_sac_op", (f"{COMPILE} {AC} selective {AC_OPTION} op",)),
    Row("2d_eager", (f"{TP} 2",)),
    Row("2d_compile", (f"{COMPILE} {TP} 2",)),
    Row("full_checkpoint", (SAVE, f"{SAVE} --training.steps 20")),
    Row(
        "model_only_hf_checkpoint",
        (
            f"{SAVE} --checkpoint.folder hf_checkpoint --checkpoint.last_save_model_only"
            " --checkpoint.last_save_in_hf",
            f"{SAVE} --checkpoint.initial_load_path {{dump}}/hf_checkpoint/step-10/"
            " --checkpoint.initial_load_model_only --checkpoint.initial_load_in_hf",
        ),
    ),
    Row("last_save_model_only_fp32", (f"{SAVE} --checkpoint.last_save_model_only",)),
    Row(
        "last_save_model_only_bf16",
        (f"{SAVE} --checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16",),
    ),
    Row("pp_looped_zero_bubble", (f"{PP} 4 {SCHEDULE} InterleavedZeroBubble",)),
    Row("pp_zbv", (f"{PP} 2 {SCHEDULE} ZBVZeroBubble",), 2),
    Row("pp_1f1b", (f"{PP} 2 {SCHEDULE} 1F1B {SHARD} 1",), 2),
    Row("pp_gpipe", (f"{PP} 2 {SCHEDULE} GPipe {SHARD} 1",), 2),
    Row(
        "pp_dp_1f1b",
        (f"{PP} 2 {SCHEDULE} 1F1B {SHARD} 2", f"{PP} 2 {SCHEDULE} 1F1B {PER_STAGE} 4 {SHARD} 2"),
    ),
    Row("pp_dp_gpipe", (f"{PP} 2 {SCHEDULE} GPipe {SHARD} 2",)),
    Row("pp_tp", (f"{PP} 2 {TP} 2",)),
    Row("pp_dp_tp", (f"{SAVE} {ALL_THREE}", f"--training.steps 20 {SAVE} {ALL_THREE}"), 8),
    Row("3d_compile", (f"{ALL_THREE} {COMPILE}",), 8),
    Row(
        "pp_looped_1f1b",
        (f"{PP} 4 {SCHEDULE} Interleaved1F1B", f"{PP} 4 {SCHEDULE} Interleaved1F1B {PER_STAGE} 1"),
    ),
    Row(
        "pp_custom_csv",
        (
            f"{PP} 2 {SCHEDULE} PipelineScheduleMulti"
            " --parallelism.pipeline_parallel_schedule_csv ./tests/assets/custom_schedule.csv",
        ),
        2,
    ),
    Row("optimizer_foreach", ("--optimizer.name AdamW --optimizer.implementation foreach",), 2),
    Row("ddp", (f"{SHARD}=1 {COPIES}=4",)),
    Row("hsdp", (f"{SHARD}=2 {COPIES}=2",)),
    Row("fsdp+flex_attn", (f"{SHARD}=4 {AC}='full' --model.flavor=debugmodel_flex_attn",)),
    Row(
        "fsdp+flex_attn+per_op_sac",
        (f"{SHARD}=4 {AC}=selective {AC_OPTION}=op --model.flavor=debugmodel_flex_attn",),
    ),
    Row(
        "fsdp+varlen_attn+per_op_sac",
        (f"{SHARD}=4 {AC}=selective {AC_OPTION}=op --model.flavor=debugmodel_varlen_attn",),
    ),
    Row("cp_allgather", (f"{CP}=4 {ROTATE}='allgather'",)),
    Row("cp_alltoall", (f"{CP}=4 {ROTATE}='alltoall'",)),
    Row("hsdp+tp", (f"{SHARD}=2 {COPIES}=2 {TP}=2",), 8),
    Row("fsdp+cp", (f"{SHARD}=2 {CP}=2",)),
    Row("hsdp+cp_without_dp_shard", (f"{SHARD}=1 {COPIES}=2 {CP}=2",)),
    Row("hsdp+cp_with_dp_shard", (f"{SHARD}=2 {COPIES}=2 {CP}=2",), 8),
    Row("fsdp+tp+cp", (f"{SHARD}=2 {TP}=2 {CP}=2",), 8),
    Row("test_generate", (SAVE,), 2),
    Row("fsdp_reshard_always", ("--parallelism.fsdp_reshard_after_forward always",), 2),
    Row(
        "optional_checkpoint",
        (
            f"{SAVE} --training.steps 10",
            f"{SAVE} --checkpoint.exclude_from_loading lr_scheduler,dataloader,optimizer {TP} 2"
            " --training.steps 20",
        ),
    ),
    Row(
        "float8_emulation",
        (
            "--model.converters quantize.linear.float8"
            f" {FLOAT8}.enable_fsdp_float8_all_gather"
            f" {FLOAT8}.precompute_float8_dynamic_scale_for_fsdp {FLOAT8}.emulate",
        ),
    ),
    Row(
        "gradient_accumulation",
        ("--training.local_batch_size 8 --training.global_batch_size 32",),
        2,
    ),
    Row(
        "validation_tp_cp_pp",
        (
            f"--validation.enable --validation.dataset c4_test {TP}=2 {CP}=2 {PP}=2"
            f" {SCHEDULE} Interleaved1F1B",
        ),
        8,
    ),
    Row(
        "dataloader_kwargs",
        (
            f"{WORKERS}.num_workers 2 {WORKERS}.pin_memory {WORKERS}.persistent_workers"
            f" {WORKERS}.prefetch_factor 4",
        ),
        2,
    ),
)
# All rows of its model tests, each with the debug flavor of its model.
MODEL, EP = "--model.name", "--parallelism.expert_parallel_degree"
EXPERT_TP = "--parallelism.expert_tensor_parallel_degree"
INTERLEAVED = f"{PP} 2 {SCHEDULE} Interleaved1F1B"
MODEL_ROWS = (
    Row("deepseek_v3_fsdp+ep+compile", (f"{MODEL} deepseek_v3 {SHARD} 4 {EP} 2 {COMPILE}",)),
    Row(
        "deepseek_v3_pp_dualpipev",
        (f"{MODEL} deepseek_v3 {PP} 2 {SCHEDULE} DualPipeV {SHARD} 2 {EP} 2 {AC} none",),
    ),
    Row(
        "deepseek_v3_pp+fsdp+tp+ep",
        (f"{MODEL} deepseek_v3 {INTERLEAVED} {SHARD} 2 {TP} 2 {EP} 4 {EXPERT_TP} 1",),
        8,
    ),
    Row(
        "deepseek_v3_pp+fsdp+tp+ep+etp",
        (f"{MODEL} deepseek_v3 {INTERLEAVED} {SHARD} 2 {TP} 2 {EP} 2 {EXPERT_TP} 2",),
        8,
    ),
    Row(
        "deepseek_v3_flex+pp+fsdp+ep+sacop",
        (
            f"{MODEL} deepseek_v3 --model.flavor debugmodel_flex_attn {SHARD} 4 {INTERLEAVED}"
            f" {EP} 4 {AC} 'selective' {AC_OPTION} 'op'",
        ),
        8,
    ),
    Row("qwen3_fsdp+tp", (f"{MODEL} qwen3 {SHARD} 2 {TP} 2",)),
    Row(
        "qwen3_fsdp+tp+ep+etp",
        (f"{MODEL} qwen3 --model.flavor debugmodel_moe {SHARD} 2 {TP} 2 {EP} 2 {EXPERT_TP} 2",),
    ),
    Row(
        "llama4_pp+fsdp+tp+ep+compile",
        (f"{MODEL} llama4 {INTERLEAVED} {SHARD} 2 {TP} 2 {EP} 4 {EXPERT_TP} 1 {COMPILE}",),
        8,
    ),
    Row(
        "gpt_oss_fsdp+tp+ep+compile",
        (f"{MODEL} gpt_oss {SHARD} 4 {TP} 2 {EP} 4 {EXPERT_TP} 1 {COMPILE}",),
        8,
        # Its vocabulary of 201,088 takes most of the time.
        "--training.local_batch_size 1 --training.seq_len 64",
    ),
)
# Tests that cannot run on CPU ranks: the rejected setting, and a part of the reason.
REJECTED = {
    Row("2d_asynctp_compile", (f"{COMPILE} {TP} 2 --parallelism.enable_async_tensor_parallel",)): (
        "parallelism.enable_async_tensor_parallel",
        "false without GPUs",
    ),
    Row("cpu_offload+opt_in_bwd+TP+DP+CP", (f"{SAVE} {TP}=2 {CP}=2 {OFFLOAD}",), 8): (
        "training.enable_cpu_offload",
        "false without a GPU",
    ),
}
# Tests that end without training.
DRY = Row("fsdp2_memory_estimation", ("--memory_estimation.enable",), 2)


def run(line: str, ngpu: int, folder: Path, start: ForkedTrainer) -> RunResult:
    words = shlex.split(line.format(dump=folder))
    arguments = ["--job.config_file", BASE, "--job.dump_folder", str(folder), *PRECISION, *words]
    return start(arguments, ngpu, folder, timeout=1500)  # 8 ranks compile on two cores


def expect_words(result: RunResult, *words: str) -> None:
    for part in words:
        assert part in result.stdout, result.tail


def expect_generated_text(runs: list[RunResult]) -> None:
    command = [
        sys.executable,
        "-m",
        "torchtitan_like",
        "generate",
        str(runs[0].dump_folder / "checkpoint/step-10"),
    ]
    done = subprocess.run(
        [*command, "--prompt", "To be", "--num-tokens", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def expect_changed_order(runs: list[RunResult]) -> None:
    order = "The order of the samples differs from the run that saved the checkpoint: "
    expect_words(runs[1], f"{order}training.global_batch_size 32 -> 16")
    assert [row["step"] for row in runs[1].metrics] == list(range(1, 21))


def expect_reference_mask(runs: list[RunResult]) -> None:
    expect_words(runs[0], "scaled_dot_product_attention with the same block_causal mask")


EXPECT: Mapping[str, Callable[[list[RunResult]], None]] = {
    "test_generate": expect_generated_text,
    "optional_checkpoint": expect_changed_order,
    "fsdp+flex_attn": expect_reference_mask,
    "fsdp+flex_attn+per_op_sac": expect_reference_mask,
    "fsdp+varlen_attn+per_op_sac": expect_reference_mask,
}


def test_table_has_all_feature_tests() -> None:
    names = [row.name for row in (*ROWS, *REJECTED, DRY)]
    assert len(set(names)) == len(names) == 43 and len(ROWS) == 40
    assert len({row.name for row in MODEL_ROWS}) == len(MODEL_ROWS) == 9


@pytest.mark.nightly
@pytest.mark.parametrize("row", (*ROWS, *MODEL_ROWS), ids=lambda row: row.name)
def test_feature_trains(row: Row, tmp_path: Path, run_forked: ForkedTrainer) -> None:
    results = []
    for line in row.runs:
        result = run(f"{line} {row.sizes}", row.ngpu, tmp_path / "outputs", run_forked)
        assert result.returncode == 0, result.tail
        warned = [line for line in result.stdout.splitlines() if PYTHON_WARNING.search(line)]
        assert not warned, warned
        losses = [step["loss"] for step in result.metrics]
        assert len(losses) >= 10 and all(map(math.isfinite, losses)), losses
        assert min(losses[-3:]) < losses[0] - 0.15, losses
        results.append(result)
    if row.name in EXPECT:
        EXPECT[row.name](results)


@pytest.mark.nightly
@pytest.mark.parametrize("row", REJECTED, ids=lambda row: row.name)
def test_unsupported_feature_is_rejected_with_a_reason(
    row: Row, tmp_path: Path, run_forked: ForkedTrainer
) -> None:
    result = run(row.runs[0], row.ngpu, tmp_path / "outputs", run_forked)
    key, reason = REJECTED[row]
    assert result.returncode == 78, result.tail
    expect_words(result, key, reason)


@pytest.mark.nightly
def test_memory_is_estimated_instead_of_training(tmp_path: Path, run_forked: ForkedTrainer) -> None:
    result = run(DRY.runs[0], DRY.ngpu, tmp_path / "outputs", run_forked)
    assert result.returncode == 0, result.tail
    expect_words(result, "= reserved by the allocator", "H100")
    assert not result.metrics


# TorchTitan's own debug files of models with experts -> settings in addition to the sizes below.
DEBUG_FILES = {
    "deepseek_v3_debug_model": "",
    "gpt_oss_debug_model": "",
    "llama4_debug_model": "",
    "qwen3_moe_debug": "--training.dataset c4_test",  # its dataset is on the Hub
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEBUG_FILES)
def test_debug_file_trains(name: str, tmp_path: Path, run_forked: ForkedTrainer) -> None:
    """Six steps, unchanged except for the seed and for sizes that fit two CPU ranks.

    The loss of such small batches, 128 tokens each, differs by a few tenths between batches.
    """
    sizes = "--training.local_batch_size 1 --training.seq_len 64 --training.steps 6 --debug.seed 1"
    folder = tmp_path / "outputs"
    arguments = ["--job.config_file", f"tests/assets/torchtitan/{name}.toml"]
    words = f"{sizes} {DEBUG_FILES[name]}".split()
    arguments += ["--job.dump_folder", str(folder), *PRECISION, *words]
    result = run_forked(arguments, 2, folder, timeout=500)
    assert result.returncode == 0, result.tail
    losses = [step["loss"] for step in result.metrics]
    assert len(losses) == 6 and sum(losses[3:]) < sum(losses[:3]), losses
