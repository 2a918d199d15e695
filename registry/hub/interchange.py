"""Names that other routers use for a translator: the id of semantic-router's kv_mapper draft.

    {pair}-{family}-{dtype}-tp{degree}-h{KV heads}-s{sender commit}-t{receiver commit}-b{version}

An id pins both models' weights by full commit. A branch or tag is resolved before fitting and never
written.
"""

from __future__ import annotations

import re

from kvbridge.errors import UsageError
from kvbridge.registry.store.records import COMMIT, Record, Side

BUNDLE_VERSION = 1
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def mapper_id(
    record: Record,
    *,
    sender_tp: int = 1,
    receiver_tp: int = 1,
    bundle_version: int = BUNDLE_VERSION,
) -> str:
    """The id under which a router names this translator.

    Where the two sides differ in dtype, tensor-parallel degree or KV heads, both stand there, the
    sender's first (`h8x4`). Raises UsageError where a side has no full commit: such an asset has no
    id that others could resolve.
    """
    sender, receiver = record.sender, record.receiver
    if sender is None or receiver is None or record.family is None:
        raise UsageError(f"{record.digest}: expected a translator, found a {record.kind}")
    if min(sender_tp, receiver_tp, bundle_version) < 1:
        raise UsageError("expected tensor-parallel degrees and a bundle version of 1 or more")
    parts = [
        f"{_slug(sender)}-{_slug(receiver)}",
        record.family.replace("-", "_"),
        _both(_dtype(sender), _dtype(receiver)),
        "tp" + _both(str(sender_tp), str(receiver_tp)),
        "h" + _both(str(sender.kv_heads), str(receiver.kv_heads)),
        "s" + _commit(sender),
        "t" + _commit(receiver),
        f"b{bundle_version}",
    ]
    return "-".join(parts)


def _commit(side: Side) -> str:
    if not COMMIT.fullmatch(side.commit):
        raise UsageError(
            f"{side.model_id}: expected the full commit of its weights, "
            f"found {side.commit[:80] or 'none'!r}; "
            "fit from org/name@revision, which is resolved to a commit"
        )
    return side.commit


def _slug(side: Side) -> str:
    name = side.model_id.rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._]+", "-", name).strip("-") or "model"


def _dtype(side: Side) -> str:
    return _DTYPES.get(side.dtype, side.dtype)


def _both(sender: str, receiver: str) -> str:
    return sender if sender == receiver else f"{sender}x{receiver}"
