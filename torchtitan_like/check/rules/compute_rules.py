"""Rules of [activation_checkpoint], [compile] and [quantize]: how a step computes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib.metadata import entry_points

from torchtitan_like.check.context import RunContext
from torchtitan_like.check.rules.keys import AC_MODE, COMPILE, IMPL
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
