"""Everything a fit may be told, checked at construction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbridge.cache.align import MIN_EXACT_SHARE
from kvbridge.cache.features import hidden_layer
from kvbridge.codec import check_fields
from kvbridge.duplicates import NEAR
from kvbridge.errors import UsageError, unknown_names
from kvbridge.fitting.families import FAMILIES
from kvbridge.fitting.select import SELECTORS
from kvbridge.fitting.solve import SOLVERS

PRECISIONS = ("float32", "float64")
WEIGHTS_DTYPES = ("float32", "bfloat16", "float16")
WITHOUT_EFFECT = ("memory_bytes", "spill_bytes", "spill_folder", "one_at_a_time", "force")
"""Settings that alter where and how a fit runs, never what comes out."""


@dataclass(frozen=True)
class FitConfig:
    """How a translator is fitted.

    family, selection, solver: keys of FAMILIES, SELECTORS, SOLVERS. `layers`: sender layers read by
    each receiver layer (all, where the sender has fewer). `receiver_features`: none, embeddings or
    hidden:m. `lambdas`: ridge candidates relative to the mean diagonal of the centred Gram, chosen
    per layer and stream on validation. `candidates`: only the sender layers nearest in relative
    depth are considered (None: all; for `nearest` it is `layers`): less memory and work.
    `max_tokens` per document, every `stride`-th token after the first `sinks` is a row. `precision`
    of products: float64, or float32 about a shift, accumulated in float64. Budgets in bytes, None:
    70 % of what is free. `force` goes on with too few rows and marks the asset. `fractions`: train,
    validation, test by document. `near_duplicates`: the share of a text that an earlier one holds
    from which on both are kept in one split (None: they are not looked for).
    """

    family: str = "full-head"
    layers: int = 8
    receiver_features: str = "embeddings"
    selection: str = "top-k"
    solver: str = "cholesky"
    lambdas: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    candidates: int | None = None
    max_tokens: int = 1024
    stride: int = 1
    sinks: int = 4
    batch_tokens: int = 8192
    precision: str = "float32"
    weights_dtype: str = "float32"
    one_at_a_time: bool = False
    memory_bytes: int | None = None
    spill_bytes: int | None = None
    spill_folder: str | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    cosine_documents: int = 16
    min_exact_share: float = MIN_EXACT_SHARE
    near_duplicates: float | None = NEAR
    force: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, known in (("family", FAMILIES), ("selection", SELECTORS), ("solver", SOLVERS)):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(unknown_names(f"a {name}", [str(value)], known))
        hidden_layer(self.receiver_features)
        for name in ("layers", "max_tokens", "stride", "batch_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"expected {name} ≥ 1, found {getattr(self, name)}")
        for name in ("sinks", "cosine_documents"):
            if getattr(self, name) < 0:
                raise UsageError(f"expected {name} ≥ 0, found {getattr(self, name)}")
        if self.candidates is not None and self.candidates < self.layers:
            raise UsageError(
                f"expected candidates ≥ layers ({self.layers}), found {self.candidates}"
            )
        if not self.lambdas or not all(0 < x < float("inf") for x in self.lambdas):
            raise UsageError(f"expected positive relative lambdas, found {self.lambdas}")
        if self.precision not in PRECISIONS or self.weights_dtype not in WEIGHTS_DTYPES:
            raise UsageError(
                "expected precision float32 or float64 and weights_dtype float32, bfloat16 or "
                f"float16, found {self.precision}, {self.weights_dtype}"
            )
        if self.near_duplicates is not None and not 0 < self.near_duplicates <= 1:
            raise UsageError(
                f"expected near_duplicates in (0, 1] or None, found {self.near_duplicates}"
            )
        if min(self.fractions) <= 0 or abs(sum(self.fractions) - 1) > 1e-6:
            raise UsageError(
                f"expected three positive fractions that sum to 1, found {self.fractions}"
            )

    def to_json(self) -> dict[str, Any]:
        """What alters the result, as plain JSON types; budgets and places do not."""
        body = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        for name in WITHOUT_EFFECT:
            del body[name]
        return body
