"""Hostile manifests, every sum and binding right: each is refused as a FileError."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kvbridge.errors import UnknownSchema
from tests.hostile.forge import (
    MANIFEST,
    drop,
    forge_manifest,
    refused,
    reseal,
    set_at,
)

GROUP = ("maps", 0, "groups", 0)
BAD_NUMBERS: tuple[Any, ...] = (-1, True, 1.0, "1", None, [], 10**30, 2**63)
BAD_MANIFESTS = {
    "not an object": lambda body: [body],
    "unknown score": set_at("scores", "more", value=1),
    "a string": lambda body: "kvbridge.translator/1",
    "empty": lambda body: {},
    "unknown field": set_at("extra", value=1),
    "no maps": set_at("maps", value=[]),
    "maps null": set_at("maps", value=None),
    "maps a string": set_at("maps", value="maps"),
    "a map missing": drop("maps", -1),
    "the first map missing": drop("maps", 0),
    "a map twice": lambda body: body["maps"].append(copy.deepcopy(body["maps"][0])),
    "a map extra": lambda body: body["maps"].append(
        {**copy.deepcopy(body["maps"][0]), "stream": "latent"}
    ),
    **{f"map layer {n!r}": set_at("maps", 0, "layer", value=n) for n in (3, *BAD_NUMBERS)},
    **{f"head {n!r}": set_at(*GROUP, "heads", value=[0, n]) for n in (2, 0, *BAD_NUMBERS)},
    **{f"block layer {n!r}": set_at(*GROUP, "blocks", 0, 0, value=n) for n in (3, *BAD_NUMBERS)},
    **{f"block head {n!r}": set_at(*GROUP, "blocks", 0, 2, value=[n]) for n in (2, *BAD_NUMBERS)},
    "block of another stream": set_at(*GROUP, "blocks", 0, 1, value="latent"),
    "block of three layers": set_at(*GROUP, "blocks", value=[[0, "k", None, 1]]),
    "no heads": set_at(*GROUP, "heads", value=[]),
    "an empty group": lambda body: body["maps"][0]["groups"].append(
        {"heads": [], "blocks": [], "features": True}
    ),
    "features a number": set_at(*GROUP, "features", value=1),
    "no features where announced": set_at(*GROUP, "features", value=False),
    **{
        f"receiver features {v!r}": set_at("receiver_features", value=v)
        for v in ("none", "hidden:3", "hidden:0", "banana", "hidden:-1", 0, None, "hidden:1 ")
    },
    **{f"weights_bytes {n!r}": set_at("weights_bytes", value=n) for n in (0, 5, *BAD_NUMBERS)},
    **{f"parameters {n!r}": set_at("parameters", value=n) for n in (0, *BAD_NUMBERS)},
    "one parameter more": lambda body: body.update(parameters=body["parameters"] + 1),
    **{
        f"{name} of another kind": set_at(name, value=7)
        for name in (
            "family",
            "config",
            "lambda",
            "jitter",
            "corpus_digest",
            "splits",
            "scores",
            "licences",
            "marks",
            "sender",
            "receiver",
        )
    },
    **{
        f"factor layer {n!r}": set_at("leverage", "k", "layers", 0, value=n)
        for n in (3, *BAD_NUMBERS)
    },
    **{
        f"factor rank {n!r}": set_at("leverage", "v", "rank", value=n)
        for n in (0, 7, 9, *BAD_NUMBERS)
    },
    "factor layers null": set_at("leverage", "k", "layers", value=None),
    "factor of no layer": set_at("leverage", "k", "layers", value=[]),
    "factor of one layer twice": set_at("leverage", "k", "layers", value=[1, 1]),
    "factor of another stream": set_at("leverage", "latent", value={"layers": [0], "rank": 1}),
    "factor with more": set_at("leverage", "k", "more", value=1),
    "factor missing": drop("leverage", "k"),
    "no factors": drop("leverage"),
    "factors a list": set_at("leverage", value=[]),
    "share a string": set_at("alignment_exact_share", value="1"),
    "share true": set_at("alignment_exact_share", value=True),
    "share of two": set_at("alignment_exact_share", value=2.0),
    "marks of numbers": set_at("marks", value=[1]),
    "scores of the train split": set_at("scores", "split", value="train"),
    **{
        f"{side} {name} {n!r}": set_at(side, name, value=n)
        for side in ("sender", "receiver")
        for name in (
            "hidden_size",
            "attention_heads",
            "max_positions",
            "vocabulary",
            "parameters",
            "layer_parameters",
        )
        for n in (-1, 0, True, 1.0, "1", None, 10**30)
    },
    **{
        f"stream {name} {n!r}": set_at("receiver", "layers", 1, "streams", 0, name, value=n)
        for name in ("heads", "width")
        for n in (0, *BAD_NUMBERS)
    },
    "stream rotated 1": set_at("receiver", "layers", 1, "streams", 0, "rotated", value=1),
    "stream twice": lambda body: body["sender"]["layers"][0]["streams"].append(
        body["sender"]["layers"][0]["streams"][0]
    ),
    "no streams": set_at("sender", "layers", 2, "streams", value=[]),
    "no layers": set_at("sender", "layers", value=[]),
    "layers a string": set_at("sender", "layers", value="abc"),
    "layer kind": set_at("sender", "layers", 0, "kind", value="recurrent"),
    **{
        f"window {n!r}": set_at("sender", "layers", 0, "window_tokens", value=n)
        for n in (0, -5, True, 1.5, "8")
    },
    "unknown geometry field": set_at("sender", "extra", value="x"),
    "unknown layer field": set_at("sender", "layers", 0, "extra", value="x"),
    "unknown stream field": set_at("sender", "layers", 0, "streams", 0, "extra", value="x"),
    "missing geometry field": drop("sender", "rope_digest"),
    "missing layer field": drop("sender", "layers", 0, "weights_digest"),
    "adapters a string": set_at("sender", "adapters", value="abc"),
    "adapters of numbers": set_at("sender", "adapters", value=[1]),
    "digest a number": set_at("sender", "weights_digest", value=1),
    "dtype unknown": set_at("sender", "dtype", value="int3"),
}


@pytest.mark.parametrize("what", BAD_MANIFESTS)
def test_manifests_that_say_what_cannot_be(asset, what):
    forge_manifest(asset, BAD_MANIFESTS[what])
    assert "not of this manifest" not in refused(asset), "refused by the binding alone"


@pytest.mark.parametrize(
    "names",
    [None, "a", {}, ["a"], [1], ["A" * 16], ["0" * 16 + "\n"], ["0" * 16] * 262_145],
    ids=lambda n: f"{n!r:.20}",
)
def test_names_of_fitted_documents_are_few_and_digests(asset, names):
    forge_manifest(asset, set_at("fitted_on", value=names))
    assert "fitted_on" in refused(asset)


def test_every_field_is_needed(asset):
    original = (asset / MANIFEST).read_text("utf-8")
    for name in json.loads(original):
        (asset / MANIFEST).write_text(original, "utf-8")
        forge_manifest(asset, drop(name))
        refused(asset)


@pytest.mark.parametrize(
    "schema",
    [
        "kvbridge.translator/2",
        "kvbridge.translator",
        "",
        None,
        1,
        [],
        {},
        "kvbridge.controls/1",
    ],
)
def test_an_unknown_version_is_named(asset, schema):
    forge_manifest(asset, set_at("schema", value=schema))
    message = refused(asset, UnknownSchema)
    assert "kvbridge.translator/1" in message


BAD_JSON = {
    "duplicate keys": lambda text: text.replace("{", '{"schema": "kvbridge.translator/1",', 1),
    "duplicate keys within": lambda text: text.replace(
        '"documents": 2', '"documents": 2, "documents": 3', 1
    ),
    "NaN": lambda text: text.replace(
        '"alignment_exact_share": 1.0', '"alignment_exact_share": NaN'
    ),
    "infinity": lambda text: text.replace(
        '"alignment_exact_share": 1.0', '"alignment_exact_share": -Infinity'
    ),
    "overflow": lambda text: text.replace(
        '"alignment_exact_share": 1.0', '"alignment_exact_share": 1e999'
    ),
    "nesting": lambda text: text.replace(
        '"marks": []', '"marks": ' + "[" * 100_000 + "]" * 100_000
    ),
    "nesting of objects": lambda text: text.replace(
        '"marks": []', '"marks": ' + '{"a":' * 50_000 + "1" + "}" * 50_000
    ),
    "nesting a little": lambda text: text.replace(
        '"single_layer_r2": {',
        '"single_layer_r2": {"a": '
        + "[" * 70
        + "]" * 70
        + ("" if '"single_layer_r2": {}' in text else ","),
    ),
    "digits": lambda text: text.replace('"parameters": 1000', '"parameters": ' + "9" * 10_000, 1),
    "surrogate": lambda text: text.replace("sender-0", "sender\\ud800", 1),
    "trailing": lambda text: text + "{}",
    "comment": lambda text: "// hi\n" + text,
    "byte order mark": lambda text: "\ufeff" + text,
    "only space": lambda text: " " * 1000,
    "many values": lambda text: text.replace('"marks": []', '"marks": [' + "0," * 2_000_000 + "0]"),
    "too large": lambda text: text + " " * (17 << 20),
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_manifests_that_are_not_plain_json(asset, what):
    text = (asset / MANIFEST).read_text("utf-8")
    changed = BAD_JSON[what](text)
    assert changed != text
    (asset / MANIFEST).write_text(changed, "utf-8")
    if what == "nesting a little":
        body = json.loads(changed)
        forge_manifest(asset, lambda _: body)
        assert "deep" in refused(asset)
        return
    reseal(asset)
    refused(asset)


@pytest.mark.parametrize("raw", [b"\xff\xfe{\x00}\x00", '{"é": 1}'.encode("latin-1"), b"\x80\x04."])
def test_manifests_that_are_not_utf8(asset, raw):
    (asset / MANIFEST).write_bytes(raw)
    reseal(asset)
    refused(asset)
