"""Digests of weights and tokenizers: over what they hold, never over file bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvbridge.geometry import digest_json, digest_parts

CACHE_NAME = ".kvbridge-digests.json"
CACHE_SCHEMA = 1
ADAPTER_NAMES = {
    # Settings of an adapter that name it or say where it came from, and alter no value.
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "task_type",
    "auto_mapping",
    "peft_version",
    "runtime_config",
}


@dataclass(frozen=True)
class WeightsDigests:
    """SHA-256 per layer, of the embedding, and of everything."""

    layers: tuple[str, ...]
    embedding: str
    whole: str


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and every byte of a tensor."""
    data = tensor.detach().cpu().contiguous()
    parts = [str(data.dtype).encode(), str(tuple(data.shape)).encode()]
    if data.numel():
        # As bytes: NumPy has no bfloat16, and −0.0 and NaN count as they are stored.
        parts.append(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest_parts(parts)


def weights_digests(
    model: Any, layers: nn.ModuleList, dtype: torch.dtype, folder: Path | None
) -> WeightsDigests:
    """Digests of every tensor of the live model, floats hashed in `dtype`, grouped per decoder
    layer.

    With a `folder`, the result is kept beside its weight files, valid for the dtype they were
    loaded in while their sizes and times stand; loaded adapters and models without files are always
    hashed.
    """
    key = None if folder is None or adapter_names(model) else _file_key(folder, dtype, model.dtype)
    if key is not None and (known := _read_cache(folder, key, len(layers))) is not None:
        return known
    # By identity and not by name: tied weights have several names, and a layer's tensors may be
    # named anything.
    owner: dict[int, int] = {}
    for layer, module in enumerate(layers):
        owner |= {id(tensor): layer for tensor in (*module.parameters(), *module.buffers())}
    embedding_ids = {id(p) for p in model.get_input_embeddings().parameters()}
    grouped: list[list[bytes]] = [[] for _ in layers]
    embedding: list[bytes] = []
    rest: list[bytes] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        entry = tensor_digest(cast).encode()
        holder = owner.get(id(tensor))
        if holder is not None:
            # The name within the layer: equal layers at other depths have equal digests.
            within = name.rpartition(f".{holder}.")[2]
            grouped[holder].append(within.encode() + b"=" + entry)
        elif id(tensor) in embedding_ids or "position" in name or ".wpe." in name:
            embedding.append(entry)
        else:
            rest.append(name.encode() + b"=" + entry)
    per_layer = tuple(digest_parts(sorted(parts)) for parts in grouped)
    # A set, for a tied head is the embedding under a second name.
    entrance = digest_parts(sorted(set(embedding)))
    whole = digest_parts([*(d.encode() for d in per_layer), entrance.encode(), *sorted(rest)])
    result = WeightsDigests(per_layer, entrance, whole)
    if key is not None and folder is not None:
        _write_cache(folder, key, result)
    return result


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of everything in a fast tokenizer that alters ids: vocabulary, merges, added tokens,
    normaliser, pre-tokenizer, post-processor. Truncation, padding and file layout do not count."""
    body = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
    return digest_json({name: body.get(name) for name in parts})


_SILENT = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "use_cache",
)


def config_digest(config: Any) -> str:
    """Digest of a text config's settings: norms' epsilon, activations, scalings, soft caps and all
    else that alters values without being a weight. Names, versions, dtype and special token ids do
    not count."""
    body = {k: v for k, v in config.to_dict().items() if k not in _SILENT and not k.startswith("_")}
    body.pop("transformers_version", None)
    return digest_json(json.loads(json.dumps(body, default=str, sort_keys=True)))


def adapter_names(model: Any) -> tuple[str, ...]:
    """The PEFT adapters that are loaded, sorted: name, digest of the settings that alter values (a
    scale is no tensor), and whether it is switched off."""
    active: set[str] = set()
    for module in model.modules():
        names = getattr(module, "active_adapters", None)
        if isinstance(names, (list, tuple, str)) and not getattr(module, "disable_adapters", False):
            active.update([names] if isinstance(names, str) else names)
    adapters = []
    for name, config in sorted((getattr(model, "peft_config", None) or {}).items()):
        settings = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        body = {k: _plain(v) for k, v in settings.items() if k not in ADAPTER_NAMES}
        adapters.append(f"{name}@{digest_json(body)[:16]}" + ("" if name in active else " off"))
    return tuple(adapters)


def _plain(value: Any) -> str:
    """A setting as text that does not depend on the order of a set."""
    if isinstance(value, (set, frozenset)):
        value = sorted(map(str, value))
    return repr(value)


def _file_key(folder: Path, dtype: torch.dtype, loaded: torch.dtype) -> str | None:
    """What cached digests are valid for; None for a folder without weight files.

    Sizes and times of the files, and what turns their bytes into the tensors that are hashed: the
    two dtypes, and torch, whose casts may round otherwise in another release.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    stats = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    release = torch.__version__.split("+")[0]
    return digest_json([CACHE_SCHEMA, str(dtype), str(loaded), release, stats])


def _read_cache(folder: Path | None, key: str, layers: int) -> WeightsDigests | None:
    """The cached digests if they are well-formed and for exactly these files; anything else means
    hashing again."""
    if folder is None:
        return None
    try:
        body = json.loads((folder / CACHE_NAME).read_text("utf-8"))
        cached = WeightsDigests(tuple(body["layers"]), body["embedding"], body["whole"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    texts = (*cached.layers, cached.embedding, cached.whole)
    sound = all(isinstance(t, str) and len(t) == hashlib.sha256().digest_size * 2 for t in texts)
    if not sound or body.get("key") != key or len(cached.layers) != layers:
        return None
    return cached


def _write_cache(folder: Path, key: str, digests: WeightsDigests) -> None:
    """Best effort: a folder that cannot be written is hashed again next time."""
    body = {
        "key": key,
        "layers": list(digests.layers),
        "embedding": digests.embedding,
        "whole": digests.whole,
    }
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=CACHE_NAME)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(body, file)
        os.replace(temporary, folder / CACHE_NAME)
