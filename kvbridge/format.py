"""Every file's name, suffix, schema and limit, stated once. Imports nothing of kvbridge and no
torch.

A folder format is a set of files that is published whole together with `SHA256SUMS`, whose digest
is the folder's. Readers refuse another schema, another set of files, and whatever exceeds a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUMS = "SHA256SUMS"
CARD = "README.md"
METADATA_KEY = "kvbridge"
"""The one key of the metadata of our safetensors files: what binds tensors to their description."""
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
"""Safetensors dtypes of weights and of cached values."""


@dataclass(frozen=True)
class FolderFormat:
    """One kind of published folder: the file that describes it, its tensors (none: an empty name),
    and other files.

    `suffix` is what its name adds to that of the asset it belongs to, where it stands beside one.
    """

    schema: str
    description: str
    tensors: str = ""
    others: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def required(self) -> frozenset[str]:
        """Names of all its files but SHA256SUMS, which comes with them."""
        return frozenset({self.description, self.tensors, *self.others} - {""})

    def beside(self, asset: Path) -> Path:
        """Where it stands, unless said otherwise, for the asset in that folder."""
        # "." has no name of its own.
        named = asset if asset.name else asset.absolute()
        return named.with_name(named.name + self.suffix)


TRANSLATOR = FolderFormat(
    "kvbridge.translator/1", "manifest.json", "weights.safetensors", others=(CARD,)
)
CONTROL_SET = FolderFormat(
    "kvbridge.controls/1", "manifest.json", "controls.safetensors", suffix=".controls"
)
CALIBRATION = FolderFormat(
    "kvbridge.calibration/4", "calibration.json", "gate.safetensors", suffix=".gate"
)
SIGNATURE = FolderFormat("kvbridge.signature/1", "statement.json", others=("model.sig",))
FOLDERS = {
    "translator": TRANSLATOR,
    "controls": CONTROL_SET,
    "calibration": CALIBRATION,
    "signature": SIGNATURE,
}
"""What a store can hold, by the name of its kind."""

SNAPSHOT_SCHEMA = "kvbridge.snapshot/1"
REF_SCHEMA = "kvbridge.ref/1"
REF_SUFFIX, REF_DRAFT, REF_ASIDE = ".json", "ref.json", ".aside"
CATALOG = "catalog.sqlite"

RUN_ROWS = "rows.jsonl"
RUN_META = "run.json"
RUN_SUMMARY = "summary.json"
RUN_REPORT = "report.html"
RUN_MARKDOWN = "summary.md"
RUN_FIT = "fit.json"
RUN_ASSET = "asset"
ROW_SCHEMA = 1
SUMMARY_SCHEMA = 1
SCREENING_FILE = "screening.json"
SCREENING_SCHEMA = 1
PREDICTORS_FILE = "predictors.json"
LATENCY_FILE = "latency.json"

MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 8
MAX_SUMS_BYTES = 1 << 16
MAX_CARD_BYTES = 4 << 20
MAX_REF_BYTES = 1 << 16
MAX_PARSE_BYTES = 256 << 20
"""What reading a description or a header may hold at once; measured: 203 MiB at worst."""
MAX_ASSET_TENSORS = 65_536
MAX_SNAPSHOT_TENSORS = 4096
MAX_CALIBRATION_TENSORS = 4096
MAX_FITTED_DOCUMENTS = 1 << 18
MAX_RUNGS = 16
"""Repair plans of one calibration."""
