"""Documents of JSON lines, plain or compressed with gzip."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from .records import NOT_GZIP, READ_BYTES, BadRecord, NotUtf8, Span, decode, not_unpacked, open_bytes, short

# A gzip file has to be unpacked from its beginning to reach any place in it, so that it is cut into few parts: of about this
# many bytes of text, of which a byte of the file is taken to hold two and a half.
GZIP_BYTES = 64 * 2**20
_END = 2**62  # beyond the last byte of any file


def text_bytes(gzip_size: int) -> int:
    """About the bytes of text in a gzip file of ``gzip_size`` bytes."""
    return gzip_size * 5 // 2


def gzip_parts(size: int) -> int:
    """Into how many parts a gzip file of ``size`` bytes is cut."""
    return -(-text_bytes(size) // GZIP_BYTES)


def gzip_part(file: str, part: int, num_parts: int) -> Span:
    """Cut by the number of bytes that stands at a gzip file's end (RFC 1952, ISIZE: of the last member, modulo 2**32); where
    that is not all of them, the last part is so much longer.
    """
    with open(file, "rb") as stream:
        stream.seek(max(stream.seek(0, os.SEEK_END) - 4, 0))
        size = int.from_bytes(stream.read(4), "little")
    stop = _END if part + 1 == num_parts else size * (part + 1) // num_parts
    return Span(file, size * part // num_parts, stop, text_bytes(os.stat(file).st_size) // num_parts)


def read_lines(span: Span, field: str) -> Iterator[str | BadRecord]:
    """Documents of the lines that begin in the byte range of ``span``."""
    place = span.start
    try:
        with open_bytes(span.file) as stream:
            if span.start > 0:  # the line across the border belongs to the range before
                stream.seek(span.start - 1)
                place = span.start - 1
                while place < span.stop and (part := stream.readline(READ_BYTES)):
                    place += len(part)
                    if part.endswith(b"\n"):
                        break
            while place < span.stop and (line := stream.readline()):
                if line.strip():
                    try:
                        yield _parse_line(line, place, field)
                    except (NotUtf8, _NoText) as fault:
                        yield BadRecord(span.file, "byte", place, str(fault))
                place += len(line)
    except NOT_GZIP as error:
        yield not_unpacked(span.file, place, error)


class _NoText(Exception):
    """A line without the text that is wanted; says what is there."""


def _parse_line(line: bytes, start: int, field: str) -> str:
    def fault(found: str) -> _NoText:
        return _NoText(f'{found}; expected a JSON object with text in "{field}"')

    try:
        document = json.loads(decode(line, start))
    except json.JSONDecodeError as error:
        raise fault(f"malformed JSON ({error.msg} at character {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nested without end
        raise fault(f"JSON that cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise fault(f"found a JSON {type(document).__name__}")
    if field not in document:
        names = ", ".join(map(repr, document)) or "none"
        raise fault(f'no field "{field}" among {short(names)} (set the source\'s `text_field`)')
    text = document[field]
    if not isinstance(text, str):
        raise fault(f'"{field}" is {short(json.dumps(text), 40)}')
    if b"\\u" in line:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise fault(f"half of a surrogate pair at character {error.start + 1} of the text") from error
    return text
