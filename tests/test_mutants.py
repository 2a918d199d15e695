"""Every mutant of tests/mutants.py still applies, and names a test that exists."""

import pytest

from tests.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_still_applies(mutant):
    assert (ROOT / mutant.file).read_text("utf-8").count(mutant.find) == 1
    file, _, test = mutant.test.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text("utf-8")
    assert mutant.find != mutant.replace


def test_names_are_unique():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
