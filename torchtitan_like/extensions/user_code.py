"""Import the user code that a setting names as "module:name", call it, and check its results."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_like.extensions.protocols import Observer, Settings
from torchtitan_like.util.modules import describe_line, package_of
from torchtitan_like.util.suggestions import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

logger = logging.getLogger()


# Kind of a `config.base.NameOf` -> the arguments of the call that its protocol describes.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "optimizer": ("groups", "settings"),
    "learning-rate schedule": ("step", "total_steps", "settings"),
    "loss": ("logits", "labels", "settings"),
    "converter": ("model", "settings"),
    "data source": ("path", "settings"),
    "sample processor": ("record", "settings"),
    "observer": ("run_folder", "settings"),
}


class ExtensionError(Exception):
    """User code cannot be imported, or does not follow its protocol.

    problem, remedy: the two parts of the message.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


def resolve_name(name: str, kind: str) -> Any:
    """Return the function or class `name`, "module:name", after importing its module.

    kind: a key of `PARAMETERS`. Raises ExtensionError if the module cannot be imported, or does not
    define such a name, and for other parameters than the protocol's.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package_of(name)
        remedy = "add the folder of the module to PYTHONPATH" if is_absent else "correct it"
        raise ExtensionError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}"
            f"{describe_line(error)}. Expected no error",
            remedy,
        ) from error
    if not hasattr(module, attribute):
        remedy = did_you_mean(attribute, vars(module), f"{module_name}:") or "correct it"
        raise ExtensionError(
            f"the module {module_name} has no {attribute}. Expected the name of a {kind}",
            remedy,
        )
    item = getattr(module, attribute)
    expected = f"{attribute}({', '.join(PARAMETERS[kind])})"
    if not callable(item):
        raise ExtensionError(
            f"the {kind} {name} is {item!r}. Expected a function or a class that can be called as "
            f"{expected}",
            "name one",
        )
    # A checkpoint must not choose another function that the module imports.
    home = str(getattr(item, "__module__", None))
    if package_of(home) != package_of(name):
        raise ExtensionError(
            f"the {kind} {name} is defined in {home}. Expected a function or a class that "
            f"{package_of(name)} defines",
            "define one that calls it",
        )
    try:
        inspect.signature(item).bind(*PARAMETERS[kind])
    except (TypeError, ValueError) as error:
        raise ExtensionError(
            f"the {kind} {name} cannot be called as {expected}: {error}. Expected the parameters "
            "of the protocol",
            "change them",
        ) from error
    return item


# ---- converters


def convert(name: str, model: nn.Module, settings: Settings) -> None:
    """Apply the user's converter to a model on the meta device, in place.

    Raises ExtensionError if names, shapes or dtypes of its saved tensors change.
    """
    before = _saved_tensors(model)
    resolve_name(name, "converter")(model, settings)
    after = _saved_tensors(model)
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    if changed:
        key = changed[0]
        raise ExtensionError(
            f"the converter {name} changes {len(changed)} saved tensors, such as {key} from "
            f"{before.get(key)} to {after.get(key)}. Expected the same names, shapes and dtypes, "
            "which checkpoints and sharding depend on: keep them"
        )


def _saved_tensors(model: nn.Module) -> dict[str, str]:
    return {
        key: f"{value.dtype} {tuple(value.shape)} on {value.device}"
        for key, value in model.state_dict().items()
    }


# ---- observers


METHODS = ("on_step", "on_validation", "close")


class Observers:
    """The observers of a run by name. An observer that raises an error is logged and dropped."""

    def __init__(self) -> None:
        self._observers: dict[str, Observer] = {}

    def build(self, names: Sequence[str], run_folder: Path, settings: Settings) -> None:
        """Build the user's observers. Raises ExtensionError."""
        for name in names:
            builder = resolve_name(name, "observer")
            try:
                observer = builder(run_folder, settings)
            except Exception as error:  # user code may raise anything
                raise ExtensionError(
                    f"the observer {name} cannot be built: {type(error).__name__}: {error}"
                    f"{describe_line(error)}. Expected no error: correct it"
                ) from error
            if missing := [method for method in METHODS if not hasattr(observer, method)]:
                raise ExtensionError(
                    f"the observer {name} has no {', '.join(missing)}. Expected on_step, "
                    "on_validation and close: define them"
                )
            self._observers[name] = observer

    def on_steps(self, rows: Sequence[dict[str, Any]]) -> None:
        """Pass on rows of metrics.jsonl."""
        for row in rows:
            self._call("on_step", dict(row))  # the observer may change its copy

    def on_validation(self, row: dict[str, Any]) -> None:
        """Pass on a row of validation.jsonl."""
        self._call("on_validation", dict(row))

    def close(self) -> None:
        """Close all observers."""
        self._call("close")

    def _call(self, method: str, *rows: Mapping[str, Any]) -> None:
        for name, observer in tuple(self._observers.items()):
            try:
                getattr(observer, method)(*rows)
            except Exception as error:  # user code may raise anything
                del self._observers[name]
                logger.error(
                    f"The observer {name} failed and receives no more rows: "
                    f"{type(error).__name__}: {error}{describe_line(error)}"
                )


# ---- optimizers


GROUP_KEYS = ("lr", "peak_lr", "group", "weight_decay")


def build_optimizer(
    name: str, groups: list[dict[str, Any]], settings: Settings
) -> torch.optim.Optimizer:
    """Build the user's optimizer. groups: see `OptimizerBuilder`.

    Raises ExtensionError if it does not follow the protocol.
    """
    import torch

    given = {parameter for group in groups for _, parameter in group["params"]}
    optimizer = resolve_name(name, "optimizer")(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problems = [f"it is {type(optimizer).__name__}, not a torch.optim.Optimizer"]
    else:
        problems = list(_problems(optimizer, given))
    if problems:
        raise ExtensionError(
            f"the optimizer {name}: {'; '.join(problems)}. Expected an optimizer over the given "
            "groups, with its whole state: correct its constructor"
        )
    _check_first_step(name, optimizer)
    return optimizer  # type: ignore[no-any-return]


def _problems(optimizer: torch.optim.Optimizer, given: set[Tensor]) -> Iterator[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if set(parameters) != given or len(parameters) != len(given):
        yield f"it has {len(parameters)} parameters of the {len(given)} given ones"
        return
    for group in optimizer.param_groups:
        if missing := [key for key in GROUP_KEYS if key not in group]:
            yield f"a group of its param_groups has lost {', '.join(missing)}"
            return
    for p in parameters:
        for key, value in optimizer.state.get(p, {}).items():
            if problem := _state_problem(p, value):
                yield f"its state {key!r} {problem}"
                return


def _state_problem(parameter: Any, value: Any) -> str:
    """Return what is wrong with a state of a parameter, or ""."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, not a tensor: a checkpoint would not contain it"
    is_sharded = hasattr(parameter, "placements")
    if is_sharded and value.ndim and not hasattr(value, "placements"):
        return (
            "is a plain tensor of a sharded parameter: a checkpoint would contain the shard of one "
            "rank (torch.zeros_like(parameter) returns a DTensor)"
        )
    if value.device != parameter.device:
        return f"is on {value.device}, not on {parameter.device} like its parameter"
    return ""


def _check_first_step(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ExtensionError in the first `step` if it adds or replaces tensors of the state."""
    before = _state_tensors(optimizer)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        handle.remove()
        if new := _state_tensors(optimizer).keys() - before.keys():
            keys = sorted({key for _, key, _ in new})
            raise ExtensionError(
                f"the optimizer {name} replaces or adds the state {', '.join(keys)} in a step. "
                "Expected tensors that exist after building and are updated in place, because a "
                "checkpoint is loaded into them: create them in the constructor"
            )

    handle = optimizer.register_step_post_hook(check)


def _state_tensors(optimizer: torch.optim.Optimizer) -> dict[tuple[Tensor, str, int], Tensor]:
    """Return the tensors of the state by parameter, key and identity."""
    return {
        (parameter, key, id(value)): value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
