"""The raw record of an evaluation: one JSON object per (item, task, condition) in an append-only
JSONL file.

Every figure shown anywhere is recomputed from these rows. A run that was cut continues: complete
rows stay, a torn last line is cut off, and `RowWriter.done` says what need not be run again.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Self, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kvbridge.codec import one_of
from kvbridge.errors import CorruptFile, EvalError, UnknownSchema
from kvbridge.eval.tasks import TASKS
from kvbridge.format import ROW_SCHEMA

STATUSES = ("ok", "failed", "excluded")
VERDICTS = ("use", "use_approximate", "discard")

RowKey = tuple[str, str, str]
Text = Annotated[str, Meta(min_length=1, description="be a non-empty string")]
Whole = Annotated[int, Meta(ge=0, description="be a whole number ≥ 0")]
Correct = Annotated[int, Meta(ge=0, le=1, description="be one of 0, 1 or null")]
TailTokens = Annotated[int, Meta(ge=1, description="be a whole number ≥ 1 or null")]
Figure = Annotated[float, Meta(description="be a number or null")]
ShareFigure = Annotated[float, Meta(ge=0, le=1, description="lie in [0, 1] or be null")]
"""What a field may hold, and the words for it in messages."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one condition did on one item. Fields that do not apply are None.

    `document` is the cluster the item is resampled with. `loss` is the sum of nats over the
    `tokens` scored tokens, which cover `characters` characters; `kl` is the mean KL(native ‖
    condition) over them, `agreement` the share with native's argmax. `chance` is what guessing
    scores on the item. `tail` is how many of the last tokens the receiver recomputed. `flops` and
    `ttft_ms` are what the condition alone needs up to the first token, `prefill_share` these FLOPs
    over the receiver's dense prefill's. `score` is the gate's predicted risk: lower is safer.
    """

    pair: Text
    item: Text
    document: Text
    task: Text
    condition: Text
    conversation: str | None = None
    loss: Figure | None = None
    tokens: Whole = 0
    characters: Whole = 0
    kl: Figure | None = None
    agreement: ShareFigure | None = None
    correct: Correct | None = None
    f1: ShareFigure | None = None
    chance: ShareFigure | None = None
    prefill_share: Figure | None = None
    ttft_ms: Figure | None = None
    flops: Whole | None = None
    tail: TailTokens | None = None
    verdict: Annotated[str, one_of(*VERDICTS)] | None = None
    score: Figure | None = None
    status: Annotated[str, one_of(*STATUSES)] = "ok"
    reason: str = ""
    schema: int = ROW_SCHEMA

    @property
    def key(self) -> RowKey:
        return (self.item, self.task, self.condition)

    def checked(self) -> Row:
        """This row, or, if a figure is NaN or infinite, an excluded row without figures that says
        which.

        Raises EvalError for values that no evaluation can produce: they are bugs of the runner, not
        data.
        """
        infinite = [name for name in FIGURES if _is_infinite(getattr(self, name))]
        for name, (kind, words) in CHECKED_FIELDS.items():
            value = getattr(self, name)
            # NumPy's floats are floats to Python, but not to msgspec.
            given = float(value) if isinstance(value, float) else value
            try:
                msgspec.convert(None if name in infinite else given, kind)
            except msgspec.ValidationError:
                raise EvalError(f"row {self.key}: {name} must {words}, found {value!r}") from None
        if self.task not in TASKS:
            raise EvalError(
                f"row {self.key}: task must be one of {', '.join(TASKS)}, found {self.task!r}"
            )
        if infinite:
            blank: dict[str, Any] = dict.fromkeys((*FIGURES, "correct"))
            status = "failed" if self.status == "failed" else "excluded"
            reason = self.reason or f"not finite: {', '.join(infinite)}"
            return replace(self, **blank, status=status, reason=reason)
        if self.loss is not None and (self.characters == 0 or self.loss < 0):
            raise EvalError(
                f"row {self.key}: {self.loss!r} nats over {self.characters} characters "
                "is not a possible loss"
            )
        return self


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _words(kind: Any) -> str:
    """What a field must do, out of its annotation; empty where that says nothing."""
    for part in (*getattr(kind, "__metadata__", ()), *get_args(kind)):
        words = part.description if isinstance(part, Meta) else _words(part)
        if words:
            return words
    return ""


_KINDS = get_type_hints(Row, include_extras=True)
CHECKED_FIELDS = {name: (kind, _words(kind)) for name, kind in _KINDS.items() if _words(kind)}
"""Fields with the type that checks each, and the words for it."""
FIGURES = tuple(
    name for name, kind in _KINDS.items() if kind in (Figure | None, ShareFigure | None)
)
_REQUIRED = {"schema", "pair", "item", "document", "task", "condition"}


def parse_row(line: bytes | str, where: str) -> Row:
    """A row from its JSON line, `where` naming it in errors: UnknownSchema, CorruptFile or
    EvalError."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"{where}: not a JSON object ({error}); move the file aside and run again"
        ) from None
    if not isinstance(record, dict):
        raise CorruptFile(f"{where}: expected a JSON object, found {type(record).__name__}")
    if record.get("schema") != ROW_SCHEMA:
        raise UnknownSchema(
            f"{where}: expected row schema {ROW_SCHEMA}, found {record.get('schema')!r}; "
            "write to a new folder"
        )
    if (missing := _REQUIRED - record.keys()) or (unknown := record.keys() - _KINDS.keys()):
        what = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
        raise CorruptFile(f"{where}: the row {what}")
    try:
        return Row(**record).checked()
    except EvalError as error:
        raise EvalError(f"{where}: {error}") from None


@dataclass(frozen=True)
class RowFile:
    """The rows of a file; `torn_bytes` is the length of the incomplete last line that was left
    out."""

    rows: list[Row] = field(default_factory=list)
    torn_bytes: int = 0


def read_rows(path: Path | str, *, pair: str | None = None, repair: bool = True) -> RowFile:
    """Read and check a rows file; with `repair` a torn last line is also cut off on disk.

    A last line that is a complete row but lacks its newline is kept and completed. Raises EvalError
    for a row of another pair and for a duplicate (item, task, condition), CorruptFile for damage
    before the last line, UnknownSchema.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise EvalError(
            f"{path} does not exist: run the evaluation first, it writes this file"
        ) from None
    complete, _, tail = data.rpartition(b"\n")
    torn = bool(tail) and not _is_json(tail)
    if torn and repair:
        with path.open("r+b") as file:
            file.truncate(len(data) - len(tail))
    elif tail and repair:
        with path.open("ab") as file:
            file.write(b"\n")
    lines = (
        (complete if torn or not tail else data).split(b"\n")
        if complete or (tail and not torn)
        else []
    )
    rows: list[Row] = []
    first_seen: dict[RowKey, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        row = parse_row(line, where)
        if row.pair != (expected := pair or (rows[0].pair if rows else row.pair)):
            raise EvalError(
                f"{where}: expected rows of pair {expected}, found {row.pair}; "
                "use another output folder"
            )
        if row.key in first_seen:
            raise EvalError(
                f"{where}: (item, task, condition) {row.key} is already on line "
                f"{first_seen[row.key]}"
            )
        first_seen[row.key] = number
        rows.append(row)
    return RowFile(rows, len(tail) if torn else 0)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class RowWriter:
    """Appends rows to a file, each flushed, each (item, task, condition) once; a context manager.

    Opening reads what is there, repairs a torn last line and takes an exclusive lock, so that two
    runs cannot interleave (EvalError). `done` holds the keys present, failed and excluded rows
    among them; `torn_bytes` what was cut off.
    """

    def __init__(self, path: Path | str, pair: str) -> None:
        self.path, self.pair = Path(path), pair
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8", newline="\n")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = read_rows(self.path, pair=pair)
        except BlockingIOError:
            self._file.close()
            raise EvalError(
                f"{self.path} is being written by another run; wait for it or use another folder"
            ) from None
        except BaseException:
            self._file.close()
            raise
        self.done: set[RowKey] = {row.key for row in before.rows}
        self.torn_bytes = before.torn_bytes

    def write(self, row: Row) -> Row:
        """Append `row` and flush; returns it as stored (a NaN makes it an excluded row). Raises
        EvalError."""
        return self.write_all([row])[0]

    def write_all(self, rows: Iterable[Row]) -> list[Row]:
        """Append several rows in one piece, so that a killed run seldom leaves part of an item;
        returns them as stored. Raises EvalError, then none of them is written."""
        stored: dict[RowKey, Row] = {}
        for row in rows:
            if row.pair != self.pair:
                raise EvalError(f"expected a row of pair {self.pair}, found {row.pair}")
            if row.key in self.done or row.key in stored:
                raise EvalError(f"(item, task, condition) {row.key} is already in {self.path}")
            stored[row.key] = row.checked()
        lines = (
            json.dumps(asdict(r), ensure_ascii=False, allow_nan=False, sort_keys=True)
            for r in stored.values()
        )
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        self.done |= stored.keys()
        return list(stored.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
