"""The maps, factors and tensors that a manifest announces, typed and checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.asset.maps import MAP_KINDS, Maps
from kvbridge.asset.maps.base import Block, check_block, check_shapes
from kvbridge.asset.maps.dense import DenseMaps
from kvbridge.errors import CorruptFile, UnknownSchema, UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.headers import Header

FACTOR = "leverage."
KIND = "kind"


@dataclass(frozen=True)
class FactorEntry:
    """The factor of one stream: the sender layers whose rows it is of, side by side, and its number of directions."""

    layers: tuple[int, ...]
    rank: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"layers": list(self.layers), "rank": self.rank}


def maps_json(maps: Maps) -> Any:
    """What a manifest says of maps: the list of dense ones, which it does not name, or a mapping that names its kind."""
    body = maps.to_json()
    return body if maps.kind == DenseMaps.kind else {KIND: maps.kind, **body}


def read_maps(body: Any, sender: KVGeometry, receiver: KVGeometry, name: str) -> Maps:
    """The inverse of `maps_json`: every index within its geometry, every layer from some one to the last mapped.

    Raises CorruptFile, or UnknownSchema for a kind that is not known here.
    """
    kind: Any = DenseMaps.kind
    if isinstance(body, dict):
        kind, body = body.get(KIND), {key: value for key, value in body.items() if key != KIND}
        if not isinstance(kind, str) or kind == DenseMaps.kind:
            raise CorruptFile(f"{name}: malformed maps: expected a list, or a mapping with a kind")
        if kind not in MAP_KINDS:
            raise UnknownSchema(
                f"{name}: expected maps of a kind known here ({', '.join(MAP_KINDS)}), "
                f"found {kind!r:.40}; use the matching kvbridge or fit again"
            )
    try:
        maps = MAP_KINDS[kind].read(body, sender, receiver, name)
    except UsageError as error:
        raise CorruptFile(f"{name}: malformed maps: {str(error)[:200]}") from error
    layers = maps.layers
    if not layers or layers != tuple(range(layers[0], len(receiver.layers))):
        raise CorruptFile(f"{name}: expected maps of every stream from some layer to the last")
    return maps


def read_factors(body: Any, sender: KVGeometry, name: str) -> dict[str, FactorEntry]:
    """Factors by stream out of JSON, every layer within the sender; raises CorruptFile."""
    factors = {}
    try:
        for stream, entry in body.items():
            if set(entry) != {"layers", "rank"}:
                raise ValueError("expected layers and rank")
            layers, rank = tuple(_index(i) for i in entry["layers"]), _index(entry["rank"])
            if not layers or len(set(layers)) != len(layers):
                raise ValueError(f"expected different sender layers, found {str(layers)[:40]}")
            for layer in layers:
                check_block(sender, Block(layer, stream))
            if not 1 <= rank <= factor_width(sender, stream, layers):
                raise ValueError(f"no factor of these layers has rank {rank}")
            factors[stream] = FactorEntry(layers, rank)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{name}: malformed leverage: {str(error)[:200]}") from error
    return factors


def factor_width(sender: KVGeometry, stream: str, layers: tuple[int, ...]) -> int:
    """Columns of one stream's rows of these sender layers, side by side."""
    return sum(sender.layers[i].stream(stream).features for i in layers)


def factor_names(stream: str) -> tuple[str, str, str]:
    """Names of a factor's tensors: `leverage.{k|v}.{mean|scale|directions}`."""
    return f"leverage.{stream}.mean", f"leverage.{stream}.scale", f"leverage.{stream}.directions"


def factor_shapes(
    factors: Mapping[str, FactorEntry], sender: KVGeometry
) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of factors: mean and scale `[features]`, directions `[features, rank]`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for stream, entry in factors.items():
        width = factor_width(sender, stream, entry.layers)
        shapes.update(
            zip(factor_names(stream), ((width,), (width,), (width, entry.rank)), strict=True)
        )
    return shapes


def check_tensors(
    header: Header, maps: Maps, name: str, factors: Mapping[str, FactorEntry] | None = None
) -> None:
    """Raises CorruptFile unless the header holds exactly the tensors of `maps`, as they admit them, and of `factors`,
    in F32."""
    of_maps: dict[str, tuple[str, tuple[int, ...]]] = {}
    of_factors: dict[str, tuple[int, ...]] = {}
    for tensor, (dtype, shape, _) in header.tensors.items():
        if not tensor.startswith(FACTOR):
            of_maps[tensor] = (dtype, shape)
            continue
        of_factors[tensor] = shape
        if dtype != "F32":
            raise CorruptFile(f"{name}: expected {tensor[:80]} in F32")
    check_shapes(of_factors, factor_shapes(factors or {}, maps.sender), name)
    maps.admit(of_maps, name)


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an index, found {value!r:.40}")
    return value
