"""Signed statements: "version N of this pair's translator is the one with this digest", through
`model-signing`.

A signature is a folder of `statement.json`, `model.sig` and SHA256SUMS. What is signed is the
folder of the statement alone: the digest in it covers every byte of the asset.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.codec import read_json
from kvbridge.errors import Refused, UsageError
from kvbridge.files import publish_folder
from kvbridge.format import SIGNATURE
from kvbridge.registry.store.records import record_of

STATEMENT, (SIGNATURE_FILE,) = SIGNATURE.description, SIGNATURE.others


@dataclass(frozen=True)
class Statement:
    """What a signature vouches for. `version` only ever grows for a pair and tag."""

    translator: str
    version: int


def sign(digest: str, version: int, private_key: str | Path, path: str | Path) -> str:
    """Writes a signature of an asset's digest as folder `path` and returns the folder's digest.

    The key is a PEM file of an elliptic curve key. Raises UsageError for a negative version or
    where the package is missing.
    """
    if version < 0:
        raise UsageError(f"expected a version of 0 or more, found {version}")
    body = {"schema": SIGNATURE.schema, "translator": digest, "version": version}
    raw = (json.dumps(body, sort_keys=True) + "\n").encode()
    with tempfile.TemporaryDirectory() as work:
        folder, signature = Path(work) / "signed", Path(work) / SIGNATURE_FILE
        folder.mkdir()
        (folder / STATEMENT).write_bytes(raw)
        _package().signing.Config().use_elliptic_key_signer(private_key=str(private_key)).sign(
            folder, signature
        )
        return publish_folder(Path(path), {STATEMENT: raw, SIGNATURE_FILE: signature.read_bytes()})


def verify_statement(
    files: Mapping[str, Path], name: str, public_keys: Sequence[Path]
) -> Statement:
    """The statement, if one of the keys signed it; raises Refused otherwise. Reads each file
    once."""
    if not {STATEMENT, SIGNATURE_FILE} <= set(files):
        raise Refused(f"{name}: expected {STATEMENT} and {SIGNATURE_FILE}")
    if not public_keys:
        raise UsageError(
            "the policy asks for a signature and names no public key; add one to policy.json"
        )
    verifying = _package().verifying
    with tempfile.TemporaryDirectory() as work:
        folder, signature = Path(work) / "signed", Path(work) / SIGNATURE_FILE
        folder.mkdir()
        # This copy is verified, and the statement read from it: nobody changes it in between.
        (folder / STATEMENT).write_bytes(files[STATEMENT].read_bytes())
        signature.write_bytes(files[SIGNATURE_FILE].read_bytes())
        problems = []
        for key in public_keys:
            try:
                verifying.Config().use_elliptic_key_verifier(public_key=str(key)).verify(
                    folder, signature
                )
            except Exception as error:  # noqa: BLE001
                # The package documents no exceptions of its own: any failure of it is a no.
                problems.append(f"{key}: {str(error)[:120] or type(error).__name__}")
            else:
                return _statement(folder / STATEMENT, name)
    raise Refused(
        f"{name}: no trusted key signed it ({'; '.join(problems)[:400]}); "
        "ask its publisher for another"
    )


def _statement(path: Path, name: str) -> Statement:
    """The statement in a file whose signature holds; raises Refused where it is malformed."""
    body: Any = read_json(path)
    record, _ = record_of("signature", "", 0, body, name)
    version = body.get("version")
    if type(version) is not int or version < 0:
        raise Refused(f"{name}: expected a version number, found {version!r:.40}")
    return Statement(record.translator or "", version)


def _package() -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise UsageError(
            "signatures need the package model-signing: pip install 'kvbridge[sign]'"
        ) from error
    return model_signing
