"""The model card of an asset: what it translates, how it was fitted, its held-out scores beside
those of the control."""

from __future__ import annotations

import re

from huggingface_hub import ModelCardData

from kvbridge.asset.manifest import Manifest
from kvbridge.geometry import KVGeometry

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9]|[-._](?![-.])){0,95}"
_HUB_ID = re.compile(rf"{_PART}/{_PART}")
_ORDER = ["library_name", "base_model", "tags"]
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def model_card(manifest: Manifest) -> str:
    """The asset's README.md. Its metadata names base models only where they are on the Hub, at a
    resolved commit; folders and `demo:` models stand in the text alone."""
    body, sender, receiver = manifest.body, manifest.sender, manifest.receiver
    from_hub = [name for side in (sender, receiver) if (name := hub_id(side)) is not None]
    metadata = ModelCardData(
        library_name="kvbridge", base_model=from_hub or None, tags=["kv-cache"]
    )
    marks = "".join(f"\n**{mark}**\n" for mark in body["marks"])
    licences = [body["licences"][side] or "not stated" for side in ("sender", "receiver")]
    return f"""---
{metadata.to_yaml(original_order=_ORDER)}
---
# {sender.model_id} → {receiver.model_id}

Translates the KV cache of {_named(sender)} into that of {_named(receiver)}.
It is bound to exactly these weights, tokenizers and dtypes; kvbridge refuses it for any other.
{marks}
- Family: {body["family"]}, receiver features: {body["receiver_features"]}, \
{body["parameters"]:,} parameters.
- Data: {body["splits"]}, corpus digest `{body["corpus_digest"]}`.
- Licences of the base models: {licences[0]} (sender), {licences[1]} (receiver).

Held-out scores (test split; R² is the mean over dimensions that vary). \
Token-only is the control: a map from the same
receiver features that reads no sender. What the translation adds starts there.

{_scores(manifest)}
"""


def hub_id(geometry: KVGeometry) -> str | None:
    """`org/name` of a model that came from the Hub at a resolved commit; None for one from
    elsewhere."""
    name = geometry.model_id.partition("@")[0]
    return name if _COMMIT.fullmatch(geometry.commit) and _HUB_ID.fullmatch(name) else None


def _scores(manifest: Manifest) -> str:
    scores = manifest.scores
    layers = scores["layers"]
    control = scores.get("token_only") or {
        "k_r2": [None] * len(layers),
        "v_r2": [None] * len(layers),
    }
    columns = [
        scores["k_r2"],
        control["k_r2"],
        scores["v_r2"],
        control["v_r2"],
        scores["attention_cosine"],
    ]
    rows = [
        [str(layer), *map(_number, values)] for layer, *values in zip(layers, *columns, strict=True)
    ]
    if len(layers) > 1:
        rows.append(["mean", *(_number(_mean(values)) for values in columns)])
    head = [
        "receiver layer",
        "K R²",
        "K R², token-only",
        "V R²",
        "V R², token-only",
        "attention-output cosine",
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _named(geometry: KVGeometry) -> str:
    """A model, and the commit it was at where it has one."""
    commit = f" at `{geometry.commit}`" if geometry.commit else ""
    return f"`{geometry.model_id}`{commit}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
