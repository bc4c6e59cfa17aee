"""The type of functions that report long work."""

from __future__ import annotations

from collections.abc import Callable

# Called with a phase, what is done, the total, and seconds since the phase began.
Progress = Callable[[str, int, int, float], None]
