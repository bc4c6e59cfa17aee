"""The files of the training and validation datasets."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_like.config.availability import sources_of, value_of
from torchtitan_like.config.datasets import datasets_for
from torchtitan_like.config.problems import NO_EFFECT, nearest
from torchtitan_like.preflight.folders import missing_at

if TYPE_CHECKING:
    from torchtitan_like.config.findings import Findings
    from torchtitan_like.config.sections_training import DataSource


def check_text(findings: Findings, section: str) -> None:
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
        findings.missing_file(key, f"a file, folder or glob with files; {missing_at(Path(path))}")
    elif not is_tokens:
        try:
            find_corpus(path, format_name)
        except DataError as error:
            findings.error(key, f"files that can be read; {error}", involves=involves)


def _matches(path: str) -> bool:
    if os.path.isdir(path):
        return any(True for _ in os.scandir(path))
    return os.path.exists(path) or any(map(os.path.isfile, glob.iglob(path, recursive=True)))
