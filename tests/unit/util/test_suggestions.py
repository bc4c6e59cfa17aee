"""Which existing name is suggested for a misspelled one."""

from __future__ import annotations

import pytest

from torchtitan_like.util.suggestions import did_you_mean, nearest

NAMES = ["steps", "seq_len", "Linear"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stepz", "steps"),
        ("STEPS", "steps"),
        ("linea", "Linear"),
        ("lane", None),  # its ratio to "linear" is 0.6
        ("xyzzy", None),
    ],
)
def test_the_most_similar_name_is_suggested_in_its_own_case(
    name: str, expected: str | None
) -> None:
    assert nearest(name, NAMES) == expected


def test_the_remedy_quotes_the_full_name() -> None:
    assert did_you_mean("stepz", NAMES, prefix="training.") == 'did you mean "training.steps"?'
    assert did_you_mean("xyzzy", NAMES) == ""
