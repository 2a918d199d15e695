"""What must hold before one request is translated: each check returns a refusal, or None."""

from __future__ import annotations

import torch

from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.align import Alignment, align_positions, align_spans
from kvbridge.cache.provenance import Decision, discard
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.geometry import KVGeometry, digest_text
from kvbridge.model.load import Encoding, Model


def check_models(sender: Model, receiver: Model) -> Decision | None:
    """Both models are as they were loaded. Looks at every weight's counter: once for all requests of a call."""
    for role, model in (("sender", sender), ("receiver", receiver)):
        if what := model.changed():
            return discard(
                "contract_mismatch",
                f"{role}: its {what} changed since it was loaded; load or wrap it again",
            )
    return None


def check_contract(
    snapshot: KVSnapshot, sender: Model, receiver: Model, translator: Translator | None
) -> Decision | None:
    """The snapshot is `sender`'s own cache, and the translator was fitted for both models exactly as loaded."""
    ours = sender.geometry
    if snapshot.geometry.digest != ours.digest:
        return discard(
            "wrong_pair",
            f"the snapshot is of {snapshot.geometry.model_id}, this bridge takes {ours.model_id} as it was loaded",
        )
    origin = snapshot.provenance
    if origin.depth > 0 or origin.fidelity != "exact":
        return discard(
            "lineage",
            f"the snapshot is {origin.fidelity}, {origin.depth} translations deep; expected a model's own cache",
        )
    if translator is None:
        return None
    for role, fitted, found in (
        ("sender", translator.sender, ours),
        ("receiver", translator.receiver, receiver.geometry),
    ):
        if fitted.digest != found.digest:
            return discard(
                "contract_mismatch",
                f"{role}: fitted for {fitted.model_id}, found {found.model_id}, which differs in {difference(fitted, found)}",
            )
    return None


def check_text(
    snapshot: KVSnapshot, text: str, encoding: Encoding, sender: Model, receiver: Model
) -> Decision | None:
    """The snapshot is of `text` or of its beginning, and both models have positions for it."""
    if digest_text(text[: snapshot.characters]) != snapshot.text_digest:
        return discard(
            "text_mismatch",
            f"the snapshot's {snapshot.characters} characters are not the beginning of this text",
        )
    if len(snapshot) == 0 or len(encoding) < 2:
        return discard(
            "too_short", f"{len(snapshot)} sender tokens, {len(encoding)} receiver tokens"
        )
    for model, count in ((receiver, len(encoding)), (sender, int(snapshot.positions[-1]) + 1)):
        if count > model.geometry.max_positions:
            return discard(
                "positions_out_of_range",
                f"{count} tokens, {model.name} has {model.geometry.max_positions} positions",
            )
    return None


def align_request(
    snapshot: KVSnapshot, encoding: Encoding, receiver: KVGeometry
) -> tuple[Alignment, bool]:
    """Alignment, and whether each covered token is the sender's token itself, at its own position.

    Equal tokenizers can still differ where the snapshot's text ends or its ids were generated: where most tokens
    then stand elsewhere, spans decide.
    """
    if snapshot.geometry.tokenizer_digest == receiver.tokenizer_digest:
        found = align_positions(snapshot.positions, torch.arange(len(encoding)))
        equal = ~found.covered | (snapshot.token_ids[found.index] == encoding.ids)
        covered = found.covered & (torch.cummin(equal.int(), dim=0).values == 1)
        if int(covered.sum()) * 2 >= int(found.covered.sum()):
            return Alignment(found.index, covered, found.exact_share), True
    return align_spans(snapshot.spans, encoding.spans), False


def difference(fitted: KVGeometry, found: KVGeometry) -> str:
    """Names of the contract's fields in which two geometries differ."""
    ours, theirs = fitted.to_json(), found.to_json()
    names = [n for n in ours if n not in ("model_id", "commit", "licence") and ours[n] != theirs[n]]
    return ", ".join(names)
