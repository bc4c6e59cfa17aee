"""Each mutation of tests/mutations.py changes one place that exists."""

from __future__ import annotations

import pytest

from tests.harness.runner import ROOT
from tests.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place(mutation: Mutation) -> None:
    text = (ROOT / "torchtitan_like" / mutation.file).read_text()
    assert text.count(mutation.before) == 1 and mutation.after not in text
    for word in mutation.tests.split():
        assert (ROOT / word.partition("::")[0]).exists()


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
