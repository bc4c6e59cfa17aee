"""Hashes of token files without hash tables: recorded at the first read, compared at later reads.

A start cannot read terabytes to detect changes. Each process therefore has a log in the run's
folder, and appends the hash of every extent that it reads for the first time. The next start merges
these logs into one table for each source. An extent with another hash than in the table ends the
run. The start itself verifies at most `NUM_AT_START` of the recorded extents.

A log has 8 bytes for each extent of `EXTENT_BYTES` that its process reads. The table has 4 bytes
for each extent of the source (128 MB for 1 TB). A process needs one bit for each extent.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Sequence
from io import FileIO
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.tokens import checked_file
from torchtitan_like.data.tokens.checked_file import CheckedFile, RawFile
from torchtitan_like.data.tokens.token_file import written_atomically
from torchtitan_like.util.extents import num_extents

logger = logging.getLogger()

FOLDER = "token_digests"  # in the run's folder
NUM_AT_START = 512
ENTRY = np.dtype("<u4")
RECORD = np.dtype([("extent", "<u4"), ("digest", "<u4")])


class RunDigests:
    """The recorded hashes of the files of one source. Extents are numbered through all files.

    files: their order and sizes identify the source, together with ``identity``.
    is_recorder: this process records the hashes of its reads. One of the ranks that read the same
        samples is enough.
    """

    def __init__(
        self, run_folder: str, files: Sequence[RawFile], identity: int, *, is_recorder: bool
    ) -> None:
        sizes = [file.size for file in files]
        key = xxhash.xxh3_64_hexdigest(
            json.dumps([checked_file.EXTENT_BYTES, identity, sizes]).encode()
        )
        self._folder = Path(run_folder).absolute() / FOLDER
        self._files = files
        self._bases = [
            0,
            *accumulate(num_extents(size, checked_file.EXTENT_BYTES) for size in sizes),
        ]
        self._name = key
        self._is_recorder = is_recorder
        self._table: RawFile | None = None
        self._log: FileIO | None = None

    @property
    def path(self) -> Path:
        """Path of the table."""
        return self._folder / f"{self._name}.u32"

    def merge(self) -> None:
        """Merge the logs of earlier starts into the table and verify some extents.

        One process calls it, before all processes call `open`. Raises DataError if two starts or
        two nodes have read different bytes, or if a verified extent has changed.
        """
        logs = sorted(self._folder.glob(f"{self._name}.*.log"))
        table = self._read_table() if logs or self.path.exists() else None
        if table is None:
            return
        for log in logs:
            self._add(table, log)
        if logs:
            with written_atomically(self.path, "the table of recorded hashes") as stream:
                stream.write(table.data)
            for log in logs:
                log.unlink()
        recorded = np.flatnonzero(table)
        self.open()
        checked = self.files()
        for number in recorded[:: -(-len(recorded) // NUM_AT_START) or 1].tolist():
            file = int(np.searchsorted(self._bases, number, side="right")) - 1
            checked[file].verify(number - self._bases[file])

    def open(self) -> None:
        """Open the table, if there is one. `check` compares with it from now on."""
        self._table = RawFile(self.path) if self.path.exists() else None

    def files(self) -> list[CheckedFile]:
        """Return the files of the source; reads compare and record their extents."""
        return [
            CheckedFile(file, _FileDigests(self, base))
            for file, base in zip(self._files, self._bases[:-1], strict=True)
        ]

    def check(self, number: int, digest: int) -> str:
        """See `Hashes.check`. Records an extent without a recorded hash."""
        short = digest & 0xFFFFFFFF or 1
        entry = np.zeros(1, ENTRY)
        if self._table is not None:
            self._table.read(number * ENTRY.itemsize, entry)
        expected = int(entry[0])
        if not expected:
            self._record(number, short)
        if expected in (0, short):
            return ""
        return (
            f"Expected a hash that ends with {expected:08x}, recorded by this run in {self.path}: "
            "restore the file, or delete the record to train on the file as it is now"
        )

    def _record(self, number: int, digest: int) -> None:
        if not self._is_recorder:
            return
        try:
            # A second source with the same files has merged and removed the log: start a new one.
            if self._log is None or not os.fstat(self._log.fileno()).st_nlink:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{self._name}.{uuid.uuid4().hex}.log"
                self._log = FileIO(
                    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "w"
                )
            self._log.write(np.array((number, digest), RECORD).tobytes())
        except OSError as error:
            self._is_recorder = False
            logger.warning(
                f"cannot record hashes of token files in {self._folder} ({error}). Later starts of "
                "this run cannot detect changes of these files"
            )

    def _read_table(self) -> NDArray[np.uint32]:
        if not self.path.exists():
            return np.zeros(self._bases[-1], ENTRY)
        table = np.fromfile(self.path, ENTRY)
        if len(table) != self._bases[-1]:
            raise DataError(
                f"{self.path} has {len(table):,} recorded hashes. Expected {self._bases[-1]:,}: "
                "delete it"
            )
        return table

    def _add(self, table: NDArray[np.uint32], log: Path) -> None:
        size = log.stat().st_size // RECORD.itemsize
        records = np.fromfile(log, RECORD, size)  # a kill may have left half a record
        records = records[(records["extent"] < len(table)) & (records["digest"] > 0)]
        numbers, digests = records["extent"], records["digest"]
        is_new = table[numbers] == 0
        table[numbers[is_new]] = digests[is_new]
        wrong = np.flatnonzero(table[numbers] != digests)
        if len(wrong):
            number = int(numbers[wrong[0]])
            file = int(np.searchsorted(self._bases, number, side="right")) - 1
            start = (number - self._bases[file]) * checked_file.EXTENT_BYTES
            raise DataError(
                f"{self._files[file].path} has changed during this run: the run has read different "
                f"contents of the {checked_file.EXTENT_BYTES:,} bytes from {start:,} on. Expected "
                f"no change: restore the file, delete {self._folder}, and start again from a "
                "checkpoint before the change"
            )


class _FileDigests:
    """`Hashes` of one file of a source. base: the number of its first extent."""

    def __init__(self, run: RunDigests, base: int) -> None:
        self._run = run
        self._base = base

    def check(self, extent: int, digest: int) -> str:
        """See `Hashes.check`."""
        return self._run.check(self._base + extent, digest)
