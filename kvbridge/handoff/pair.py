"""Who hands over to whom, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.align import MIN_EXACT_SHARE
from kvbridge.engines.port import Engine
from kvbridge.engines.transformers import engine_of
from kvbridge.errors import UsageError
from kvbridge.model.arguments import found_in
from kvbridge.model.model import Model

TemplateTokens = Literal["recompute", "translate"]
"""`translate`: each from the sender's row next to it, counted from the message that follows, where
the template writes little between messages. `recompute`: by the receiver, as all that the sender's
cache does not cover. On held-out chats of the demo's validation split the first keeps more, and
costs less (`python -m benchmarks.chats`)."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Two engines and the handle of a translator between them: an asset or a bare translator as it
    was loaded, whose tensors a lease puts where they may be used (None: nothing is ever
    translated). `min_exact_share`: share of the receiver's tokens that must end where a sender's
    does. `template_tokens`: what becomes of the receiver's template tokens between the messages of
    a chat that the sender read under another template.
    """

    sender: Engine
    receiver: Engine
    handle: Asset | Translator | None
    min_exact_share: float = MIN_EXACT_SHARE
    template_tokens: TemplateTokens = "translate"

    @classmethod
    def of(
        cls,
        handle: Asset | Translator | None,
        sender: Model | Engine,
        receiver: Model | Engine,
        min_exact_share: float = MIN_EXACT_SHARE,
        template_tokens: TemplateTokens = "translate",
    ) -> Pair:
        """From models or engines. Raises UsageError for anything else."""
        if template_tokens not in get_args(TemplateTokens):
            raise UsageError(
                f"expected template_tokens as {' or '.join(get_args(TemplateTokens))}, "
                f"found {template_tokens!r:.40}"
            )
        if handle is not None and not isinstance(handle, (Asset, Translator)):
            raise UsageError(
                "expected an asset of kvbridge.load_asset or a translator, found "
                f"{type(handle).__name__}"
            )
        if isinstance(min_exact_share, bool) or not isinstance(min_exact_share, (int, float)):
            raise UsageError(f"expected a share from 0 to 1, found {found_in(min_exact_share)}")
        return cls(engine_of(sender), engine_of(receiver), handle, min_exact_share, template_tokens)

    @property
    def asset(self) -> Asset | None:
        """The asset, where the translator is one."""
        return self.handle if isinstance(self.handle, Asset) else None

    @property
    def translator(self) -> Translator | None:
        """The translator as it was loaded: what it reads and how large it is, not where it runs."""
        return self.handle.translator if isinstance(self.handle, Asset) else self.handle
