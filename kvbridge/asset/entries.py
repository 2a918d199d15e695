"""The maps, factors and tensors that a manifest announces, checked against both models. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge import codec
from kvbridge.asset.maps import MAP_KINDS, Maps
from kvbridge.asset.maps.base import Block, check_block
from kvbridge.asset.maps.dense import DenseMaps
from kvbridge.asset.written import FactorEntry
from kvbridge.errors import CorruptFile, UnknownSchema, UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.headers import Header, expect_tensors

FACTOR = "leverage."
KIND = "kind"


def maps_json(maps: Maps) -> Any:
    """What a manifest says of maps: the list of dense ones, which it does not name, or a mapping
    that names its kind."""
    body = maps.to_json()
    return body if maps.kind == DenseMaps.kind else {KIND: maps.kind, **body}


def read_maps(body: Any, sender: KVGeometry, receiver: KVGeometry, name: str) -> Maps:
    """The inverse of `maps_json`: every index within its geometry, every layer from some one to the
    last mapped.

    Raises CorruptFile, or UnknownSchema for a kind that is not known here.
    """
    kind: Any = DenseMaps.kind
    if isinstance(body, dict):
        kind, body = body.get(KIND), {key: value for key, value in body.items() if key != KIND}
        if not isinstance(kind, str) or kind == DenseMaps.kind:
            raise CorruptFile(f"{name}: maps: expected a list, or a mapping with a kind")
        if kind not in MAP_KINDS:
            raise UnknownSchema(
                f"{name}: expected maps of a kind known here ({', '.join(MAP_KINDS)}), "
                f"found {kind!r:.40}; use the matching kvbridge or fit again"
            )
    try:
        maps = MAP_KINDS[kind].read(body, sender, receiver, f"{name}: maps")
    except UsageError as error:
        raise CorruptFile(f"{name}: maps: {str(error)[:200]}") from error
    layers = maps.layers
    if not layers or layers != tuple(range(layers[0], len(receiver.layers))):
        raise CorruptFile(f"{name}: expected maps of every stream from some layer to the last")
    return maps


def read_factors(body: Any, sender: KVGeometry, name: str) -> dict[str, FactorEntry]:
    """Factors by stream out of JSON, every layer within the sender; raises CorruptFile."""
    factors = codec.convert(body, dict[str, FactorEntry], f"{name}: leverage")
    check_factors(factors, sender, name)
    return factors


def check_factors(factors: Mapping[str, FactorEntry], sender: KVGeometry, name: str) -> None:
    """Raises CorruptFile unless the sender has these layers, each is named once, and their rows
    have that many directions."""
    for stream, entry in factors.items():
        if len(set(entry.layers)) != len(entry.layers):
            raise CorruptFile(f"{name}: leverage of {stream[:40]!r} names a layer twice")
        try:
            for layer in entry.layers:
                check_block(sender, Block(layer, stream))
        except UsageError as error:
            raise CorruptFile(f"{name}: leverage: {str(error)[:200]}") from error
        if not 1 <= entry.rank <= factor_width(sender, stream, entry.layers):
            raise CorruptFile(f"{name}: no factor of these layers has rank {entry.rank}")


def factor_width(sender: KVGeometry, stream: str, layers: tuple[int, ...]) -> int:
    """Columns of one stream's rows of these sender layers, side by side."""
    return sum(sender.layers[i].stream(stream).features for i in layers)


def factor_names(stream: str) -> tuple[str, str, str]:
    """Names of a factor's tensors: `leverage.{k|v}.{mean|scale|directions}`."""
    stem = f"{FACTOR}{stream}"
    return f"{stem}.mean", f"{stem}.scale", f"{stem}.directions"


def factor_shapes(
    factors: Mapping[str, FactorEntry], sender: KVGeometry
) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of factors: mean and scale `[features]`, directions `[features,
    rank]`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for stream, entry in factors.items():
        mean, scale, directions = factor_names(stream)
        width = factor_width(sender, stream, entry.layers)
        shapes |= {mean: (width,), scale: (width,), directions: (width, entry.rank)}
    return shapes


def check_tensors(
    header: Header, maps: Maps, name: str, factors: Mapping[str, FactorEntry] | None = None
) -> None:
    """Raises CorruptFile unless the header holds exactly the tensors of `maps`, as they admit them,
    and of `factors`, in F32."""
    of_maps, of_factors = Header(header.metadata, {}), Header(header.metadata, {})
    for tensor, entry in header.tensors.items():
        part = of_factors if tensor.startswith(FACTOR) else of_maps
        part.tensors[tensor] = entry
    expect_tensors(of_factors, factor_shapes(factors or {}, maps.sender), "the manifest", name)
    for tensor, (dtype, _, _) in of_factors.tensors.items():
        if dtype != "F32":
            raise CorruptFile(f"{name}: expected {tensor[:80]} in F32, found {dtype}")
    maps.admit(of_maps, name)
