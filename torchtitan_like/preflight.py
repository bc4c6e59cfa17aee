"""Checks that need more than one room: configuration x layout x model x tokenizer x files. No torch is imported."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_like.config import ConfigError, JobConfig, Problem, load_config
from torchtitan_like.config.availability import (
    NOT_AVAILABLE,
    is_used,
    not_available,
    sources_of,
    value_of,
    without_effect,
)
from torchtitan_like.config.datasets import DATASETS
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.problems import nearest

if TYPE_CHECKING:
    from torchtitan_like.distributed.dims import ParallelDims

__all__ = ["NOT_AVAILABLE", "check", "load_checked"]

DeviceType = Literal["cpu", "cuda"]
_REPOSITORY = Path(__file__).resolve().parent.parent
_MODEL_KEYS = ("model.name", "model.flavor", "model.args")
_DEGREES = tuple(
    f"parallelism.{name}_degree"
    for name in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
)


class _Findings:
    """Collects problems; fills in value and origin of the keys they name."""

    def __init__(self, config: JobConfig, *, training: bool) -> None:
        self.config, self.training = config, training
        self.problems: list[Problem] = []

    def error(self, key: str, expected: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        self._add(key, expected, remedy, "error", involves)

    def warning(self, key: str, text: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        self._add(key, text, remedy, "warning", involves)

    def missing_file(self, key: str, expected: str, remedy: str = "", *, involves: tuple[str, ...] = ()) -> None:
        """An error when about to train; a warning in a check, which may run on another machine."""
        text = expected if self.training else f"expected {expected}"
        self._add(key, text, remedy, "error" if self.training else "warning", involves)

    def _add(
        self, key: str, expected: str, remedy: str, severity: Literal["error", "warning"], involves: tuple[str, ...]
    ) -> None:
        value = value_of(self.config, key) if "." in key and key != "model.args" else None
        written = [name for name in (key, *involves) if self.config.is_set(name)]
        origin = self.config.origin_of(written[0] if written else key)
        self.problems.append(Problem(key, value, expected, remedy, origin, severity, involves))


def load_checked(
    argv: list[str], world_size: int | None, *, training: bool, device_type: DeviceType | None = None
) -> tuple[JobConfig, list[Problem]]:
    """Load the configuration and check all of it; returns it with the warnings.

    Raises ConfigError with the problems of both: a misspelt key does not hide a missing tokenizer.
    """
    problems: list[Problem] = []
    faulty: frozenset[str] = frozenset()
    try:
        config = load_config(argv)
        problems += config.notices
    except ConfigError as error:
        if error.partial is None:
            raise
        config, faulty = error.partial, error.faulty
        problems += error.problems
    found = check(config, world_size, training=training, device_type=device_type)
    problems += [problem for problem in found if not _is_doubtful(problem, faulty)]
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError(problems)
    return config, problems


def _is_doubtful(problem: Problem, faulty: frozenset[str]) -> bool:
    """True if a finding rests on a setting whose written value was refused, so that its default was checked."""
    keys = (problem.key, *problem.involves)
    return any(key == bad or key.startswith(f"{bad}.") for key in keys for bad in faulty)


def check(
    config: JobConfig, world_size: int | None, *, training: bool, device_type: DeviceType | None = None
) -> list[Problem]:
    """Every problem of a valid configuration on ``world_size`` ranks (None: only what does not depend on it).

    ``training``: missing files, and features that are not available yet, are errors; else warnings. ``device_type``
    None leaves out what depends on the hardware.
    """
    findings = _Findings(config, training=training)
    dims = _check_layout(findings, world_size)
    _check_batch(findings, dims)
    limits = _check_model(findings)
    _check_model_layout(findings, limits, dims)
    _check_sequences(findings, limits)
    _check_schedule(findings)
    _check_numerics(findings, dims)
    _check_hardware(findings, device_type)
    _check_tokenizer(findings, limits)
    for section in ("training", "validation"):
        if is_used(config, section):
            _check_text(findings, section)
    _check_folders(findings)
    _check_checkpoint(findings, world_size, device_type)
    _check_packages(findings)
    return [*findings.problems, *not_available(config, training=training), *without_effect(config)]


def _check_layout(findings: _Findings, world_size: int | None) -> ParallelDims | None:
    """The degrees against the number of ranks."""
    if world_size is None:
        return None
    from torchtitan_like.distributed.dims import resolve_degrees

    dims, reasons = resolve_degrees(findings.config.parallelism, world_size)
    for reason in reasons:
        findings.error(
            "parallelism",
            f"degrees whose product is the number of ranks: {reason}",
            "change a degree or the number of ranks (NGPU); data_parallel_shard_degree = -1 takes all left-over ranks",
            involves=_DEGREES,
        )
    return dims


def _check_batch(findings: _Findings, dims: ParallelDims | None) -> None:
    """global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation."""
    training, parallelism = findings.config.training, findings.config.parallelism
    dp = dims.dp if dims else parallelism.data_parallel_replicate_degree
    local, total = training.local_batch_size, training.global_batch_size
    unit = local * dp
    involves = ("training.local_batch_size", *_DEGREES)
    if total > 0 and total % unit:
        below = total // unit * unit
        sizes = f"{below} or {below + unit}" if below else f"{unit}"
        findings.error(
            "training.global_batch_size",
            f"a multiple of local_batch_size x data-parallel ranks = {local} x {dp} = {unit} "
            "(global_batch_size = local_batch_size x data-parallel ranks x gradient accumulation)",
            f"set it to {sizes}, or change training.local_batch_size",
            involves=involves,
        )
    if findings.config.optimizer.early_step_in_backward and total > unit and total % unit == 0 and dims:
        findings.error(
            "optimizer.early_step_in_backward",
            f"no gradient accumulation (it is {total // unit} here): each backward pass updates the weights",
            f"set training.global_batch_size to {unit} or -1",
            involves=("training.global_batch_size", *involves),
        )
    micro = parallelism.pipeline_parallel_microbatch_size
    if parallelism.pipeline_parallel_degree > 1 and local % micro:
        findings.error(
            "parallelism.pipeline_parallel_microbatch_size",
            f"a divisor of training.local_batch_size = {local}",
            involves=("training.local_batch_size",),
        )


def _check_model(findings: _Findings) -> dict[str, int]:
    """Name, flavor and sizes; returns what the model demands of a layout (empty if there is no such model)."""
    from torchtitan_like.models.spec import get_spec, resolve_args

    section = findings.config.model
    module = findings.config.experimental.custom_import
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the user's module raises is the user's answer
            problem = f"{type(error).__name__}: {error}"
            findings.error("experimental.custom_import", f"a module that can be imported; {problem}")
            return {}
    try:
        spec = get_spec(section.name)
    except KeyError as error:
        findings.error("model.name", f"a registered model: {error.args[0]}", involves=("experimental.custom_import",))
        return {}
    if section.flavor not in spec.flavors:
        known = ", ".join(spec.flavors)
        findings.error(
            "model.flavor",
            f"a flavor of {section.name}: {known}",
            nearest(section.flavor, spec.flavors),
            involves=("model.name",),
        )
        return {}
    try:
        args = resolve_args(spec, section.flavor, section.args)
    except ValueError as error:
        for line in str(error).splitlines():
            findings.error("model.args", f"sizes that {section.name} can have: {line}", involves=_MODEL_KEYS)
        return {}
    return spec.constraints(args)


def _check_model_layout(findings: _Findings, limits: dict[str, int], dims: ParallelDims | None) -> None:
    """Heads, layers and experts against the degrees that cut them."""
    parallelism = findings.config.parallelism
    tp, pp = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    for limit, what in (("n_heads", "attention heads"), ("n_kv_heads", "key-value heads")):
        number = limits.get(limit)
        if number and number % tp:
            findings.error(
                "parallelism.tensor_parallel_degree",
                f"a divisor of the model's {number} {what}",
                f"set it to one of {_divisors(number)}",
                involves=_MODEL_KEYS,
            )
    stages = pp * (2 if _has_two_stages_per_rank(parallelism.pipeline_parallel_schedule) else 1)
    if pp > 1 and stages > limits.get("n_layers", stages):
        findings.error(
            "parallelism.pipeline_parallel_degree",
            f"at most one stage per layer: {stages} stages, the model has {limits['n_layers']} layers",
            involves=(*_MODEL_KEYS, "parallelism.pipeline_parallel_schedule"),
        )
    if dims and dims.ep > 1 and (dims.dp_shard * dims.cp * dims.tp) % dims.ep:
        findings.error(
            "parallelism.expert_parallel_degree",
            f"a divisor of dp_shard x cp x tp = {dims.dp_shard} x {dims.cp} x {dims.tp}",
            involves=_DEGREES,
        )


def _check_sequences(findings: _Findings, limits: dict[str, int]) -> None:
    """Sequence lengths against the degrees that cut them and the model's rotary tables."""
    config = findings.config
    tp, cp = config.parallelism.tensor_parallel_degree, config.parallelism.context_parallel_degree
    balanced = cp > 1 and config.parallelism.context_parallel_load_balancer == "headtail"
    pieces = tp * cp * (2 if balanced else 1)
    for section in ("training", "validation"):
        if not is_used(config, section):
            continue
        key = f"{section}.seq_len"
        seq_len = value_of(config, key)
        if seq_len % pieces:
            head_tail = " x 2 (head and tail)" if balanced else ""
            findings.error(
                key,
                f"a multiple of tensor_parallel_degree x context_parallel_degree = {tp} x {cp}{head_tail} = {pieces}",
                f"set it to {max(seq_len // pieces, 1) * pieces}",
                involves=("parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"),
            )
        if seq_len > limits.get("max_seq_len", seq_len):
            findings.error(
                key,
                f"at most the model's max_seq_len = {limits['max_seq_len']}",
                f"set model.args.max_seq_len = {seq_len}",
                involves=_MODEL_KEYS,
            )


def _has_two_stages_per_rank(schedule: str) -> bool:
    return schedule.startswith("Interleaved") or schedule in ("LoopedBFS", "ZBVZeroBubble", "DualPipeV")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_schedule(findings: _Findings) -> None:
    """Warm-up and decay against the horizon; they are fitted into it, which the user should know."""
    section, steps = findings.config.lr_scheduler, findings.config.training.steps
    total = section.total_steps or steps
    involves = ("lr_scheduler.total_steps", "training.steps")
    if section.warmup_steps > total:
        findings.warning(
            "lr_scheduler.warmup_steps",
            f"Warmup steps ({section.warmup_steps}) exceed total training steps ({total}). "
            f"Adjusting warmup steps to {total}.",
            involves=involves,
        )
    elif section.decay_ratio is not None and section.warmup_steps + round(total * section.decay_ratio) > total:
        findings.warning(
            "lr_scheduler.decay_ratio",
            f"Warmup steps ({section.warmup_steps}) and decay steps ({round(total * section.decay_ratio)}) exceed "
            f"total training steps ({total}). The decay begins after the warmup: {total - section.warmup_steps} steps.",
            involves=("lr_scheduler.warmup_steps", *involves),
        )
    if total < steps:
        findings.warning(
            "lr_scheduler.total_steps",
            f"the schedule ends at step {total} of {steps}; after it the learning rate stays at min_lr_factor = "
            f"{section.min_lr_factor} of its peak",
            involves=("training.steps",),
        )


def _check_numerics(findings: _Findings, dims: ParallelDims | None) -> None:
    """Combinations of types, compilation and recomputation."""
    config = findings.config
    training, compiled = config.training, config.compile.enable and "model" in config.compile.components
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        findings.warning(
            "training.mixed_precision_param",
            "weights stored in bfloat16 are computed with in float32: the memory of one, the speed of the other",
            'set training.dtype = "float32" for mixed precision, or mixed_precision_param = "bfloat16"',
            involves=("training.dtype",),
        )
    if config.activation_checkpoint.mode == "memory_budget" and not compiled:
        findings.error(
            "activation_checkpoint.mode",
            'a compiled model with "memory_budget": the compiler decides what is kept',
            'set compile.enable = true with "model" among compile.components',
            involves=("compile.enable", "compile.components"),
        )
    parallelism = config.parallelism
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree > 1 and not compiled:
        findings.error(
            "parallelism.enable_async_tensor_parallel",
            "a compiled model: the compiler overlaps communication and computation",
            "set compile.enable = true",
            involves=("compile.enable", "compile.components"),
        )
    if config.optimizer.early_step_in_backward and config.is_set("training.max_norm"):
        findings.warning(
            "training.max_norm",
            "has no effect in this run: with optimizer.early_step_in_backward weights are updated before the gradient "
            "norm is known",
            involves=("optimizer.early_step_in_backward",),
        )
    policy = "parallelism.fsdp_reshard_after_forward"
    if dims and dims.dp_shard * dims.cp == 1 and value_of(config, policy) != "default":
        findings.warning(policy, "has no effect in this run: weights are not sharded", involves=_DEGREES)


def _check_hardware(findings: _Findings, device_type: DeviceType | None) -> None:
    """What this kind of device cannot do."""
    config = findings.config
    if device_type != "cpu":
        return
    if config.training.enable_cpu_offload:
        findings.error(
            "training.enable_cpu_offload",
            "false without a GPU: parameters are in host memory anyway",
            "set it to false",
        )
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if config.compile.enable and config.compile.backend == "inductor" and not any(map(shutil.which, compilers)):
        findings.error(
            "compile.enable", "a C++ compiler, which torch.compile needs on CPU", "install g++, or set it to false"
        )


def _check_tokenizer(findings: _Findings, limits: dict[str, int]) -> None:
    """It is there, can be read, and all its ids are in the model's vocabulary."""
    config = findings.config
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.hf_assets_path"
    path = Path(config.model.tokenizer_folder).expanduser()
    if config.model.tokenizer_path:
        findings.warning(key, "is an older name", "put the tokenizer into the folder model.hf_assets_path")
    if not path.exists():
        shipped = _REPOSITORY / config.model.tokenizer_folder
        remedy = "scripts/download_assets.py fetches one from the Hub"
        if not path.is_absolute() and shipped.exists():
            remedy = f"start in {_REPOSITORY}, or set it to {shipped.resolve()}"
        findings.missing_file(key, f"a folder with tokenizer.json or a tiktoken .model file; {_where(path)}", remedy)
        return
    from torchtitan_like.data.tokenizer import TokenizerError, check_vocabulary, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        if "vocab_size" in limits:
            check_vocabulary(tokenizer, limits["vocab_size"], add_bos=config.data.add_bos, add_eos=config.data.add_eos)
    except TokenizerError as error:
        involves = (*_MODEL_KEYS, "data.add_bos", "data.add_eos")
        findings.error(key, f"a tokenizer that fits the model; {error}", involves=involves)


def _check_text(findings: _Findings, section: str) -> None:
    """The training or validation text is known and there."""
    config = findings.config
    table = "data.sources" if section == "training" else "validation.sources"
    sources = sources_of(config, section)
    for name, source in sources.items():
        key = f"{table}.{name}.path"
        if not _matches(source.path):
            findings.missing_file(key, f"a file, folder or glob with files; {_where(Path(source.path))}")
    if sources:
        for key in (f"{section}.dataset", f"{section}.dataset_path"):
            if config.is_set(key) and config.layer_of(key) >= config.layer_of(table):
                findings.warning(key, f"has no effect in this run: the text is that of [{table}]", involves=(table,))
        return
    dataset, path = value_of(config, f"{section}.dataset"), value_of(config, f"{section}.dataset_path")
    if path is not None:
        if not _matches(path):
            findings.missing_file(f"{section}.dataset_path", f"a file, folder or glob with files; {_where(Path(path))}")
        return
    if dataset not in DATASETS:
        findings.error(
            f"{section}.dataset",
            f"one of {', '.join(DATASETS)}",
            nearest(dataset, DATASETS) or f"to train on a text of your own, set {section}.dataset_path",
            involves=(f"{section}.dataset_path", table),
        )
    elif DATASETS[dataset].kind == "file" and not DATASETS[dataset].file.exists():
        findings.missing_file(
            f"{section}.dataset", f"the shipped text {DATASETS[dataset].file}", "install the package again"
        )


def _matches(path: str) -> bool:
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        return any(True for _ in os.scandir(expanded))
    return os.path.exists(expanded) or any(map(os.path.isfile, glob.iglob(expanded, recursive=True)))


def _where(path: Path) -> str:
    return f"there is nothing at {path}" if path.is_absolute() else f"there is nothing at {path} below {Path.cwd()}"


def _check_folders(findings: _Findings) -> None:
    """The run directory can be written."""
    config = findings.config
    folder = Path(config.job.dump_folder).expanduser()
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "is not writable" if existing.is_dir() else "is a file"
        findings.missing_file("job.dump_folder", f"a folder that can be written; {existing} {kind}")


def _check_checkpoint(findings: _Findings, world_size: int | None, device_type: DeviceType | None) -> None:
    """[checkpoint] against the rest: other sections, ranks, hardware, what is on disk. See also CHECKPOINT_RULES."""
    config, section = findings.config, findings.config.checkpoint
    if not section.enable:
        return
    if section.create_seed_checkpoint and world_size not in (None, 1):
        findings.error("checkpoint.create_seed_checkpoint", f"one rank, not {world_size}", "start it with NGPU=1")
    keys = [setting.key for setting in all_settings()]
    for pattern in section.allow_change:
        of_model = pattern.startswith("model.args.")  # the names below it are the model's
        if not of_model and not any(
            fnmatchcase(key, pattern) or fnmatchcase(pattern, key.replace("<name>", "*")) for key in keys
        ):
            remedy = nearest(pattern, keys) or 'for example "optimizer.lr" or "model.*"'
            findings.error(
                "checkpoint.allow_change", f'patterns that match a setting; "{pattern}" matches none', remedy
            )
    if section.async_mode == "async_with_pinned_mem" and device_type == "cpu":
        findings.warning(
            "checkpoint.async_mode", 'is the same as "async" in this run: without a GPU no memory is page-locked'
        )
    _check_what_is_loaded(findings, Path(config.job.dump_folder).expanduser() / section.folder)


def _check_what_is_loaded(findings: _Findings, steps: Path) -> None:
    """The checkpoint to start from is there. ``steps``: the folder of the run's own."""
    config, section = findings.config, findings.config.checkpoint
    start, assets = section.initial_load_path, Path(config.model.hf_assets_path).expanduser()
    needs_start = section.load_step < 0 and not (section.start in ("auto", "resume") and any(steps.glob("step-*")))
    if needs_start and start and not Path(start).expanduser().is_dir():
        findings.missing_file(
            "checkpoint.initial_load_path",
            f"the folder of one checkpoint (.../step-N); {_where(Path(start))}",
            involves=("checkpoint.start", "job.dump_folder"),
        )
    if needs_start and not start and section.initial_load_in_hf and not any(assets.glob("*.safetensors")):
        findings.missing_file(
            "checkpoint.initial_load_in_hf",
            f"*.safetensors in model.hf_assets_path = {assets}, as checkpoint.initial_load_path is unset; it holds none",
            "set checkpoint.initial_load_path, or fetch the weights with scripts/download_assets.py",
            involves=("checkpoint.start", "job.dump_folder", "model.hf_assets_path"),
        )
    if section.load_step >= 0 and not (steps / f"step-{section.load_step}").is_dir():
        known = sorted((int(p.name[5:]) for p in steps.glob("step-*") if p.name[5:].isdigit()), reverse=True)
        found = f"{steps} holds the steps {', '.join(map(str, known[:10]))}" if known else f"{steps} holds none"
        involves = ("checkpoint.folder", "job.dump_folder")
        findings.missing_file("checkpoint.load_step", f"a saved step; {found}", involves=involves)


def _check_packages(findings: _Findings) -> None:
    """Packages that only some settings need."""
    rules: tuple[tuple[str, str, str], ...] = (
        ("metrics.enable_tensorboard", "tensorboard", "pip install tensorboard"),
        ("metrics.enable_wandb", "wandb", "pip install 'torchtitan_like[wandb]'"),
    )
    for key, package, remedy in rules:
        if value_of(findings.config, key) and importlib.util.find_spec(package) is None:
            findings.missing_file(key, f"the package {package}, which is not installed", remedy)
