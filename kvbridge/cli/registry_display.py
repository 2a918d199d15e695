"""The store's tables for people and documents for machines. Names from assets are shown without
control characters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbridge.errors import CorruptFile, NotInStore, Refused, UsageError
from kvbridge.registry.hub.interchange import mapper_id
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.catalog import Entry
from kvbridge.registry.store.collect import Plan
from kvbridge.registry.store.kinds import folder_files, kind_of
from kvbridge.registry.store.naming import clean
from kvbridge.registry.store.refs import Ref


def is_bound(folder: Path) -> bool:
    """Whether a folder holds something that is bound to a translator."""
    try:
        return kind_of(frozenset(folder_files(folder))) != "translator"
    except Refused:
        return False


def ref_json(ref: Ref) -> dict[str, Any]:
    """Plain JSON types."""
    return {**asdict(ref), "scope": list(ref.scope)}


def entry_json(entry: Entry) -> dict[str, Any]:
    """Plain JSON types: the name, the record, and what is wrong."""
    return {
        "ref": None if entry.ref is None else ref_json(entry.ref),
        "record": None if entry.record is None else entry.record.to_json(),
        "problem": entry.problem,
    }


def name_of(entry: Entry) -> str:
    """`SENDER..RECEIVER@TAG`, or the kind and what it is bound to, and its tag."""
    ref = entry.ref
    return "an unreadable name" if ref is None else clean(f"{ref.label}@{ref.tag}")


def table(home: Path, entries: list[Entry]) -> RenderableType:
    """One row per name."""
    if not entries:
        return Text(f"{home}: nothing here yet; `kvbridge registry add DIR` puts a fitted asset in")
    shown = Table(box=None, pad_edge=False)
    columns = {
        "asset": "left",
        "kind": "left",
        "digest": "left",
        "size": "right",
        "V R²": "right",
        "token-only": "right",
    }
    for column, side in columns.items():
        shown.add_column(column, justify=side, overflow="fold")  # type: ignore[arg-type]
    shown.add_column("family")
    shown.add_column("")
    for entry in entries:
        record, ref = entry.record, entry.ref
        shown.add_row(
            Text(name_of(entry)),
            "?" if ref is None else ref.kind,
            "?" if ref is None else ref.digest[:12],
            "–" if record is None else size(record.bytes),
            *(
                number(((record and record.scores) or {}).get(key))
                for key in ("v_r2", "token_only_v_r2")
            ),
            Text(
                ""
                if record is None or record.family is None
                else clean(f"{record.family}, {record.receiver_features}")
            ),
            Text("" if entry.problem is None else clean(entry.problem)[:80], style="red"),
        )
    return shown


def details(store: LocalStore, entry: Entry) -> dict[str, Any]:
    """Everything about one asset; raises what is wrong with it."""
    if entry.ref is None or entry.record is None:
        raise NotInStore(f"{name_of(entry)}: {entry.problem}; publish or pull it again")
    try:
        identity: dict[str, Any] = {"mapper_id": mapper_id(entry.record), "mapper_id_problem": None}
    except UsageError as error:
        identity = {"mapper_id": None, "mapper_id_problem": str(error)}
    body = entry_json(entry) | identity | {"path": str(store.path(entry.ref.digest))}
    body["attached"] = [ref_json(ref) for ref in store.bound(entry.ref.digest)]
    if entry.record.kind == "translator":
        try:
            manifest = store.manifest(entry.ref.digest)
        except CorruptFile as error:
            raise CorruptFile(f"{error}; run `kvbridge registry verify`") from error
        body["corpus_digest"] = manifest.body["corpus_digest"]
        body["marks"] = manifest.body["marks"]
    return body


def details_table(body: dict[str, Any]) -> RenderableType:
    """`details` for people."""
    record, rows = body["record"], Table(box=None, pad_edge=False, show_header=False)
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for side in ("sender", "receiver"):
        model = record[side]
        if model is not None:
            rows.add_row(side, Text(clean(f"{model['model_id']} {model['commit']}".strip())))
            rows.add_row(
                "",
                Text(
                    clean(
                        f"{model['dtype']}, {model['kv_heads']} KV heads, licence "
                        f"{model['licence'] or 'not stated'}"
                    )
                ),
            )
    rows.add_row("digest", record["digest"])
    rows.add_row("path", Text(body["path"]))
    rows.add_row("size", size(record["bytes"]))
    if record["translator"]:
        rows.add_row("bound to", record["translator"])
    if record["family"]:
        rows.add_row(
            "map",
            Text(
                clean(
                    f"{record['family']}, receiver features {record['receiver_features']}, "
                    f"{record['parameters']:,} parameters"
                )
            ),
        )
    for name, value in (record["scores"] or {}).items():
        rows.add_row(name, number(value))
    if body["ref"]["origin"]:
        rows.add_row("origin", Text(clean(body["ref"]["origin"])))
    rows.add_row(
        "mapper id", Text(clean(body["mapper_id"] or f"none: {body['mapper_id_problem']}"))
    )
    for ref in body["attached"]:
        rows.add_row("attached", f"{ref['kind']} {ref['tag']} {ref['digest'][:12]}")
    for mark in body.get("marks", ()):
        rows.add_row("mark", Text(clean(mark)))
    return rows


def verified(results: list[dict[str, Any]]) -> RenderableType:
    """One line per object."""
    return Group(
        *(
            Text(
                f"{'ok ' if r['problem'] is None else 'BAD'}  {(r['digest'] or '?')[:12]}  "
                f"{clean(r['name'])}"
            )
            for r in results
        )
    )


def plan(collected: Plan, dry_run: bool) -> RenderableType:
    """One line per sort of thing, and the bytes."""
    verb = "would delete" if dry_run else "deleted"
    counts = {
        "object(s) without a name": collected.objects,
        "abandoned write(s)": collected.stages,
        "piece(s) of trash": collected.trash,
        "name(s) of attachments without a translator": collected.attachments,
    }
    lines = [f"{verb} {len(what)} {name}" for name, what in counts.items() if what]
    if collected.damaged:
        lines.append(
            f"kept all objects: {', '.join(collected.damaged[:3])} cannot be read; publish that "
            "asset again or delete the file"
        )
    return Text(
        "\n".join([*lines, f"{size(collected.bytes)} in all" if lines else "nothing to delete"])
    )


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def number(value: float | None) -> str:
    """A score with three decimals."""
    return "–" if value is None else f"{value:.3f}"
