"""A table of all rules: for each an example that breaks it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.check.test_rules import (
    CONFIG,
    FLOAT8,
    ILLEGAL,
    MOE,
    MUP,
    UNALIGNED,
    arguments,
)
from torchtitan_like.check import check_config, context
from torchtitan_like.check.rules import RULES
from torchtitan_like.check.rules.no_effect_rules import NO_EFFECT_RULES
from torchtitan_like.config import ConfigError, Problem, load_config
from torchtitan_like.config.base import Section
from torchtitan_like.config.fields import all_settings, find
from torchtitan_like.config.problems import Rule
from torchtitan_like.config.sections_run import LIGHTHOUSE


class Example(NamedTuple):
    """Settings that break a rule, and a part of the problem's line.

    line: in the short form of `arguments`.
    lacks: the environment lacks all packages that rules look for, compilers and a lighthouse.
    capability: compute capability of the GPU. torch: installed release.
    """

    rule: str
    line: str
    message: str
    ranks: int = 2
    device: str | None = None
    lacks: bool = False
    capability: tuple[int, int] = (9, 0)
    torch: tuple[int, int] = (2, 13)


MINE = f"{__name__}:mine"
HF_LAST = "checkpoint.last_save_in_hf=true"
GRAPHS = "compile.cuda_graphs=true"
BF16 = "training.mixed_precision_param=bfloat16"
FULL_LAST = "checkpoint.last_save_model_only=false"
SAVE = "checkpoint.enable=true"
START = "checkpoint.initial_load_path=x"
SEED = f"{SAVE} checkpoint.create_seed_checkpoint=true"
UPCYCLED = f"{SAVE} {START} checkpoint.initial_load_upcycle=true"
BIASES = f"{MOE} model.args.load_balance=bias"
GPU_FLOAT8 = f"{FLOAT8} seq=2048 compile=true validate=false"
GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather=true"
GROUPS = "fault_tolerance.enable=true fault_tolerance.group_size=2"
DILOCO = f"{GROUPS} fault_tolerance.semi_sync_method=diloco"
TOKENS = "data.sources.a.path=x data.sources.a.format=tokens"

EXAMPLES = [
    # [training], [optimizer], [ema], [lr_scheduler]
    Example("unreachable-batch-ramp", "global=64 ramp=16,15,100",
            "a multiple of increment is global_batch_size"),
    Example("float32-compute-of-bfloat16-weights",
            "training.dtype=bfloat16 training.mixed_precision_param=float32",
            'set training.dtype = "float32"'),
    Example("bfloat16-reduction", "reduce=bfloat16", "8 bits of precision"),
    Example("emulated-bfloat16", "training.mixed_precision_param=bfloat16", "is slow on this CPU",
            device="cpu"),
    Example("norm-of-early-step", "early=true training.max_norm=1.0",
            "before the gradient norm is known"),
    Example("offload-without-gpu", "training.enable_cpu_offload=true", "already in host memory",
            device="cpu"),
    Example("adamw8bit-without-torchao", "optimizer.name=AdamW8bit", "-m pip install torchao",
            lacks=True),
    Example("parametrized-optimizer",
            f"{MUP} optimizer.groups.a.name=Muon optimizer.groups.a.parameters=layers.*",
            "the learning rates of Muon do not scale like AdamW's"),
    Example("average-of-initial-weights",
            f"ema.enable=true {SAVE} ema.warmup=false training.steps=1000",
            "keeps 90% of the first weights in the average after training.steps = 1000"),
    Example("unused-average", "ema.enable=true checkpoint.enable=false",
            "neither saved nor validated"),
    Example("last-save-without-average",
            f"ema.enable=true {SAVE} {HF_LAST} checkpoint.last_save_model_only=true",
            "titan ckpt export"),
    Example("warmup-beyond-schedule", "training.steps=10 lr_scheduler.warmup_steps=200",
            "Warmup steps (200) exceed total training steps (10). Adjusting warmup steps to 10."),
    Example("decay-overlaps-warmup",
            "training.steps=1000 lr_scheduler.warmup_steps=200 lr_scheduler.decay_ratio=0.9",
            "takes 800 steps"),
    Example("decay-below-one-step", "training.steps=100 lr_scheduler.decay_ratio=0.001",
            "does not decay"),
    Example("schedule-ends-early",
            "training.steps=1000 lr_scheduler.total_steps=500 lr_scheduler.warmup_steps=2 "
            "lr_scheduler.min_lr_factor=0.0", "stays at min_lr_factor = 0.0 of its peak"),
    Example("schedule-ends-early",
            "training.steps=1000 lr_scheduler.total_steps=500 lr_scheduler.decay_ratio=0.0",
            "the learning rate stays at its peak, without a decay"),
    Example("schedule-ends-early", "training.steps=1000 lr_scheduler.total_steps=500",
            "ends the schedule at step 500 of 1000"),
    # [data], [validation]
    Example("streamed-token-files", f"{TOKENS} data.sources.a.streaming=true",
            "token files are read in place"),
    Example("no-weight-at-first-step", f"{TOKENS} data.sources.a.weight=0",
            "give one source a weight"),
    Example("ending-stream-in-mixture",
            "data.sources.a.path=x data.sources.b.path=y data.sources.a.streaming=true "
            "data.sources.a.max_epochs=1", "not available yet"),
    Example("streamed-validation",
            "validate=true validation.sources.a.path=x validation.sources.a.streaming=true",
            "reads the same samples"),
    # [parallelism]
    Example("csv-of-named-schedule", "pp=2 schedule=1F1B csv=x.csv", "PipelineScheduleMulti"),
    Example("expert-tensor-parallel-degree", f"{MOE} tp=4 etp=2", "1 or tensor_parallel_degree = 4",
            4),
    Example("reshard-of-replicated-weights",
            "parallelism.fsdp_reshard_after_forward=never replicate=2", "weights are not sharded"),
    Example("reshard-of-replicated-weights", "parallelism.fsdp_reshard_after_forward=always",
            "weights are not sharded", 1),
    Example("prefetch-without-shards", "parallelism.fsdp_prefetch_depth=2 impl=simple_fsdp",
            "and sharded weights"),
    Example("prefetch-without-shards", "parallelism.fsdp_prefetch_depth=2", "and sharded weights",
            1),
    Example("bucketing-without-graph", "bucketing=true impl=simple_fsdp", "a model compiled by"),
    Example("bucketing-without-graph",
            "bucketing=true impl=simple_fsdp compile=true compile.backend=eager",
            "a model compiled by"),
    Example("bucketing-without-graph", "bucketing=true",
            'needs data_parallel_impl = "simple_fsdp"'),
    Example("bucketing-alone", "bucketing=true impl=simple_fsdp compile=true",
            "at least two data-parallel", 1),
    Example("async-without-tp", "async_tp=true", "tensor_parallel_degree > 1"),
    Example("few-micro-batches", "pp=4 schedule=GPipe local=3",
            "a step has 3 micro-batches for 4 pipeline ranks", 4),
    Example("tp-across-nodes", "tp=16",
            "nodes of 8 ranks (assumed: no launcher reports the number)", 16),
    Example("old-zero-bubble", "pp=2 schedule=ZBVZeroBubble", "install torch 2.13", torch=(2, 12)),
    Example("experts-on-old-torch", f"{MOE} ep=2", "install torch 2.12", torch=(2, 11)),
    Example("experts-of-tensor-parallel-ranks-on-old-torch", f"{MOE} tp=2", "install torch 2.12",
            torch=(2, 11)),
    Example("unavailable-expert-backend",
            f"{MOE} ep=2 parallelism.expert_parallel_comm_backend=deepep", "not available yet"),
    # [activation_checkpoint], [compile], [quantize]
    Example("offloaded-activations-on-cpu", "ac=offload", "saves no memory without a GPU",
            device="cpu"),
    Example("eager-memory-budget", "ac=memory_budget", "the compiler selects"),
    Example("compiled-recording", "ac=full ac_debug=true compile=true",
            "no operations are recorded"),
    Example("per-op-recording", "ac=selective ac_option=op ac_debug=true",
            'selective_ac_option = "1"'),
    Example("no-compiled-component", "compile=true compile.components=",
            "compile.components is empty"),
    Example("memory-budget-backend", "ac=memory_budget compile=true compile.backend=eager",
            "this one keeps all"),
    Example("unknown-backend", "compile=true compile.backend=nonsense",
            "torch._dynamo.register_backend"),
    Example("backend-not-installed", "compile=true compile.backend=tvm", "the package tvm",
            lacks=True),
    Example("no-cpp-compiler", "compile=true", "install g++", device="cpu", lacks=True),
    Example("cuda-graphs-on-cpu", GRAPHS, "without a GPU", 1, device="cpu"),
    Example("cuda-graphs-on-many-ranks", GRAPHS, "false on 2 ranks", device="cuda"),
    Example("cuda-graphs-of-replica-groups", f"{GRAPHS} {GROUPS}", "set compile.cuda_graphs = false", 1),
    Example("cuda-graphs-offload", f"{GRAPHS} training.enable_cpu_offload=true", "offloaded gradients", 1),
    Example("cuda-graphs-offloaded-activations", f"{GRAPHS} ac=offload", 'set it to "full"', 1),
    Example("cuda-graphs-random-state", f"{GRAPHS} ac=full", 'or set mode = "none"', 1),
    Example("cuda-graphs-early-step", f"{GRAPHS} early=true", "the learning rate of its capture", 1),
    Example("cuda-graphs-varlen", f"{GRAPHS} model.flavor=debugmodel_varlen_attn",
            "the number of documents", 1),
    Example("cuda-graphs-experts", f"{GRAPHS} {MOE} {BF16} training.grouped_mm=loop",
            "computes them in bfloat16", 1),
    Example("cuda-graphs-experts", f"{GRAPHS} {MOE} training.mixed_precision_param=float32",
            'grouped_mm = "auto"', 1),
    Example("cuda-graphs-experts", f"{GRAPHS} {MOE} {BF16}", "compute capability 9.0 or 10.0", 1,
            device="cuda", capability=(8, 0)),
    Example("cuda-graphs-overflow-detection", f"{GRAPHS} debug.detect_overflow=true",
            "cannot be inspected", 1),
    Example("cuda-graphs-of-compiler", f"{GRAPHS} compile=true compile.backend=cudagraphs",
            'set it to "inductor"', 1),
    Example("unavailable-converter", "converters=quantize.linear.mx", "not available yet"),
    Example("float8-on-cpu", FLOAT8, "set it to true", device="cpu"),
    Example("torchao-not-installed", f"{FLOAT8} emulate=true", "-m pip install torchao",
            device="cpu", lacks=True),
    Example("eager-float8", FLOAT8, "each cast is a separate kernel", device="cuda"),
    Example("float8-on-old-gpu", GPU_FLOAT8, "train in bfloat16", device="cuda", capability=(8, 0)),
    Example("uneven-float8-tokens", f"{GPU_FLOAT8} seq=2050",
            "a multiple of 16 tokens on each rank", device="cuda"),
    Example("float8-gather-by-row",
            f"{GPU_FLOAT8} {GATHER} quantize.linear.float8.recipe_name=rowwise",
            'recipe_name = "tensorwise"', device="cuda"),
    Example("float8-gather-simple-fsdp", f"{GPU_FLOAT8} {GATHER} impl=simple_fsdp",
            "only FSDP2 gathers in float8", device="cuda"),
    # [model]
    Example("bias-of-softmax", BIASES, "loads may oscillate"),
    Example("bias-without-hf-name", f"{BIASES} {SAVE} checkpoint.hf_interval=10",
            "with checkpoint.hf_interval: Hugging Face's qwen3"),
    # [checkpoint]
    Example("hf-save-of-optimizer", f"{SAVE} {HF_LAST} {FULL_LAST}",
            "set checkpoint.last_save_model_only = true"),
    Example("converted-optimizer", f"{SAVE} checkpoint.export_dtype=bfloat16 {FULL_LAST}",
            "leave export_dtype out"),
    Example("optimizer-from-hf",
            f"{SAVE} checkpoint.initial_load_in_hf=true checkpoint.initial_load_model_only=false",
            "set checkpoint.initial_load_model_only = true"),
    Example("quantized-without-hf", f"{SAVE} checkpoint.initial_load_in_hf_quantized=true",
            "set checkpoint.initial_load_in_hf = true"),
    Example("upcycle-without-weights", f"{SAVE} checkpoint.initial_load_upcycle=true",
            "the path of a dense checkpoint"),
    Example("upcycle-with-optimizer", f"{UPCYCLED} checkpoint.initial_load_model_only=false",
            "set checkpoint.initial_load_model_only = true"),
    Example("warm-without-weights", f"{SAVE} checkpoint.start=warm",
            "set checkpoint.initial_load_path"),
    Example("warm-with-optimizer",
            f"{SAVE} checkpoint.start=warm {START} checkpoint.initial_load_model_only=false",
            'start = "auto"'),
    Example("warm-without-model",
            f"{SAVE} checkpoint.start=warm {START} checkpoint.exclude_from_loading=model",
            'start = "scratch"'),
    Example("scratch-with-weights", f"{SAVE} checkpoint.start=scratch {START}",
            'set checkpoint.start = "warm"'),
    Example("step-of-no-run", f"{SAVE} checkpoint.start=scratch checkpoint.load_step=5",
            'set checkpoint.start = "resume"'),
    Example("seed-without-checkpoints",
            "checkpoint.enable=false checkpoint.create_seed_checkpoint=true",
            "set checkpoint.enable = true"),
    Example("seed-with-load-only", f"{SEED} checkpoint.load_only=true",
            "remove one of the two settings", 1),
    Example("seed-with-start", f"{SEED} checkpoint.start=resume", "remove one of the two settings",
            1),
    Example("seed-with-weights", f"{SEED} {START}", "remove one of the two settings", 1),
    Example("seed-with-step", f"{SEED} checkpoint.load_step=5", "remove one of the two settings",
            1),
    Example("kept-step-never-saved", f"{SAVE} checkpoint.interval=10 checkpoint.keep_every=25",
            "set it to a multiple"),
    Example("checkpoint-folder-uri", f"{SAVE} checkpoint.folder=s3://bucket/run",
            "needs a POSIX file system"),
    Example("initial-checkpoint-uri", f"{SAVE} checkpoint.initial_load_path=gs://bucket/step-5",
            "copy that checkpoint to a local or shared folder first"),
    Example("seed-on-many-ranks", SEED, "one rank, not 2"),
    Example("upcycle-without-dense-model", UPCYCLED, "choose a model with experts"),
    Example("upcycle-without-normalized-weights", f"{UPCYCLED} {MOE} model.args.route_norm=false",
            "route_norm = true"),
    Example("pinned-memory-without-gpu", f"{SAVE} checkpoint.async_mode=async_with_pinned_mem",
            "no memory is page-locked", device="cpu"),
    # [job], [metrics], [profiling], [resilience], [debug], [memory_estimation]
    Example("run-directory-uri", "job.dump_folder=s3://bucket", "rclone or rsync"),
    Example("unavailable-job.custom_config_module", "job.custom_config_module=my.module",
            "not available yet"),
    Example("unavailable-experimental.custom_args_module",
            "experimental.custom_args_module=my.module", "not available yet"),
    Example("unavailable-estimation",
            "memory_estimation.enable=true memory_estimation.disable_fake_mode=true",
            "not available yet"),
    Example("tensorboard-not-installed", "metrics.enable_tensorboard=true",
            "-m pip install tensorboard", lacks=True),
    Example("wandb-not-installed", "metrics.enable_wandb=true", "-m pip install wandb", lacks=True),
    Example("matplotlib-not-installed", "ac=memory_budget compile=true "
            "activation_checkpoint.visualize_memory_budget_pareto=true", "pip install matplotlib",
            lacks=True),
    Example("short-profiling-cycle",
            "profiling.enable_profiling=true profiling.profile_freq=3 profiling.profiler_warmup=3",
            "profiler_warmup + profiler_active = 4"),
    Example("trace-beyond-end",
            "training.steps=1000 profiling.enable_profiling=true profiling.profile_freq=1001",
            "writes no trace: the first one is due at step 1001, and the run ends at step 1000"),
    Example("skipped-nonfinite-early-step", "early=true resilience.on_nonfinite=skip",
            'on_nonfinite = "stop"'),
    Example("skipped-spike-early-step", "early=true resilience.on_spike=skip", 'on_spike = "log"'),
    Example("high-norm-early-step", "early=true resilience.on_high_norm=rerun",
            'on_high_norm = "accept"'),
    Example("bounded-exchange-early-step",
            "early=true parallelism.expert_parallel_exchange=bounded",
            'expert_parallel_exchange = "exact"'),
    Example("bounded-exchange-debug",
            "debug.detect_overflow=true parallelism.expert_parallel_exchange=bounded",
            "until its rows have arrived"),
    Example("gradient-check-early-step", "early=true resilience.verify_gradients_freq=10",
            "would update the weights"),
    Example("replica-check-without-replicas", "check=10", "data_parallel_replicate_degree > 1"),
    Example("compiled-overflow-detection", "debug.detect_overflow=true compile=true",
            "cannot be inspected"),
    Example("balance-without-experts", "debug.moe_force_load_balance=true",
            "llama3 has no experts"),
    Example("launch-blocking-without-gpu", "debug.launch_blocking=true", "there is no GPU",
            device="cpu"),
    Example("launch-blocking", "debug.launch_blocking=true", "much slower", device="cuda"),
    # [fault_tolerance]
    Example("replica-id-beyond-group", f"{GROUPS} fault_tolerance.replica_id=2",
            "less than group_size = 2"),
    Example("groups-without-size", "fault_tolerance.enable=true global=8", "the number of replica groups"),
    Example("groups-without-lighthouse", GROUPS, "distributed.lighthouse", lacks=True),
    Example("torchft-not-installed", GROUPS, "torchft>=0.2,<0.3", lacks=True),
    Example("groups-over-nccl", f"{GROUPS} fault_tolerance.process_group=nccl",
            "NCCL between groups is not tested"),
    Example("positions-of-groups",
            f"{GROUPS} {SAVE} checkpoint.enable_ft_dataloader_checkpoints=false",
            "the positions of all groups"),
    Example("groups-pp", f"{GROUPS} pp=2", "set it to 1"),
    Example("groups-cp", f"{GROUPS} cp=2", "set it to 1"),
    Example("groups-tp", f"{GROUPS} tp=2", "set it to 1"),
    Example("groups-replicate", f"{GROUPS} replicate=2", "start more groups"),
    Example("groups-experts", f"{GROUPS} {MOE}", "a dense model"),
    Example("groups-early-step", f"{GROUPS} early=true", "expected false"),
    Example("groups-high-norm", f"{GROUPS} resilience.on_high_norm=rerun", "leave it out"),
    Example("groups-average",
            f"{GROUPS} {SAVE} ema.enable=true fault_tolerance.semi_sync_method=local_sgd",
            "the weights of the groups differ"),
    Example("groups-offload", f"{GROUPS} training.enable_cpu_offload=true", "expected false"),
    Example("groups-stream", f"{GROUPS} training.dataset=c4", "a dataset on disk"),
    Example("groups-ramp", f"{GROUPS} global=64 ramp=32,32,100", "leave it out"),
    Example("groups-seed-checkpoint", f"{GROUPS} {SEED}", "create it without [fault_tolerance]", 1),
    Example("groups-quantize", f"{DILOCO} fault_tolerance.should_quantize=true", "expected false"),
    Example("more-live-groups-than-groups", f"{GROUPS} fault_tolerance.min_replica_size=3",
            "lower it"),
    Example("uneven-fragments", f"{DILOCO} fault_tolerance.num_fragments=2",
            "a multiple of the 2 model fragments"),
    Example("late-fragment", f"{DILOCO} fault_tolerance.fragment_sync_delay=5", "raise sync_steps"),
    Example("wrong-fragments",
            f"{DILOCO} fault_tolerance.module_fqns_per_model_fragment=tok_embeddings,layers.0",
            "lower num_fragments"),
    # Names of user code
    Example("own-optimizer-early-step", f"optimizer.name={MINE} early=true",
            "the gradients of all parameters"),
    Example("own-loss-compiled", f"loss.name={MINE} compile=true impl=simple_fsdp",
            "whose graph contains the loss"),
    Example("processed-token-files", f"{TOKENS} data.sources.a.processor={MINE}",
            "which has no records"),
    # Layouts, whose tests are in test_rules.py
    *(Example(case.rule, case.line, case.message, case.ranks) for case in ILLEGAL if case.rule),
    *(Example(rule, line, message, ranks) for line, ranks, message, rule in UNALIGNED if rule),
]  # fmt: skip


def all_rules() -> Iterator[tuple[str, Rule[Any]]]:
    """Yield every rule with its dotted key; `<name>` is the name of a table."""
    for rule in RULES:
        yield rule.key, rule
    sections: dict[type[Section], tuple[str, ...]] = {}
    for setting in all_settings():
        table = find(setting.path[:-1])
        if table is not None and table.section is not None:
            sections.setdefault(table.section, setting.path[:-1])
    for section, path in sections.items():
        for rule in section.rules:
            yield ".".join((*path, rule.key)), rule


KEYS = {rule.name: (key, rule) for key, rule in all_rules()}


def mine(*_: Any) -> None:
    """Be an optimizer, a loss or a sample processor."""


@pytest.fixture(autouse=True)
def _in_the_repository(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def find_problems(example: Example, line: str, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Return the problems that training with these settings would have."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.backends.registry", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if example.lacks else name)
    monkeypatch.setattr(shutil, "which", lambda name: None if example.lacks else name)
    monkeypatch.setenv(LIGHTHOUSE, "" if example.lacks else "http://127.0.0.1:29510")
    monkeypatch.setattr(context, "installed_torch_release", lambda: example.torch)
    monkeypatch.setattr(context, "_gpu_capability", lambda: example.capability)
    monkeypatch.setattr(context, "_cpu_has_bfloat16", lambda: False)
    device = "cpu" if "device=cpu" in line else example.device
    device = "cuda" if "device=cuda" in line else device
    words = [word for word in line.split() if not word.startswith("device=")]
    try:
        config = load_config(["--job.config_file", CONFIG, *arguments(" ".join(words))])
    except ConfigError as error:
        return error.problems
    return check_config(config, example.ranks, training=True, device_type=device)  # type: ignore[arg-type]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.rule)
def test_an_example_breaks_its_rule(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line has the key, the severity and the message. Without the example there is none."""
    problems = find_problems(example, example.line, monkeypatch)
    (problem,) = [problem for problem in problems if problem.rule == example.rule]
    key, rule = KEYS[example.rule]
    assert problem.key == key.replace("<name>", "a")
    assert problem.severity == ("warning" if rule.severity == "warning" else "error")
    assert example.message in str(problem) and "\n" not in str(problem)
    assert problem.has_no_effect == (rule in NO_EFFECT_RULES)
    usual = find_problems(example, "metrics.enable_tensorboard=false", monkeypatch)
    assert example.rule not in {problem.rule for problem in usual}


@pytest.mark.parametrize("switch", [SAVE, "fault_tolerance.enable=true"])
def test_a_disabled_feature_breaks_no_rule(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files often contain settings of features that they disable."""
    examples = [example for example in EXAMPLES if example.line.startswith(switch)]
    for example in examples:
        line = example.line.replace(switch, switch.replace("true", "false"))
        reported = {problem.rule for problem in find_problems(example, line, monkeypatch)}
        assert example.rule not in reported, line
    assert len(examples) > 20


def test_every_rule_has_an_example() -> None:
    rules = [rule.name for _, rule in all_rules()]
    assert len(set(rules)) == len(rules)
    assert set(rules) == {example.rule for example in EXAMPLES}


@pytest.mark.parametrize(
    ("key", "rule"), list(all_rules()), ids=lambda value: getattr(value, "name", "")
)
def test_a_rule_names_settings_and_has_a_remedy(key: str, rule: Rule[Any]) -> None:
    section = key.removesuffix(rule.key)
    for name in (rule.key, *rule.involves):
        assert find(tuple(f"{section}{name}".split("."))) is not None, name
    assert rule.expected and (rule.remedy or rule.severity == "warning")


@pytest.mark.parametrize(
    "line",
    [
        "ac=selective ac_option=op activation_checkpoint.preserve_rng_state=false",
        "ac=full compile=true",
        "optimizer.name=Muon ema.enable=true global=64 ramp=16,16,100",
        f"{MOE} {BF16} resilience.verify_gradients_freq=10",
        "model.flavor=debugmodel_flex_attn",
        f"{GPU_FLOAT8} {BF16}",
    ],
)
def test_cuda_graphs_are_accepted_with(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("", "", "", 1, device="cuda")
    problems = find_problems(example, f"{GRAPHS} {line}", monkeypatch)
    assert [problem.rule for problem in problems if problem.severity != "warning"] == []
