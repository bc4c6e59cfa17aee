"""Names that ``training.dataset`` and ``validation.dataset`` understand.

Relative paths in this table start at the package directory, where the shipped texts lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DatasetEntry:
    """Where the text behind a dataset name is.

    ``kind`` "file": ``path`` is a JSON-lines file; "hub": ``path`` is a repository of the Hugging Face Hub and
    ``subset`` its configuration. ``note`` is told to the user when the name is used.
    """

    path: str
    kind: Literal["file", "hub"] = "file"
    subset: str | None = None
    note: str = ""

    @property
    def file(self) -> Path:
        """Absolute path of a shipped file."""
        return Path(__file__).resolve().parent.parent / self.path


_TRAIN = "data/corpus/shakespeare_train.jsonl"
_VALIDATION = "data/corpus/shakespeare_validation.jsonl"

DATASETS: dict[str, DatasetEntry] = {
    "shakespeare": DatasetEntry(_TRAIN),
    "shakespeare_validation": DatasetEntry(_VALIDATION),
    "c4_test": DatasetEntry(_TRAIN, note='the shipped text "shakespeare" stands in for "c4_test"'),
    "c4_validation": DatasetEntry(
        _VALIDATION, note='the shipped text "shakespeare_validation" stands in for "c4_validation"'
    ),
    "c4": DatasetEntry("allenai/c4", kind="hub", subset="en"),
}
