"""Names that ``training.dataset`` and ``validation.dataset`` understand.

Relative paths in this table start at the package directory, where the shipped texts lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DatasetEntry:
    """Where the text behind a dataset name is, and how it is read.

    ``path``: a shipped file of JSON lines, or files of the Hub as `DataSource.path` names them. ``streaming``: as
    `DataSource.streaming`. ``note`` is told to the user when the name is used.
    """

    path: str
    streaming: bool = False
    note: str = ""

    @property
    def is_shipped(self) -> bool:
        """Whether the text is here, with the package."""
        return not self.path.startswith("hf://")

    @property
    def file(self) -> Path:
        """Absolute path of a shipped file."""
        return Path(__file__).resolve().parent.parent / self.path

    @property
    def source_path(self) -> str:
        """As `DataSource.path`."""
        return str(self.file) if self.is_shipped else self.path


_TRAIN = "data/corpus/shakespeare_train.jsonl"
_VALIDATION = "data/corpus/shakespeare_validation.jsonl"
_C4 = "hf://datasets/allenai/c4@1588ec454efa1a09f29cd18ddd04fe05fc8653a2"

DATASETS: dict[str, DatasetEntry] = {
    "shakespeare": DatasetEntry(_TRAIN),
    "shakespeare_validation": DatasetEntry(_VALIDATION),
    "c4_test": DatasetEntry(_TRAIN, note='the shipped text "shakespeare" stands in for "c4_test"'),
    "c4_validation": DatasetEntry(f"{_C4}/en/c4-validation.*.json.gz"),
    "c4": DatasetEntry(f"{_C4}/en/c4-train.*.json.gz", streaming=True),
}


def datasets_for(section: str) -> dict[str, DatasetEntry]:
    """Those that "training" or "validation" can use: a loss that is compared needs the same samples each time."""
    return {name: entry for name, entry in DATASETS.items() if section == "training" or not entry.streaming}
