"""One request's KV cache as a value: explicit positions, no batch axis, bound to its model and its
text."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.given import cached_pairs, check_one_run, has_dropped, like_ids
from kvbridge.cache.layers import LayerKV, build_cache, remembered
from kvbridge.cache.provenance import Provenance, exact_provenance, lowered
from kvbridge.cache.snapshot_file import Description, check_content, describe
from kvbridge.cache.spelling import Said
from kvbridge.cache.verify import check_positions, find_positions
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import write_file
from kvbridge.format import MAX_SNAPSHOT_TENSORS, METADATA_KEY
from kvbridge.geometry import KVGeometry, digest_text
from kvbridge.headers import check_safetensors_header
from kvbridge.model.arguments import expect, path_of, token_ids
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
        check: bool = True,
    ) -> KVSnapshot:
        """From a transformers cache (an object with `.layers`, or pairs of keys and values) that
        `model` filled with one prompt from its beginning.

        input_ids, `attention_mask` and `position_ids` are `[tokens]` or `[1, tokens]`. The mask
        marks padding with 0, on either side. Positions that are not given are found: as `generate`
        counts them (from the first real token), as a plain forward does (padding counts), else
        wherever layer 0 says that one ascending run of them begins. The cache may cover fewer
        tokens than input_ids (the last one generated is not cached). `text` is what the ids spell,
        where the caller has it; `messages` (and `template`, as of `capture`) are the chat that they
        spell, a generated answer at its end included. Tensors are referenced, not copied. A cache
        that came out of a handoff remembers what it is: its snapshot keeps that provenance, also
        once the cache has grown.

        A cache that is said to be the model's own is checked (`kvbridge.cache.verify`): up to 512
        rows of layer 0 are recomputed, and up to 128 tokens run again over the others' rows in
        every layer, which costs a forward of that many tokens. `check=False` leaves that out: the
        snapshot is then `approximate`, for nobody knows, and positions that are not given count
        from the first real token. Raises UsageError, naming the row, where the cache cannot be of
        these ids, and for static, quantised and batched caches and a model in training.
        """
        expect(model, Model, "a model as made by kvbridge.load")
        expect(provenance, (Provenance, type(None)), "a Provenance as provenance=")
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
            origin="given" if check else "unchecked",
        )

    def to_cache(self, model: Model) -> DynamicCache:
        """A transformers cache for `model`, sliding layers cut to their window; raises UsageError
        with holes."""
        expect(model, Model, "a model as made by kvbridge.load")
        if self.geometry.digest != model.geometry.digest:
            raise UsageError(f"this snapshot is of {self.geometry.model_id}, not of {model.name}")
        if len(self) and int(self.positions[-1]) != len(self) - 1:
            raise UsageError(
                "a snapshot with holes, or of rows that do not begin at position 0, has no "
                "transformers cache; hand it over instead"
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
        header = {METADATA_KEY: json.dumps(body, sort_keys=True)}
        write_file(path_of(path, "a file to write to"), save(tensors, metadata=header))

    @classmethod
    def load(cls, path: str | Path) -> KVSnapshot:
        """Reads what `save` wrote, verified against its digest. Raises CorruptFile or
        UnknownSchema; reads no pickle."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = path_of(path, "the file of a snapshot")
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
    origin: Literal["computed", "given", "unchecked"] = "computed",
) -> KVSnapshot:
    """`KVSnapshot.from_cache`, by where the cache is from: `computed` by whoever calls, who has
    just run the model over these ids from position 0; `given` and to be checked; or
    `unchecked`."""
    if (mode := model.training()) is not None:
        raise UsageError(f"expected a model that computes the same twice, found one in {mode}")
    pairs = cached_pairs(cache, model.geometry)
    ids = token_ids(input_ids, model.geometry.vocabulary)
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
        mask = like_ids(attention_mask, len(ids), "attention_mask")[:count].bool()
    rows = mask.nonzero()[:, 0]
    real = ids[rows]
    layers = tuple({"k": _rows(k, rows), "v": _rows(v, rows)} for k, v in pairs)
    if provenance is None:
        provenance = remembered(cache, model, len(layers), len(real))
    positions = torch.arange(len(real))
    if position_ids is not None:
        positions = like_ids(position_ids, len(ids), "position_ids")[rows].long()
        check_one_run(positions)
    if origin == "unchecked" and provenance.fidelity == "exact":
        provenance = lowered(provenance)
    if origin == "given" and len(real) and provenance.fidelity == "exact":
        if position_ids is not None:
            check_positions(model, real, positions, layers)
        else:
            positions = find_positions(model, real, layers, (positions, rows))
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


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    cached = tensor[0].transpose(0, 1)
    return cached if len(rows) == len(cached) else cached[rows.to(cached.device)]
