"""A loaded model: transformers' model and tokenizer with what was measured on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvbridge.geometry import KVGeometry
from kvbridge.model import text as texts
from kvbridge.model.arguments import text_of
from kvbridge.model.arguments import token_ids as ids_of
from kvbridge.model.attention import decoder_layers, mask_refusal
from kvbridge.model.chat import Chat, Messages, TemplateOptions, render_chat
from kvbridge.model.digests import adapter_names
from kvbridge.model.rope import Rotation
from kvbridge.model.text import Encoding


@dataclass(frozen=True, eq=False)
class Model:
    """A transformers model with its tokenizer, geometry and rotation.

    `name` is what it was loaded from, `adapter` where its PEFT adapter came from. `kvbridge.load`
    and `kvbridge.wrap` make it.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: KVGeometry
    rotation: Rotation
    adapter: str | None = None
    _versions: tuple[int, ...] = field(init=False, repr=False)
    _adapters: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", _versions(self.model))
        object.__setattr__(self, "_adapters", _adapter_state(self.model))

    def changed(self) -> str | None:
        """What of the live model is no longer as `geometry` says, in a few words; None for nothing.

        Weights written in place are seen by the counters torch keeps; writes through `.data` escape
        them.
        """
        if f"torch.{self.geometry.dtype}" != str(self.dtype):
            return f"dtype (now {str(self.dtype).removeprefix('torch.')})"
        if mask_refusal(self.model):
            return "attention implementation"
        if adapter_names(self.model) != self.geometry.adapters:
            return "adapters"
        # Looked at in every handoff: not walked where there was nothing. What was attached since is
        # another name above, or more weights below.
        if self._adapters and _adapter_state(self.model) != self._adapters:
            return "adapter scaling"
        if (mode := self.training()) is not None:
            return f"mode ({mode})"
        return "weights" if _versions(self.model) != self._versions else None

    def training(self) -> str | None:
        """Where the model drops out at random, so that no two forwards agree, in a few words; None
        where it does not."""
        for name, module in self.model.named_modules():
            if not module.training:
                continue
            rates = [getattr(module, setting, None) for setting in _DROPOUT_RATES]
            if isinstance(module, nn.Dropout):
                rates.append(module.p)
            rate = max((r for r in rates if isinstance(r, float)), default=0.0)
            if rate > 0:
                return f"training, with dropout {rate:g} in {name}; call .eval() on the model"
        return None

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
        """Token ids and character spans as the tokenizer itself would make them.

        Special tokens included. Raises UsageError for a lone surrogate.
        """
        return texts.encode(self.tokenizer, text_of(text))

    def encode_ids(self, token_ids: Tensor) -> tuple[str, Encoding]:
        """The text that `token_ids` `[tokens]` spell and where each ends in it.

        Generated ids need not be canonical. Special tokens that the tokenizer adds by itself spell
        nothing.
        """
        return texts.encode_ids(self.tokenizer, ids_of(token_ids, self.geometry.vocabulary))

    def chat(self, messages: Messages, template: TemplateOptions | None = None) -> Chat:
        """The prompt of a chat under the model's own chat template: exactly the ids of
        `apply_chat_template`. `template` is what that takes besides messages.

        Raises UsageError where the model has no template or it cannot render these messages.
        """
        return render_chat(self.tokenizer, messages, template, self.name)

    def render(self, messages: Messages, template: TemplateOptions | None = None) -> str:
        """The text of `chat`, without the special tokens that `encode` puts before a text."""
        return self.chat(messages, template).text


def _versions(model: nn.Module) -> tuple[int, ...]:
    """How often each weight has been written to; inference tensors cannot be and keep no count."""
    return tuple(0 if p.is_inference() else p._version for p in model.parameters())


def _adapter_state(model: nn.Module) -> tuple[str, ...]:
    """What alters a live adapter's effect besides its weights, layer by layer: its scaling, whether
    it is switched off, merged, and which are active."""
    states = []
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, dict):
            flags = (getattr(module, flag, None) for flag in _ADAPTER_FLAGS)
            states.append(f"{name} {sorted(scaling.items())} {[str(flag) for flag in flags]}")
    return tuple(states)


_DROPOUT_RATES = ("attention_dropout", "dropout", "dropout_p", "activation_dropout", "layerdrop")
"""Where modules keep the rate of a dropout that is not a module of its own."""

_ADAPTER_FLAGS = ("disable_adapters", "merged_adapters", "active_adapters")
