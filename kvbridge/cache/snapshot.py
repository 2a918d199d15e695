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

from kvbridge.cache.layers import LayerKV, build_cache, remembered
from kvbridge.cache.provenance import Provenance, exact_provenance
from kvbridge.cache.run import one_sequence
from kvbridge.cache.snapshot_file import Description, check_content, describe
from kvbridge.cache.spelling import Said
from kvbridge.cache.verify import check_positions, check_tail, find_positions
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import write_file
from kvbridge.format import MAX_SNAPSHOT_TENSORS, METADATA_KEY
from kvbridge.geometry import KVGeometry, digest_text
from kvbridge.headers import check_safetensors_header
from kvbridge.model.chat import Messages, TemplateOptions
from kvbridge.model.model import Model
from kvbridge.model.passages import Passage
from kvbridge.model.rope import Rotation


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """What a model cached for one text.

    token_ids, positions `[tokens]` int64; spans `[tokens, 2]` int64 characters of the text;
    `text_digest` and `characters` of the text the tokens spell; `layers[i][stream]` `[tokens,
    heads, width]` exactly as cached (keys rotated). Positions ascend and may leave holes; padding
    is not in it. `passages` says of a chat where each message stands in the text.
    """

    token_ids: Tensor
    positions: Tensor
    spans: Tensor
    text_digest: str
    characters: int
    layers: tuple[LayerKV, ...]
    geometry: KVGeometry
    provenance: Provenance
    passages: tuple[Passage, ...] = ()

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
            self.passages,
        )

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        model: Model,
        input_ids: Tensor,
        *,
        text: str | None = None,
        messages: Messages | None = None,
        template: TemplateOptions | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        provenance: Provenance | None = None,
    ) -> KVSnapshot:
        """From a transformers cache (an object with `.layers`, or pairs of keys and values) that
        `model` filled with one prompt from its beginning.

        input_ids, `attention_mask` and `position_ids` are `[tokens]` or `[1, tokens]`. The mask
        marks padding with 0, on either side. Positions that are not given are found: as `generate`
        counts them (from the first real token), as a plain forward does (padding counts), else
        wherever layer 0 says that one ascending run of them begins. The cache may cover fewer
        tokens than input_ids (the last one generated is not cached). `text` is what the ids spell,
        where the caller has it; `messages` (and `template`, as of `capture`) are the chat that they
        spell, a generated answer at its end included. Tensors are referenced, not copied. A cache that came out of a
        handoff remembers what it is: its snapshot keeps that provenance, also once the cache has
        grown.

        A cache that is said to be the model's own is checked (`kvbridge.cache.verify`): rows of
        layer 0 are recomputed, and the last tokens run once more through all layers, which costs a
        forward of eight tokens. Raises UsageError, naming the row, where the cache cannot be of
        these ids, and for static, quantised and batched caches and a model in training.
        """
        said = Said(text, None if messages is None else model.chat(messages, template))
        if template is not None and messages is None:
            raise UsageError("template= says how messages= are rendered; give both or neither")
        return snapshot_of_cache(
            cache,
            model,
            input_ids,
            said,
            attention_mask=attention_mask,
            position_ids=position_ids,
            provenance=provenance,
            own=False,
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
        bare = Description(
            self.text_digest, self.characters, self.geometry, self.provenance, "", self.passages
        )
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
                description.passages,
            )
        except (OSError, SafetensorError, UsageError) as error:
            raise CorruptFile(
                f"{path}: expected a saved snapshot, found something else: {error}"
            ) from error


def snapshot_of_cache(
    cache: Any,
    model: Model,
    input_ids: Tensor,
    said: Said,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    provenance: Provenance | None = None,
    own: bool = True,
) -> KVSnapshot:
    """`KVSnapshot.from_cache`, and with `own` without its checks of values: for whoever has just run
    the model over these ids, from position 0."""
    if (mode := model.training()) is not None:
        raise UsageError(f"expected a model that computes the same twice, found {mode}")
    pairs = cached_pairs(cache, model.geometry)
    ids = one_sequence(input_ids, model.geometry.vocabulary)
    count = len(pairs[0][0][0, 0])
    if has_dropped(cache, model.geometry, count, len(ids)):
        raise UsageError(
            f"layers hold {count} tokens, but not the first ones (sliding layers); "
            "capture with DynamicCache() without a config"
        )
    if count > len(ids):
        raise UsageError(f"the cache covers {count} tokens, input_ids only {len(ids)}")
    mask = torch.ones(count, dtype=torch.bool)
    if attention_mask is not None:
        mask = _like(attention_mask, len(ids), "attention_mask")[:count].bool()
    rows = mask.nonzero()[:, 0]
    real = ids[rows]
    layers = tuple({"k": _rows(k, rows), "v": _rows(v, rows)} for k, v in pairs)
    if provenance is None:
        provenance = remembered(cache, model, len(layers), len(real))
    positions = torch.arange(len(real))
    if position_ids is not None:
        positions = _like(position_ids, len(ids), "position_ids")[rows].long()
        _check_one_run(positions)
    if not own and len(real) and provenance.fidelity == "exact":
        if position_ids is not None:
            check_positions(model, real, positions, layers[0])
        else:
            positions = find_positions(model, real, layers[0], (positions, rows))
        if int(positions[-1] - positions[0]) == len(positions) - 1:
            check_tail(model, real, positions, layers)
    spelt = said.spelling(model, torch.cat((real, ids[count:])), len(real))
    end = int(spelt.spans[-1, 1]) if len(real) else 0
    return KVSnapshot(
        token_ids=real,
        positions=positions,
        spans=spelt.spans,
        text_digest=digest_text(spelt.text[:end]),
        characters=end,
        layers=layers,
        geometry=model.geometry,
        provenance=provenance,
        passages=spelt.passages,
    )


def _like(values: Any, tokens: int, name: str) -> Tensor:
    """`[tokens]` out of a tensor `[tokens]` or `[1, tokens]`, as input_ids are; UsageError for another
    shape. A mask or positions may reach further than the ids, never less far."""
    if not isinstance(values, Tensor):
        raise UsageError(f"expected a tensor as {name}, found {type(values).__name__}")
    if values.ndim not in (1, 2) or (values.ndim == 2 and len(values) != 1):
        raise UsageError(
            f"expected {name} [{tokens}] or [1, {tokens}] of one request, "
            f"found {tuple(values.shape)}"
        )
    flat = values.to("cpu").reshape(-1)
    if len(flat) < tokens:
        raise UsageError(f"expected {name} of {tokens} tokens, found {len(flat)}")
    return flat


def _check_one_run(positions: Tensor) -> None:
    """Raises UsageError where positions do not ascend: they restart where another prompt begins."""
    back = (positions[1:] <= positions[:-1]).nonzero()[:, 0]
    if len(back):
        row = int(back[0]) + 1
        raise UsageError(
            f"position_ids go back from {int(positions[row - 1])} to {int(positions[row])} at row "
            f"{row}: several prompts are packed into one row; give one of them"
        )


def cached_pairs(cache: Any, geometry: KVGeometry) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[1, heads, tokens, width]` of each layer; UsageError for what is no filled
    cache of one request, of equal length in every layer."""
    layers = getattr(cache, "layers", None)
    for layer in layers or ():
        name = type(layer).__name__
        for kind in ("Static", "Quantized"):
            if kind in name:
                raise UsageError(
                    "expected a cache that holds just the tokens it has seen, as they were "
                    f"computed, found a {kind.lower()} one ({name}); use DynamicCache()"
                )
    pairs = _pairs(cache)
    if not pairs or any(not isinstance(t, Tensor) for pair in pairs for t in pair):
        raise UsageError("expected a filled cache, found layers without keys")
    if any(t.ndim != 4 or t.shape[0] != 1 for pair in pairs for t in pair):
        raise UsageError(
            "expected keys and values [1, heads, tokens, width] of one request, found "
            f"{tuple(pairs[0][0].shape)}; take one row of a batch or of beams"
        )
    if len(pairs) != len(geometry.layers):
        raise UsageError(f"expected {len(geometry.layers)} layers, found {len(pairs)}")
    lengths = {int(tensor.shape[2]) for pair in pairs for tensor in pair}
    if len(lengths) != 1:
        raise UsageError(
            f"layers hold {sorted(lengths)} tokens: sliding layers have dropped some, or rows were "
            "evicted; capture with DynamicCache() without a config"
        )
    return pairs


def _pairs(cache: Any) -> list[tuple[Any, Any]]:
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return [(entry[0], entry[1]) for entry in cache]


def has_dropped(cache: Any, geometry: KVGeometry, count: int, tokens: int) -> bool:
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
