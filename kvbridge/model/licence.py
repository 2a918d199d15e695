"""The licence that a model's card states."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError


def licence_of(source: Path | None, commit: str) -> str | None:
    """`license:` in the card of a model folder, or of the Hub repository `source` at that commit.

    `other` gives way to `license_name:`. None where there is no card, where none can be had
    (offline, and not in the cache), or where it states none.
    """
    if source is None:
        return None
    card = source / "README.md"
    if not source.is_dir():
        try:
            card = Path(hf_hub_download(source.as_posix(), "README.md", revision=commit or None))
        except (HfHubHTTPError, OSError, ValueError):
            return None
    if not card.is_file():
        return None
    stated = {}
    for line in card.read_text("utf-8", "replace").splitlines()[:60]:
        name, colon, value = line.partition(":")
        if colon and name in ("license", "license_name"):
            stated[name] = value.strip().strip("'\"")
    licence = stated.get("license")
    if licence == "other":
        licence = stated.get("license_name") or licence
    return licence or None
