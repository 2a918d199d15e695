"""A new kind of maps is one class and one entry of MAP_KINDS; everything else follows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import kvbridge
from kvbridge import RepairPlan, Translator
from kvbridge.asset.maps import MAP_KINDS, Maps
from kvbridge.asset.maps.base import Block
from kvbridge.errors import CorruptFile, UnknownSchema, UsageError
from kvbridge.fitting.job import Fit
from kvbridge.format import CONTROL_SET
from kvbridge.registry.store.admission import AdmissionPolicy, admit
from tests.fitting.pairs import documents, fitted, receiver, sender
from tests.hostile.forge import forge_manifest, forge_weights, refused, set_at, split_weights

TEXT = documents()[-1].text


@dataclass(frozen=True)
class LowRank(Maps):
    """`y = (x A) B + b`: x is K and V of some sender layers, A is shared by every receiver layer
    and stream.

    B is int8, one fp32 `scale` per output; A `[inputs, rank]`, B `[rank, outputs]` of all receiver
    streams.
    """

    sources: tuple[int, ...]
    rank: int
    kind = "low-rank"

    @classmethod
    def read(cls, body, sender, receiver, name):
        sources, rank = tuple(body["sources"]), body["rank"]
        if not all(type(i) is int and 0 <= i < len(sender.layers) for i in (*sources, rank)):
            raise CorruptFile(f"{name}: expected sender layers and a rank")
        return cls(sender, receiver, False, sources, rank)

    def to_json(self):
        return {"sources": list(self.sources), "rank": self.rank}

    @property
    def layers(self):
        return tuple(range(len(self.receiver.layers)))

    def outputs(self) -> Iterator[tuple[int, str, int, int]]:
        for layer, geometry in enumerate(self.receiver.layers):
            for s in geometry.streams:
                yield layer, s.name, s.heads, s.width

    @property
    def shapes(self):
        inputs = sum(Block(*read).width(self.sender) for read in self.reads(range(0)))
        outputs = sum(heads * width for _, _, heads, width in self.outputs())
        ends = {"b": (outputs,), "scale": (outputs,)}
        return {"A": (inputs, self.rank), "B": (self.rank, outputs), **ends}

    def dtypes(self, tensor):
        return ("I8",) if tensor == "B" else ("F32",)

    def reads(self, layers):
        return tuple((i, s.name) for i in self.sources for s in self.sender.layers[i].streams)

    def flops(self, layers):
        kept = sum(h * w for layer, _, h, w in self.outputs() if layer in layers)
        return 2 * (math.prod(self.shapes["A"]) + (self.rank + 1) * kept)

    def apply(self, weights, rows, layers):
        blocks = [Block(*read) for read in self.reads(layers)]
        x = rows.columns(blocks, features=False, dtype=weights["A"].dtype) @ weights["A"]
        at, translated = 0, {}
        for layer, stream, heads, width in self.outputs():
            cut = slice(at, at := at + heads * width)
            if layer in layers:
                b, scale = weights["B"][:, cut].to(x.dtype), weights["scale"][cut]
                y = (x @ b) * scale + weights["b"][cut]
                translated.setdefault(layer, {})[stream] = y.unflatten(-1, (heads, width))
        return translated


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(MAP_KINDS, "low-rank", LowRank)


def made(rank: int = 2) -> Translator:
    """Any numbers: what is tested is that they come through."""
    maps = LowRank(sender().geometry, receiver().geometry, False, (0, 2), rank)
    random = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=random) / 4 for n, s in maps.shapes.items()}
    tensors["B"] = (tensors["B"] * 100).round().to(torch.int8)
    tensors["scale"] = tensors["scale"].abs() / 100
    return Translator("toy", "none", maps, tensors)


def saved(folder: Path, translator: Translator | None = None) -> Path:
    fit: Fit = fitted(receiver_features="none")
    kvbridge.save_asset(replace(fit, translator=translator or made(), factors={}), folder)
    return folder


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def test_another_kind_is_saved_loaded_admitted_and_handed_over(registered, tmp_path):
    translator, folder = made(), saved(tmp_path / "asset")
    asset = kvbridge.load_asset(folder)
    assert asset.manifest.body["maps"] == {"kind": "low-rank", "sources": [0, 2], "rank": 2}
    assert asset.translator.tensors["B"].dtype is torch.int8
    assert asset.translator.digest == translator.digest
    assert asset.translator.sender_layers == (0, 2)
    admitted = admit(files_of(folder), "toy", AdmissionPolicy())
    assert admitted.record.digest == asset.digest
    bridge = kvbridge.Bridge(asset, sender=sender(), receiver=receiver())
    snapshot = kvbridge.capture(sender(), TEXT)
    handoff = bridge.handoff(snapshot, TEXT, repair=RepairPlan(layers=1))
    assert str(handoff.decision.verdict) == "use_approximate"
    assert handoff.provenance.at(1, 9) == "approximate"


def test_what_it_gives_and_costs_is_the_formula(registered):
    translator = made()
    t, rows = translator.tensors, 7
    content = {
        i: {s.name: torch.randn(rows, s.heads, s.width) for s in layer.streams}
        for i, layer in enumerate(sender().geometry.layers)
    }
    x = torch.cat([content[i][s].flatten(1) for i in (0, 2) for s in ("k", "v")], dim=1)
    y = x @ t["A"] @ (t["B"] * t["scale"]) + t["b"]
    out = translator(content, None)
    whole = [out[i][s].flatten(1) for i in out for s in ("k", "v")]
    torch.testing.assert_close(torch.cat(whole, dim=1), y, rtol=1e-4, atol=1e-5)
    outputs, layers = y.shape[1], len(receiver().geometry.layers)
    assert translator.flops() == 2 * (x.shape[1] * 2 + 3 * outputs)
    assert translator.flops() != 2 * translator.parameters
    last = translator.only(range(layers - 1, layers))
    assert last.layers == (layers - 1,)
    assert last.flops() == translator.flops(skip_layers=layers - 1) < translator.flops()
    assert torch.equal(last(content, None)[layers - 1]["v"], out[layers - 1]["v"])
    assert set(translator(content, None, skip_layers=1)) == set(range(1, layers))
    moved = translator.to("cpu", torch.bfloat16)
    assert (moved.tensors["A"].dtype, moved.tensors["B"].dtype) == (torch.bfloat16, torch.int8)


FORGED = {
    "B in another dtype": lambda h, d: ({**h, "B": {**h["B"], "dtype": "U8"}}, d),
    "B of another shape": lambda h, d: ({**h, "B": {**h["B"], "shape": h["B"]["shape"][::-1]}}, d),
    "another name": lambda h, d: ({("C" if n == "B" else n): v for n, v in h.items()}, d),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_hostile_header_is_refused_before_tensors_are_read(
    registered, tmp_path, monkeypatch, what
):
    folder = saved(tmp_path / "asset")
    forge_weights(folder, FORGED[what])
    monkeypatch.setattr("kvbridge.asset.tensors.load_file", lambda path: pytest.fail("allocated"))
    assert "B" in refused(folder)
    with pytest.raises(CorruptFile):
        admit(files_of(folder), "toy", AdmissionPolicy())


@pytest.mark.parametrize(
    ("maps", "kind"),
    [
        ({"kind": "low-rank", "sources": [0, 9], "rank": 2}, CorruptFile),
        ({"kind": "dense", "maps": []}, CorruptFile),
        ({"kind": ["low-rank"], "sources": [0, 2], "rank": 2}, CorruptFile),
        ({"sources": [0, 2], "rank": 2}, CorruptFile),
        ({"kind": "low-rank", "sources": [0, 2], "rank": 1}, CorruptFile),
        ({"kind": "later", "sources": [0, 2], "rank": 2}, UnknownSchema),
    ],
)
def test_manifests_that_say_something_else(registered, tmp_path, maps, kind):
    folder = saved(tmp_path / "asset")
    forge_manifest(folder, set_at("maps", value=maps))
    refused(folder, kind)


def test_a_kind_that_is_not_registered_is_named(tmp_path):
    assert "low-rank" in refused(saved(tmp_path / "asset"), UnknownSchema)


def test_a_control_of_another_kind_must_not_read_the_sender_either(registered, tmp_path):
    folder = tmp_path / "asset"
    kvbridge.save_asset(fitted(receiver_features="none"), folder)
    asset, controls = kvbridge.load_asset(folder), CONTROL_SET.beside(folder)
    forge_manifest(controls, set_at("maps", value={"kind": "low-rank", **made().maps.to_json()}))
    with pytest.raises(CorruptFile):
        kvbridge.load_controls(asset)


def test_dense_maps_are_not_named_and_their_tensors_neither_change(tmp_path):
    fit = fitted()
    kvbridge.save_asset(fit, tmp_path / "asset")
    body = json.loads((tmp_path / "asset" / "manifest.json").read_text("utf-8"))
    assert set(body["maps"][0]) == {"layer", "stream", "groups"}
    header, _ = split_weights(tmp_path / "asset" / "weights.safetensors")
    assert {"target.0.k.W", "target.0.k.b"} <= set(header)


def test_a_part_is_not_saved_as_a_whole(tmp_path):
    fit = fitted()
    with pytest.raises(UsageError, match="whole"):
        kvbridge.save_asset(
            replace(fit, translator=fit.translator.only(range(1, 3))), tmp_path / "asset"
        )


@pytest.mark.parametrize("family", ["full-head", "head-local"])
def test_a_part_gives_what_the_whole_gives_there(family):
    translator = fitted(family=family).translator
    snapshot, at = kvbridge.capture(sender(), TEXT), 20
    content = {
        i: {n: t[:at] for n, t in snapshot.content(sender().rotation, torch.arange(at), i).items()}
        for i in translator.sender_layers
    }
    features = torch.randn(at, receiver().geometry.hidden_size)
    whole = translator(content, features)
    for start, stop in ((0, 1), (1, 3), (2, 9)):
        part = translator.only(range(start, stop))
        read = {i: content[i] for i in part.sender_layers}
        given = part(read, features)
        assert set(given) == set(part.layers) == set(range(start, min(stop, 3)))
        for layer in given:
            assert all(torch.equal(given[layer][n], whole[layer][n]) for n in ("k", "v"))
        assert part.flops() == 2 * part.parameters
    halves = [translator.only(range(0, 1)), translator.only(range(1, 3))]
    assert sum(half.parameters for half in halves) == translator.parameters
    assert sum(half.flops() for half in halves) == translator.flops()


def test_tensors_of_another_shape_or_none_are_refused():
    translator = fitted().translator
    short = {n: t for n, t in translator.tensors.items() if n != "target.1.v.b"}
    with pytest.raises(UsageError, match=r"target\.1\.v\.b"):
        replace(translator, tensors=short)
    with pytest.raises(UsageError, match=r"target\.1\.v\.b"):
        replace(translator, tensors={**short, "target.1.v.b": torch.zeros(3)})
    assert translator.only(range(1)).parameters > 0
