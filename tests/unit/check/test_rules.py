"""The check refuses impossible layouts with one line and a remedy, and accepts all others."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from torchtitan_like.check import check_config, context, load_checked
from torchtitan_like.check.context import RunContext, _cpu_has_bfloat16, build_context
from torchtitan_like.check.model_checks import check_model
from torchtitan_like.check.rules import QUANTIZE_RULES, RULES
from torchtitan_like.cli import main
from torchtitan_like.config import ConfigError, load_config
from torchtitan_like.config.problems import Rule
from torchtitan_like.config.problems import broken_rules as find_broken

CONFIG = "train_configs/debug_model.toml"  # 6 layers, 16 heads, 256 tokens, batches of 4; validation is on
SHORT = {
    "shard": "parallelism.data_parallel_shard_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "impl": "parallelism.data_parallel_impl",
    "bucketing": "parallelism.simple_fsdp_bucketing",
    "tp": "parallelism.tensor_parallel_degree",
    "sp": "parallelism.enable_sequence_parallel",
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "cp": "parallelism.context_parallel_degree",
    "rotate": "parallelism.context_parallel_rotate_method",
    "balancer": "parallelism.context_parallel_load_balancer",
    "pp": "parallelism.pipeline_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "csv": "parallelism.pipeline_parallel_schedule_csv",
    "layers_per_stage": "parallelism.pipeline_parallel_layers_per_stage",
    "micro": "parallelism.pipeline_parallel_microbatch_size",
    "stages": "parallelism.module_fqns_per_model_part",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "ac": "activation_checkpoint.mode",
    "ac_option": "activation_checkpoint.selective_ac_option",
    "ac_debug": "activation_checkpoint.debug",
    "early": "optimizer.early_step_in_backward",
    "reduce": "training.mixed_precision_reduce",
    "check": "resilience.replica_check_freq",
    "local": "training.local_batch_size",
    "global": "training.global_batch_size",
    "ramp": "training.batch_ramp",
    "seq": "training.seq_len",
    "compile": "compile.enable",
    "converters": "model.converters",
    "emulate": "quantize.linear.float8.emulate",
    "heads": "model.args.n_heads",
    "kv_heads": "model.args.n_kv_heads",
    "layers": "model.args.n_layers",
    "multiple_of": "model.args.multiple_of",
    "tied": "model.args.enable_weight_tying",
    "mask": "model.args.attn_mask_type",
    "validate": "validation.enable",
    "device": "device-type",
}


def arguments(line: str) -> list[str]:
    """Return the arguments for a short form such as "tp=2 seq=64"."""
    pairs = [word.split("=", 1) for word in line.split()]
    return [
        part for name, value in pairs for part in (f"--{SHORT.get(name, name)}", *value.split("|"))
    ]


class Illegal(NamedTuple):
    """A layout, its number of ranks, the key and message of the error, and the rule's name."""

    line: str
    ranks: int
    key: str
    message: str
    rule: str = ""


FLOAT8 = "converters=quantize.linear.float8"
MOE = "model.name=qwen3 model.flavor=debugmodel_moe"
DEEPSEEK = "model.name=deepseek_v3 model.flavor=debugmodel"
MUP = "model.parametrization=mup model.base_args.dim=64"
MTP = f"{DEEPSEEK} model.args.num_mtp_layers=1"
ILLEGAL = [
    Illegal("shard=3", 4, "parallelism", "dp_shard 3 x cp 1 x tp 1 x pp 1 = 3, but the world has 4 ranks"),
    Illegal("replicate=3", 4, "parallelism", "dp_replicate 3 x dp_shard 1"),
    Illegal("tp=2 cp=2 pp=2", 4, "parallelism", "= 8, but the world has 4 ranks"),
    Illegal("local=4 global=12", 2, "training.global_batch_size", "set it to 8 or 16", "uneven-batch"),
    Illegal("local=4 global=32 ramp=8,12,100", 2, "training.batch_ramp", "in multiples of local_batch_size x data-parallel "
            "ranks = 8", "uneven-ramp"),
    Illegal("global=32 early=true", 2, "optimizer.early_step_in_backward", "accumulation over 4 passes",
            "accumulated-early-step"),
    Illegal("impl=ddp", 2, "parallelism.data_parallel_impl", "set data_parallel_shard_degree = 1 and "
            "data_parallel_replicate_degree = 2", "sharded-ddp"),
    Illegal("impl=ddp cp=2", 2, "parallelism.data_parallel_impl", 'set it to "fsdp2"', "cp-ddp"),
    Illegal("impl=simple_fsdp training.enable_cpu_offload=true", 2, "parallelism.data_parallel_impl",
            "enable_cpu_offload = false", "offloaded-simple-fsdp"),
    Illegal("impl=simple_fsdp ac=offload", 2, "parallelism.data_parallel_impl",
            'activation_checkpoint.mode = "full"', "offloaded-activations-simple-fsdp"),
    Illegal("ac=offload compile=true", 2, "activation_checkpoint.mode", 'remove "model" from compile.components',
            "offloaded-activations-compiled"),
    Illegal("tp=3 seq=240 validate=false", 3, "parallelism.tensor_parallel_degree", "16 attention heads -> set it to one "
            "of 1, 2, 4, 8, 16", "uneven-heads"),
    Illegal("tp=4 kv_heads=2", 4, "parallelism.tensor_parallel_degree", "2 key-value heads -> set it to one of 1, 2",
            "uneven-kv-heads"),
    Illegal("tp=64 model.args.vocab_size=2050 heads=64", 64, "parallelism.tensor_parallel_degree",
            "2050 entries for every rank: in shards of 33", "vocabulary-too-small"),
    Illegal("tp=2 seq=255 validate=false", 2, "training.seq_len", "2 x 1 = 2 -> set it to 254", "uneven-training-sequence"),
    Illegal("tp=2 validation.seq_len=255", 2, "validation.seq_len", "2 x 1 = 2 -> set it to 254", "uneven-validation-sequence"),
    Illegal("cp=2 seq=254 validate=false", 2, "training.seq_len", "1 x 2 x 2 (head and tail) = 4 -> set it to 252",
            "uneven-training-sequence"),
    Illegal("cp=2 tp=2 seq=252 validate=false", 4, "training.seq_len", "2 x 2 x 2 (head and tail) = 8",
            "uneven-training-sequence"),
    Illegal("cp=2 balancer=None seq=255 validate=false", 2, "training.seq_len", "1 x 2 = 2", "uneven-training-sequence"),
    Illegal("seq=262144 validate=false", 1, "training.seq_len", "max_seq_len = 131072 -> set model.args.max_seq_len = "
            "262144", "training-beyond-rotary-table"),
    Illegal("validation.seq_len=262144", 1, "validation.seq_len", "max_seq_len = 131072",
            "validation-beyond-rotary-table"),
    Illegal(f"{MTP} pp=2", 2, "parallelism.pipeline_parallel_degree", "num_mtp_layers = 0", "pipelined-mtp"),
    Illegal(f"{MTP} cp=2", 2, "parallelism.context_parallel_degree", "set it to 1, or model.args.num_mtp_layers = 0",
            "mtp-of-sharded-sequences"),
    Illegal(f"{MTP} impl=simple_fsdp", 2, "parallelism.data_parallel_impl", 'set it to "fsdp2"', "mtp-of-simple-fsdp"),
    Illegal(f"{MTP} {FLOAT8} device=cuda", 2, "model.converters", "remove it, or model.args.num_mtp_layers = 0",
            "mtp-in-float8"),
    Illegal("cp=2 balancer=ptrr", 2, "parallelism.context_parallel_load_balancer", 'set it to "headtail"', "ptrr"),
    Illegal("cp=2 rotate=alltoall compile=true", 2, "parallelism.context_parallel_rotate_method",
            'set it to "allgather", or compile.enable = false', "compiled-ring"),
    Illegal("cp=2 rotate=alltoall mask=block_causal", 2, "parallelism.context_parallel_rotate_method",
            'set it to "allgather"', "ring-documents"),
    Illegal("model.name=gpt_oss cp=2 rotate=alltoall validate=false", 2, "parallelism.context_parallel_rotate_method",
            "layers have windows: a ring", "ring-windows"),
    Illegal("model.name=hf model.flavor=mistral cp=2 rotate=alltoall validate=false", 2,
            "parallelism.context_parallel_rotate_method", "with hf, whose layers have windows", "ring-windows"),
    Illegal("model.name=hf model.flavor=llama model.args.rope_type=dynamic model.args.max_seq_len=4096 seq=4096 cp=2 "
            "validate=false", 2, "parallelism.context_parallel_degree", "1 for sequences of more than 2048 tokens",
            "sharded-dynamic-rope"),
    Illegal("model.name=llama4 model.flavor=debugmodel_irope mask=causal cp=2 rotate=alltoall seq=512 validate=false", 2,
            "parallelism.context_parallel_rotate_method", "within chunks of 256 tokens", "ring-chunks"),
    Illegal("cp=3 rotate=ulysses seq=240 validate=false", 3, "parallelism.context_parallel_degree",
            "a divisor of the 16 attention heads that each tensor-parallel rank has of the model's 16", "ulysses-heads"),
    Illegal("cp=4 tp=8 rotate=ulysses", 32, "parallelism.context_parallel_degree", "the 2 attention heads that each",
            "ulysses-heads"),
    Illegal("tp=2 async_tp=true", 2, "parallelism.enable_async_tensor_parallel", "set compile.enable = true",
            "async-tp-eager"),
    Illegal("tp=2 async_tp=true compile=true compile.backend=aot_eager", 2, "parallelism.enable_async_tensor_parallel",
            'compile.backend = "inductor"', "async-tp-eager"),
    Illegal("tp=2 async_tp=true compile=true sp=false", 2, "parallelism.enable_async_tensor_parallel",
            "set parallelism.enable_sequence_parallel = true", "async-tp-without-sp"),
    Illegal("tp=2 async_tp=true compile=true device=cpu", 2, "parallelism.enable_async_tensor_parallel",
            "false without GPUs", "async-tp-on-cpu"),
    Illegal("optimizer.name=Muon early=true", 2, "optimizer.early_step_in_backward", "false with Muon", "muon-early-step"),
    Illegal(f"{MUP} optimizer.name=Lion", 2, "optimizer.name", 'set it to "AdamW"', "parametrized-optimizer"),
    Illegal("model.parametrization=mup", 2, "model.base_args", "width of the model for which the learning rate was"),
    Illegal(f"{MUP} model.base_args.n_heads=3", 2, "model.base_args", "dim = 64: expected a multiple of 2 x n_heads"),
    Illegal(f"{MUP} model.base_args.heads=3", 2, "model.base_args", "llama3 has no such argument"),
    Illegal(f"{MUP} model.base_args.vocab_size=512", 2, "model.base_args", "vocab_size: only dim, n_heads, "),
    Illegal(f"{MUP} model.base_args.n_layers=2", 2, "model.base_args", 'only model.parametrization = "completep"'),
    Illegal("pp=2 early=true", 2, "optimizer.early_step_in_backward", "with pipeline parallelism", "pipelined-early-step"),
    Illegal("pp=2 micro=3", 2, "parallelism.pipeline_parallel_microbatch_size", "a divisor of training.local_batch_size"),
    Illegal("pp=2 schedule=Interleaved1F1B local=5", 2, "parallelism.pipeline_parallel_microbatch_size", "5 on 2 ranks"),
    Illegal("pp=8 layers=4 local=8", 8, "parallelism.pipeline_parallel_degree", "enough layers for each stage"),
    Illegal("pp=4 schedule=Interleaved1F1B layers=4", 4, "parallelism.pipeline_parallel_degree", "of 8 stages"),
    Illegal("pp=2 layers_per_stage=2", 2, "parallelism.pipeline_parallel_layers_per_stage", "use Interleaved1F1B"),
    Illegal("pp=2 layers_per_stage=3", 2, "parallelism.pipeline_parallel_layers_per_stage", "2 pipeline ranks divide"),
    Illegal("pp=2 schedule=Interleaved1F1B layers_per_stage=4", 2, "parallelism.pipeline_parallel_layers_per_stage",
            "at least 2 stages per rank"),
    Illegal("pp=2 layers=1 stages=tok_embeddings,layers.0,norm,output", 2, "parallelism.module_fqns_per_model_part",
            "2 pipeline ranks divide"),
    Illegal("pp=2 schedule=InterleavedZeroBubble compile=true", 2, "parallelism.pipeline_parallel_schedule",
            'set it to "Interleaved1F1B"', "compiled-zero-bubble"),
    Illegal("pp=2 schedule=ZBVZeroBubble compile=true", 2, "parallelism.pipeline_parallel_schedule",
            "each backward pass as a whole", "compiled-zero-bubble"),
    Illegal("pp=2 schedule=DualPipeV compile=true", 2, "parallelism.pipeline_parallel_schedule",
            "each backward pass as a whole", "compiled-zero-bubble"),
    *(
        Illegal(f"pp=2 schedule={schedule} ac=selective ac_option=op", 2, "parallelism.pipeline_parallel_schedule",
                'selective_ac_option = "1"', "zero-bubble-per-op")
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    Illegal("pp=2 schedule=ZBVZeroBubble ac=full ac_debug=true", 2, "parallelism.pipeline_parallel_schedule",
            "activation_checkpoint.debug = false", "zero-bubble-debug"),
    Illegal("pp=2 schedule=Interleaved1F1B local=1 global=8 ramp=2,3,60", 2, "parallelism.pipeline_parallel_microbatch_size",
            "5 on 2 ranks"),
    Illegal("pp=2 tied=true", 2, "parallelism.pipeline_parallel_degree", "untie them in [model.args]"),
    Illegal("pp=2 schedule=PipelineScheduleMulti", 2, "parallelism.pipeline_parallel_schedule_csv", "the file with the"),
    Illegal("pp=2 schedule=PipelineScheduleMulti csv=nowhere.csv", 2, "parallelism.pipeline_parallel_schedule_csv",
            "nowhere.csv"),
    Illegal("tp=2 multiple_of=1 model.args.ffn_dim_multiplier=1.002", 2, "parallelism.tensor_parallel_degree",
            "683 features of each feed-forward network", "uneven-features"),
    Illegal("model.name=qwen3 model.flavor=debugmodel tp=2 model.args.hidden_dim=171", 2,
            "parallelism.tensor_parallel_degree", "171 features", "uneven-features"),
    Illegal(f"{DEEPSEEK} tp=2 model.args.inter_dim=13", 2, "parallelism.tensor_parallel_degree", "13 features",
            "uneven-features"),
    Illegal(f"{DEEPSEEK} tp=2 model.args.moe_inter_dim=13 model.args.num_shared_experts=1", 2,
            "parallelism.tensor_parallel_degree", "13 features of the shared experts", "uneven-shared-experts"),
    Illegal(f"{DEEPSEEK} tp=2 etp=2 model.args.moe_inter_dim=13", 2, "parallelism.expert_tensor_parallel_degree",
            "the 13 hidden units of each expert", "uneven-expert-features"),
    Illegal("ep=2", 2, "parallelism.expert_parallel_degree", "llama3 has no experts", "experts-of-dense-model"),
    Illegal(f"{MOE} ep=4", 2, "parallelism.expert_parallel_degree", "a divisor of dp_shard x cp x tp = 2 x 1 x 1",
            "uneven-expert-ranks"),
    Illegal(f"{MOE} ep=4 tp=2 etp=2", 4, "parallelism.expert_parallel_degree", "a divisor of dp_shard x cp = 2 x 1",
            "uneven-expert-ranks"),
    Illegal(f"{MOE} ep=2 model.args.num_experts=9", 2, "parallelism.expert_parallel_degree", "the model's 9 experts -> set "
            "it to one of 1, 3, 9", "uneven-experts"),
    Illegal(f"{MOE} ep=2 tp=2 etp=2 model.args.moe_inter_dim=33", 4, "parallelism.expert_tensor_parallel_degree",
            "the 33 hidden units of each expert -> set it to 1", "uneven-expert-features"),
    Illegal(f"{MOE} ep=2 tp=2 sp=false", 2, "parallelism.enable_sequence_parallel", "must send different tokens",
            "experts-without-sequence-parallelism"),
    Illegal(f"{MOE} ep=2 impl=simple_fsdp", 2, "parallelism.data_parallel_impl", 'set it to "fsdp2"',
            "experts-of-simple-fsdp"),
    Illegal(f"{MOE} ep=2 tp=2 replicate=2", 4, "parallelism.data_parallel_replicate_degree",
            "the ranks of DDP have all experts", "experts-of-replicas"),
    Illegal(f"{MOE} tp=2 etp=2 replicate=2", 4, "parallelism.data_parallel_replicate_degree",
            "the ranks of DDP have all experts", "experts-of-replicas"),
    Illegal(f"{MOE} tp=2 etp=2 impl=simple_fsdp", 2, "parallelism.data_parallel_impl", 'set it to "fsdp2"',
            "experts-of-simple-fsdp"),
    Illegal(f"{MOE} tp=2 etp=2 sp=false", 2, "parallelism.enable_sequence_parallel", "must send different tokens",
            "experts-without-sequence-parallelism"),
    Illegal(f"{MOE} tp=4 etp=2", 4, "parallelism.expert_tensor_parallel_degree", "1 or tensor_parallel_degree = 4"),
    Illegal(f"{MOE} ep=2 tp=4 etp=2", 4, "parallelism.expert_tensor_parallel_degree", "1 or tensor_parallel_degree = 4"),
    Illegal(f"{FLOAT8} device=cpu", 2, "quantize.linear.float8.emulate", "set it to true"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("torchtitan_like.check.context.installed_torch_release", lambda: (2, 13))


@pytest.mark.parametrize("case", ILLEGAL, ids=lambda case: case.line)
def test_an_illegal_layout_is_refused(case: Illegal, capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits with code 78 and prints one line for the problem to stderr."""
    assert main(["check", CONFIG, "--world-size", str(case.ranks), *arguments(case.line)]) == 78
    captured = capsys.readouterr()
    title, *lines = [line for line in captured.err.splitlines() if not line.startswith("warning: ")]
    assert captured.out == "" and title == "1 problem in the configuration:" and len(lines) == 1, (
        captured.err
    )
    assert f": {case.key}" in lines[0] and case.message in lines[0]
    assert lines[0].startswith("  1. command line: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pp=2 local=1", "1 are fewer than the 2 stages"),
        ("pp=2 schedule=DualPipeV local=3", "3 are fewer than the 4 stages"),
        ("pp=2 local=1 global=4 ramp=1,1,12", "1 are fewer than the 2 stages"),
    ],
)
def test_too_few_micro_batches_are_refused_only_in_training(line: str, message: str) -> None:
    """The command of the run may still set a larger batch size."""
    config = load_config(["--job.config_file", CONFIG, *arguments(line)])
    key = "parallelism.pipeline_parallel_microbatch_size"
    for training, severity in ((True, "error"), (False, "warning")):
        problems = check_config(config, 2, training=training)
        (problem,) = [each for each in problems if each.key == key]
        assert problem.severity == severity and message in problem.expected and problem.remedy


LEGAL = [
    ("", 1), ("", 8), ("replicate=8", 8), ("replicate=2", 8), ("replicate=8 impl=ddp", 8), ("shard=1 impl=ddp", 1),
    ("impl=simple_fsdp", 4), ("impl=simple_fsdp replicate=2", 4), ("impl=simple_fsdp compile=true", 4),
    ("tp=2", 2), ("tp=8", 8), ("tp=16", 16), ("tp=4 kv_heads=4", 4), ("tp=2 sp=false", 4),
    ("tp=2 sp=false seq=255 validation.seq_len=251", 2), ("tp=2 compile=true async_tp=true device=cuda", 2),
    ("tp=2 tied=true", 2), ("tp=2 early=true", 2),
    ("cp=2", 2), ("cp=2 balancer=None seq=254", 2), ("cp=2 mask=block_causal", 2), ("cp=2 rotate=alltoall", 2),
    ("cp=2 rotate=ulysses", 2), ("cp=4 tp=2 rotate=ulysses kv_heads=2", 8), ("cp=2 rotate=ulysses seq=254", 2),
    ("cp=2 rotate=ulysses compile=true", 2), ("model.name=llama4 cp=2 rotate=alltoall", 2),
    ("cp=2 rotate=ulysses balancer=None mask=block_causal", 2), ("cp=4 tp=2", 16), ("cp=2 compile=true", 2),
    ("balancer=ptrr", 2),
    (f"{MOE} ep=2", 2), (f"{MOE} ep=4 tp=2", 4), (f"{MOE} ep=2 tp=2 etp=2", 4), (f"{MOE} ep=2 replicate=2", 4),
    (f"{MOE} ep=4 cp=2", 4), (f"{MOE} ep=2 pp=2", 4),
    ("pp=2", 2), ("pp=4", 8), ("pp=2 micro=2", 2), ("pp=2 schedule=GPipe local=1", 2), ("pp=2 compile=true", 2),
    ("pp=2 schedule=Interleaved1F1B layers=8", 2), ("pp=2 schedule=Interleaved1F1B layers_per_stage=2 layers=6", 2),
    ("pp=2 schedule=LoopedBFS", 2), ("pp=2 schedule=InterleavedZeroBubble", 2), ("pp=2 schedule=ZBVZeroBubble", 2),
    ("pp=2 schedule=DualPipeV", 2), ("pp=2 local=1 global=4", 2),
    ("pp=2 layers=2 stages=tok_embeddings,layers.0|layers.1,norm,output", 2),
    ("pp=2 tp=2 cp=2", 16), ("pp=2 tp=2 replicate=2", 16), ("pp=2 impl=ddp replicate=2", 4),
    ("pp=2 schedule=ZBVZeroBubble ac=full", 2), ("pp=2 schedule=DualPipeV ac=selective ac_option=1", 2),
    ("pp=2 ac=full ac_debug=true", 2),
    ("pp=2 ac=selective ac_option=op", 2), ("tied=true", 2), ("early=true", 2), ("local=2 global=16", 4),
    (f"{FLOAT8} emulate=true device=cpu", 2), (f"{FLOAT8} emulate=true tp=2 device=cpu", 2),
    (f"{FLOAT8} compile=true device=cuda", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "ranks"), LEGAL, ids=[line or f"{ranks} ranks" for line, ranks in LEGAL]
)
def test_a_legal_layout_is_accepted(
    line: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["check", CONFIG, "--world-size", str(ranks), *arguments(line)])
    captured = capsys.readouterr()
    assert code == 0 and captured.out, captured.err


@pytest.mark.parametrize("size", [["--world-size", "3"], []], ids=["3 ranks", "ranks unknown"])
def test_the_number_of_ranks_may_be_unknown(
    size: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In that case, only problems of any number of ranks are reported."""
    assert main(["check", CONFIG, *size, *arguments("replicate=2 global=24")]) == (
        78 if size else 0
    )
    line = "tp=3 kv_heads=3 heads=6 model.args.dim=240 seq=255 validate=false"
    assert main(["check", CONFIG, *size, *arguments(line)]) == 0
    line = "tp=3 kv_heads=2 heads=6 model.args.dim=240 seq=255 validate=false"
    assert main(["check", CONFIG, *size, *arguments(line)]) == 78
    assert "2 key-value heads" in capsys.readouterr().err


def test_offloaded_activations_save_no_memory_on_cpu() -> None:
    assert broken_rules(layout("ac=offload", 2)) == []
    (rule,) = broken_rules(layout("ac=offload device=cpu", 2))
    assert (rule.name, rule.severity) == ("offloaded-activations-on-cpu", "warning")


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_slow_bfloat16_of_a_cpu_is_reported(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_cpu_has_bfloat16", lambda: has_bfloat16)
    cases = {
        "bfloat16 device=cpu": not has_bfloat16,
        "float32 device=cpu": False,
        "bfloat16": False,
    }
    for value, is_reported in cases.items():
        rules = broken_rules(layout(f"training.mixed_precision_param={value}", 2))
        severities = {rule.name: rule.severity for rule in rules}
        assert severities.get("emulated-bfloat16") == ("warning" if is_reported else None), value


def test_the_speed_of_bfloat16_is_that_of_the_cpu() -> None:
    """oneDNN has bfloat16 kernels for CPUs with AVX-512 (or newer), and none for older ones."""
    if platform.machine() == "x86_64" and sys.platform == "linux":
        flags = Path("/proc/cpuinfo").read_text()
        assert _cpu_has_bfloat16() == ("avx512bw" in flags and "avx512vl" in flags)


QWEN_EXPERTS = "model.name=qwen3 model.flavor=debugmodel_moe"
BIASES = f"{QWEN_EXPERTS} model.args.load_balance=bias"
UPCYCLED = (
    "checkpoint.enable=true checkpoint.initial_load_path=x checkpoint.initial_load_upcycle=true"
)


def test_upcycling_needs_a_family_with_dense_models() -> None:
    """A run that resumes never upcycles, so nothing is refused then."""
    sink = "no dense model has its attention sinks and biased experts"
    latent = "no dense model has its latent attention"
    rule = "upcycle-without-dense-model"
    for model, reason in {
        "model.name=gpt_oss model.flavor=20b": sink,
        "model.name=deepseek_v3 model.flavor=16B": latent,
    }.items():
        run = layout(f"{UPCYCLED} {model}", 2)
        problems = [broken.problem(run) for broken in broken_rules(run) if broken.name == rule]
        assert [reason in problem.expected for problem in problems] == [True]
    for line in (
        f"{UPCYCLED} {QWEN_EXPERTS}",
        f"{UPCYCLED} {BIASES} checkpoint.initial_load_in_hf=true",
        f"{UPCYCLED} checkpoint.start=resume",
        f"{UPCYCLED} checkpoint.load_step=5",
    ):
        names = {broken.name for broken in broken_rules(layout(line, 2))}
        assert not names & {rule, "bias-without-hf-name"}, line


@pytest.mark.parametrize(
    ("flavor", "is_refused"), [("debugmodel", True), ("16B", True), ("671B", False)]
)
def test_biases_that_hugging_face_lacks_are_not_exported(flavor: str, is_refused: bool) -> None:
    """DeepSeek-V3 has biases. DeepSeek-V2, to which softmax flavors are exported, has none."""
    model = f"model.name=deepseek_v3 model.flavor={flavor}"
    export = "checkpoint.enable=true checkpoint.hf_interval=10"
    for line, expected in (
        (f"{model} {export}", is_refused),
        (f"{model} {export} model.args.load_balance=global", False),
        (model, False),
    ):
        names = [broken.name for broken in broken_rules(layout(line, 2))]
        assert ("bias-without-hf-name" in names) is expected


def test_biases_of_llama4_train_and_are_not_exported() -> None:
    """Its sigmoid router may have biases, but Hugging Face's format cannot store them."""
    line = "model.name=llama4 model.args.load_balance=bias"
    assert broken_rules(layout(line, 2)) == []
    export = "checkpoint.enable=true checkpoint.hf_interval=10"
    names = [broken.name for broken in broken_rules(layout(f"{line} {export}", 2))]
    assert names == ["bias-without-hf-name"]


def test_biases_of_gpt_oss_are_refused_with_hugging_face_weights() -> None:
    """The line names the settings that need the format, and what to do."""
    rule = "bias-without-hf-name"
    model = "model.name=gpt_oss model.flavor=20b checkpoint.enable=true"
    biased = f"{model} model.args.load_balance=bias"
    last = "last_save_in_hf=true checkpoint.last_save_model_only=true"
    settings = ("initial_load_in_hf=true", last, "hf_interval=10")
    for setting in settings:
        run = layout(f"{biased} checkpoint.{setting}", 2)
        (broken,) = [broken for broken in broken_rules(run) if broken.name == rule]
        problem = broken.problem(run)
        assert problem.key == "model.args"
        assert (
            f"with checkpoint.{setting.partition('=')[0]}: Hugging Face's gpt_oss"
            in problem.expected
        )
        assert problem.remedy == 'set load_balance = "global", or remove that setting'
        balanced = layout(f"{model} model.args.load_balance=global checkpoint.{setting}", 2)
        assert rule not in {broken.name for broken in broken_rules(balanced)}
    assert rule not in {broken.name for broken in broken_rules(layout(biased, 2))}


GPU_RUN = f"{FLOAT8} local=4 seq=2048 compile=true"
GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather=true"
RECIPE = "quantize.linear.float8.recipe_name"
FLOAT8_RUNS = [
    ("", {}, []),
    (f"{RECIPE}=rowwise", {}, []),
    (f"{GATHER} quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=true", {}, []),
    ("", {"device_type": None, "gpu_capability": None}, []),
    ("compile=false", {}, ["eager-float8"]),
    ("compile=false emulate=true", {}, []),
    ("", {"gpu_capability": (8, 9)}, []),
    ("", {"gpu_capability": (8, 0)}, ["float8-on-old-gpu"]),
    ("emulate=true", {"gpu_capability": (8, 0)}, []),
    ("", {"device_type": "cpu", "gpu_capability": None}, ["float8-on-cpu"]),
    ("emulate=true", {"device_type": "cpu", "gpu_capability": None}, []),
    ("seq=2050", {}, ["uneven-float8-tokens"]),
    ("seq=2050 emulate=true", {}, []),
    (f"{GATHER} {RECIPE}=rowwise", {}, ["float8-gather-by-row"]),
    (f"{GATHER} {RECIPE}=tensorwise", {}, []),
    (f"{GATHER} impl=simple_fsdp", {}, ["float8-gather-simple-fsdp"]),
    (f"{GATHER} impl=ddp", {}, []),
    ("quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp=true", {}, []),
]


@pytest.mark.parametrize(("line", "changes", "rules"), FLOAT8_RUNS)
def test_float8_rules(
    line: str, changes: dict[str, Any], rules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    gpu = replace(layout(f"{GPU_RUN} {line}", 1), device_type="cuda", gpu_capability=(9, 0))
    broken = find_broken(QUANTIZE_RULES, replace(gpu, **changes))
    assert [rule.name for rule in broken] == rules
    assert [rule.severity for rule in broken] == [
        "warning" if name == "eager-float8" else "error" for name in rules
    ]


@pytest.mark.parametrize(
    "case", [case for case in ILLEGAL if case.rule], ids=lambda case: case.line
)
def test_an_illegal_layout_breaks_one_rule(case: Illegal) -> None:
    """The parity matrix names this rule for each excluded cell."""
    assert [
        rule.name
        for rule in broken_rules(layout(case.line, case.ranks))
        if rule.severity == "error"
    ] == [case.rule]


def broken_rules(run: RunContext) -> list[Rule[RunContext]]:
    return find_broken(RULES, run)


def layout(line: str, ranks: int) -> RunContext:
    device = "cpu" if "device=cpu" in line else None
    line = " ".join(word for word in line.split() if not word.startswith("device"))
    config = load_config(["--job.config_file", CONFIG, *arguments(line)])
    return build_context(config, ranks, check_model(config), device)


def test_a_refused_value_causes_no_further_problems() -> None:
    """Only the refused degree is reported, not the rules that depend on it."""
    with pytest.raises(ConfigError) as caught:
        load_checked(
            ["--job.config_file", CONFIG, *arguments("seq=255 validate=false tp=2x")],
            2,
            training=False,
        )
    assert [problem.key for problem in caught.value.problems] == [
        "parallelism.tensor_parallel_degree"
    ]


def warnings(line: str, ranks: int | None) -> list[str]:
    config = load_config(["--job.config_file", CONFIG, *arguments(line)])
    problems = check_config(config, ranks, training=False)
    assert all(problem.severity == "warning" for problem in problems), problems
    return [str(problem) for problem in problems if "not available" not in problem.expected]


def test_tensor_parallelism_across_nodes_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = warnings("tp=16", 16)
    assert (
        "nodes of 8 ranks (assumed: no launcher reports the number)" in line
        and "a divisor of 8" in line
    )
    assert warnings("tp=8", 16) == warnings("tp=16", None) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (line,) = warnings("tp=4", 4)
    assert "nodes of 2 ranks: each layer" in line
    assert warnings("tp=2", 4) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert warnings("tp=16", 32) == []


def test_three_tensor_parallel_ranks_span_two_nodes() -> None:
    """A group that is smaller than a node can still span two nodes."""
    (line,) = warnings("tp=3 kv_heads=3 heads=6 model.args.dim=240 seq=255 validate=false", 24)
    assert "shards layers across nodes" in line


def test_too_few_micro_batches_warn() -> None:
    (line,) = warnings("pp=4 schedule=GPipe local=3", 4)
    assert "a step has 3 micro-batches for 4 pipeline ranks" in line
    assert (
        warnings("pp=4 schedule=GPipe local=4", 4)
        == warnings("pp=4 schedule=GPipe local=2 global=4", 4)
        == []
    )


def test_bfloat16_reduction_warns() -> None:
    (line,) = warnings("reduce=bfloat16", 2)
    assert "8 bits of precision" in line and 'set it to "float32"' in line
    assert warnings("reduce=bfloat16", 1) == warnings("reduce=float32", 2) == []


BFLOAT16 = "training.mixed_precision_param=bfloat16"
UNALIGNED = [
    (
        f"{BFLOAT16} model.args.vocab_size=50257",
        1,
        "model.args.vocab_size = 50304",
        "unaligned-vocabulary",
    ),
    (f"{BFLOAT16} model.args.vocab_size=50304 tp=16", 16, "vocab_size = 50304", ""),
    (
        f"{BFLOAT16} model.args.vocab_size=50368 tp=16",
        16,
        "vocab_size = 50432",
        "unaligned-vocabulary",
    ),
    (f"{BFLOAT16} model.args.dim=288 heads=2", 1, "dim = 320", "unaligned-width"),
    (
        f"{BFLOAT16} multiple_of=1 model.args.dim=256",
        1,
        "a feed-forward width of 682",
        "unaligned-features",
    ),
    (
        f"{BFLOAT16} multiple_of=64 model.args.ffn_dim_multiplier=1.4 tp=16",
        16,
        "of 960 on 16",
        "unaligned-features",
    ),
    (f"{BFLOAT16} model.args.dim=192 heads=16", 1, "heads of 12 dimensions", "unaligned-heads"),
    (f"{BFLOAT16} seq=100 local=1 validate=false", 1, "100 tokens a rank", "unaligned-tokens"),
    (f"{BFLOAT16} seq=64 local=1 tp=16 validate=false", 16, "4 tokens a rank", "unaligned-tokens"),
]


@pytest.mark.parametrize(("line", "ranks", "message", "rule"), UNALIGNED)
def test_sizes_that_are_slow_on_tensor_cores_warn(
    line: str, ranks: int, message: str, rule: str
) -> None:
    broken = broken_rules(layout(line, ranks))
    names = [broken_rule.name for broken_rule in broken if "unaligned" in broken_rule.name]
    assert names == ([rule] if rule else [])
    assert (message in " ".join(warnings(line, ranks))) is bool(rule)
    on_cpu = layout(f"{line} device=cpu", ranks)
    in_float32 = layout(line.replace("bfloat16", "float32"), ranks)
    for other in (on_cpu, in_float32):
        assert not [
            broken_rule for broken_rule in broken_rules(other) if "unaligned" in broken_rule.name
        ]


@pytest.mark.parametrize(
    ("name", "flavor"),
    [("llama3", flavor) for flavor in ("1B", "3B", "8B", "70B", "405B")]
    + [("qwen3", flavor) for flavor in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")],
)
def test_published_models_have_aligned_sizes(name: str, flavor: str) -> None:
    for tp in (1, 8):
        line = f"{BFLOAT16} model.name={name} model.flavor={flavor} tp={tp} validate=false"
        names = [rule.name for rule in broken_rules(layout(line, tp))]
        assert not [name for name in names if "unaligned" in name], names


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("sp=false", "tensor_parallel_degree > 1"),
        ("rotate=ulysses", "context_parallel_degree > 1"),
        ("micro=2", "pipeline_parallel_degree > 1"),
    ],
)
def test_settings_of_a_parallelism_of_degree_1_warn(line: str, needs: str) -> None:
    (text,) = warnings(line, 1)
    assert "has no effect in this run" in text and needs in text


@pytest.mark.parametrize(
    ("toml", "line", "needs"),
    [
        ('context_parallel_degree = 2\ncontext_parallel_rotate_method = "ulysses"', "balancer=None", "all ranks do the same"),
        ('pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "output"]]',
         "layers_per_stage=2 layers=1", "module_fqns_per_model_part to be unset"),
    ],
)  # fmt: skip
def test_settings_overridden_by_another_setting_warn(
    tmp_path: Path, toml: str, line: str, needs: str
) -> None:
    (tmp_path / "x.toml").write_text(
        f"[parallelism]\n{toml}\n[training]\nsteps = 1000\nlocal_batch_size = 4"
    )
    problems = check_config(
        load_config(["--job.config_file", str(tmp_path / "x.toml"), *arguments(line)]),
        2,
        training=False,
    )
    (text,) = map(str, problems)
    assert "has no effect in this run" in text and needs in text


def test_schedule_files_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule must fit the ranks and micro-batches of the run, and must end."""
    good = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    files = {
        "good": (good, "local=2", ""),
        "other ranks": ("0F0,0B0\n", "local=1", "one line per pipeline rank: 2; it has 1"),
        "other micro-batches": (
            good,
            "local=4",
            "a schedule of the 4 micro-batches of a step; it has 2",
        ),
        "deadlock": ("0F0,0B0\n1B0,1F0\n", "local=1", "it cannot be run"),
        "not a schedule": ("hello\n", "local=1", "expected an action such as"),
    }
    for name, (text, line, message) in files.items():
        path = tmp_path / f"{name.replace(' ', '-')}.csv"
        path.write_text(text)
        line = f"pp=2 schedule=PipelineScheduleSingle csv={path} {line}"
        assert main(["check", CONFIG, "--world-size", "2", *arguments(line)]) == (
            78 if message else 0
        ), name
        assert message in capsys.readouterr().err


def test_schedules_that_split_the_backward_pass_exclude_compile_and_old_torch(
    tmp_path: Path,
) -> None:
    """The rules apply to named schedules and to CSV files."""
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1\n")
    file = f"pp=2 schedule=PipelineScheduleSingle csv={path} local=2"
    for line in (file, "pp=2 schedule=ZBVZeroBubble"):
        assert broken_rules(layout(line, 2)) == []
        assert [rule.name for rule in broken_rules(layout(f"{line} compile=true", 2))] == [
            "compiled-zero-bubble"
        ]
        assert [
            rule.name for rule in broken_rules(replace(layout(line, 2), torch_release=(2, 12)))
        ] == ["old-zero-bubble"]
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    assert not layout(file, 2).splits_backward


def test_expert_parallelism_needs_torch_2_12() -> None:
    run = layout(f"{MOE} ep=2", 2)
    assert broken_rules(replace(run, torch_release=(2, 12))) == []
    (rule,) = broken_rules(replace(run, torch_release=(2, 11)))
    assert rule.name == "experts-on-old-torch"
    run = layout(f"{MOE} tp=2", 2)
    assert broken_rules(replace(run, torch_release=(2, 12))) == []
    (rule,) = broken_rules(replace(run, torch_release=(2, 11)))
    assert rule.name == "experts-of-tensor-parallel-ranks-on-old-torch"
    run = layout(f"{MOE} tp=2 sp=false", 2)
    assert broken_rules(replace(run, torch_release=(2, 11))) == []


def test_micro_batches_are_checked_only_on_a_given_number_of_ranks() -> None:
    """Every step of a batch ramp must have enough micro-batches."""
    assert warnings("pp=2 local=1 global=4 shard=2", None) == []
    assert layout("pp=2 local=1 global=4 ramp=2,2,12", 2).accumulations == (2, 4)
    assert warnings("pp=2 local=1 global=4 ramp=2,2,12", 2) == []


COMMANDS = [
    "tp=3 seq=240 validate=false",
    "pp=2 schedule=Interleaved1F1B local=5",
    "cp=2 balancer=ptrr",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_check_is_fast_and_imports_no_torch(line: str, repo_root: Path) -> None:
    """The limit is 5 s of CPU time."""
    (case,) = [case for case in ILLEGAL if case.line == line]
    code = (
        "import sys\nfrom torchtitan_like.cli import main\n"
        "code = main(['check', *sys.argv[1:]])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    start = os.times().children_user
    result = subprocess.run(
        [sys.executable, "-c", code, CONFIG, "--world-size", str(case.ranks), *arguments(line)],
        cwd=repo_root, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 78 and result.stdout == "" and case.message in result.stderr, (
        result.stderr
    )
    assert os.times().children_user - start < 5
