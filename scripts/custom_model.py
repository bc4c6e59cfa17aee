"""A model from outside the package, found where training finds it: `experimental.custom_import` of a run's config."""

from __future__ import annotations

import importlib
import os
import sys

from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.problems import Problem


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
