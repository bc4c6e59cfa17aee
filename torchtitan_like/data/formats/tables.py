"""Documents of tables: parquet, and Arrow's files and streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .records import BadRecord, Span, short

if TYPE_CHECKING:
    import pyarrow


def read_table(span: Span, format_name: str, field: str) -> Iterator[str | BadRecord]:
    with Table(span.file, format_name, field) as table:
        for index in range(span.start, span.stop):
            for row, raw in enumerate(table.column(index), start=table.rows_before(index) + 1):
                if raw is None:
                    yield BadRecord(span.file, "row", row, f'"{field}" is null, expected text')
                    continue
                try:
                    yield raw.decode()
                except UnicodeDecodeError as error:
                    yield BadRecord(span.file, "row", row, f"the text is not UTF-8 ({error.reason})")


class Table:
    """A parquet or arrow file as numbered chunks of rows. pyarrow is imported here, so that other formats do not
    need it.
    """

    def __init__(self, file: str, format_name: str, field: str) -> None:
        import pyarrow
        import pyarrow.parquet

        self._file, self._field = file, field
        self._arrow = pyarrow
        self._parquet: Any = None
        self._batches: list[Any] = []
        with self._refusing(f"is not a readable {format_name} file"):
            if format_name == "parquet":
                self._parquet = pyarrow.parquet.ParquetFile(file)
                schema = self._parquet.schema_arrow
            else:
                self._batches, schema = self._open_arrow(file)
            names = schema.names
        self._check_column(schema, names)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parquet is not None:
            self._parquet.close()

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """What pyarrow raises for damaged files is of many kinds."""
        try:
            yield
        except Exception as error:
            raise DataError(f"{self._file} {what}: {error}") from error

    def sizes(self) -> list[int]:
        """Bytes of each chunk; more than its text where a parquet file has other columns."""
        with self._refusing("is damaged"):
            if self._parquet is None:
                return [self._strings(batch).nbytes for batch in self._batches]
            # Of all columns: to ask for one of a damaged file ends the process (pyarrow 26).
            metadata = self._parquet.metadata
            return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]

    def column(self, index: int) -> Iterator[bytes | None]:
        """The texts of one chunk, not yet decoded."""
        with self._refusing("is damaged"):
            if self._parquet is None:
                batches: Iterable[Any] = [self._batches[index]]
            else:
                batches = self._parquet.iter_batches(batch_size=1024, row_groups=[index], columns=[self._field])
            for batch in batches:
                yield from self._raw(self._strings(batch))

    def rows_before(self, index: int) -> int:
        """Rows of all chunks before this one."""
        if self._parquet is None:
            return sum(batch.num_rows for batch in self._batches[:index])
        return sum(self._parquet.metadata.row_group(earlier).num_rows for earlier in range(index))

    def _strings(self, batch: pyarrow.RecordBatch) -> Any:
        column = batch.column(self._field)
        column.validate()  # that its buffers are as long as it says: what is mapped into memory has not been looked at
        return column

    def _raw(self, column: Any) -> Iterator[bytes | None]:
        """The bytes of each string, whose places are checked first: wrong ones would end the process."""
        if self._arrow.types.is_dictionary(column.type):
            places, strings = column.indices, self._bytes(column.dictionary)
            places.validate(full=True)
            for place in places:
                number = place.as_py()
                if number is not None and not 0 <= number < len(strings):
                    raise ValueError(f"entry {number} of a dictionary of {len(strings)}")
                yield None if number is None else strings[number].as_py()
        else:
            yield from (value.as_py() for value in self._bytes(column))

    def _bytes(self, strings: Any) -> Any:
        is_large = self._arrow.types.is_large_string(strings.type)
        raw = strings.view(self._arrow.large_binary() if is_large else self._arrow.binary())
        raw.validate(full=True)
        return raw

    def _open_arrow(self, file: str) -> tuple[list[pyarrow.RecordBatch], pyarrow.Schema]:
        """Record batches (not loaded: memory-mapped) of an Arrow stream, as `datasets` writes it, or of an Arrow
        file.
        """
        source = self._arrow.memory_map(file)
        if source.read(6) == b"ARROW1":
            reader = self._arrow.ipc.open_file(source)
            return [reader.get_batch(index) for index in range(reader.num_record_batches)], reader.schema
        source.seek(0)
        stream = self._arrow.ipc.open_stream(source)
        return list(stream), stream.schema

    def _check_column(self, schema: pyarrow.Schema, names: list[str]) -> None:
        if self._field not in names:
            raise DataError(
                f'{self._file} has no column "{self._field}" but {short(", ".join(names))}: set '
                "the source's `text_field`"
            )
        kind = schema.field(self._field).type
        value = kind.value_type if self._arrow.types.is_dictionary(kind) else kind
        tests = (self._arrow.types.is_string, self._arrow.types.is_large_string)
        if not any(test(value) for test in tests):
            raise DataError(f'{self._file}: column "{self._field}" is {kind}, expected string')
