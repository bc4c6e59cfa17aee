"""Checks that need more than one room: configuration x layout x model x tokenizer x files. No torch is imported."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_like.config import ConfigError, JobConfig, Problem, load_config
from torchtitan_like.config.availability import (
    NOT_AVAILABLE,
    is_used,
    not_available,
    only_tokens,
    sources_of,
    value_of,
    without_effect,
)
from torchtitan_like.config.datasets import datasets_for
from torchtitan_like.config.fields import all_settings
from torchtitan_like.config.findings import Findings
from torchtitan_like.config.layout_rules import MODEL_KEYS
from torchtitan_like.config.problems import NO_EFFECT, merge_no_effect, nearest
from torchtitan_like.preflight_layout import check_layout, check_torch

if TYPE_CHECKING:
    from torchtitan_like.config.sections_training import DataSource
    from torchtitan_like.models.spec import ModelSpec

__all__ = ["NOT_AVAILABLE", "check", "load_checked"]

DeviceType = Literal["cpu", "cuda"]
_REPOSITORY = Path(__file__).resolve().parent.parent


def load_checked(
    argv: list[str],
    world_size: int | None,
    *,
    training: bool,
    device_type: DeviceType | Callable[[JobConfig], DeviceType] | None = None,
) -> tuple[JobConfig, list[Problem]]:
    """Load the configuration and check all of it; returns it with the warnings.

    ``device_type``: see `check`; or what looks for the device once the settings are known.

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
    device = device_type(config) if callable(device_type) else device_type
    found = check(config, world_size, training=training, device_type=device)
    problems += [problem for problem in found if not _is_doubtful(problem, faulty)]
    problems = merge_no_effect(problems)
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError(problems, partial=config, faulty=faulty)
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
    findings = Findings(config, training=training)
    if training:
        check_torch(findings)
    spec, args = _check_model(findings)
    limits = spec.constraints(args) if spec else {}
    check_layout(findings, world_size, spec, args, device_type)
    if spec:
        _check_exempt(findings, spec, args)
    _check_schedule(findings)
    _check_profiling(findings)
    _check_numerics(findings)
    _check_hardware(findings, device_type, args)
    _check_tokenizer(findings, limits)
    for section in ("training", "validation"):
        if is_used(config, section):
            _check_text(findings, section)
    _check_folders(findings)
    _check_checkpoint(findings, world_size, device_type)
    _check_packages(findings)
    spoken_of = {
        problem.key
        for problem in findings.problems
        if problem.severity == "error" or problem.has_no_effect
    }
    missing = [problem for problem in not_available(config, training=training) if problem.key not in spoken_of]
    return [*findings.problems, *missing, *without_effect(config)]


def _check_model(findings: Findings) -> tuple[ModelSpec | None, Any]:
    """Name, flavor and sizes; returns the model and its arguments (None, None if there is no such model)."""
    from torchtitan_like.models.spec import get_spec, resolve_args

    section = findings.config.model
    module = findings.config.experimental.custom_import
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the user's module raises is the user's answer
            problem = f"{type(error).__name__}: {error}"
            findings.error("experimental.custom_import", f"a module that can be imported; {problem}")
            return None, None
    try:
        spec = get_spec(section.name)
    except KeyError as error:
        findings.error("model.name", f"a registered model: {error.args[0]}", involves=("experimental.custom_import",))
        return None, None
    if section.flavor not in spec.flavors:
        known = ", ".join(spec.flavors)
        findings.error(
            "model.flavor",
            f"a flavor of {section.name}: {known}",
            nearest(section.flavor, spec.flavors),
            involves=("model.name",),
        )
        return None, None
    try:
        args = resolve_args(spec, section.flavor, section.args)
    except ValueError as error:
        for line in str(error).splitlines():
            findings.error("model.args", f"sizes that {section.name} can have: {line}", involves=MODEL_KEYS)
        return None, None
    return spec, args


def _check_exempt(findings: Findings, spec: ModelSpec, args: Any) -> None:
    """Each pattern of optimizer.no_weight_decay matches a parameter, or what it was to spare would decay in silence."""
    tied = dict(spec.tied(args))
    rows = [row if isinstance(row, tuple) else (row.ours,) for row in spec.hf_names(args)]
    stems = [stem for ours, *_ in rows for stem in ([ours] if isinstance(ours, str) else ours) if stem not in tied]
    if not findings.config.optimizer.weight_decay:
        return
    layers = range(spec.constraints(args)["n_layers"])
    names = [name for stem in stems for name in dict.fromkeys(stem.replace("{}", str(layer)) for layer in layers)]
    for pattern in findings.config.optimizer.no_weight_decay:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(stem.replace("{}", "0") for stem in stems)
            findings.error(
                "optimizer.no_weight_decay",
                f'patterns that match a parameter; "{pattern}" matches none of {shown}, ...',
                nearest(pattern, names),
                involves=MODEL_KEYS,
            )


def _check_schedule(findings: Findings) -> None:
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
    if section.decay_ratio and not round(total * section.decay_ratio):
        findings.warning(
            "lr_scheduler.decay_ratio", f"is less than one of {total} steps: nothing decays", involves=involves
        )
    if total < steps:
        decays = section.warmup_steps < total and (section.decay_ratio is None or round(total * section.decay_ratio))
        rest = f"min_lr_factor = {section.min_lr_factor} of its peak" if decays else "its peak, as nothing decays"
        findings.warning(
            "lr_scheduler.total_steps",
            f"the schedule ends at step {total} of {steps}; after it the learning rate stays at {rest}",
            involves=("training.steps",),
        )


def _check_profiling(findings: Findings) -> None:
    """A trace is written at the end of a cycle."""
    section, steps = findings.config.profiling, findings.config.training.steps
    if section.enable_profiling and steps < section.profile_freq:
        findings.warning(
            "profiling.profile_freq",
            f"no trace is written: the first one would be at step {section.profile_freq}, and the run ends at step {steps}",
            "lower it, or raise training.steps",
            involves=("training.steps", "profiling.enable_profiling"),
        )


def _check_numerics(findings: Findings) -> None:
    """Combinations of types, compilation and recomputation."""
    config = findings.config
    training = config.training
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        findings.warning(
            "training.mixed_precision_param",
            "weights stored in bfloat16 are computed with in float32: the memory of one, the speed of the other",
            'set training.dtype = "float32" for mixed precision, or mixed_precision_param = "bfloat16"',
            involves=("training.dtype",),
        )
    if config.compile.enable and not config.compile.components:
        text = f"{NO_EFFECT}: compile.components is empty"
        findings.warning("compile.enable", text, involves=("compile.components",))
    if config.debug.detect_overflow and config.compile.is_on:
        findings.error(
            "debug.detect_overflow",
            "false with compile.enable = true: modules inside compiled code cannot be looked at",
            "set compile.enable = false while you look for the bad number",
            involves=("compile.enable",),
        )
    if config.optimizer.early_step_in_backward and config.is_set("training.max_norm"):
        findings.warning(
            "training.max_norm",
            f"{NO_EFFECT}: with optimizer.early_step_in_backward weights are updated before the gradient "
            "norm is known",
            involves=("optimizer.early_step_in_backward",),
        )
    resilience = config.resilience
    skips = {
        "on_nonfinite": ("stop", True),
        "on_spike": ("log", resilience.spike_threshold > 0),
    }
    for name, (other, is_on) in skips.items():
        is_skipped = is_on and getattr(resilience, name) == "skip"
        if config.optimizer.early_step_in_backward and is_skipped:
            findings.error(
                f"resilience.{name}",
                f'"{other}" with optimizer.early_step_in_backward: weights are updated before the gradient norm is known, and '
                "cannot be left as they were",
                f'set optimizer.early_step_in_backward = false, or {name} = "{other}"',
                involves=("optimizer.early_step_in_backward",),
            )


def _check_hardware(findings: Findings, device_type: DeviceType | None, args: Any) -> None:
    """What this kind of device cannot do. ``args``: the model's; None where there is none."""
    config = findings.config
    if device_type is not None and hasattr(args, "attn_type"):
        from torchtitan_like.models.attention_rules import unsupported_attention

        reason = unsupported_attention(
            args.attn_type,
            device_type=device_type,
            dtype=config.training.mixed_precision_param,
            head_dim=args.head_dim,
        )
        if reason:
            findings.error("model.args", f"attention that can be computed here; {reason}", involves=MODEL_KEYS)
        if device_type == "cpu" and args.attn_type != "sdpa":
            findings.warning(
                "model.args" if "attn_type" in config.model.args else "model.flavor",
                f'attn_type = "{args.attn_type}" needs a GPU. On CPU, scaled_dot_product_attention with the '
                f'same {args.attn_mask_type} mask computes attention (attn_type = "sdpa")',
                involves=MODEL_KEYS,
            )
    if config.debug.launch_blocking:
        slow = "makes the run much slower: the host waits for each kernel"
        findings.warning(
            "debug.launch_blocking", f"{NO_EFFECT}: there is no GPU" if device_type == "cpu" else slow
        )
    if device_type == "cuda" and not config.debug.deterministic:  # which sets both itself
        for name in ("NCCL_ALGO", "NCCL_PROTO"):
            if value := os.environ.get(name):
                text = f"{name}={value} is set: NCCL chooses by message size, a forced choice is mostly slower"
                findings.warning(name, text, "unset it, or see docs/guides/nccl.md")
    if device_type != "cpu":
        return
    if config.training.enable_cpu_offload:
        findings.error(
            "training.enable_cpu_offload",
            "false without a GPU: parameters are in host memory anyway",
            "set it to false",
        )
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if config.compile.is_on and config.compile.backend == "inductor" and not any(map(shutil.which, compilers)):
        findings.error(
            "compile.enable", "a C++ compiler, which torch.compile needs on CPU", "install g++, or set it to false"
        )


def _check_tokenizer(findings: Findings, limits: dict[str, int]) -> None:
    """It is there, can be read, and all its ids are in the model's vocabulary."""
    config = findings.config
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.hf_assets_path"
    path = Path(config.model.tokenizer_folder)
    if config.model.tokenizer_path:
        findings.warning(key, "is an older name", "put the tokenizer into the folder model.hf_assets_path")
    if not path.exists():
        shipped = _REPOSITORY / config.model.tokenizer_folder
        remedy = "scripts/download_assets.py fetches one from the Hub"
        if not path.is_absolute() and shipped.exists():
            remedy = f"start in {_REPOSITORY}, or set it to {shipped.resolve()}"
        findings.missing_file(key, f"a folder with tokenizer.json or a tiktoken .model file; {_where(path)}", remedy)
        return
    from torchtitan_like.data.formats.tokenizer import TokenizerError, check_vocabulary, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        if "vocab_size" in limits:
            add_bos, add_eos = (
                wanted and not only_tokens(config) for wanted in (config.data.add_bos, config.data.add_eos)
            )
            check_vocabulary(tokenizer, limits["vocab_size"], add_bos=add_bos, add_eos=add_eos)
    except TokenizerError as error:
        involves = (*MODEL_KEYS, "data.add_bos", "data.add_eos")
        findings.error(key, f"a tokenizer that fits the model; {error}", involves=involves)


def _check_text(findings: Findings, section: str) -> None:
    """The training or validation text is known and there."""
    config = findings.config
    loader = value_of(config, f"{section}.dataloader")
    if loader.pin_memory:
        text = f"{NO_EFFECT}: batches go to a GPU through page-locked memory either way"
        findings.warning(f"{section}.dataloader.pin_memory", text)
    if loader.persistent_workers and loader.num_workers and section == "training":
        text = f"{NO_EFFECT}: workers of the training text live as long as the run"
        findings.warning("training.dataloader.persistent_workers", text)
    table = "data.sources" if section == "training" else "validation.sources"
    sources = sources_of(config, section)
    for name, source in sources.items():
        key = f"{table}.{name}.path"
        _check_files(findings, key, source.path, source.format, f"{table}.{name}.format")
        for unused, reason in _unused_of_source(source, section):
            if getattr(source, unused) != type(source).model_fields[unused].default:
                text = f"{NO_EFFECT}: {reason}"
                findings.warning(f"{table}.{name}.{unused}", text, involves=(table,))
    if sources:
        for key in (f"{section}.dataset", f"{section}.dataset_path"):
            if config.is_set(key) and config.layer_of(key) >= config.layer_of(table):
                findings.warning(key, f"{NO_EFFECT}: the text is that of [{table}]", involves=(table,))
        return
    dataset, path = value_of(config, f"{section}.dataset"), value_of(config, f"{section}.dataset_path")
    if path is not None:
        _check_files(findings, f"{section}.dataset_path", path)
        return
    known = datasets_for(section)
    if dataset not in known:
        findings.error(
            f"{section}.dataset",
            f"one of {', '.join(known)}",
            nearest(dataset, known) or f"to train on a text of your own, set {section}.dataset_path",
            involves=(f"{section}.dataset_path", table),
        )
    elif known[dataset].is_shipped and not known[dataset].file.exists():
        findings.missing_file(
            f"{section}.dataset", f"the shipped text {known[dataset].file}", "install the package again"
        )


def _unused_of_source(source: DataSource, section: str) -> Iterator[tuple[str, str]]:
    """Settings of a source that change nothing, each with the reason."""
    if section == "validation":
        for name in ("weight", "weight_from", "max_epochs"):
            yield name, "each validation text is read once, for a loss of its own"
    if source.format == "tokens":
        yield "text_field", 'with format = "tokens" there is no text to be looked for'
    else:
        yield "token_dtype", 'it needs format = "tokens"'


def _check_files(findings: Findings, key: str, path: str, format_name: str = "auto", *involves: str) -> None:
    """They are there, and of a kind that can be read. Of what lies on the Hub only the name is looked at."""
    from torchtitan_like.data.errors import DataError
    from torchtitan_like.data.formats.documents import find_corpus
    from torchtitan_like.data.formats.hub import PREFIX, check_name

    is_tokens = format_name == "tokens"
    if path.startswith(PREFIX):
        if is_tokens:
            remedy = "download them, and name the folder they are in"
            findings.error(
                key, 'files that lie here: with format = "tokens" they are read in place', remedy, involves=involves
            )
            return
        try:
            check_name(path)
        except DataError as error:
            findings.error(key, f"files that can be read; {error}")
        return
    if is_tokens and any(_matches(path + ending) for ending in (".bin", ".idx")):
        return
    if not _matches(path):
        findings.missing_file(key, f"a file, folder or glob with files; {_where(Path(path))}")
    elif not is_tokens:
        try:
            find_corpus(path, format_name)
        except DataError as error:
            findings.error(key, f"files that can be read; {error}", involves=involves)


def _matches(path: str) -> bool:
    if os.path.isdir(path):
        return any(True for _ in os.scandir(path))
    return os.path.exists(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True)))


def _where(path: Path) -> str:
    return f"there is nothing at {path}" if path.is_absolute() else f"there is nothing at {path} below {Path.cwd()}"


def _check_folders(findings: Findings) -> None:
    """The run directory can be written."""
    config = findings.config
    folder = Path(config.job.dump_folder)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        kind = "is not writable" if existing.is_dir() else "is a file"
        findings.missing_file("job.dump_folder", f"a folder that can be written; {existing} {kind}")
    if config.job.save_config_file and (folder / config.job.save_config_file).is_dir():
        findings.error("job.save_config_file", "the name of a file; there is a folder of that name")


def _check_checkpoint(findings: Findings, world_size: int | None, device_type: DeviceType | None) -> None:
    """[checkpoint] against the rest: other sections, ranks, hardware, what is on disk. See also CHECKPOINT_RULES."""
    config, section = findings.config, findings.config.checkpoint
    if not section.enable:
        return
    if section.create_seed_checkpoint and world_size not in (None, 1):
        findings.error("checkpoint.create_seed_checkpoint", f"one rank, not {world_size}", "start it with NGPU=1")
    keys = [setting.key for setting in all_settings()]
    for pattern in section.allow_change if section.start in ("auto", "resume") else ():
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
    _check_what_is_loaded(findings, Path(config.job.dump_folder) / section.folder)


def _check_what_is_loaded(findings: Findings, steps: Path) -> None:
    """The checkpoint to start from is there. ``steps``: the folder of the run's own."""
    config, section = findings.config, findings.config.checkpoint
    start, assets = section.initial_load_path, Path(config.model.hf_assets_path)
    has_own_steps = section.start == "auto" and any(steps.glob("step-*"))
    needs_start = section.load_step < 0 and section.start != "resume" and not has_own_steps
    if needs_start and start and not Path(start).is_dir():
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


def _check_packages(findings: Findings) -> None:
    """Packages that only some settings need."""
    rules: tuple[tuple[str, str, str], ...] = (
        ("metrics.enable_tensorboard", "tensorboard", "pip install tensorboard"),
        ("metrics.enable_wandb", "wandb", "pip install 'torchtitan_like[wandb]'"),
        ("activation_checkpoint.visualize_memory_budget_pareto", "matplotlib", "pip install matplotlib"),
    )
    idle = {problem.key for problem in without_effect(findings.config, every_layer=True)}
    for key, package, remedy in rules:
        if key not in idle and value_of(findings.config, key) and importlib.util.find_spec(package) is None:
            findings.missing_file(key, f"the package {package}, which is not installed", remedy)
