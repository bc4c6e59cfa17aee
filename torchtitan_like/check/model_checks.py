"""Checks of the model: name, flavor, sizes, attention on the device, parameters, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan_like.check.environment import describe_missing
from torchtitan_like.check.rules.keys import HF_ASSETS, MODEL_KEYS, ROTATE
from torchtitan_like.config.problems import ConfigError, Problem, no_effect_warning
from torchtitan_like.models.argument_rules import unsupported_attention, unsupported_backend
from torchtitan_like.models.parametrization import find_problems, parametrize
from torchtitan_like.models.spec import get_spec, num_mtp_layers, resolve_args
from torchtitan_like.util.reading import read_json
from torchtitan_like.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from torchtitan_like.check.context import RunContext
    from torchtitan_like.config import JobConfig
    from torchtitan_like.models.spec import ModelSpec


def read_sizes(config: JobConfig) -> tuple[JobConfig, list[Problem]]:
    """Return the configuration with the sizes of config.json in model.hf_assets_path, and warnings.

    This concerns families that take their sizes from such a file, unless model.flavor is one of the
    family's, as in a stored configuration. Other configurations are returned unchanged.

    Raises ConfigError if there is no such file, or for each of its fields that is not supported.
    """
    section = config.model
    spec, _ = _find_spec(config)
    if spec is None or spec.hf_args is None or section.flavor in spec.flavors:
        return config, []
    file = Path(section.assets_folder) / "config.json"
    try:
        fields = read_json(file)
        if not isinstance(fields, dict):
            raise ValueError("it contains no table")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        expected = (
            f'a folder with the config.json of a model, which model.name = "{section.name}" '
            f"reads; {file}: {reason}"
        )
        remedy = "give the folder of a downloaded model, or another model.name"
        problem = Problem(HF_ASSETS, None, expected, remedy, involves=("model.name",))
        raise ConfigError([config.locate(problem)]) from error
    try:
        model = spec.hf_args(fields)
    except ValueError as error:
        remedy = "use another checkpoint, or convert it to a supported one"
        problems = [
            Problem(HF_ASSETS, None, f"a supported config.json; it has {line}", remedy)
            for line in str(error).splitlines()
        ]
        raise ConfigError([config.locate(problem) for problem in problems]) from error
    warnings = [
        Problem(HF_ASSETS, None, f"{file} {note}", severity="warning") for note in model.notes
    ]
    if config.is_set("model.flavor"):
        warnings.append(no_effect_warning("model.flavor", f"{file} sets it"))
    located = [config.locate(problem) for problem in warnings]
    return config.with_sizes(model.flavor, model.args, str(file)), located


def _find_spec(config: JobConfig) -> tuple[ModelSpec | None, list[Problem]]:
    """Return the model of the name in the configuration, or the problem."""
    try:
        return get_spec(config.model.name), []
    except KeyError as error:
        expected = f"a registered model: {error.args[0]}"
        involves = ("experimental.custom_import",)
        return None, [Problem("model.name", None, expected, involves=involves)]


class CheckedModel(NamedTuple):
    """The model of a configuration and its sizes; None and None if `problems` are why not."""

    spec: ModelSpec | None
    args: Any
    problems: Sequence[Problem] = ()


def check_model(config: JobConfig) -> CheckedModel:
    """Find the model of a configuration, and resolve its sizes."""
    section = config.model
    spec, problems = _find_spec(config)
    if spec is None:
        return CheckedModel(None, None, problems)
    if section.flavor not in spec.flavors:
        expected = f"a flavor of {section.name}: {', '.join(spec.flavors)}"
        remedy = did_you_mean(section.flavor, spec.flavors)
        problem = Problem("model.flavor", None, expected, remedy, involves=("model.name",))
        return CheckedModel(None, None, [problem])
    try:
        args = resolve_args(spec, section.flavor, section.args)
    except ValueError as error:
        problems = [
            Problem(
                "model.args",
                None,
                f"sizes that {section.name} supports: {line}",
                involves=MODEL_KEYS,
            )
            for line in str(error).splitlines()
        ]
        return CheckedModel(None, None, problems)
    if section.parametrization == "standard":
        return CheckedModel(spec, args)
    try:
        base = resolve_args(spec, section.flavor, {**section.args, **section.base_args})
        lines = find_problems(spec, args, base, section.base_args)
        if section.parametrization == "mup" and base.n_layers != args.n_layers:
            lines.append('n_layers: only model.parametrization = "completep" transfers over depth')
    except ValueError as error:
        lines = str(error).splitlines()
    if not lines:
        return CheckedModel(parametrize(spec, args, base), args)
    involves = ("model.parametrization", *MODEL_KEYS)
    problems = [
        Problem("model.base_args", None, f"sizes of a base model: {line}", involves=involves)
        for line in lines
    ]
    return CheckedModel(spec, args, problems)


def check_attention(run: RunContext) -> Iterator[Problem]:
    """Check that the device can compute the model's attention."""
    args = run.args
    if run.device_type is None or not hasattr(args, "attn_type"):
        return
    reason = unsupported_attention(
        args.attn_type,
        device_type=run.device_type,
        dtype=run.config.training.mixed_precision_param,
        head_dim=args.head_dim,
    )
    if reason:
        expected = f"attention that this device can compute; {reason}"
        yield Problem("model.args", None, expected, involves=MODEL_KEYS)
    expected = unsupported_backend(
        run.config.training.attention_backend,
        attn_type=args.attn_type,
        device_type=run.device_type,
        dtype=run.config.training.mixed_precision_param,
        needs_mask=run.has_document_masks or run.has_windows or run.has_chunks,
        is_ring=run.rotate_method == "alltoall",
    )
    if expected:
        key = "training.attention_backend"
        yield Problem(key, None, expected, involves=(*MODEL_KEYS, ROTATE))
    if run.device_type == "cpu" and args.attn_type != "sdpa":
        yield Problem(
            "model.args" if "attn_type" in run.config.model.args else "model.flavor",
            None,
            f'attn_type = "{args.attn_type}" needs a GPU. On CPU, scaled_dot_product_attention '
            f'with the same {args.attn_mask_type} mask computes attention (attn_type = "sdpa")',
            severity="warning",
            involves=MODEL_KEYS,
        )


def check_parameter_patterns(run: RunContext) -> Iterator[Problem]:
    """Check that each pattern of [optimizer] matches a parameter, and no parameter two groups.

    The parameters of a misspelled pattern would have other settings than expected.
    """
    if run.spec is None:
        return
    section = run.config.optimizer
    patterns = {
        f"optimizer.groups.{name}.parameters": group.parameters
        for name, group in section.groups.items()
    }
    if section.has_weight_decay:
        patterns["optimizer.no_weight_decay"] = section.no_weight_decay
    templates, names = parameter_names(run)
    for key, pattern in [(key, each) for key, group in patterns.items() for each in group]:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            examples = ", ".join(template.replace("{}", "0") for template in templates)
            yield Problem(
                key,
                None,
                f'patterns that match a parameter; "{pattern}" matches none of {examples}, ...',
                did_you_mean(pattern, names),
                involves=MODEL_KEYS,
            )
    ambiguous = {name: groups for name in names if len(groups := section.groups_of(name)) > 1}
    if ambiguous:
        name, groups = next(iter(ambiguous.items()))
        yield Problem(
            f"optimizer.groups.{groups[1]}.parameters",
            None,
            f'patterns of parameters in no other group; {name} is in "{groups[0]}" too',
            "change the patterns of one group",
            involves=(f"optimizer.groups.{groups[0]}.parameters", *MODEL_KEYS),
        )


def parameter_names(run: RunContext) -> tuple[list[str], list[str]]:
    """Return the names of the model's parameters: with "{}" for the layer, and for every layer.

    Some layers of a family may lack some of the names.
    """
    assert run.spec is not None
    tied = dict(run.spec.tied(run.args))
    rows = [row if isinstance(row, tuple) else (row.native,) for row in run.spec.hf_names(run.args)]
    templates = [
        name
        for native, *_ in rows
        for name in ([native] if isinstance(native, str) else native)
        if name not in tied
    ]
    layers = range(run.size("n_layers") + num_mtp_layers(run.args))
    names = [
        name
        for template in templates
        for name in dict.fromkeys(template.replace("{}", str(layer)) for layer in layers)
    ]
    return templates, names


def check_tokenizer(config: JobConfig, model: CheckedModel) -> Iterator[Problem]:
    """Check that the tokenizer exists and is readable, and that the vocabulary has all its ids."""
    key = "model.tokenizer_path" if config.model.tokenizer_path else HF_ASSETS
    path = Path(config.model.tokenizer_folder)
    if config.model.tokenizer_path:
        remedy = "put the tokenizer into the folder model.hf_assets_path"
        yield Problem(key, None, "is deprecated", remedy, severity="warning")
    if not path.exists():
        remedy = "download one from the Hub with `titan download`"
        missing = describe_missing(path)
        expected = f"a folder with tokenizer.json or a tiktoken .model file; {missing}"
        yield Problem(key, None, expected, remedy, severity="training_error")
        return
    from torchtitan_like.data.data_errors import TokenizerError
    from torchtitan_like.data.text.tokenizer import check_vocabulary, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        limits = model.spec.constraints(model.args) if model.spec else {}
        if vocab_size := limits.get("vocab_size"):
            check_vocabulary(
                tokenizer,
                vocab_size,
                add_bos=config.data.add_bos and config.reads_text,
                add_eos=config.data.add_eos and config.reads_text,
            )
    except TokenizerError as error:
        involves = (*MODEL_KEYS, "data.add_bos", "data.add_eos")
        yield Problem(key, None, f"a tokenizer that fits the model; {error}", involves=involves)
