"""Rules of [activation_checkpoint], [compile] and [quantize]: how a step computes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import (
    AC_MODE,
    COMPILE,
    CUDA_GRAPHS,
    DEGREES,
    EARLY_STEP,
    IMPL,
    MODEL_KEYS,
)
from torchtitan_like.config.problems import Rule
from torchtitan_like.config.sections_scale import BACKENDS, KEEPING_ALL, PACKAGE_OF_BACKEND
from torchtitan_like.distributed.float8 import FLOAT8, MULTIPLE
from torchtitan_like.util.modules import is_dotted, pip_install
from torchtitan_like.util.suggestions import did_you_mean


def _records_blocks(run: RunContext) -> bool:
    section = run.config.activation_checkpoint
    return section.debug and section.mode in ("selective", "full")


ACTIVATION_CHECKPOINT_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "offloaded-activations-compiled",
        AC_MODE,
        lambda run: run.offloads_activations and run.compiles_model,
        'another mode than "offload" with a compiled model: the copies to host memory cannot be '
        "part of a compiled block",
        'set it to "selective" or "full", or remove "model" from compile.components',
        COMPILE,
    ),
    Rule(
        "offloaded-activations-on-cpu",
        AC_MODE,
        lambda run: run.offloads_activations and run.device_type == "cpu",
        "saves no memory without a GPU: activations are copied within host memory",
        'set it to "none"',
        severity="warning",
    ),
    Rule(
        "eager-memory-budget",
        AC_MODE,
        lambda run: (
            run.config.activation_checkpoint.mode == "memory_budget" and not run.compiles_model
        ),
        'a compiled model with "memory_budget": the compiler selects what to keep',
        'set compile.enable = true with "model" in compile.components',
        COMPILE,
    ),
    Rule(
        "compiled-recording",
        "activation_checkpoint.debug",
        lambda run: _records_blocks(run) and run.compiles_model,
        "false with a compiled model: inside compiled code no operations are recorded",
        "set it to false, or compile.enable = false for debugging",
        (AC_MODE, *COMPILE),
    ),
    Rule(
        "per-op-recording",
        "activation_checkpoint.debug",
        lambda run: (
            _records_blocks(run)
            and not run.compiles_model
            and run.config.activation_checkpoint.mode == "selective"
            and run.config.activation_checkpoint.selective_ac_option == "op"
        ),
        'false with selective_ac_option = "op": '
        "torch records only blocks that are recomputed as a whole",
        'set it to false, or selective_ac_option = "1"',
        (AC_MODE, "activation_checkpoint.selective_ac_option"),
    ),
)


def _is_unknown_backend(run: RunContext) -> bool:
    """Return True if torch, installed packages and `experimental.custom_import` lack the backend.

    The custom module is already imported. If it registers a backend, torch's registry is imported.
    """
    section = run.config.compile
    registered = entry_points(group="torch_dynamo_backends").names
    if not section.is_on or section.backend in BACKENDS or section.backend in registered:
        return False
    registry = sys.modules.get("torch._dynamo.backends.registry")
    return registry is None or section.backend not in registry.list_backends(exclude_tags=())


def _lacks_backend_package(run: RunContext) -> bool:
    section = run.config.compile
    package = PACKAGE_OF_BACKEND.get(section.backend)
    return section.is_on and package is not None and importlib.util.find_spec(package) is None


def _lacks_cpp_compiler(run: RunContext) -> bool:
    section = run.config.compile
    if run.device_type != "cpu" or not section.is_on or section.backend != "inductor":
        return False
    names = (os.environ.get("CXX"), "g++", "clang++")
    return not any(shutil.which(name) for name in names if name)


COMPILE_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "own-loss-compiled",
        "loss.name",
        lambda run: (
            is_dotted(run.config.loss.name)
            and run.compiles_model
            and run.parallelism.data_parallel_impl == "simple_fsdp"
        ),
        '"cross_entropy" with compiled SimpleFSDP, whose graph contains the loss',
        'set parallelism.data_parallel_impl = "fsdp2", which compiles blocks only',
        (IMPL, *COMPILE),
    ),
    Rule(
        "memory-budget-backend",
        "compile.backend",
        lambda run: (
            run.config.activation_checkpoint.mode == "memory_budget"
            and run.compiles_model
            and run.config.compile.backend in KEEPING_ALL
        ),
        'a backend that selects what to keep, with activation_checkpoint.mode = "memory_budget": '
        "this one keeps all",
        'set it to "inductor" or "aot_eager"',
        (AC_MODE, "compile.enable"),
    ),
    Rule(
        "no-cpp-compiler",
        "compile.enable",
        _lacks_cpp_compiler,
        "a C++ compiler, which torch.compile needs on CPU",
        "install g++, or set it to false",
    ),
    Rule(
        "unknown-backend",
        "compile.backend",
        _is_unknown_backend,
        f"a backend of torch.compile: {', '.join(BACKENDS[:3])}, "
        "or one that experimental.custom_import registers",
        lambda run: (
            did_you_mean(run.config.compile.backend, BACKENDS)
            or "set it to inductor, or name a module that calls torch._dynamo.register_backend"
        ),
        ("compile.enable", "experimental.custom_import"),
    ),
    Rule(
        "backend-not-installed",
        "compile.backend",
        _lacks_backend_package,
        lambda run: (
            f"the package {PACKAGE_OF_BACKEND[run.config.compile.backend]}, which is not installed"
        ),
        "install it, or set compile.backend to inductor",
        ("compile.enable",),
        "training_error",
    ),
)

NO_GRAPHS = "set compile.cuda_graphs = false"


def _graph_rule(
    name: str,
    key: str,
    when: Callable[[RunContext], bool],
    expected: str | Callable[[RunContext], str],
    remedy: str = NO_GRAPHS,
    involves: tuple[str, ...] = (),
) -> Rule[RunContext]:
    """Return the rule that a run with CUDA graphs may not have a setting."""

    def has_graphs_and(run: RunContext) -> bool:
        return run.config.compile.cuda_graphs and when(run)

    others = tuple(other for other in (CUDA_GRAPHS, *involves) if other != key)
    return Rule(name, key, has_graphs_and, expected, remedy, others)


def _reads_row_counts(run: RunContext) -> bool:
    """Return True if the host reads how many rows each expert has: see `layers.grouped_linear`.

    `grouped_mm` does so for other types than bfloat16, and on other GPUs than Hopper and Blackwell.
    """
    training, capability = run.config.training, run.gpu_capability
    has_kernel = capability is None or capability[0] in (9, 10)
    is_product = training.grouped_mm != "loop" and training.mixed_precision_param == "bfloat16"
    return bool(run.size("n_experts")) and not (is_product and has_kernel)


def _restores_random_state(run: RunContext) -> bool:
    section = run.config.activation_checkpoint
    recomputes = section.mode in ("selective", "full") and not run.compiles_model
    return recomputes and section.preserve_rng_state


def _has_other_graphs(run: RunContext) -> bool:
    section = run.config.compile
    is_inductor = section.backend == "inductor"
    by_variable = is_inductor and os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"
    return section.is_on and (section.backend == "cudagraphs" or by_variable)


CUDA_GRAPH_RULES: tuple[Rule[RunContext], ...] = (
    _graph_rule(
        "cuda-graphs-on-cpu",
        CUDA_GRAPHS,
        lambda run: run.device_type == "cpu",
        "false without a GPU: a CUDA graph is a sequence of its kernels",
        "set it to false",
    ),
    _graph_rule(
        "cuda-graphs-on-many-ranks",
        CUDA_GRAPHS,
        lambda run: max(run.world_size or 1, run.dims.world_size) > 1,
        lambda run: (
            f"false on {max(run.world_size or 1, run.dims.world_size)} ranks: "
            "collectives are no part of a graph"
        ),
        "set it to false, or start one rank with NGPU=1",
        DEGREES,
    ),
    _graph_rule(
        "cuda-graphs-of-replica-groups",
        "fault_tolerance.enable",
        lambda run: run.config.fault_tolerance.enable,
        "false with compile.cuda_graphs: other groups change gradients and weights of this one",
    ),
    _graph_rule(
        "cuda-graphs-offload",
        "training.enable_cpu_offload",
        lambda run: run.config.training.enable_cpu_offload,
        "false with compile.cuda_graphs: the host waits for offloaded gradients",
    ),
    _graph_rule(
        "cuda-graphs-offloaded-activations",
        AC_MODE,
        lambda run: run.offloads_activations,
        'another mode than "offload" with compile.cuda_graphs: the host allocates its memory',
        'set it to "full"',
    ),
    _graph_rule(
        "cuda-graphs-random-state",
        "activation_checkpoint.preserve_rng_state",
        _restores_random_state,
        "false with compile.cuda_graphs: the host would read the random state in forward",
        'set it to false, which changes no number of a model without dropout, or set mode = "none"',
        (AC_MODE, *COMPILE),
    ),
    _graph_rule(
        "cuda-graphs-early-step",
        EARLY_STEP,
        lambda run: run.config.optimizer.early_step_in_backward,
        "false with compile.cuda_graphs: a graph would repeat the learning rate of its capture",
    ),
    _graph_rule(
        "cuda-graphs-varlen",
        CUDA_GRAPHS,
        lambda run: getattr(run.args, "attn_type", "") == "varlen" and run.has_document_masks,
        'false with attn_type = "varlen": the number of documents changes shapes',
        'set it to false, or use attn_type = "flex" or "sdpa"',
        MODEL_KEYS,
    ),
    _graph_rule(
        "cuda-graphs-experts",
        CUDA_GRAPHS,
        _reads_row_counts,
        "false with these experts: the host reads their numbers of rows unless grouped_mm "
        "computes them in bfloat16 on a GPU of compute capability 9.0 or 10.0",
        'set it to false, or training.mixed_precision_param = "bfloat16" and grouped_mm = "auto"',
        ("training.mixed_precision_param", "training.grouped_mm", *MODEL_KEYS),
    ),
    _graph_rule(
        "cuda-graphs-overflow-detection",
        "debug.detect_overflow",
        lambda run: run.config.debug.detect_overflow,
        "false with compile.cuda_graphs: modules inside a graph cannot be inspected",
        "set compile.cuda_graphs = false while you search for the non-finite value",
    ),
    _graph_rule(
        "cuda-graphs-of-compiler",
        "compile.backend",
        _has_other_graphs,
        "a backend that makes no CUDA graphs of its own, with compile.cuda_graphs",
        'set it to "inductor", without TORCHINDUCTOR_CUDAGRAPHS in the environment',
        ("compile.enable",),
    ),
)

FLOAT8_CAPABILITY = (8, 9)
EMULATE = f"{FLOAT8}.emulate"
FLOAT8_ALL_GATHER = f"{FLOAT8}.enable_fsdp_float8_all_gather"
NO_FLOAT8_KERNELS = (
    "true, for tests: float8 kernels need a GPU of compute capability 8.9 (L40S, H100) or later"
)


def _computes_in_float8(run: RunContext) -> bool:
    """Return True if the run needs float8 kernels."""
    return run.uses_float8 and not run.config.quantize.linear.float8.emulate


def _lacks_capability(run: RunContext) -> bool:
    capability = run.gpu_capability
    return _computes_in_float8(run) and capability is not None and capability < FLOAT8_CAPABILITY


def _num_tokens(run: RunContext) -> int:
    """Return a micro-batch's tokens on one rank: the inner dimension of a weight's gradient."""
    return run.samples_per_micro_batch * run.config.training.seq_len // run.dims.cp


def _gathers_in_float8(run: RunContext) -> bool:
    return run.uses_float8 and run.config.quantize.linear.float8.enable_fsdp_float8_all_gather


# Converters of TorchTitan that are refused, and why.
UNAVAILABLE_CONVERTERS = {
    "quantize.grouped_mm.float8": "float8 of experts, whose kernels were not checked on a GPU",
    "quantize.linear.mx": "MXFP8, whose kernels were not checked on a GPU",
    "quantize.grouped_mm.mx": "MXFP8 of experts, whose kernels were not checked on a GPU",
}


def _unavailable_converters(run: RunContext) -> list[str]:
    return [name for name in run.config.model.converters if name in UNAVAILABLE_CONVERTERS]


QUANTIZE_RULES: tuple[Rule[RunContext], ...] = (
    Rule(
        "unavailable-converter",
        "model.converters",
        lambda run: bool(_unavailable_converters(run)),
        lambda run: (
            f'"{FLOAT8}" or your own converters; not available yet: '
            + ", ".join(UNAVAILABLE_CONVERTERS[name] for name in _unavailable_converters(run))
        ),
        lambda run: f"remove {', '.join(_unavailable_converters(run))}",
        severity="training_error",
    ),
    Rule(
        "torchao-not-installed",
        "model.converters",
        lambda run: run.uses_float8 and importlib.util.find_spec("torchao") is None,
        "the package torchao, which is not installed",
        pip_install("torchao"),
    ),
    Rule(
        "float8-on-cpu",
        EMULATE,
        lambda run: _computes_in_float8(run) and run.device_type == "cpu",
        NO_FLOAT8_KERNELS,
        f"set it to true, or remove {FLOAT8} from model.converters",
        ("model.converters",),
    ),
    Rule(
        "float8-on-old-gpu",
        EMULATE,
        _lacks_capability,
        NO_FLOAT8_KERNELS,
        f"remove {FLOAT8} from model.converters and train in bfloat16",
        ("model.converters",),
    ),
    Rule(
        "eager-float8",
        "model.converters",
        lambda run: (
            _computes_in_float8(run) and run.device_type != "cpu" and not run.compiles_model
        ),
        "is slower than bfloat16 without torch.compile: each cast is a separate kernel",
        'set compile.enable = true with "model" in compile.components',
        COMPILE,
        "warning",
    ),
    Rule(
        "uneven-float8-tokens",
        "model.converters",
        lambda run: _computes_in_float8(run) and _num_tokens(run) % MULTIPLE != 0,
        f"micro-batches of a multiple of {MULTIPLE} tokens on each rank, "
        "which the float8 kernels need",
        "change training.seq_len or training.local_batch_size",
        ("training.seq_len", "training.local_batch_size"),
    ),
    Rule(
        "float8-gather-by-row",
        FLOAT8_ALL_GATHER,
        lambda run: (
            _gathers_in_float8(run)
            and run.config.quantize.linear.float8.recipe_name not in (None, "tensorwise")
        ),
        "false with this recipe: a weight gathered in float8 has one scale, "
        "and the recipe has one for each row",
        f'set it to false, or {FLOAT8}.recipe_name = "tensorwise"',
        ("model.converters", f"{FLOAT8}.recipe_name"),
    ),
    Rule(
        "float8-gather-simple-fsdp",
        FLOAT8_ALL_GATHER,
        lambda run: _gathers_in_float8(run) and run.parallelism.data_parallel_impl == "simple_fsdp",
        "false with SimpleFSDP: only FSDP2 gathers in float8",
        'set it to false, or parallelism.data_parallel_impl = "fsdp2"',
        ("model.converters", IMPL),
    ),
)
