"""The raw record of an evaluation: one JSON object per (item, task, condition) in an append-only JSONL file.

Every figure shown anywhere is recomputed from these rows. A run that was cut continues: complete rows stay,
a torn last line is cut off, and `RowWriter.done` says what need not be run again.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvbridge.errors import CorruptFile, EvalError, UnknownSchema
from kvbridge.format import ROW_SCHEMA

TASKS = ("continuation", "recall", "multiple_choice", "qa")
STATUSES = ("ok", "failed", "excluded")
VERDICTS = ("use", "use_approximate", "discard")

Key = tuple[str, str, str]

_SHARES = ("agreement", "f1", "chance")
_FLOATS = ("loss", "kl", "agreement", "f1", "chance", "prefill_share", "ttft_ms", "score")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one condition did on one item. Fields that do not apply are None.

    `document` is the cluster the item is resampled with. `loss` is the sum of nats over the `tokens` scored
    tokens, which cover `characters` characters; `kl` is the mean KL(native ‖ condition) over them,
    `agreement` the share with native's argmax. `chance` is what guessing scores on the item.
    `tail` is how many of the last tokens the receiver recomputed. `flops` and `ttft_ms` are what the condition
    alone needs up to the first token, `prefill_share` these FLOPs over the receiver's dense prefill's.
    `score` is the gate's predicted risk: lower is safer.
    """

    pair: str
    item: str
    document: str
    task: str
    condition: str
    conversation: str | None = None
    loss: float | None = None
    tokens: int = 0
    characters: int = 0
    kl: float | None = None
    agreement: float | None = None
    correct: int | None = None
    f1: float | None = None
    chance: float | None = None
    prefill_share: float | None = None
    ttft_ms: float | None = None
    flops: int | None = None
    tail: int | None = None
    verdict: str | None = None
    score: float | None = None
    status: str = "ok"
    reason: str = ""
    schema: int = ROW_SCHEMA

    @property
    def key(self) -> Key:
        return (self.item, self.task, self.condition)

    def checked(self) -> Row:
        """This row, or, if a figure is NaN or infinite, an excluded row without figures that says which.

        Raises EvalError for values that no evaluation can produce: they are bugs of the runner, not data.
        """
        for name in ("pair", "item", "document", "condition"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise EvalError(
                    f"row {self.key}: {name} must be a non-empty string, found {getattr(self, name)!r}"
                )
        _one_of(self, "task", TASKS)
        _one_of(self, "status", STATUSES)
        _one_of(self, "verdict", (*VERDICTS, None))
        _one_of(self, "correct", (0, 1, None))
        for name in ("tokens", "characters"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise EvalError(
                    f"row {self.key}: {name} must be a whole number ≥ 0, found {value!r}"
                )
        for name, least in (("tail", 1), ("flops", 0)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise EvalError(
                    f"row {self.key}: {name} must be a whole number ≥ {least} or null, found {value!r}"
                )
        for name in _FLOATS:
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int | float) or isinstance(value, bool)
            ):
                raise EvalError(f"row {self.key}: {name} must be a number or null, found {value!r}")
        bad = [
            name
            for name in _FLOATS
            if (value := getattr(self, name)) is not None and not math.isfinite(value)
        ]
        if bad:
            reason = self.reason or f"not finite: {', '.join(bad)}"
            blank = dict.fromkeys((*_FLOATS, "correct"))
            return replace(
                self,
                **blank,  # type: ignore[arg-type]
                status="failed" if self.status == "failed" else "excluded",
                reason=reason,
            )
        for name in _SHARES:
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise EvalError(f"row {self.key}: {name} must lie in [0, 1], found {value!r}")
        if self.loss is not None and (self.characters == 0 or self.loss < 0):
            raise EvalError(
                f"row {self.key}: {self.loss!r} nats over {self.characters} characters is not a possible loss"
            )
        return self


def _one_of(row: Row, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(row, name)
    if isinstance(value, bool) or value not in allowed:
        raise EvalError(
            f"row {row.key}: {name} must be one of {', '.join(map(str, allowed))}, found {value!r}"
        )


_NAMES = {f.name for f in fields(Row)}
_REQUIRED = {"schema", "pair", "item", "document", "task", "condition"}


def parse_row(line: bytes | str, where: str) -> Row:
    """A row from its JSON line, `where` naming it in errors: UnknownSchema, CorruptFile or EvalError."""
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
            f"{where}: expected row schema {ROW_SCHEMA}, found {record.get('schema')!r}; write to a new folder"
        )
    if (missing := _REQUIRED - record.keys()) or (unknown := record.keys() - _NAMES):
        what = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
        raise CorruptFile(f"{where}: the row {what}")
    try:
        return Row(**record).checked()
    except EvalError as error:
        raise EvalError(f"{where}: {error}") from None


@dataclass(frozen=True)
class RowFile:
    """The rows of a file; `torn_bytes` is the length of the incomplete last line that was left out."""

    rows: list[Row] = field(default_factory=list)
    torn_bytes: int = 0


def read_rows(path: Path | str, *, pair: str | None = None, repair: bool = True) -> RowFile:
    """Read and check a rows file; with `repair` a torn last line is also cut off on disk.

    A last line that is a complete row but lacks its newline is kept and completed. Raises EvalError for a
    row of another pair and for a duplicate (item, task, condition), CorruptFile for damage before the last
    line, UnknownSchema.
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
    first_seen: dict[Key, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        row = parse_row(line, where)
        if row.pair != (expected := pair or (rows[0].pair if rows else row.pair)):
            raise EvalError(
                f"{where}: expected rows of pair {expected}, found {row.pair}; use another output folder"
            )
        if row.key in first_seen:
            raise EvalError(
                f"{where}: (item, task, condition) {row.key} is already on line {first_seen[row.key]}"
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

    Opening reads what is there, repairs a torn last line and takes an exclusive lock, so that two runs
    cannot interleave (EvalError). `done` holds the keys present, failed and excluded rows among them;
    `torn_bytes` what was cut off.
    """

    def __init__(self, path: Path | str, pair: str) -> None:
        self.path, self.pair = Path(path), pair
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8", newline="\n")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = read_rows(self.path, pair=pair)
        except BlockingIOError:
            self._file.close()
            raise EvalError(
                f"{self.path} is being written by another run; wait for it or use another folder"
            ) from None
        except BaseException:
            self._file.close()
            raise
        self.done: set[Key] = {row.key for row in found.rows}
        self.torn_bytes = found.torn_bytes

    def write(self, row: Row) -> Row:
        """Append `row` and flush; returns it as stored (a NaN makes it an excluded row). Raises EvalError."""
        return self.write_all([row])[0]

    def write_all(self, rows: Iterable[Row]) -> list[Row]:
        """Append several rows in one piece, so that a killed run seldom leaves part of an item; returns them as stored.
        Raises EvalError, then none of them is written."""
        stored: dict[Key, Row] = {}
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
