"""What a run's config names by a path that may be relative: a model from outside the package, and the tokenizer."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.problems import Problem
from torchtitan_like.config.sections_training import Model

REPOSITORY = Path(__file__).resolve().parents[1]


def import_custom(config: JobConfig) -> None:
    """Import the module that the config names, if it names one. Raises ConfigError where that fails."""
    name = config.experimental.custom_import
    if not name:
        return
    see_working_folder()
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever the user's module raises is the user's answer
        expected = f"a module that can be imported; {type(error).__name__}: {error}"
        remedy = "stand in the folder where the run was started, or name that of the module in PYTHONPATH"
        raise ConfigError([Problem("experimental.custom_import", name, expected, remedy)]) from error


def see_working_folder() -> None:
    """Modules are found in the folder that one stands in, as with `python -m`; a script finds those beside it instead."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def find_assets(named: str, step_folder: Path) -> Path:
    """The folder that a run's config names: seen from here, from where one of the run's attempts was started, newest first, or
    from the repository. Where it is nowhere, as it is named.
    """
    path = Path(named).expanduser()
    places = [Path.cwd(), *started_in(step_folder), REPOSITORY]
    return next((place / path for place in places if (place / path).exists()), path)


def started_in(step_folder: Path) -> list[Path]:
    """Working folders of the attempts of the run that the step lies in, as far as they are recorded."""
    found = []
    for folder in step_folder.resolve().parents:
        records = (path for path in folder.glob("attempts/*/environment/facts.json") if path.parts[-3].isdigit())
        for path in sorted(records, key=lambda path: int(path.parts[-3]), reverse=True):
            try:
                found.append(Path(json.loads(path.read_text(encoding="utf-8"))["folder"]))
            except (OSError, ValueError, KeyError, TypeError):  # an attempt that was killed while it wrote
                continue
    return found


def with_assets(model: Model, step_folder: Path) -> Model:
    """The section with its tokenizer and assets where `find_assets` sees them."""
    named = {key: getattr(model, key) for key in ("hf_assets_path", "tokenizer_path")}
    return model.model_copy(update={key: str(find_assets(path, step_folder)) for key, path in named.items() if path})
