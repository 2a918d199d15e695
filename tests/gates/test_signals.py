"""Every registered signal: finite, its cost stated and counted, and a reaction to another document
where it claims one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kvbridge
from kvbridge import RepairPlan
from kvbridge.cache.snapshot import build_cache
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, attention_error, parts_of
from kvbridge.gates.signals import reading as module
from kvbridge.gates.signals.attention import expected_error
from kvbridge.gates.signals.costs import BUDGET, KNOWN, SENDER_ROWS, Shape, early_layers
from kvbridge.gates.signals.extras import Extras
from kvbridge.gates.signals.reading import Inapplicable, Reading, head
from kvbridge.geometry import Stream
from kvbridge.handoff.cost import prefill_flops
from tests.gates.conftest import PLAN
from tests.models import EXACT_KINDS, TEXT, tiny

PARTS = parts_of(SIGNALS)
INTEGRITY = [name for name, s in SIGNALS.items() if s.integrity]


@torch.no_grad()
def read(reading, name):
    return SIGNALS[name].read(reading)


@pytest.mark.parametrize("name", SIGNALS)
def test_finite_named_and_paid_for(pair, name):
    reading = Reading(pair.evidence(), pair.extras)
    values = read(reading, name)
    assert len(values) == len(SIGNALS[name].columns)
    assert all(math.isfinite(v) and type(v) is float for v in values)
    assert set(reading.spent) == {p.name for p in SIGNALS[name].parts}, (
        "what it costs is what it says"
    )
    assert all(type(v) is int and v > 0 for v in reading.spent.values())
    assert SIGNALS[name].about


def known_of(pair, count):
    """The receiver's own first rows of the first text."""
    return kvbridge.capture(pair.receiver, pair.texts[0]).select(torch.arange(count))


@pytest.mark.parametrize("name", SIGNALS)
def test_what_the_receiver_knows_already_is_no_damage(pair, name):
    """Every signal is finite where the receiver has a beginning, which is covered by no sender row
    and none the worse for it."""
    evidence = pair.evidence(known=known_of(pair, 70))
    values = read(Reading(evidence, pair.extras), name)
    assert all(math.isfinite(v) for v in values)
    if name == "alignment":
        assert values == (0.0, 0.0)


def test_rows_that_the_receiver_knows_carry_no_residual(pair, monkeypatch):
    """Of the rows that the tail attends to, only translated ones are uncertain."""
    masks = []

    def noted(*arguments):
        masks.append(arguments[4])
        return expected_error(*arguments)

    monkeypatch.setattr(attention_error, "expected_error", noted)
    evidence = pair.evidence(known=known_of(pair, 70))
    read(Reading(evidence, pair.extras), "attention_error")
    translated = set(range(70, len(evidence.ids) - 1)) - set(evidence.chosen.tolist())
    assert masks
    for mask in masks:
        assert set(mask.nonzero()[:, 0].tolist()) == translated


def test_columns_and_names_of_parts_are_unique():
    columns = [c for s in SIGNALS.values() for c in s.columns]
    assert len(set(columns)) == len(columns)
    parts = {part for s in SIGNALS.values() for part in s.parts}
    assert len({part.name for part in parts}) == len(parts), "shared work is one object"


@pytest.mark.parametrize("name", SIGNALS)
def test_reading_twice_gives_the_same_and_modifies_nothing(pair, name):
    evidence = pair.evidence()
    before = [
        t.clone()
        for layers in (evidence.translated, evidence.repaired, evidence.snapshot.layers)
        for x in layers
        for t in x.values()
    ]
    first = read(Reading(evidence, pair.extras), name)
    assert read(Reading(evidence, pair.extras), name) == first
    after = [
        t
        for layers in (evidence.translated, evidence.repaired, evidence.snapshot.layers)
        for x in layers
        for t in x.values()
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["sender_first", "sender_early", "sender_tail"])
def test_a_check_of_the_snapshot_against_itself_tells_another_document_at_once(pair, name):
    (right,) = read(Reading(pair.evidence(), pair.extras), name)
    (wrong,) = read(Reading(pair.evidence(*pair.wrong()), pair.extras), name)
    assert right < -4
    assert wrong > -1.5


def test_one_foreign_row_at_the_far_front_moves_what_follows_from_it(pair):
    """Neither that row nor its layer is among those compared: the next layer's K/V of the last
    tokens have seen it."""
    other, _ = pair.wrong()
    own = kvbridge.capture(pair.sender, pair.texts[0])
    edited = [{n: t.clone() for n, t in x.items()} for x in own.layers]
    for x, y in zip(edited, other.layers, strict=True):
        for n in x:
            x[n][6] = y[n][6]
    wrong = Reading(pair.evidence(replace(own, layers=tuple(edited))), pair.extras)
    right = Reading(pair.evidence(), pair.extras)
    assert read(right, "sender_early")[0] < -4.5
    assert read(wrong, "sender_early")[0] > read(right, "sender_early")[0] + 1.5
    assert int(wrong.sender_early[0][0]) > 100, "the rows compared are the last ones"


def test_the_rest_of_the_layers_is_for_the_whole_sender_to_see(pair):
    """A first eighth of the right text under later layers of another: beyond `sender_early`, not
    beyond `sender_tail`."""
    other, text = pair.wrong()
    own = kvbridge.capture(pair.sender, text)
    count = len(other)
    head_of = [{n: t[:count] for n, t in x.items()} for x in own.layers]
    mixed = replace(other, layers=(*head_of[:2], *other.layers[2:]))
    reading = Reading(pair.evidence(mixed, text), pair.extras)
    assert read(reading, "sender_early")[0] < -4.5
    assert read(reading, "sender_tail")[0] > -1.5


def test_early_layers_are_counted_as_they_run(pair):
    """Against PyTorch's own count of matrix products and a count of attention by hand; norms are
    parameters, not products."""
    evidence, sender = pair.evidence(), pair.sender.geometry
    with FlopCounterMode(display=False) as counter:
        first = Reading(evidence, pair.extras)
        read(first, "sender_first")
    assert (
        first.spent["sender_first"]
        == counter.get_total_flops()
        == 2 * 48 * (64 + 32 + 32) * len(evidence.snapshot)
    )
    with FlopCounterMode(display=False) as counter:
        early = Reading(evidence, pair.extras)
        read(early, "sender_early")
    attended = sum(i + 1 for i in range(len(evidence.ids) - KNOWN - 1, len(evidence.ids)))
    products = counter.get_total_flops() + 4 * 4 * 16 * attended
    assert early.spent["sender_early"] == pytest.approx(products, rel=0.005)
    assert early_layers(sender) == 1
    assert early_layers(replace(sender, layers=sender.layers * 8)) == 4
    assert early_layers(replace(sender, layers=sender.layers[:1])) == 0
    shape = replace(first.shape, sender_tokens=2048)
    assert PARTS["sender_first"].flops(shape) == 2 * 48 * 128 * SENDER_ROWS
    only = replace(shape, sender=replace(sender, layers=sender.layers[:1]))
    assert PARTS["sender_early"].flops(only) == 2 * 48 * 128 * (KNOWN + 1)


def test_a_snapshot_of_a_beginning_costs_what_it_holds(pair):
    """The sender's tokens are counted, not those that the receiver makes of the whole prompt."""
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text[: len(text) // 2])
    evidence = pair.evidence(snapshot, text)
    assert len(snapshot) < len(evidence.ids) - 20
    for name in ("sender_first", "sender_early", "sender_tail"):
        reading = Reading(evidence, pair.extras)
        with FlopCounterMode(display=False) as counter:
            read(reading, name)
        attended = sum(i + 1 for i in range(len(snapshot) - KNOWN - 1, len(snapshot)))
        layers = {"sender_first": 0, "sender_early": 1, "sender_tail": 4}[name]
        products = counter.get_total_flops() + 4 * 4 * 16 * attended * layers
        assert sum(reading.spent.values()) == pytest.approx(products, rel=0.005)


@pytest.mark.parametrize("name", ["sender_first", "leverage", "disagreement", "first_layers"])
def test_products_are_counted_as_they_run(pair, name):
    """Against PyTorch's own count; maps also add a bias, which is a parameter but no product."""
    reading = Reading(pair.evidence(), pair.extras)
    with FlopCounterMode(display=False) as counter:
        read(reading, name)
    assert sum(reading.spent.values()) == pytest.approx(counter.get_total_flops(), rel=0.01)


def stream(heads, width):
    return (Stream("k", heads, width, True), Stream("v", heads, width, False))


def test_the_default_signals_cost_under_the_budget(pair):
    """Counted, at 2,048 tokens of the third-party pair: SmolLM2-135M to Gemma-3-270M, as their
    configurations say."""
    a, b = pair.sender.geometry, pair.receiver.geometry
    smol = replace(
        a,
        hidden_size=576,
        attention_heads=9,
        vocabulary=49152,
        layer_parameters=30 * 3_540_096,
        layers=(replace(a.layers[0], streams=stream(3, 64)),) * 30,
    )
    local = replace(b.layers[0], kind="sliding", streams=stream(1, 256), window_tokens=512)
    gemma = replace(
        b,
        hidden_size=640,
        attention_heads=4,
        vocabulary=262144,
        layer_parameters=18 * 5_573_632,
        layers=(*(local,) * 5, replace(local, kind="full", window_tokens=None)) * 3,
    )
    shape = Shape(smol, gemma, 2048, 2 * 3072 * 64, 2 * 1537 * 512, 2 * (640 + 3072 + 1) * 256)
    dense = prefill_flops(gemma, 2048)
    assert sum(p.flops(shape) for p in parts_of(DEFAULT_SIGNALS).values()) < 0.6 * BUDGET * dense, (
        "the rest is for what is not counted"
    )
    assert PARTS["sender_tail"].flops(shape) > 9 / 2048 * dense
    assert set(SIGNALS) - set(DEFAULT_SIGNALS) == {"sender_tail", "tail_loss", "sender_next"}
    assert GateConfig().signals == DEFAULT_SIGNALS
    assert not parts_of(DEFAULT_SIGNALS).keys() & {"sender_tail", "receiver_head"}


@pytest.mark.parametrize("name", ["tail_residual", "first_layers"])
def test_receiver_side_residuals_grow_with_another_document(pair, name):
    right = read(Reading(pair.evidence(), pair.extras), name)
    wrong = read(Reading(pair.evidence(*pair.wrong()), pair.extras), name)
    assert sum(wrong) > sum(right)


def test_leverage_and_distance_from_the_definition(pair):
    """Rows captured by hand; the centre is the corpus' own mean, so the mean of these very rows is
    at no distance."""
    evidence = pair.evidence()
    reading = Reading(evidence, pair.extras)
    rows = reading.sampled()
    leverage, outside, away, centre = [], [], [], {}
    for stream, factor in pair.asset.factors.items():
        sides = [
            evidence.snapshot.content(evidence.sender.rotation, evidence.alignment.index[rows], i)[
                stream
            ]
            for i in factor.layers
        ]
        x = (
            torch.cat([side.flatten(1) for side in sides], 1).double() - factor.mean
        ) / factor.scale
        z = x @ factor.directions.double()
        q = torch.linalg.qr(factor.directions.double()).Q
        leverage.append(float(z.square().mean()))
        outside.append(float((x - x @ q @ q.T).square().sum() / x.square().sum()))
        away.append(float((z.mean(0) - pair.extras.centre[stream]).square().mean()) * len(rows))
        centre[stream] = z.mean(0).float()
    expected = math.log(sum(leverage) / 2 + 1e-6), sum(outside) / 2, math.log(sum(away) / 2 + 1e-6)
    assert read(reading, "leverage") == pytest.approx(expected, rel=1e-3, abs=1e-4)
    at_home = read(Reading(evidence, replace(pair.extras, centre=centre)), "leverage")
    assert at_home[2] == pytest.approx(math.log(1e-6), abs=0.1)


def test_an_asset_without_a_factor_has_no_leverage(pair):
    evidence = pair.evidence()
    bare = replace(evidence.pair, handle=replace(pair.asset, factors={}))
    evidence = replace(evidence, pair=bare)
    with pytest.raises(Inapplicable, match="fit it again"):
        read(Reading(evidence, pair.extras), "leverage")


def test_leverage_grows_for_rows_of_no_corpus(pair):
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    odd = replace(snapshot, layers=tuple({n: 5 * t for n, t in x.items()} for x in snapshot.layers))
    right = read(Reading(pair.evidence(), pair.extras), "leverage")
    wrong = read(Reading(pair.evidence(odd), pair.extras), "leverage")
    assert wrong[0] > right[0] + 2


def test_the_next_token_is_the_models_own(pair):
    """Logits under the repaired cache against a plain forward from the handoff."""
    text = pair.texts[0]
    handoff = pair.bridge().handoff(kvbridge.capture(pair.sender, text), text, repair=PLAN)
    with torch.no_grad():
        out = pair.receiver.model(
            input_ids=handoff.remaining_ids,
            past_key_values=handoff.cache,
            use_cache=True,
            attention_mask=torch.ones((1, len(handoff.ids)), dtype=torch.int64),
        )
    read = Reading(pair.evidence(), pair.extras).next_logs
    assert torch.allclose(read, out.logits[0, -1].float().log_softmax(-1), atol=1e-4)


def test_the_known_tail_is_predicted_as_by_a_plain_forward(pair):
    """The receiver fed with the known tail, from the repaired cache of what is before it."""
    evidence = pair.evidence()
    logs, following = Reading(evidence, pair.extras).receiver_tail_logs
    cached = len(evidence.ids) - 1
    first = cached - KNOWN
    cache = build_cache(
        pair.receiver, [{n: t[:first] for n, t in x.items()} for x in evidence.repaired]
    )
    with torch.no_grad():
        out = pair.receiver.model(
            input_ids=evidence.ids[None, first:cached],
            past_key_values=cache,
            use_cache=True,
            attention_mask=torch.ones((1, cached), dtype=torch.int64),
        )
    assert torch.equal(following, evidence.ids[-KNOWN:])
    assert torch.allclose(logs, out.logits[0].float().log_softmax(-1), atol=1e-4)


@pytest.mark.parametrize("kind", [*EXACT_KINDS, "cohere"])
def test_the_head_gives_the_models_own_logits(kind):
    model = tiny(kind)
    ids = model.encode(TEXT).ids[None, :20]
    with torch.no_grad():
        states = model.decoder(input_ids=ids).last_hidden_state[0]
        expected = model.model(ids).logits[0].float().log_softmax(-1)
    assert torch.allclose(head(model, states), expected, atol=1e-4)


def test_what_cannot_be_read_says_so(pair):
    none = Extras()
    for name in ("leverage", "disagreement"):
        with pytest.raises(Inapplicable):
            read(Reading(pair.evidence(), none), name)
    with pytest.raises(Inapplicable, match="tail"):
        read(Reading(pair.evidence(plan=RepairPlan(tail=1)), pair.extras), "tail_residual")
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    holes = snapshot.select(torch.tensor([i for i in range(len(snapshot)) if i != 9]))
    with pytest.raises(Inapplicable, match="holes"):
        read(Reading(pair.evidence(holes), pair.extras), "sender_tail")
    with pytest.raises(Inapplicable, match="holes"):
        read(Reading(pair.evidence(holes), pair.extras), "sender_early")


@torch.no_grad()
def test_what_is_planned_goes_through_the_head_at_once(pair, monkeypatch):
    """The same numbers with one pass over the head's weights, each part counted as before, none for
    what has no tail."""
    calls = []
    real = module.head
    monkeypatch.setattr(
        module, "head", lambda model, states: calls.append(len(states)) or real(model, states)
    )
    evidence = pair.evidence()
    apart, both = (
        Reading(evidence, pair.extras),
        Reading(evidence, pair.extras, planned=parts_of(SIGNALS)),
    )
    for name in ("next_token", "tail_loss"):
        assert read(both, name) == pytest.approx(read(apart, name), abs=1e-4)
    assert sorted(calls) == [1, KNOWN, KNOWN + 1, KNOWN + 1, KNOWN + 1], (
        "two of them are the sender's tail"
    )
    assert both.spent == apart.spent
    short = Reading(pair.evidence(plan=RepairPlan(tail=1)), pair.extras, planned=parts_of(SIGNALS))
    assert all(map(math.isfinite, read(short, "next_token")))


def test_rows_that_several_signals_read_are_unrotated_once(pair, monkeypatch):
    reading, calls = Reading(pair.evidence(), pair.extras), []
    real = type(reading.evidence.snapshot).content
    monkeypatch.setattr(
        type(reading.evidence.snapshot),
        "content",
        lambda s, r, rows, layer: calls.append((layer, len(rows))) or real(s, r, rows, layer),
    )
    for name in ("leverage", "first_layers", "disagreement"):
        read(reading, name)
    assert calls
    assert len(set(calls)) == len(calls)
    other = reading.content(torch.tensor([9, 8]), 0)
    assert torch.equal(other["k"], reading.content(torch.tensor([8, 9]), 0)["k"].flip(0))


@pytest.mark.parametrize(
    ("name", "layer"), [("sender_first", 0), ("sender_early", 1), ("sender_tail", -1)]
)
def test_nan_in_a_cache_is_never_the_smaller_error(pair, name, layer):
    evidence = pair.evidence()
    layers = [dict(x) for x in evidence.snapshot.layers]
    layers[layer]["v"] = layers[layer]["v"].clone()
    layers[layer]["v"][-1] = float("nan")
    snapshot = replace(evidence.snapshot, layers=tuple(layers))
    poisoned = replace(evidence, request=replace(evidence.request, snapshot=snapshot))
    with torch.no_grad():
        assert math.isnan(SIGNALS[name].read(Reading(poisoned, pair.extras))[0])
