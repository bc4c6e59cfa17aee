"""Dataset names for `training.dataset` and `validation.dataset`.

Relative paths in this table start at the package directory, which contains the shipped datasets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DatasetEntry:
    """A named dataset: its files and how they are read.

    path: a shipped file of JSON lines, or files of the Hub as in `DataSource.path`.
    streaming: as in `DataSource`. note: logged if a run uses the name.
    """

    path: str
    streaming: bool = False
    note: str = ""

    @property
    def is_shipped(self) -> bool:
        """True if the dataset is part of the package."""
        return not self.path.startswith("hf://")

    @property
    def file(self) -> Path:
        """Absolute path of a shipped file."""
        return Path(__file__).resolve().parent.parent / self.path

    @property
    def source_path(self) -> str:
        """The path as in `DataSource.path`."""
        return str(self.file) if self.is_shipped else self.path


_TRAIN = "data/corpus/shakespeare_train.jsonl"
_VALIDATION = "data/corpus/shakespeare_validation.jsonl"
_C4 = "hf://datasets/allenai/c4@1588ec454efa1a09f29cd18ddd04fe05fc8653a2"

DATASETS: dict[str, DatasetEntry] = {
    "shakespeare": DatasetEntry(_TRAIN),
    "shakespeare_validation": DatasetEntry(_VALIDATION),
    "c4_test": DatasetEntry(_TRAIN, note='"c4_test" reads the shipped dataset "shakespeare"'),
    "c4_validation": DatasetEntry(f"{_C4}/en/c4-validation.*.json.gz"),
    "c4": DatasetEntry(f"{_C4}/en/c4-train.*.json.gz", streaming=True),
}


def datasets_for(section: str) -> dict[str, DatasetEntry]:
    """Return the datasets for "training" or "validation".

    Validation compares losses on the same samples, so its datasets are not streamed.
    """
    may_stream = section == "training"
    return {name: entry for name, entry in DATASETS.items() if may_stream or not entry.streaming}
