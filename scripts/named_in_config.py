"""What a stored config names: a model from outside the package, and the tokenizer.

A config in a checkpoint or a run folder may be somebody else's. The module in its
`experimental.custom_import` is never imported; tools import what their own command line names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from torchtitan_like.config import ConfigError, JobConfig
from torchtitan_like.config.cli import parse_arguments
from torchtitan_like.config.problems import Problem
from torchtitan_like.config.sections_training import Model

REPOSITORY = Path(__file__).resolve().parents[1]
KEY = "experimental.custom_import"


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--experimental.custom_import MODULE`."""
    parser.add_argument(
        f"--{KEY}",
        dest="custom_import",
        metavar="MODULE",
        default="",
        help="module to import first, found through PYTHONPATH, which registers the checkpoint's "
        "model. The module that the checkpoint's own config names is never imported",
    )


def imported_by(settings: list[str]) -> str:
    """Return the module that settings on a command line name; "" if they name none."""
    arguments, _ = parse_arguments(settings)
    return str(dict(arguments.leaves).get(tuple(KEY.split(".")), ""))


def import_custom(config: JobConfig, module: str) -> None:
    """Import `module`, which the user's command names ("": none), for the model of a stored config.

    Raises ConfigError if that fails, or if the config's model is not registered afterwards. Prints a
    note if the config names a module that was not imported.
    """
    from torchtitan_like.models.spec import get_spec

    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # user code may raise anything
            expected = f"a module that can be imported; {type(error).__name__}: {error}"
            raise ConfigError(
                [Problem(KEY, module, expected, "add the module's folder to PYTHONPATH")]
            ) from error
    stored = config.experimental.custom_import
    try:
        get_spec(config.model.name)
    except KeyError as error:
        remedy = f"if you trust it: --{KEY} {stored}, with its folder in PYTHONPATH" if stored else ""
        expected = f"a registered model: {error.args[0]}"
        expected += f". The config asks for the module {stored!r}" if stored else ""
        raise ConfigError([Problem("model.name", config.model.name, expected, remedy)]) from error
    if stored and stored != module:
        print(f"Not imported: {stored}, which the config names as {KEY}", file=sys.stderr)


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
