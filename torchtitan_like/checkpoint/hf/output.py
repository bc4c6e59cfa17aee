"""Safetensors files that several ranks write together, extent by extent. Their headers come last.

A file of full size with a header and holes would load as zeros without an error; without a header it does not load.
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
from torchtitan_like.checkpoint.extents import EXTENT, FileRecord, hash_extent, naming, write_file
from torchtitan_like.checkpoint.hf.plan import ExtentId, extents_of
from torchtitan_like.checkpoint.hf.safetensors_file import INDEX, FileLayout, read_header, render_index
from torchtitan_like.checkpoint.votes import Votes
from torchtitan_like.util.files import sync_path


class Output:
    """The files of one export: `create`, `write` every extent on one rank, `finish`; all but `write` on all ranks together."""

    def __init__(self, folder: Path, files: Sequence[FileLayout], votes: Votes) -> None:
        self.folder = folder
        self.files = files
        self._votes = votes
        self._descriptors: dict[int, int] = {}
        self._locks = [threading.Lock() for _ in files]
        self._digests: dict[ExtentId, str] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def create(self, mine: Iterable[ExtentId]) -> None:
        """Rank 0 makes the files in their full size, then every rank opens those of its extents. Nothing is overwritten."""
        self._votes.leader_does(self._create)
        self._votes.all_do(lambda: self._open_all({f for f, _ in mine}))

    def _create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / name for name in (*(file.name for file in self.files), INDEX)]
        present = next((path for path in paths if path.exists()), None)
        if present is not None:
            raise CheckpointError(f"{present} exists already: choose a folder that holds no model")
        for path, file in zip(paths, self.files, strict=False):
            with naming(path), open(path, "xb") as created:
                # Not posix_fallocate: on file systems that cannot, the C library writes a byte into every block.
                os.truncate(created.fileno(), file.size)

    def _open_all(self, files: Iterable[int]) -> None:
        for f in files:
            self._descriptors[f] = os.open(self.folder / self.files[f].name, os.O_WRONLY)
            self._closing.callback(os.close, self._descriptors[f])

    def _header_in(self, extent: ExtentId) -> bytes:
        return self.files[extent[0]].header[extent[1] * EXTENT : (extent[1] + 1) * EXTENT]

    def begin(self, extent: ExtentId, buffer: Tensor) -> Tensor:
        """The part of `buffer`, uint8 (EXTENT,), that is to be filled with this extent; what is header is filled in."""
        if header := self._header_in(extent):
            buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return buffer[: min(EXTENT, self.files[extent[0]].size - extent[1] * EXTENT)]

    def write(self, extent: ExtentId, data: Tensor) -> None:
        """Hash a filled extent, and write all of it but the header. Threads may write different extents at a time."""
        view = data.numpy().data
        self._digests[extent] = hash_extent(view)
        header = len(self._header_in(extent))
        with self._locks[extent[0]]:  # writers of one file wait for each other in any case, in the kernel and spinning
            self._write_at(extent[0], extent[1] * EXTENT + header, view[header:])

    def _write_at(self, f: int, offset: int, view: memoryview) -> None:
        descriptor, begin = self._descriptors[f], offset
        with naming(self.folder / self.files[f].name):
            while view:
                count = os.pwrite(descriptor, view, offset)
                offset, view = offset + count, view[count:]
            # The disk starts now, not at fsync: DONTNEED starts writing what is dirty, and waits for nothing.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, begin, offset - begin, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """After a failure, on one rank: nothing that looks like a model stays."""
        for file in self.files:
            (self.folder / file.name).unlink(missing_ok=True)

    def finish(self) -> dict[str, FileRecord]:
        """When every byte of every rank is on disk: headers, index. What was written, on every rank."""
        digests: dict[ExtentId, str] = {}
        for part in self._votes.all_do(self._sync):
            digests |= part
        self._votes.all_do(self._write_headers)
        extents = extents_of(self.files)
        records = {
            file.name: FileRecord(file.size, tuple(digests[extent] for extent in extents if extent[0] == f))
            for f, file in enumerate(self.files)
        }
        return records | {INDEX: self._votes.leader_does(self._write_index)}

    def _sync(self) -> dict[ExtentId, str]:
        for f in self._descriptors:
            self._sync_file(f)
        return self._digests

    def _sync_file(self, f: int) -> None:
        with naming(self.folder / self.files[f].name):
            os.fsync(self._descriptors[f])

    def _write_headers(self) -> None:
        mine = range(self._votes.group.rank, len(self.files), self._votes.group.size)
        self._open_all(f for f in mine if f not in self._descriptors)
        for f in mine:
            self._write_at(f, 0, memoryview(self.files[f].header))
            self._sync_file(f)

    def _write_index(self) -> FileRecord:
        for file in self.files:
            if read_header(self.folder / file.name)[0] != list(file.entries):
                raise CheckpointError(f"{self.folder / file.name} does not hold the header written to it")
        record = write_file(self.folder / INDEX, render_index(self.files))
        sync_path(self.folder)
        return record


def in_rounds(
    votes: Votes, count: int, work: Callable[[int], None], exchange: Callable[[int], None] = lambda turn: None
) -> None:
    """`exchange` and `work` for each of `count` rounds, on all ranks together; both may only fail on this rank's own.

    After a failure of `work` a rank goes on to exchange, so that nobody waits for it, until all have heard of it: one
    round later. Then it is raised on all.
    """
    failure: Exception | None = None
    for turn in range(count):
        failures = votes.group.sum_async([int(failure is not None)])
        exchange(turn)
        if failure is None:
            try:
                work(turn)
            except Exception as error:
                failure = error
        if failures.wait()[0]:
            break

    def tell() -> None:
        if failure is not None:
            raise failure

    votes.all_do(tell)
