"""Loading a model: its geometry read, and its RoPE proven, on the live model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvbridge.errors import LoadError, UnsupportedModel
from kvbridge.geometry import KVGeometry, LayerGeometry, Stream
from kvbridge.model.arguments import DTYPES, device_of, dtype_of, expect, no_autocast
from kvbridge.model.attention import decoder_layers, mask_refusal
from kvbridge.model.digests import (
    WeightsDigests,
    adapter_names,
    config_digest,
    tokenizer_digest,
    weights_digests,
)
from kvbridge.model.licence import licence_of
from kvbridge.model.model import Model
from kvbridge.model.probe import Probe, positions_of, probe
from kvbridge.model.rope import Rotation, measure_rotation
from kvbridge.model.sources import load_errors, locate, no_progress


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """A Model from `demo:sender|receiver|tuned`, a folder, or `org/name[@revision]`.

    dtype: float32 on the CPU and the checkpoint's own elsewhere, unless given. `adapter` is a PEFT
    folder or id. Remote code is off unless asked for. A branch or tag is resolved to its commit
    first, and everything is loaded from that. Raises LoadError (UnsupportedModel, RotationMismatch
    among its kinds).
    """
    expect(source, (str, Path), "demo:sender, a folder or org/name as a model")
    expect(revision, (str, NoneType), "a revision as a text")
    expect(adapter, (str, Path, NoneType), "a folder or id as an adapter")
    expect(trust_remote_code, bool, "True or False as trust_remote_code")
    name, target, dtype = str(source), device_of(device), dtype_of(dtype)
    with load_errors(name):
        located = locate(name, revision)
        common = {"revision": located.revision, "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(located.path, **common)
        stored = config.get_text_config(decoder=True).dtype or torch.float32
        default = torch.float32 if target.type == "cpu" else stored
        with no_progress():
            model: Any = AutoModelForCausalLM.from_pretrained(
                located.path, dtype=dtype or default, **common
            )
        tokenizer = AutoTokenizer.from_pretrained(located.path, **common)
        if adapter is not None:
            model.load_adapter(str(adapter))
    model = model.to(target).eval()
    loaded = _assemble(model, tokenizer, name, located.commit, Path(located.path), stored)
    return loaded if adapter is None else replace(loaded, adapter=str(adapter))


def check_source(source: str | Path) -> None:
    """Raises LoadError where `load` would find no model's configuration at `source`.

    No weights are read.
    """
    expect(source, (str, Path), "demo:sender, a folder or org/name as a model")
    with load_errors(str(source)):
        located = locate(str(source), None)
        AutoConfig.from_pretrained(located.path, revision=located.revision)


def wrap(model: Any, tokenizer: Any, *, name: str = "", commit: str = "") -> Model:
    """A Model around a transformers model and tokenizer that are already loaded.

    Both are used as they are, and every weight is hashed as it stands: a model that was loaded in
    another dtype than its checkpoint's is not the one that `load` makes of that checkpoint. Raises
    UnsupportedModel or RotationMismatch.
    """
    expect(model, PreTrainedModel, "a transformers model")
    expect(name, str, "a name as a text")
    expect(commit, str, "a commit as a text")
    return _assemble(model, tokenizer, name, commit, None, model.dtype)


def _assemble(
    model: Any,
    tokenizer: Any,
    name: str,
    commit: str,
    folder: Path | None,
    stored_dtype: torch.dtype,
) -> Model:
    """Measures a loaded model.

    `folder` is where a model just loaded has its files (digests are cached beside them),
    `stored_dtype` the dtype that weights are hashed in, so that upcasting on load changes no
    digest.
    """
    _check_model(model, name)
    config = model.config.get_text_config(decoder=True)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModel(
            f"{name}: expected a fast tokenizer (character spans are needed), "
            f"found {type(tokenizer).__name__}"
        )
    decoder = model.get_decoder()
    with _named(name):
        probed = probe(model, config, name)
        layers = decoder_layers(decoder)
        rotation = measure_rotation(
            decoder, config, probed.content, probed.cached, probed.positions
        )
    digests = weights_digests(model, layers, stored_dtype, folder)
    geometry = KVGeometry(
        # With a commit, the branch or tag that it was found under says nothing more.
        model_id=name.partition("@")[0] if commit else name,
        commit=commit,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        attention_heads=config.num_attention_heads,
        max_positions=positions_of(config),
        vocabulary=config.vocab_size,
        parameters=_parameters(model),
        layer_parameters=_parameters(layers),
        layers=_layer_geometries(probed, rotation, digests),
        tokenizer_digest=tokenizer_digest(tokenizer),
        rope_digest=rotation.digest(),
        config_digest=config_digest(config),
        embedding_digest=digests.embedding,
        weights_digest=digests.whole,
        adapters=adapter_names(model),
        licence=licence_of(folder, commit),
    )
    return Model(name, model, tokenizer, geometry, rotation)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside the block, a refusal begins with the model's name."""
    try:
        yield
    except LoadError as refusal:
        if str(refusal).startswith(name):
            raise
        raise type(refusal)(f"{name}: {refusal}") from refusal


def _check_model(model: Any, name: str) -> None:
    """Raises UnsupportedModel for a model that cannot be run here as a whole, before it is."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: expected a decoder, found an encoder with one; its cache depends on both"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{name}: {type(model).__name__} has no language-model head; load it with "
            "AutoModelForCausalLM"
        )
    devices = {str(tensor.device) for tensor in model.parameters()}
    if "meta" in devices:
        raise UnsupportedModel(
            f"{name}: weights are not in memory (offloaded, or on the meta device); load the model "
            "onto one device"
        )
    if len(devices) > 1:
        raise UnsupportedModel(
            f"{name}: expected all weights on one device, found {', '.join(sorted(devices))}"
        )
    no_autocast(model.device)
    if model.dtype not in DTYPES:
        raise UnsupportedModel(f"{name}: weights of {model.dtype} are not supported")
    if refusal := mask_refusal(model):
        raise UnsupportedModel(f"{name}: {refusal}")


def _layer_geometries(
    probed: Probe, rotation: Rotation, digests: WeightsDigests
) -> tuple[LayerGeometry, ...]:
    """Each layer's kind and streams, as the probe's forward cached them."""
    layers = []
    for index, window in enumerate(probed.windows):
        rotated = rotation.styles[index] != "none"
        keys = Stream("k", *probed.key_shapes[index], rotated=rotated)
        values = Stream("v", *probed.value_shapes[index], rotated=False)
        kind = "sliding" if window else "full"
        layers.append(LayerGeometry(kind, (keys, values), window, digests.layers[index]))
    return tuple(layers)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
