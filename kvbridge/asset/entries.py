"""The maps and tensors that a manifest announces, typed and checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.errors import CorruptFile
from kvbridge.format import FLOAT_DTYPES
from kvbridge.geometry import KVGeometry
from kvbridge.headers import Header

FACTOR = "leverage."


@dataclass(frozen=True)
class GroupEntry:
    """One group of receiver heads and what it reads: blocks of (sender layer, stream, heads or None)."""

    heads: tuple[int, ...]
    blocks: tuple[tuple[int, str, tuple[int, ...] | None], ...]
    features: bool


@dataclass(frozen=True)
class FactorEntry:
    """The factor of one stream: the sender layers whose rows it is of, side by side, and its number of directions."""

    layers: tuple[int, ...]
    rank: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"layers": list(self.layers), "rank": self.rank}


@dataclass(frozen=True)
class MapEntry:
    """The groups of one receiver layer and stream."""

    layer: int
    stream: str
    groups: tuple[GroupEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        groups = [
            {
                "heads": list(g.heads),
                "blocks": [
                    [layer, stream, None if heads is None else list(heads)]
                    for layer, stream, heads in g.blocks
                ],
                "features": g.features,
            }
            for g in self.groups
        ]
        return {"layer": self.layer, "stream": self.stream, "groups": groups}


def read_maps(
    body: Any, sender: KVGeometry, receiver: KVGeometry, name: str
) -> tuple[MapEntry, ...]:
    """Typed maps out of JSON, every index within its geometry; raises CorruptFile."""
    entries: list[MapEntry] = []
    try:
        for item in body:
            groups = tuple(
                GroupEntry(
                    tuple(_index(h) for h in g["heads"]),
                    tuple(
                        (_index(a), _text(s), None if h is None else tuple(_index(x) for x in h))
                        for a, s, h in g["blocks"]
                    ),
                    _flag(g["features"]),
                )
                for g in item["groups"]
            )
            entries.append(MapEntry(_index(item["layer"]), _text(item["stream"]), groups))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptFile(f"{name}: malformed maps: {error}") from error
    keys = [(e.layer, e.stream) for e in entries]
    if len(set(keys)) != len(keys):
        raise CorruptFile(f"{name}: a layer's map stands twice")
    first = min((layer for layer, _ in keys), default=len(receiver.layers))
    wanted = {
        (i, s.name) for i, layer in enumerate(receiver.layers) if i >= first for s in layer.streams
    }
    if not keys or set(keys) != wanted:
        raise CorruptFile(f"{name}: expected maps of every stream from some layer to the last")
    for entry in entries:
        _within(receiver, entry.layer, entry.stream, (), name)
        count = receiver.layers[entry.layer].stream(entry.stream).heads
        covered = sorted(h for g in entry.groups for h in g.heads)
        if len(covered) != count or covered != list(range(count)):
            raise CorruptFile(
                f"{name}: layer {entry.layer} {entry.stream}: every head must be in exactly one group"
            )
        for g in entry.groups:
            for layer, stream, heads in g.blocks:
                _within(sender, layer, stream, heads or (), name)
    return tuple(entries)


def read_factors(body: Any, sender: KVGeometry, name: str) -> dict[str, FactorEntry]:
    """Factors by stream out of JSON, every layer within the sender; raises CorruptFile."""
    found = {}
    try:
        for stream, entry in body.items():
            if set(entry) != {"layers", "rank"}:
                raise ValueError("expected layers and rank")
            layers, rank = tuple(_index(i) for i in entry["layers"]), _index(entry["rank"])
            if not layers or len(set(layers)) != len(layers):
                raise ValueError(f"expected different sender layers, found {str(layers)[:40]}")
            for layer in layers:
                _within(sender, layer, stream, (), name)
            if not 1 <= rank <= factor_width(sender, stream, layers):
                raise ValueError(f"no factor of these layers has rank {rank}")
            found[_text(stream)] = FactorEntry(layers, rank)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{name}: malformed leverage: {str(error)[:200]}") from error
    return found


def factor_width(sender: KVGeometry, stream: str, layers: tuple[int, ...]) -> int:
    """Columns of one stream's rows of these sender layers, side by side."""
    return sum(sender.layers[i].stream(stream).features for i in layers)


def _within(
    geometry: KVGeometry, layer: int, stream: str, heads: tuple[int, ...], name: str
) -> None:
    try:
        most = geometry.layers[layer].stream(stream).heads
    except (IndexError, KeyError):
        raise CorruptFile(
            f"{name}: {geometry.model_id} has no layer {layer} with a stream {stream!r:.40}"
        ) from None
    if any(h >= most for h in heads):
        raise CorruptFile(
            f"{name}: layer {layer} {stream} has {most} heads, the manifest names {max(heads)}"
        )


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an index, found {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, found {value!r:.40}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, found {value!r:.40}")
    return value


def map_entries(translator: Any) -> tuple[MapEntry, ...]:
    """The maps of a translator as manifest entries, sorted."""
    return tuple(
        MapEntry(
            layer,
            stream,
            tuple(
                GroupEntry(
                    g.heads, tuple((b.layer, b.stream, b.heads) for b in g.blocks), g.features
                )
                for g in groups
            ),
        )
        for (layer, stream), groups in sorted(translator.maps.items())
    )


def tensor_names(layer: int, stream: str, group: int, groups: int) -> tuple[str, str]:
    """Names of W and b: `target.{layer}.{k|v}.{W|b}`, with the group's number where there are several."""
    stem = f"target.{layer}.{stream}" if groups == 1 else f"target.{layer}.{stream}.{group}"
    return f"{stem}.W", f"{stem}.b"


def expected_shapes(
    entries: tuple[MapEntry, ...], sender: KVGeometry, receiver: KVGeometry
) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of everything that `entries` need: W `[inputs, heads·width]`, b `[heads·width]`."""
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for index, group in enumerate(entry.groups):
            w, b = tensor_names(entry.layer, entry.stream, index, len(entry.groups))
            inputs = receiver.hidden_size if group.features else 0
            for layer, name, heads in group.blocks:
                stream = sender.layers[layer].stream(name)
                inputs += stream.features if heads is None else len(heads) * stream.width
            outputs = len(group.heads) * receiver.layers[entry.layer].stream(entry.stream).width
            expected[w], expected[b] = (inputs, outputs), (outputs,)
    return expected


def factor_names(stream: str) -> tuple[str, str, str]:
    """Names of a factor's tensors: `leverage.{k|v}.{mean|scale|directions}`."""
    return f"leverage.{stream}.mean", f"leverage.{stream}.scale", f"leverage.{stream}.directions"


def factor_shapes(
    factors: Mapping[str, FactorEntry], sender: KVGeometry
) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of factors: mean and scale `[features]`, directions `[features, rank]`."""
    found: dict[str, tuple[int, ...]] = {}
    for stream, entry in factors.items():
        width = factor_width(sender, stream, entry.layers)
        shapes = (width,), (width,), (width, entry.rank)
        found.update(zip(factor_names(stream), shapes, strict=True))
    return found


def check_tensors(header: Header, expected: dict[str, tuple[int, ...]], name: str) -> None:
    """Raises CorruptFile unless the header holds exactly the expected tensors: maps of one floating-point dtype, factors
    in F32."""
    found = {tensor: shape for tensor, (_, shape, _) in header.tensors.items()}
    if found != expected:
        odd = sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
        raise CorruptFile(
            f"{name}: tensors do not match the manifest: {', '.join(k[:80] for k in odd[:4])}"
        )
    dtypes = {
        dtype for tensor, (dtype, _, _) in header.tensors.items() if not tensor.startswith(FACTOR)
    }
    if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
        raise CorruptFile(
            f"{name}: expected weights of one floating-point dtype, found {', '.join(sorted(dtypes))}"
        )
    odd = [
        t[:80]
        for t, (dtype, _, _) in header.tensors.items()
        if t.startswith(FACTOR) and dtype != "F32"
    ]
    if odd:
        raise CorruptFile(f"{name}: expected {odd[0]} in F32")
