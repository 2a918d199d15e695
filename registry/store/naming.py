"""Names for people: `SENDER..RECEIVER@TAG`, or the beginning of a digest."""

from __future__ import annotations

from kvbridge.errors import NotInStore, UsageError
from kvbridge.registry.store.catalog import Entry
from kvbridge.registry.store.records import DIGEST, Record
from kvbridge.registry.store.refs import Ref


def translator_ref(record: Record, tag: str) -> Ref:
    """The reference under which a translator is found by its two models.

    Raises UsageError for another kind.
    """
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
    named = [(entry.ref, entry) for entry in entries if entry.ref is not None]
    if len(name) >= 6 and DIGEST.fullmatch(name.ljust(64, "0")):
        # Several tags of one object are one asset: by digest, the first of them stands for all.
        matches = {
            ref.digest: entry for ref, entry in reversed(named) if ref.digest.startswith(name)
        }
    else:
        matches = {ref.key: entry for ref, entry in named if name in _names(ref)}
    if not matches:
        raise NotInStore(
            f"{name[:200]}: no such asset; expected SENDER..RECEIVER[@TAG] or a digest, "
            "see `kvbridge registry ls`"
        )
    if len(matches) > 1:
        digests = sorted(e.ref.digest[:12] for e in matches.values() if e.ref is not None)
        raise UsageError(
            f"{name[:200]}: stands for {len(matches)} assets ({', '.join(digests[:6])}); "
            "name one by its digest"
        )
    return next(iter(matches.values()))


def _names(ref: Ref) -> set[str]:
    """What people may call a reference; the tag `main` may be left out."""
    if not ref.label:
        return set()
    names = {f"{ref.label}@{ref.tag}"}
    return names | {ref.label} if ref.tag == "main" else names


def clean(text: str) -> str:
    """The text on one line, without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)
