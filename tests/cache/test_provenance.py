"""Decisions and provenance as values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge import Decision, Provenance
from kvbridge.cache.provenance import FIDELITIES, Span, exact_provenance, spans_of
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.handoff.decision import discard

MIXED = Provenance(
    "sender",
    "receiver",
    "asset",
    1,
    (
        Span((0, 1), (0, 9), "exact"),
        Span((1, 4), (0, 6), "approximate"),
        Span((1, 4), (6, 9), "repaired"),
    ),
)


def test_the_lowest_part_names_the_whole():
    assert MIXED.fidelity == "approximate"
    assert replace(MIXED, spans=(MIXED.spans[0], MIXED.spans[2])).fidelity == "repaired"
    assert exact_provenance("g", 4, 9).fidelity == "exact"
    assert exact_provenance("g", 4, 0).spans == ()
    assert exact_provenance("g", 4, 0).fidelity == "exact"
    assert FIDELITIES == ("approximate", "repaired", "exact")


def test_cells():
    assert MIXED.at(0, 8) == "exact"
    assert MIXED.at(3, 5) == "approximate"
    assert MIXED.at(3, 6) == "repaired"
    assert [MIXED.share(f) for f in FIDELITIES] == [18 / 36, 9 / 36, 9 / 36]
    for layer, token in ((4, 0), (0, 9), (-1, 0)):
        with pytest.raises(UsageError):
            MIXED.at(layer, token)


def test_through_json():
    assert Provenance.from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED
    none = replace(MIXED, translator=None)
    assert Provenance.from_json(json.loads(json.dumps(none.to_json()))) == none


@pytest.mark.parametrize(
    "damage",
    [
        None,
        [],
        {},
        {"spans": 1},
        {**MIXED.to_json(), "spans": [[0, 1, 0, 9, "certain"]]},
        {**MIXED.to_json(), "depth": "x"},
    ],
)
def test_damaged_provenance_is_corrupt(damage):
    with pytest.raises(CorruptFile):
        Provenance.from_json(damage)


@given(st.integers(1, 4), st.integers(0, 7), st.data())
def test_rectangles_cover_each_cell_once(layers, tokens, data):
    row = st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens)
    matrix = data.draw(st.lists(row, min_size=layers, max_size=layers))
    provenance = Provenance("s", "r", None, 1, spans_of(matrix))
    for layer in range(layers):
        for token in range(tokens):
            assert provenance.at(layer, token) == FIDELITIES[matrix[layer][token]]
    cells = sum((s.layers[1] - s.layers[0]) * (s.tokens[1] - s.tokens[0]) for s in provenance.spans)
    assert cells == layers * tokens


def test_decisions():
    decision = discard("no_asset", "from a to b")
    assert decision == Decision("discard", "no_asset", "from a to b")
    assert str(decision) == "discard (no_asset): from a to b"
    assert not decision.accepted
    assert Decision("use", "exact").accepted
    assert Decision("use_approximate", "ungated").accepted
    assert json.loads(json.dumps(decision.to_json()))["reason"] == "no_asset"
