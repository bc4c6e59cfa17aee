"""Suggest the existing name that a misspelled name most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.65  # ratio of difflib's SequenceMatcher, from 0 to 1


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `name` in any case, or None if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=MIN_SIMILARITY)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the remedy for a misspelled name (`did you mean "steps"?`), or "".

    prefix: of the suggested name in the remedy.
    """
    suggestion = nearest(name, candidates)
    return "" if suggestion is None else f'did you mean "{prefix}{suggestion}"?'
