"""Data sources and sample processors of user code (see `extensions.protocols`)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash
from pydantic import BaseModel

from torchtitan_like.data.data_errors import DataError
from torchtitan_like.data.text.formats import NoDocument
from torchtitan_like.extensions.user_code import resolve_name
from torchtitan_like.util.modules import describe_line

# A document: its text, or its parts, each with True if its tokens are trained on.
Document = str | list[tuple[str, bool]]


class UserProcessor:
    """A sample processor of user code.

    identity: changes with the files that name and define the processor, and with the config
        sections of user code, on which its results depend.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._function = resolve_name(name, "sample processor")
        self._settings = settings
        modules = dict.fromkeys((name.partition(":")[0], self._function.__module__))
        code = [inspect.getsource(sys.modules[module]) for module in modules]
        values = {
            key: section.model_dump() if isinstance(section, BaseModel) else section
            for key, section in settings.items()
        }
        content = [name, *code, json.dumps(values, sort_keys=True)]
        self.identity = xxhash.xxh3_128_hexdigest("\0".join(content).encode())

    def __call__(self, record: Mapping[str, Any]) -> Document:
        """Return the document of a record. Raises NoDocument for an error of user code."""
        try:
            result = self._function(record, self._settings)
        except Exception as error:  # user code may raise anything
            raise NoDocument(
                f"the sample processor {self._name} raised {type(error).__name__}: {error}"
                f"{describe_line(error)}"
            ) from error
        if isinstance(result, str):
            check_text(result)
            return result
        if isinstance(result, Sequence) and all(map(_is_part, result)):
            check_text("".join(part for part, _ in result))
            return list(map(tuple, result))
        raise NoDocument(
            f"the sample processor {self._name} returned {result!r:.100}, expected text or pairs "
            "(text, is_trained)"
        )


def _is_part(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and len(value) == 2
    return is_pair and isinstance(value[0], str) and isinstance(value[1], bool)


def check_text(text: str) -> None:
    """Raise NoDocument unless the text can be written as UTF-8."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise NoDocument(
            f"half of a surrogate pair at character {error.start + 1} of the text"
        ) from error


class UserDocuments:
    """The documents of a data source of user code, by number.

    fingerprint: of the source. is_sequential: True for an iterable, which can only be read in order.

    Raises ExtensionError if the source cannot be imported. Raises DataError if it does not follow
    the protocol, or if its code raises an error.
    """

    def __init__(self, name: str, path: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        source = resolve_name(name, "data source")
        try:
            self._source = source(path, settings)
        except Exception as error:  # user code may raise anything
            raise self._failed("cannot be opened", error) from error
        self.is_sequential = not hasattr(self._source, "__getitem__")
        methods = ["__len__", "__iter__" if self.is_sequential else "__getitem__"]
        missing = [method for method in methods if not hasattr(self._source, method)]
        fingerprint = getattr(self._source, "fingerprint", None)
        if missing or not isinstance(fingerprint, str) or not fingerprint:
            problem = f"has no {missing[0]}" if missing else f"has the fingerprint {fingerprint!r}"
            raise DataError(
                f"{self} {problem}. Expected __len__, __getitem__ or __iter__, and a fingerprint "
                "(text) that changes with its documents: define them"
            )
        self.fingerprint: str = fingerprint
        self._length = len(self._source)
        # Iterators by the number of the next document. Each thread removes the one that it uses.
        self._iterators: dict[int, Iterator[Any]] = {}

    def __str__(self) -> str:
        return f"the data source {self._name}"

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the documents [start, stop), of any type.

        Raises DataError for an error of user code, and for an iterable that ends too early.
        """
        if not self.is_sequential:
            for index in range(start, stop):
                try:
                    document = self._source[index]
                except Exception as error:  # user code may raise anything
                    raise self._failed(f"cannot read document {index:,}", error) from error
                yield document
            return
        iterator = self._iterators.pop(start, None)
        index = start
        if iterator is None:
            iterator = iter(self._source)
            index = 0
        while index < stop:
            try:
                document = next(iterator)
            except StopIteration:
                raise DataError(
                    f"{self} ends after {index:,} documents. Expected {self._length:,}, its "
                    "__len__: correct one of them"
                ) from None
            except Exception as error:  # user code may raise anything
                raise self._failed(f"cannot read document {index:,}", error) from error
            if index >= start:
                yield document
            index += 1
        self._iterators[stop] = iterator

    def _failed(self, what: str, error: Exception) -> DataError:
        return DataError(
            f"{self} {what}: {type(error).__name__}: {error}{describe_line(error)}. Expected no "
            "error: correct it"
        )
