"""Whether every weight in a stream of bytes is finite, without torch and without holding a
tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbridge.headers import Header

_FLOAT: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
}
_BF16: np.dtype[Any] = np.dtype("<u2")
_BF16_EXPONENT = np.uint16(0x7F80)


class FiniteScan:
    """Fed the data bytes of a safetensors file in order (`update`), says whether NaN or infinity
    was among them.

    Holds at most 7 bytes between updates. `bad` is the dtype of the first offence, None while all
    is finite.
    """

    def __init__(self, header: Header) -> None:
        spans: list[tuple[str, int]] = []
        for dtype, _, (start, stop) in sorted(header.tensors.values(), key=lambda t: t[2]):
            if spans and spans[-1][0] == dtype:
                spans[-1] = (dtype, stop)
            elif stop > start:
                spans.append((dtype, stop))
        self._spans = spans
        self._at = 0
        self._rest = b""
        self.bad: str | None = None

    def update(self, data: bytes) -> None:
        """Scans the next bytes of the file's data part."""
        view = memoryview(data)
        while len(view) and self._spans:
            dtype, stop = self._spans[0]
            part = view[: stop - self._at]
            self._at += len(part)
            view = view[len(part) :]
            self._scan(dtype, part)
            if self._at == stop:
                self._spans.pop(0)
                self._rest = b""

    def _scan(self, dtype: str, part: memoryview) -> None:
        if dtype not in _FLOAT and dtype != "BF16":
            return
        kind = _FLOAT.get(dtype, _BF16)
        raw: bytes | memoryview = self._rest + bytes(part) if self._rest else part
        whole = len(raw) - len(raw) % kind.itemsize
        self._rest = bytes(raw[whole:])
        values = np.frombuffer(raw[:whole], dtype=kind)
        if dtype == "BF16":
            finite = not bool(np.any((values & _BF16_EXPONENT) == _BF16_EXPONENT))
        else:
            finite = bool(np.isfinite(values).all())
        if not finite and self.bad is None:
            self.bad = dtype
