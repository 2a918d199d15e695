"""What a model is before its weights are read: its shapes, its size, and the dtype it is stored in.

A model is built from its configuration on the meta device, where tensors have shapes and no
numbers, and runs a few tokens there to see what its layers would cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from kvbridge.geometry import KVGeometry, LayerGeometry, Stream
from kvbridge.model.probe import probe
from kvbridge.model.sources import load_errors, locate

_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of float dtypes in safetensors headers."""


def stored_dtype(source: str) -> torch.dtype:
    """The dtype of a checkpoint: its configuration's, else that of its first float tensor, else
    float32. No weights are read. Raises LoadError."""
    with load_errors(source):
        located = locate(source, None)
        config = AutoConfig.from_pretrained(located.path, revision=located.revision)
    declared = config.get_text_config(decoder=True).dtype or config.dtype
    return declared or _first_dtype(Path(located.path)) or torch.float32


def _first_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the first float tensor in a folder's safetensors files, by their headers."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                dtype = _STORED.get(file.get_slice(name).get_dtype())
                if dtype is not None:
                    return dtype
    return None


def outline(source: str, dtype: torch.dtype | None, device: torch.device) -> KVGeometry | None:
    """The geometry that `kvbridge.load` would find, without its digests, adapters and licence; None
    where the model cannot be run without numbers.

    `dtype` None: as for `kvbridge.load` on `device`. No weights are read and nothing of the model's
    size is allocated. Raises LoadError, or UnsupportedModel for a cache that cannot be translated.
    """
    with load_errors(source):
        located = locate(source, None)
        config = AutoConfig.from_pretrained(located.path, revision=located.revision)
    text = config.get_text_config(decoder=True)
    if dtype is None:
        stored = text.dtype or torch.float32
        dtype = torch.float32 if device.type == "cpu" else stored
    # With a padding token, transformers looks whether the probe's ids have one: they are no numbers
    # here.
    config.pad_token_id = text.pad_token_id = None
    try:
        with load_errors(source), torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        shapes = probe(model, model.config.get_text_config(decoder=True), source)
    except (RuntimeError, NotImplementedError):
        # Some models branch on a tensor's numbers, which torch refuses on the meta device.
        return None
    layers = []
    for keys, values, window in zip(
        shapes.key_shapes, shapes.value_shapes, shapes.windows, strict=True
    ):
        streams = (Stream("k", *keys, rotated=True), Stream("v", *values, rotated=False))
        layers.append(LayerGeometry("sliding" if window else "full", streams, window, ""))
    parameters = sum(p.numel() for p in model.parameters())
    decoder = model.get_decoder()
    return KVGeometry(
        model_id=source,
        commit=located.commit,
        architecture=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=text.hidden_size,
        attention_heads=text.num_attention_heads,
        max_positions=getattr(text, "max_position_embeddings", 2**31 - 1),
        vocabulary=text.vocab_size,
        parameters=parameters,
        layer_parameters=sum(p.numel() for p in decoder.parameters()),
        layers=tuple(layers),
        tokenizer_digest="",
        rope_digest="",
        config_digest="",
        embedding_digest="",
        weights_digest="",
    )
