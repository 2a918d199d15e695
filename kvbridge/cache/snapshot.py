"""One request's KV cache as a value: explicit positions, no batch axis, bound to its model and its
text."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.provenance import Provenance, exact_provenance
from kvbridge.cache.snapshot_file import Description, check_content, describe
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import write_file
from kvbridge.format import MAX_SNAPSHOT_TENSORS, METADATA_KEY
from kvbridge.geometry import KVGeometry, digest_text
from kvbridge.headers import check_safetensors_header
from kvbridge.model.model import Model
from kvbridge.model.rope import Rotation

LayerKV = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """What a model cached for one text.

    token_ids, positions `[tokens]` int64; spans `[tokens, 2]` int64 characters of the text;
    `text_digest` and `characters` of the text the tokens spell; `layers[i][stream]` `[tokens,
    heads, width]` exactly as cached (keys rotated). Positions ascend and may leave holes; padding
    is not in it.
    """

    token_ids: Tensor
    positions: Tensor
    spans: Tensor
    text_digest: str
    characters: int
    layers: tuple[LayerKV, ...]
    geometry: KVGeometry
    provenance: Provenance

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.positions) != count or tuple(self.spans.shape) != (count, 2):
            raise UsageError(
                f"expected positions [{count}] and spans [{count}, 2], "
                f"found {tuple(self.positions.shape)} and {tuple(self.spans.shape)}"
            )
        if count > 1 and not bool((self.positions[1:] > self.positions[:-1]).all()):
            raise UsageError("expected ascending positions, each once")
        if count and int(self.positions[0]) < 0:
            raise UsageError(f"expected positions from 0 on, found {int(self.positions[0])}")
        if len(self.layers) != len(self.geometry.layers):
            raise UsageError(
                f"expected {len(self.geometry.layers)} layers, found {len(self.layers)}"
            )
        for index, (layer, expected) in enumerate(
            zip(self.layers, self.geometry.layers, strict=True)
        ):
            shapes = {name: tuple(tensor.shape) for name, tensor in layer.items()}
            wanted = {s.name: (count, s.heads, s.width) for s in expected.streams}
            if shapes != wanted:
                raise UsageError(f"layer {index}: expected {wanted}, found {shapes}")
            odd = {str(t.dtype) for t in layer.values()} - {f"torch.{self.geometry.dtype}"}
            if odd:
                raise UsageError(
                    f"layer {index}: expected {self.geometry.dtype} as the model caches it, "
                    f"found {odd}"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all cached tensors."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())

    def content(self, rotation: Rotation, rows: Tensor, layer: int) -> LayerKV:
        """Rows `[n]` of one layer in content space (RoPE removed), fp32 `[n, heads, width]` per
        stream."""
        streams = {name: tensor[rows] for name, tensor in self.layers[layer].items()}
        streams["k"] = rotation.unrotate(streams["k"], self.positions[rows], layer)
        return {name: tensor.float() for name, tensor in streams.items()}

    def select(self, rows: Tensor) -> KVSnapshot:
        """The same snapshot with only `rows` `[n]` (ascending); what is left out becomes holes."""
        layers = tuple(
            {name: tensor[rows.to(tensor.device)] for name, tensor in layer.items()}
            for layer in self.layers
        )
        provenance = exact_provenance(self.geometry.digest, len(self.layers), len(rows))
        if self.provenance.fidelity != "exact":
            raise UsageError("only a model's own cache can be cut into pieces")
        return KVSnapshot(
            self.token_ids[rows],
            self.positions[rows],
            self.spans[rows],
            self.text_digest,
            self.characters,
            layers,
            self.geometry,
            provenance,
        )

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        model: Model,
        input_ids: Tensor,
        *,
        text: str | None = None,
        attention_mask: Tensor | None = None,
        provenance: Provenance | None = None,
    ) -> KVSnapshot:
        """From a transformers cache (an object with `.layers`, or pairs of keys and values) that
        `model` filled.

        input_ids `[tokens]` or `[1, tokens]`; `attention_mask` of the same shape marks padding with
        0 (positions then count from the first real token, as `generate` does). The cache may cover
        fewer tokens than input_ids (the last one generated is not cached). `text` is what the ids
        spell, where the caller has it. Tensors are referenced, not copied. A cache that came out of
        a handoff remembers what it is: its snapshot keeps that provenance, also once the cache has
        grown. Raises UsageError where the cache cannot be of these ids.
        """
        pairs = _pairs(cache)
        if not pairs or any(k is None for k, _ in pairs):
            raise UsageError("expected a filled cache, found layers without keys")
        if any(k.ndim != 4 or k.shape[0] != 1 for k, _ in pairs):
            raise UsageError(
                "expected keys [1, heads, tokens, width] of one request, "
                f"found {tuple(pairs[0][0].shape)}"
            )
        lengths = {int(k.shape[2]) for k, _ in pairs} | {int(v.shape[2]) for _, v in pairs}
        if len(lengths) != 1:
            raise UsageError(
                f"layers hold {sorted(lengths)} tokens: sliding layers have dropped some; "
                "capture with DynamicCache() without a config"
            )
        ids = input_ids.to("cpu", torch.int64).reshape(-1)
        count = lengths.pop()
        if _has_dropped(cache, model.geometry, count, len(ids)):
            raise UsageError(
                f"layers hold {count} tokens, but not the first ones (sliding or static layers); "
                "capture with DynamicCache() without a config"
            )
        if count > len(ids):
            raise UsageError(f"the cache covers {count} tokens, input_ids only {len(ids)}")
        mask = torch.ones(count, dtype=torch.bool)
        if attention_mask is not None:
            mask = attention_mask.to("cpu").reshape(-1)[:count].bool()
        real = ids[:count][mask]
        if text is None:
            text, encoding = model.encode_ids(real)
        else:
            encoding = model.encode(text)
            if len(encoding) < len(real) or not torch.equal(encoding.ids[: len(real)], real):
                raise UsageError(
                    "text= does not tokenise to input_ids; leave it out and it is decoded from them"
                )
        end = int(encoding.spans[len(real) - 1, 1]) if len(real) else 0
        covered = text[:end]
        rows = torch.arange(count)[mask]
        layers = tuple({"k": _rows(k, rows), "v": _rows(v, rows)} for k, v in pairs)
        return cls(
            token_ids=real,
            positions=torch.arange(len(real)),
            spans=encoding.spans[: len(real)],
            text_digest=digest_text(covered),
            characters=len(covered),
            layers=layers,
            geometry=model.geometry,
            provenance=provenance or _remembered(cache, model, len(layers), len(real)),
        )

    def to_cache(self, model: Model) -> DynamicCache:
        """A transformers cache for `model`, sliding layers cut to their window; raises UsageError
        with holes."""
        if self.geometry.digest != model.geometry.digest:
            raise UsageError(f"this snapshot is of {self.geometry.model_id}, not of {model.name}")
        if len(self) and int(self.positions[-1]) != len(self) - 1:
            raise UsageError(
                "a snapshot with holes has no transformers cache; hand it over instead"
            )
        return build_cache(model, self.layers, self.provenance)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file: whole under its name, or not at all."""
        from safetensors.torch import save

        tensors = {
            f"layers.{i}.{name}": t.detach().cpu().contiguous()
            for i, layer in enumerate(self.layers)
            for name, t in layer.items()
        }
        tensors |= {
            "token_ids": self.token_ids.contiguous(),
            "positions": self.positions.contiguous(),
            "spans": self.spans.contiguous(),
        }
        bare = Description(self.text_digest, self.characters, self.geometry, self.provenance, "")
        body = replace(bare, digest=bare.content_digest(tensors)).to_json()
        write_file(
            Path(path), save(tensors, metadata={METADATA_KEY: json.dumps(body, sort_keys=True)})
        )

    @classmethod
    def load(cls, path: str | Path) -> KVSnapshot:
        """Reads what `save` wrote, verified against its digest. Raises CorruptFile or
        UnknownSchema; reads no pickle."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(path)
        description = describe(
            check_safetensors_header(path, max_tensors=MAX_SNAPSHOT_TENSORS), str(path)
        )
        try:
            tensors = load_file(path)
            check_content(description, tensors, str(path))
            layers = tuple(
                {s.name: tensors[f"layers.{i}.{s.name}"] for s in layer.streams}
                for i, layer in enumerate(description.geometry.layers)
            )
            return cls(
                tensors["token_ids"],
                tensors["positions"],
                tensors["spans"],
                description.text_digest,
                description.characters,
                layers,
                description.geometry,
                description.provenance,
            )
        except (OSError, SafetensorError, UsageError) as error:
            raise CorruptFile(
                f"{path}: expected a saved snapshot, found something else: {error}"
            ) from error


def build_cache(
    model: Model, layers: tuple[LayerKV, ...] | list[LayerKV], provenance: Provenance | None = None
) -> DynamicCache:
    """A transformers cache over full-length `[tokens, heads, width]` tensors; nothing is copied.

    Sliding layers are given their full length, so that they cut themselves and count every token.
    """
    pairs = [
        (layer["k"].transpose(0, 1)[None], layer["v"].transpose(0, 1)[None]) for layer in layers
    ]
    cache = DynamicCache(pairs, config=model.model.config)
    if provenance is not None:
        setattr(cache, _MEMORY, provenance)
    return cache


_MEMORY = "kvbridge_provenance"


def _remembered(cache: Any, model: Model, layers: int, tokens: int) -> Provenance:
    """What a cache says it is (`build_cache` tells it), grown to `tokens`; any other cache is the
    model's own."""
    known = getattr(cache, _MEMORY, None)
    own = exact_provenance(model.geometry.digest, layers, tokens)
    return own if known is None else known.over(layers, tokens)


def _pairs(cache: Any) -> list[tuple[Any, Any]]:
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return [(entry[0], entry[1]) for entry in cache]


def _has_dropped(cache: Any, geometry: KVGeometry, count: int, tokens: int) -> bool:
    """Whether layers of equal length hold other tokens than the first: they say so, or all slide
    and are just full."""
    layers = getattr(cache, "layers", None)
    if layers is not None and any(int(layer.get_seq_length()) != count for layer in layers):
        return True
    windows = [layer.window_tokens for layer in geometry.layers]
    return layers is None and all(w is not None and count == w - 1 < tokens - 1 for w in windows)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    cached = tensor[0].transpose(0, 1)
    return cached if len(rows) == len(cached) else cached[rows.to(cached.device)]
