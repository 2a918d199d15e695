"""One request made ready for the maps: checked, aligned, its exact layers known, the receiver's own layers computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.align import Alignment
from kvbridge.cache.features import FirstLayers, first_layers, hidden_layer
from kvbridge.cache.provenance import Decision, discard
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.geometry import shared_layers
from kvbridge.handoff.check import align_request, check_contract, check_text
from kvbridge.handoff.repair import RepairPlan
from kvbridge.model.load import Encoding, Model


@dataclass(frozen=True, eq=False)
class Request:
    """`chosen` `[n]` are the tokens to recompute, `first` the receiver's own first layers where they were needed,
    `exact_layers` how many leading layers are exact, `feature` `[cached, hidden]` what the maps read of the receiver.
    """

    snapshot: KVSnapshot
    text: str
    encoding: Encoding
    alignment: Alignment
    chosen: Tensor
    first: FirstLayers | None
    exact_layers: int
    feature: Tensor | None

    @property
    def cached(self) -> int:
        """Tokens of the receiver that get a cache entry: all but the last."""
        return len(self.encoding) - 1


def prepare(
    snapshot: KVSnapshot,
    text: str,
    encoding: Encoding,
    plan: RepairPlan,
    sender: Model,
    receiver: Model,
    translator: Translator | None,
    min_exact_share: float,
) -> Request | Decision:
    """Contract checks, alignment and the receiver's own first layers; a Decision where the request is refused."""
    refusal = check_contract(snapshot, sender, receiver, translator)
    refusal = refusal or check_text(snapshot, text, encoding, sender, receiver)
    if refusal is not None:
        return refusal
    alignment, same_tokens = align_request(snapshot, encoding, receiver.geometry)
    cached = len(encoding) - 1
    alignment = Alignment(
        alignment.index[:cached], alignment.covered[:cached], alignment.exact_share
    )
    if alignment.exact_share < min_exact_share:
        return discard(
            "alignment",
            f"{alignment.exact_share:.0%} of the receiver's tokens end where a sender's does, expected {min_exact_share:.0%}",
        )
    chosen = plan.chosen(cached, ~alignment.covered)
    shared = shared_layers(snapshot.geometry, receiver.geometry) if same_tokens else 0
    total = len(receiver.layers)
    if translator is None and shared < total:
        return discard("no_asset", f"no translator from {sender.name} to {receiver.name}")
    if len(chosen) == cached and shared < total:
        return discard(
            "too_short",
            f"all {cached} tokens before the last would be recomputed: a prefill does the same",
        )
    wanted = (
        None
        if translator is None or shared == total
        else hidden_layer(translator.receiver_features)
    )
    depth = 0 if shared == total else max(plan.layers, wanted or 0)
    if translator is not None and shared < total:
        own = 1 + max((i for i in range(total) if i not in translator.layers), default=-1)
        if own == total:
            return discard(
                "no_asset", f"this translator leaves out the last layer of {receiver.name}"
            )
        depth = max(depth, own if own > shared else 0)
    first = None
    if wanted is not None or depth > shared:
        first = first_layers(receiver, encoding.ids[:cached], depth, entering=wanted)
    feature = None if first is None or wanted is None else first.hidden
    return Request(snapshot, text, encoding, alignment, chosen, first, max(depth, shared), feature)
