"""Safetensors files that several ranks write together, extent by extent, with the headers last.

The header comes last because a file with a header and holes loads without an error: the holes are
zeros. A file without a header does not load.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_like.checkpoint.errors import CheckpointError
from torchtitan_like.checkpoint.hf.plan import ExtentId, extents_of
from torchtitan_like.checkpoint.hf.safetensors_file import (
    INDEX,
    FileLayout,
    read_header,
    render_index,
)
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.util.extents import EXTENT, FileRecord, hash_extent, write_file
from torchtitan_like.util.files import naming, sync_path


class Output:
    """The files of one export: `create` them, `write` every extent on one rank, then `finish`.

    All ranks call `create` and `finish` together; each calls `write` for its own extents.
    """

    def __init__(self, folder: Path, files: Sequence[FileLayout], group: HostGroup) -> None:
        self.folder = folder
        self.files = files
        self._group = group
        self._descriptors: dict[int, int] = {}
        self._locks = [threading.Lock() for _ in files]
        self._digests: dict[ExtentId, str] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def create(self, own_extents: Iterable[ExtentId]) -> None:
        """Create the files on rank 0 in full size, then open the files of this rank's extents.

        Raises CheckpointError on all ranks if a file exists, or a rank cannot open one.
        """
        self._group.run_on_leader(self._create)
        try:
            self._group.run_on_all(lambda: self._open_all({f for f, _ in own_extents}))
        except CheckpointError:
            if self._group.rank == 0:
                self.remove()
            raise

    def _create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / name for name in (*(file.name for file in self.files), INDEX)]
        present = next((path for path in paths if path.exists()), None)
        if present is not None:
            raise CheckpointError(f"{present} exists already. Expected a folder without a model")
        for path, file in zip(paths, self.files, strict=False):
            with naming(path), open(path, "xb") as created:
                # Not posix_fallocate: on file systems without it, the C library writes a byte to
                # every block.
                os.truncate(created.fileno(), file.size)

    def _open_all(self, files: Iterable[int]) -> None:
        for f in files:
            self._descriptors[f] = os.open(self.folder / self.files[f].name, os.O_WRONLY)
            self._closing.callback(os.close, self._descriptors[f])

    def _header_in(self, extent: ExtentId) -> bytes:
        """Return the bytes of the file's header that are in this extent."""
        return self.files[extent[0]].header[extent[1] * EXTENT : (extent[1] + 1) * EXTENT]

    def prepare(self, extent: ExtentId, buffer: Tensor) -> Tensor:
        """Return the part of `buffer`, uint8 (EXTENT,), for the extent, with header bytes set."""
        if header := self._header_in(extent):
            buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return buffer[: min(EXTENT, self.files[extent[0]].size - extent[1] * EXTENT)]

    def write(self, extent: ExtentId, data: Tensor) -> None:
        """Hash a filled extent and write all of it except header bytes. Threads may call this."""
        view = data.numpy().data
        self._digests[extent] = hash_extent(view)
        header = len(self._header_in(extent))
        # The kernel serializes writers of one file and spins; a lock waits without spinning.
        with self._locks[extent[0]]:
            self._write_at(extent[0], extent[1] * EXTENT + header, view[header:])

    def _write_at(self, f: int, offset: int, view: memoryview) -> None:
        descriptor = self._descriptors[f]
        start = offset
        with naming(self.folder / self.files[f].name):
            while view:
                count = os.pwrite(descriptor, view, offset)
                offset, view = offset + count, view[count:]
            # DONTNEED starts the disk write now instead of at fsync, without waiting for it.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, start, offset - start, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Delete the incomplete files; one rank calls it after a failure."""
        for file in self.files:
            (self.folder / file.name).unlink(missing_ok=True)

    def finish(self) -> dict[str, FileRecord]:
        """Sync all data, then write headers and index. Return the records on every rank."""
        digests: dict[ExtentId, str] = {}
        for part in self._group.gather_objects(self._group.run_on_all(self._sync)):
            digests |= part
        self._group.run_on_all(self._write_headers)
        extents = extents_of(self.files)
        records = {
            file.name: FileRecord(
                file.size, tuple(digests[extent] for extent in extents if extent[0] == f)
            )
            for f, file in enumerate(self.files)
        }
        return records | {INDEX: self._group.run_on_leader(self._write_index)}

    def _sync(self) -> dict[ExtentId, str]:
        for f in self._descriptors:
            self._sync_file(f)
        return self._digests

    def _sync_file(self, f: int) -> None:
        with naming(self.folder / self.files[f].name):
            os.fsync(self._descriptors[f])

    def _write_headers(self) -> None:
        own_files = range(self._group.rank, len(self.files), self._group.size)
        self._open_all(f for f in own_files if f not in self._descriptors)
        for f in own_files:
            self._write_at(f, 0, memoryview(self.files[f].header))
            self._sync_file(f)

    def _write_index(self) -> FileRecord:
        for file in self.files:
            if read_header(self.folder / file.name)[0] != list(file.entries):
                raise CheckpointError(
                    f"{self.folder / file.name}: the header was read differently than written"
                )
        record = write_file(self.folder / INDEX, render_index(self.files))
        sync_path(self.folder)
        return record


def run_in_rounds(
    group: HostGroup,
    count: int,
    work: Callable[[int], None],
    exchange: Callable[[int], None] = lambda number: None,
) -> None:
    """Call `exchange` and `work` for each of `count` rounds, on all ranks together.

    A rank whose `work` fails continues to exchange, so that no peer waits for it. One round later
    all ranks receive the failure and raise it.
    """
    failure: Exception | None = None
    for number in range(count):
        failures = group.sum_async([int(failure is not None)])
        exchange(number)
        if failure is None:
            try:
                work(number)
            except Exception as error:
                failure = error
        if failures.wait()[0]:
            break

    def raise_failure() -> None:
        if failure is not None:
            raise failure

    group.run_on_all(raise_failure)
