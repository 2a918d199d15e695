"""Loading a model: transformers' model and tokenizer, their geometry, and RoPE proven on the live
model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file, logging

from kvbridge import demo
from kvbridge.errors import LoadError, UnsupportedModel, UsageError
from kvbridge.geometry import KVGeometry, LayerGeometry, Stream
from kvbridge.model.digests import adapter_names, config_digest, tokenizer_digest, weights_digests
from kvbridge.model.licence import licence_of
from kvbridge.model.probe import decoder_layers, probe
from kvbridge.model.rope import Rotation, measure_rotation

DECODE_CONTEXT, DECODE_PENDING = 4, 32


@dataclass(frozen=True)
class Encoding:
    """A text as one model's tokens: ids `[tokens]` and character spans `[tokens, 2]`, both int64 on
    the CPU."""

    ids: Tensor
    spans: Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model with its tokenizer, geometry and rotation. `name` is what it was loaded
    from."""

    name: str
    model: Any
    tokenizer: Any
    geometry: KVGeometry
    rotation: Rotation
    _versions: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", _versions(self.model))

    def changed(self) -> str | None:
        """What of the live model is no longer as `geometry` says, in a few words; None where all is
        as it was loaded.

        Weights written in place are seen by the counters torch keeps; writes through `.data` escape
        them.
        """
        if f"torch.{self.geometry.dtype}" != str(self.dtype):
            return f"dtype (now {str(self.dtype).removeprefix('torch.')})"
        if adapter_names(self.model) != self.geometry.adapters:
            return "adapters"
        return "weights" if _versions(self.model) != self._versions else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and cache."""
        return self.model.dtype

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers without the language-model head."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""
        return decoder_layers(self.decoder)

    def encode(self, text: str) -> Encoding:
        """Token ids and character spans as the tokenizer itself would make them, special tokens
        included."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"expected text, found a lone surrogate at character {error.start}"
            ) from None
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        spans = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).reshape(-1, 2)
        return Encoding(torch.tensor(encoded["input_ids"], dtype=torch.int64), _monotone(spans))

    def encode_ids(self, token_ids: Tensor) -> tuple[str, Encoding]:
        """The text that `token_ids` `[tokens]` spell and where each ends in it; generated ids need
        not be canonical.

        Special tokens that the tokenizer adds by itself spell nothing.
        """
        ids = token_ids.to("cpu", torch.int64).flatten()
        prefix = self._prefix()
        start = len(prefix) if ids[: len(prefix)].tolist() == prefix else 0
        text = self._decode(ids[start:])
        canonical = self.encode(text)
        if torch.equal(canonical.ids, ids):
            return text, canonical
        ends = [0] * start + self._ends(ids[start:])
        spans = torch.tensor(
            [[a, b] for a, b in zip([0, *ends], ends, strict=False)], dtype=torch.int64
        ).reshape(-1, 2)
        return text, Encoding(ids, _monotone(spans.clamp_max(len(text))))

    def _decode(self, ids: Tensor) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _ends(self, ids: Tensor) -> list[int]:
        """Characters that are settled once each of `ids` `[tokens]` is read: a character cut short
        is not yet one.

        Each step decodes a short window twice and counts what it adds, so that what decoders do
        between tokens (spaces, joined bytes) is done alike in both.
        """
        ends: list[int] = []
        done = read = 0
        for index in range(len(ids)):
            window = max(0, read - DECODE_CONTEXT)
            before, now = self._decode(ids[window:read]), self._decode(ids[window : index + 1])
            settled = now.rstrip("�")
            ends.append(done + max(0, len(settled) - len(before)))
            if settled == now or index - read >= DECODE_PENDING:
                done, read = done + len(now) - len(before), index + 1
        return ends

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The model's own chat template over `messages`, with the generation prompt; raises
        UsageError without one."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(f"{self.name} has no chat template; pass text= instead of messages=")
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prefix = self._decode(torch.tensor(self._prefix(), dtype=torch.int64))
        return text.removeprefix(prefix)

    def _prefix(self) -> list[int]:
        """Special tokens that the tokenizer puts before every text by itself."""
        ids = self.tokenizer("", verbose=False)["input_ids"]
        return ids if set(ids) <= set(self.tokenizer.all_special_ids) else []


def _versions(model: nn.Module) -> tuple[int, ...]:
    """How often each weight has been written to; inference tensors cannot be and keep no count."""
    return tuple(0 if p.is_inference() else p._version for p in model.parameters())


def _monotone(spans: Tensor) -> Tensor:
    """Spans whose ends never go back: byte-level pieces of one character, and special tokens,
    repeat an end."""
    ends = torch.cummax(spans[:, 1], dim=0).values if len(spans) else spans[:, 1]
    return torch.stack((torch.minimum(spans[:, 0], ends), ends), dim=1)


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
    name, target = str(source), torch.device(device)
    with _found(name):
        path, revision, commit = _located(name, revision)
        common = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(path, **common)
        stored = config.get_text_config(decoder=True).dtype or torch.float32
        with _no_progress():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype or (torch.float32 if target.type == "cpu" else stored), **common
            )
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        if adapter is not None:
            model.load_adapter(str(adapter))
    return _assemble(_moved(model, target), tokenizer, name, commit, Path(path), stored)


def check_source(source: str | Path) -> None:
    """Raises LoadError where `load` would find no model's configuration at `source`; no weights are
    read."""
    with _found(str(source)):
        path, revision, _ = _located(str(source), None)
        AutoConfig.from_pretrained(path, revision=revision)


@contextmanager
def _found(name: str) -> Iterator[None]:
    """What transformers raises on a missing or broken checkpoint becomes a LoadError of one
    line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LoadError(
            f"expected demo:sender, demo:receiver, demo:tuned, a model folder or org/name[@revision], "
            f"found {name!r}: {_first_line(error)}"
        ) from error


def _located(name: str, revision: str | None) -> tuple[str, str | None, str]:
    """(folder or repository, revision, commit) of a source; the commit is empty for folders, else
    the revision is that commit."""
    if name.startswith("demo:"):
        known = name.removeprefix("demo:")
        if known not in demo.MODELS:
            raise LoadError(
                f"expected one of {', '.join('demo:' + m for m in demo.MODELS)}, found {name!r}"
            )
        return str(demo.path(known)), revision, ""
    if Path(name).is_dir():
        return name, revision, ""
    path, at, tail = name.partition("@")
    if Path(path).is_dir():
        return path, tail if at else revision, ""
    commit = _resolved(path, tail if at else revision)
    return path, commit, commit


def _resolved(repo: str, revision: str | None) -> str:
    """The commit that a branch or tag stands for now, of the Hub or, offline, of its cache: all
    files are then of that one."""
    return Path(str(cached_file(repo, "config.json", revision=revision))).parent.name


def wrap(model: Any, tokenizer: Any, *, name: str = "", commit: str = "") -> Model:
    """A Model around a transformers model and tokenizer that are already loaded; both are used
    as they are, and every weight is hashed as it stands. Raises UnsupportedModel or
    RotationMismatch."""
    return _assemble(model, tokenizer, name, commit, None, model.dtype)


def _assemble(
    model: Any,
    tokenizer: Any,
    name: str,
    commit: str,
    folder: Path | None,
    stored_dtype: torch.dtype,
) -> Model:
    """`folder` is where a model just loaded has its files (digests are cached beside them),
    `stored_dtype` the dtype that weights are hashed in, so that upcasting on load changes no
    digest."""
    config = model.config.get_text_config(decoder=True)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModel(
            f"{name}: expected a fast tokenizer (character spans are needed), found {type(tokenizer).__name__}"
        )
    found = probe(model, config, name)
    layers = decoder_layers(model.get_decoder())
    rotation = measure_rotation(
        model.get_decoder(), config, found.content, found.cached, found.positions
    )
    digests = weights_digests(model, layers, stored_dtype, folder)
    geometry = KVGeometry(
        model_id=name.partition("@")[0]
        if commit
        else name,  # the commit says what a branch or tag only stood for
        commit=commit,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        attention_heads=config.num_attention_heads,
        max_positions=getattr(config, "max_position_embeddings", 2**31 - 1),
        vocabulary=config.vocab_size,
        parameters=sum(p.numel() for p in model.parameters()),
        layer_parameters=sum(p.numel() for p in layers.parameters()),
        layers=tuple(
            LayerGeometry(
                kind="sliding" if found.windows[i] else "full",
                streams=(
                    Stream("k", *found.key_shapes[i], rotated=rotation.styles[i] != "none"),
                    Stream("v", *found.value_shapes[i], rotated=False),
                ),
                window_tokens=found.windows[i],
                weights_digest=digests.layers[i],
            )
            for i in range(len(layers))
        ),
        tokenizer_digest=tokenizer_digest(tokenizer),
        rope_digest=rotation.digest(),
        config_digest=config_digest(config),
        embedding_digest=digests.embedding,
        weights_digest=digests.whole,
        adapters=adapter_names(model),
        licence=licence_of(folder, commit),
    )
    return Model(name, model, tokenizer, geometry, rotation)


def _moved(model: Any, device: torch.device) -> Any:
    return model.to(device).eval()


@contextmanager
def _no_progress() -> Iterator[None]:
    """Loads without transformers' progress bar, and puts it back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
