"""Conditions as routes × tails: names, what is compared with what, and one translation for several
tails."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge.asset.maps.translator import Translator
from kvbridge.errors import EvalError
from kvbridge.eval.conditions import CONDITIONS
from kvbridge.eval.conditions.base import ROLES, TAILS
from kvbridge.eval.conditions.names import (
    against,
    condition,
    controls,
    defaults,
    known_names,
    named,
    ordered,
    parsed,
    routes,
)
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup, raw_bridge
from kvbridge.eval.run.evaluate import pair_digest
from kvbridge.eval.tasks.continuation import Continuation
from kvbridge.eval.tasks.items import Item, RawItem
from tests.fitting.pairs import fitted, receiver, sender
from tests.models import random_texts, tiny_causal, wrapped

PUBLIC = {
    "native",
    "sender",
    "translated",
    "translated_tail32",
    "no_context",
    "wrong_document",
    "token_only",
    "tail_only",
    "tail_only32",
    "raw_sender",
    "gated",
}


class AcceptAll:
    def decide(self, evidence: kvbridge.Evidence) -> kvbridge.Decision:
        return kvbridge.Decision("use_approximate", "gate_lenient", score=0.5, threshold=1.0)


def setup(**changes: object) -> Setup:
    fit = fitted(receiver_features="embeddings")
    assert fit.controls is not None
    return Setup.of(fit.translator, fit.controls, sender(), receiver(), **changes)  # type: ignore[arg-type]


@cache
def item() -> Item:
    raw = RawItem("t", "d", {"text": random_texts(1, 900)[0]})
    return Continuation(context=60, continuation=6).items(raw, receiver())[0]


def prompt(of: Setup) -> Prompt:
    return Prompt(of, item(), random_texts(2, 2000)[1])


def test_names_are_a_product_and_the_public_ones_are_among_them() -> None:
    assert set(known_names()) >= PUBLIC
    for route in routes():
        for tail in (*TAILS, 17):
            assert parsed(named(route, tail)) == (route, tail)
    for wrong in (
        "translated_tail1",
        "translated_tail032",
        "tail_only_tail32",
        "native",
        "translated32",
        "x_tail3",
    ):
        assert parsed(wrong) is None
    with pytest.raises(EvalError, match="another tail, as translated_tail17"):
        condition("translated_tail1")
    assert ordered(
        [
            "tail_only32",
            "gated",
            "x",
            "translated_tail32",
            "native",
            "translated_tail17",
            "translated",
        ]
    ) == [
        "native",
        "translated",
        "translated_tail17",
        "translated_tail32",
        "gated",
        "tail_only32",
        "x",
    ]


def test_a_run_without_a_choice_has_every_translations_controls_at_its_tail() -> None:
    for tail in TAILS:
        assert {named(route, tail) for route in ("translated", *controls())} <= set(defaults())
    plain = setup()
    assert set(defaults(plain)) == set(defaults()), (
        "shapes differ, so no raw_sender, and no gate was given"
    )
    gate = setup(gate=AcceptAll(), plan=kvbridge.RepairPlan(tail=9))
    assert set(defaults(gate)) == {
        *defaults(),
        "gated",
        "translated_tail9",
        "token_only_tail9",
        "wrong_document_tail9",
        "tail_only9",
    }
    assert condition("gated")(prompt(gate)).tail == 9
    assert set(against("gated", 9)) <= {*defaults(gate), "raw_sender_tail9"}


def test_raw_sender_runs_by_itself_where_shapes_allow_and_its_bridge_is_built_once() -> None:
    twin = wrapped(tiny_causal("llama", 7), name="twin")
    identity = raw_bridge(sender(), twin)
    assert identity is not None
    assert identity.translator is not None
    same = Setup.of(identity.translator, identity.translator, sender(), twin)
    assert "raw_sender" in defaults(same)
    built = same.raw_bridge
    assert built is not None
    assert same.raw_bridge is built
    raw, through = (condition(name)(prompt(same)) for name in ("raw_sender", "translated"))
    assert torch.equal(raw.logits, through.logits), "here the translator is the identity, too"


@pytest.mark.parametrize("route", ["translated", "wrong_document", "token_only"])
def test_a_second_tail_translates_nothing_again_and_costs_what_it_costs_alone(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[int] = []
    whole = Translator.__call__

    def counted(self: Translator, content: Any, features: Any, *, skip_layers: int = 0) -> Any:
        applied.append(skip_layers)
        return whole(self, content, features, skip_layers=skip_layers)

    one, shared = prompt(setup()), prompt(setup())
    monkeypatch.setattr(Translator, "__call__", counted)
    alone = condition(f"{route}_tail32")(one)
    assert len(applied) == 1
    first = condition(route)(shared)
    (prepared,) = shared.prepared.values()
    prepared.stages_ms["translate"] = 1e6
    second = condition(f"{route}_tail32")(shared)
    assert len(applied) == 2, "the map was applied for the first tail and not for the second"
    assert torch.allclose(second.logits, alone.logits, atol=1e-5)
    assert second.prefill_share == alone.prefill_share > first.prefill_share
    assert first.ttft_ms < 1e6 < second.ttft_ms, "the shared translation's time counts for both"


def test_what_was_not_translated_is_translated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter tail after a longer one, and another document's cache, ask for rows that no
    condition before had translated."""
    applied: list[int] = []
    whole = Translator.__call__

    def counted(self: Translator, content: Any, features: Any, *, skip_layers: int = 0) -> Any:
        applied.append(skip_layers)
        return whole(self, content, features, skip_layers=skip_layers)

    one, shared = prompt(setup()), prompt(setup())
    monkeypatch.setattr(Translator, "__call__", counted)
    alone = {name: condition(name)(one) for name in ("translated", "wrong_document")}
    assert len(applied) == 2
    condition("translated_tail32")(shared)
    for name, start in alone.items():
        again = condition(name)(shared)
        assert torch.allclose(again.logits, start.logits, atol=1e-5)
    assert len(applied) == 5
    assert {len(prepared.stages_ms) for prepared in shared.prepared.values()} == {5}


def test_another_control_map_or_gate_is_another_run() -> None:
    one = setup()
    assert pair_digest(one) == pair_digest(setup())
    controls = one.control.translator
    assert controls is not None
    bias = controls.tensors["target.0.k.b"] + 1e-3
    other = replace(controls, tensors={**controls.tensors, "target.0.k.b": bias})
    translator = one.bridge.translator
    assert translator is not None
    assert pair_digest(Setup.of(translator, other, sender(), receiver())) != pair_digest(one)
    assert pair_digest(setup(gate=AcceptAll())) != pair_digest(one)


def test_every_listed_condition_can_be_asked_for_by_name() -> None:
    for name in known_names():
        if name not in ("gated",) and not name.startswith("raw_sender"):
            assert condition(name)(prompt(setup())).position > 0


@pytest.mark.parametrize("name", CONDITIONS)
def test_every_condition_says_what_it_is(name: str) -> None:
    one = CONDITIONS[name]
    assert one.name == name
    assert one.role in ROLES
    assert one.label
    assert len({other.order for other in CONDITIONS.values()}) == len(CONDITIONS)
    assert set(one.beside) <= set(routes())
    assert one.tails
    assert one.by_tail or one.tails == (1,)
