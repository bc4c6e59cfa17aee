"""Use the configuration stored in a checkpoint or run folder: its model and its tokenizer.

Another person may have written such a configuration. The module in its `experimental.custom_import`
is never imported; a command imports only the module on its command line. Without it, a
configuration with names of user code or registered sections cannot be loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan_like.check.model_checks import read_sizes
from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.identity import Identity
from torchtitan_like.checkpoint.torchtitan import OPTIMIZERS, AdamSettings
from torchtitan_like.config import (
    ConfigError,
    JobConfig,
    load_config,
    load_stored_config,
)
from torchtitan_like.config.arguments import last_value
from torchtitan_like.config.loader import CUSTOM_IMPORT, CUSTOM_IMPORT_KEY, import_module
from torchtitan_like.config.problems import Problem
from torchtitan_like.config.sections_training import Model
from torchtitan_like.util.modules import is_dotted, is_file_name
from torchtitan_like.util.output import show_error
from torchtitan_like.util.run_directory import CONFIG

# Base of relative paths in the configurations of a source checkout.
SOURCE_ROOT = Path(__file__).resolve().parents[1]


def identify_checkpoint(
    path: Path, config_file: Path | None, module: str
) -> tuple[Identity, JobConfig]:
    """Return the model and the configuration of a checkpoint.

    config_file: the TOML of a run with this model; None: config.toml in the checkpoint. module: see
    `load_trusted`. Raises CheckpointError if there is no configuration, ConfigError.
    """
    if not config_file and not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} does not store its configuration. Expected a config.toml, whose model gives "
            "the tensors their names: give --config, the TOML file of a run with this model"
        )
    if not config_file:
        return identify_step(path, module)
    config = _load(lambda: load_config(["--job.config_file", str(config_file)]), module)
    return _identify(config, config_file.parent, module)


def identify_step(step: Path, module: str) -> tuple[Identity, JobConfig]:
    """Return the model and the configuration of a published step.

    module: see `load_trusted`. Raises ConfigError.
    """
    return _identify(load_trusted(step / CONFIG, module), step, module)


def _identify(config: JobConfig, folder: Path, module: str) -> tuple[Identity, JobConfig]:
    from torchtitan_like.build import identify

    check_model_name(config, module)
    config, _ = read_sizes(config)
    return identify(with_assets(config.model, folder)), config


def custom_import_in(settings: Sequence[str]) -> str:
    """Return the module in the settings of a command line; "" without one."""
    return last_value(settings, CUSTOM_IMPORT) or ""


def load_trusted(file: Path, module: str, settings: Sequence[str] = ()) -> JobConfig:
    """Load a stored configuration after importing the module that the user's command names.

    module: "" imports nothing. settings: see `load_stored_config`.
    Raises ConfigError if that fails. Its remedy for unknown sections is the module that the
    configuration names.
    """
    return _load(lambda: load_stored_config(file, settings, module), module)


def _load(load: Callable[[], JobConfig], module: str) -> JobConfig:
    if problem := import_module(module):
        raise ConfigError([problem])
    try:
        return load()
    except ConfigError as error:
        stored = error.partial.experimental.custom_import if error.partial else ""
        problems = [
            _with_module(problem, stored)
            if stored and CUSTOM_IMPORT_KEY in problem.involves
            else problem
            for problem in error.problems
        ]
        raise ConfigError(problems, partial=error.partial, faulty=error.faulty) from error


def _with_module(problem: Problem, module: str) -> Problem:
    """Return the problem of an unknown model or section with the module that may register it."""
    remedy = f"if you trust it: --{CUSTOM_IMPORT_KEY} {module}, with the folder of a module in PYTHONPATH"
    expected = f"{problem.expected}. The config names the module {module!r}"
    return replace(problem, expected=expected, remedy=remedy)


def check_model_name(config: JobConfig, module: str) -> None:
    """Raise ConfigError unless the model of a stored configuration is registered.

    module: see `load_trusted`. Prints a note if the config names a module that was not imported.
    """
    from torchtitan_like.models.spec import get_spec

    stored = config.experimental.custom_import
    try:
        get_spec(config.model.name)
    except KeyError as error:
        expected = f"a registered model: {error.args[0]}"
        problem = Problem("model.name", config.model.name, expected)
        raise ConfigError([_with_module(problem, stored) if stored else problem]) from error
    if stored and stored != (os.path.abspath(module) if is_file_name(module) else module):
        show_error(f"Not imported: {stored}, which the config names as {CUSTOM_IMPORT_KEY}")


def find_run_assets(assets: str, step_folder: Path) -> Path:
    """Return the path of a folder that a run's config contains as a relative path.

    It is searched in the working folder, in the folders where attempts of the run were started
    (newest first), and in the source checkout. Returns `assets` unchanged if it is in none of them.
    """
    path = Path(assets).expanduser()
    folders = [Path.cwd(), *_working_folders(step_folder), SOURCE_ROOT]
    return next((folder / path for folder in folders if (folder / path).exists()), path)


def with_assets(model: Model, step_folder: Path) -> Model:
    """Return the section with the paths of `find_run_assets` for tokenizer and assets."""
    keys = ("hf_assets_path", "tokenizer_path")
    paths = {key: getattr(model, key) for key in keys}
    located = {key: str(find_run_assets(path, step_folder)) for key, path in paths.items() if path}
    return model.model_copy(update=located)


def _working_folders(step_folder: Path) -> list[Path]:
    """Return the working folders of the attempts of this step's run, newest first."""
    folders = []
    for parent in step_folder.resolve().parents:
        records = parent.glob("attempts/*/environment/facts.json")
        numbered = [path for path in records if path.parts[-3].isdigit()]
        for path in sorted(numbered, key=lambda path: int(path.parts[-3]), reverse=True):
            try:
                folders.append(Path(json.loads(path.read_text(encoding="utf-8"))["folder"]))
            except (OSError, ValueError, KeyError, TypeError):  # the attempt was killed
                continue
    return folders


def adam_settings(config: JobConfig, step: int) -> AdamSettings:
    """Return the optimizer of a run, with the learning rate of step `step` + 1.

    Raises CheckpointError unless all parameters have the same Adam or AdamW.
    """
    from torchtitan_like.optim.schedule import build_schedule

    section, name = config.optimizer, config.lr_scheduler.name
    uniform = {
        f'optimizer.name = "{section.name}"': section.name in OPTIMIZERS,
        f'lr_scheduler.name = "{name}"': not is_dotted(name),
        "optimizer.groups": not section.groups,
        "optimizer.no_weight_decay": not (section.no_weight_decay and section.weight_decay),
    }
    if others := [setting for setting, is_uniform in uniform.items() if not is_uniform]:
        raise CheckpointError(
            f"The run has {others[0]}, which TorchTitan 0.2 cannot resume. Expected Adam or AdamW "
            "with the same settings for all parameters: for the weights alone, use --to dcp"
        )
    settings = config.extra_sections
    schedule = build_schedule(config.lr_scheduler, config.training.steps, settings)
    return AdamSettings(
        name=section.name,
        lr=section.lr * schedule.factor(step + 1),
        peak_lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        implementation=section.implementation,
    )
