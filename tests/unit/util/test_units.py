"""Readable byte counts and durations."""

from torchtitan_like.util.units import format_bytes, format_duration


def test_format_of_bytes() -> None:
    texts = [format_bytes(count) for count in (0, 1, 1023, 1536, 5 * 2**30)]
    assert texts == ["0 B", "1 B", "1023 B", "1.5 KiB", "5.0 GiB"]


def test_format_of_durations() -> None:
    texts = [format_duration(seconds) for seconds in (0, 119, 600, 3 * 3600, 3 * 86400)]
    assert texts == ["0 s", "119 s", "10 min", "3.0 h", "3.0 days"]
