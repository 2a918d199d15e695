"""Names for people: `SENDER..RECEIVER@TAG`, or the beginning of a digest."""

from __future__ import annotations

from kvbridge.errors import NotInStore, UsageError
from kvbridge.registry.store.catalog import Entry
from kvbridge.registry.store.records import DIGEST, Record
from kvbridge.registry.store.refs import Ref


def translator_ref(record: Record, tag: str) -> Ref:
    """The reference under which a translator is found by its two models; raises UsageError for
    another kind."""
    if record.sender is None or record.receiver is None:
        raise UsageError(f"{record.digest}: expected a translator, found a {record.kind}")
    scope = (record.sender.geometry, record.receiver.geometry)
    return Ref(
        "translator",
        scope,
        tag,
        record.digest,
        label=f"{record.sender.model_id}..{record.receiver.model_id}",
    )


def select(entries: list[Entry], name: str) -> Entry:
    """The one entry that `name` stands for; raises NotInStore for none, UsageError for several."""
    if DIGEST.fullmatch(name.ljust(64, "0")) and len(name) >= 6:
        found = {
            e.ref.digest: e
            for e in reversed(entries)
            if e.ref is not None and e.ref.digest.startswith(name)
        }
    else:
        found = {e.ref.key: e for e in entries if e.ref is not None and name in _names(e.ref)}
    if not found:
        raise NotInStore(
            f"{name[:200]}: no such asset; expected SENDER..RECEIVER[@TAG] or a digest, see `kvbridge registry ls`"
        )
    if len(found) > 1:
        digests = ", ".join(
            sorted(e.ref.digest[:12] for e in found.values() if e.ref is not None)[:6]
        )
        raise UsageError(
            f"{name[:200]}: stands for {len(found)} assets ({digests}); name one by its digest"
        )
    return next(iter(found.values()))


def _names(ref: Ref) -> set[str]:
    return (
        {f"{ref.label}@{ref.tag}", *([ref.label] if ref.tag == "main" else [])}
        if ref.label
        else set()
    )


def clean(text: str) -> str:
    """The text on one line, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)
