"""The training and validation datasets: their names, files and formats."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.check.environment import describe_missing
from torchtitan_like.config.dataset_names import datasets_for
from torchtitan_like.config.fields import settings_of
from torchtitan_like.config.problems import Problem, no_effect_warning
from torchtitan_like.extensions.user_code import ExtensionError
from torchtitan_like.monitor.reference_curve import COLUMNS, read_reference_curve
from torchtitan_like.util.modules import is_dotted
from torchtitan_like.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from torchtitan_like.config import JobConfig
    from torchtitan_like.config.sections_training import DataSource
    from torchtitan_like.extensions.protocols import Settings


MIXTURE_SETTINGS = ("weight", "weight_from", "max_epochs")


def check_datasets(config: JobConfig) -> Iterator[Problem]:
    """Check the datasets that this run reads."""
    yield from _check_dataset(config, "training", "data.sources")
    if config.validation.enable:
        yield from _check_dataset(config, "validation", "validation.sources")
        yield from _check_reference_curve(config.validation.reference_curve)


def _check_dataset(config: JobConfig, section: str, table: str) -> Iterator[Problem]:
    """Check the dataset of "training" or "validation". `table`: the key of its sources."""
    yield from _check_loader(config, section)
    sources = config.value_of(table)
    if not sources:
        yield from _check_named_dataset(config, section, table)
        return
    for name, source in sources.items():
        key = f"{table}.{name}"
        if is_dotted(source.format):
            yield from _check_user_source(key, source, config.extra_sections)
        else:
            yield from _check_files(f"{key}.path", source.path, source.format, (f"{key}.format",))
        yield from _check_effect(config, key, source, section)
    for key in (f"{section}.dataset", f"{section}.dataset_path"):
        if config.is_set(key) and config.layer_of(key) >= config.layer_of(table):
            yield no_effect_warning(key, f"[{table}] names the dataset", table)


def _check_loader(config: JobConfig, section: str) -> Iterator[Problem]:
    loader = config.value_of(f"{section}.dataloader")
    if loader.pin_memory:
        reason = "batches are copied to a GPU through page-locked memory either way"
        yield no_effect_warning(f"{section}.dataloader.pin_memory", reason)
    if loader.persistent_workers and loader.num_workers and section == "training":
        reason = "workers of the training dataset live as long as the run"
        yield no_effect_warning("training.dataloader.persistent_workers", reason)


def _check_named_dataset(config: JobConfig, section: str, table: str) -> Iterator[Problem]:
    """Check `dataset` and `dataset_path`, which name the dataset if there are no sources."""
    name = config.value_of(f"{section}.dataset")
    path = config.value_of(f"{section}.dataset_path")
    if path is not None:
        yield from _check_files(f"{section}.dataset_path", path)
        return
    datasets = datasets_for(section)
    if name not in datasets:
        yield Problem(
            f"{section}.dataset",
            None,
            f"one of {', '.join(datasets)}",
            did_you_mean(name, datasets)
            or f"to read a dataset of your own, set {section}.dataset_path",
            involves=(f"{section}.dataset_path", table),
        )
    elif datasets[name].is_shipped and not datasets[name].file.exists():
        expected = f"the shipped file {datasets[name].file}"
        remedy = "install the package again"
        yield Problem(f"{section}.dataset", None, expected, remedy, severity="training_error")


def _check_effect(
    config: JobConfig, key: str, source: DataSource, section: str
) -> Iterator[Problem]:
    """Warn about the settings of a source that differ from their defaults and have no effect."""
    for setting in settings_of(type(source), tuple(key.split("."))):
        name = setting.path[-1]
        if getattr(source, name) == setting.default:
            continue
        for need in setting.needs:
            if not need.is_met(config.value_of(need.key), config):
                yield no_effect_warning(setting.key, f"it needs {need}", need.key)
        if section == "validation" and name in MIXTURE_SETTINGS:
            reason = "each validation source is read once and has its own loss"
            yield no_effect_warning(setting.key, reason)


def _check_user_source(key: str, source: DataSource, settings: Settings) -> Iterator[Problem]:
    """Open a data source of user code, which reads no documents yet."""
    from torchtitan_like.data.data_errors import DataError
    from torchtitan_like.data.text.user_documents import UserDocuments

    try:
        documents = UserDocuments(source.format, source.path, settings)
    except ExtensionError:  # reported by `check_names`
        return
    except DataError as error:
        yield Problem(f"{key}.format", None, f"a data source that can be opened; {error}")
        return
    if not len(documents):
        yield Problem(f"{key}.format", None, f"at least one document; {documents} has none")


def _check_files(
    key: str, path: str, format_name: str = "auto", involves: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Check that the files exist and have a known format. For files on the Hub, check the name."""
    from torchtitan_like.data.data_errors import DataError
    from torchtitan_like.data.text.documents import find_corpus
    from torchtitan_like.data.text.hub import PREFIX, check_name

    is_tokens = format_name == "tokens"
    if path.startswith(PREFIX):
        if is_tokens:
            expected = 'local files: with format = "tokens" they are read in place'
            remedy = "download them, and set the path to their folder"
            yield Problem(key, None, expected, remedy, involves=involves)
            return
        try:
            check_name(path)
        except DataError as error:
            yield Problem(key, None, f"files that can be read; {error}")
        return
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        expected = f"local files, or hf://datasets/...; data at {scheme[0]} cannot be read"
        remedy = "copy the files to a disk of this machine, and set the path to their folder"
        yield Problem(key, None, expected, remedy, involves=involves)
        return
    if is_tokens and any(_matches(path + ending) for ending in (".bin", ".idx")):
        return
    if not _matches(path):
        expected = f"a file, folder or glob with files; {describe_missing(Path(path))}"
        yield Problem(key, None, expected, severity="training_error")
    elif not is_tokens:
        try:
            find_corpus(path, format_name)
        except DataError as error:
            yield Problem(key, None, f"files that can be read; {error}", involves=involves)


def _check_reference_curve(path: str | None) -> Iterator[Problem]:
    if path is None:
        return
    key, columns = "validation.reference_curve", ",".join(COLUMNS)
    try:
        read_reference_curve(path)
    except FileNotFoundError:
        expected = f"a CSV file; {describe_missing(Path(path))}, and none in the package"
        remedy = 'correct the path, or set it to "None"'
        yield Problem(key, None, expected, remedy, severity="training_error")
    except (OSError, ValueError) as error:
        expected = f"a CSV file with the columns {columns}; {error}"
        yield Problem(key, None, expected, "correct the file, or copy it again")


def _matches(path: str) -> bool:
    """Return True for a file, a folder that is not empty, or a glob that matches a file."""
    if os.path.isdir(path):
        return any(True for _ in os.scandir(path))
    return os.path.exists(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True)))
