"""Signatures: verified where a policy asks, and an older signed version is refused."""

from __future__ import annotations

import json
import threading

import pytest

from kvbridge.errors import Refused, UsageError
from kvbridge.registry.hub import Hub
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.admission import AdmissionPolicy
from kvbridge.registry.store.kinds import folder_files
from kvbridge.registry.store.refs import Refs
from kvbridge.registry.store.signing import sign, verify_statement

pytest.importorskip("model_signing", reason="needs the package model-signing (extra `sign`)")


@pytest.fixture
def keys(tmp_path):
    """Private and public PEM files of two keys."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pairs = []
    for name in ("ours", "theirs"):
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        plain = serialization.NoEncryption()
        private.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        )
        spki = serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, spki))
        pairs.append((private, public))
    return pairs


@pytest.fixture
def strict(tmp_path, keys):
    return LocalStore(
        tmp_path / "strict", AdmissionPolicy(require_signature=True, public_keys=(keys[0][1],))
    )


def test_signed_assets_enter_and_others_do_not(store, strict, asset, newer, keys, tmp_path):
    digest, other = store.publish(asset).digest, store.publish(newer).digest
    sign(digest, 2, keys[0][0], tmp_path / "good")
    sign(digest, 2, keys[1][0], tmp_path / "foreign")
    with pytest.raises(Refused, match="none was given"):
        strict.publish(asset)
    with pytest.raises(Refused, match="no trusted key"):
        strict.publish(asset, signature=tmp_path / "foreign")
    with pytest.raises(Refused, match=f"expected {other}"):
        strict.publish(newer, signature=tmp_path / "good")
    assert strict.entries() == []
    ref = strict.publish(asset, signature=tmp_path / "good")
    assert ref.signed_version == 2
    assert strict.attached(digest, "signature") is not None


def test_an_older_version_is_refused_and_a_newer_one_replaces(
    store, strict, asset, newer, keys, tmp_path
):
    old, new = store.publish(asset).digest, store.publish(newer).digest
    for digest, version, name in ((old, 1, "v1"), (new, 2, "v2"), (old, 3, "v3")):
        sign(digest, version, keys[0][0], tmp_path / name)
    strict.publish(asset, signature=tmp_path / "v1")
    strict.publish(newer, signature=tmp_path / "v2")
    with pytest.raises(Refused, match="version 1 is older than 2"):
        strict.publish(asset, signature=tmp_path / "v1")
    assert strict.entries()[0].ref.digest == new
    assert strict.publish(asset, signature=tmp_path / "v3").signed_version == 3


def test_of_two_signed_writers_the_newer_version_stays(
    store, strict, asset, newer, keys, tmp_path, monkeypatch
):
    """The older one has looked at the version that stands, the newer one comes, the older one
    commits."""
    for path, version in ((asset, 1), (newer, 2)):
        sign(store.publish(path).digest, version, keys[0][0], tmp_path / f"v{version}")
    other = LocalStore(strict.home, strict.policy)
    late = threading.Thread(
        target=other.publish, args=(newer,), kwargs={"signature": tmp_path / "v2"}
    )
    real = Refs.draft

    def draft(self, ref, stage):
        if ref.signed_version == 1:
            late.start()
            late.join(0.5)
        real(self, ref, stage)

    monkeypatch.setattr(Refs, "draft", draft)
    strict.publish(asset, signature=tmp_path / "v1")
    late.join()
    (entry,) = (e for e in strict.entries() if e.ref.kind == "translator")
    assert entry.ref.signed_version == 2


def test_a_changed_statement_is_not_signed(store, asset, keys, tmp_path):
    digest = store.publish(asset).digest
    sign(digest, 1, keys[0][0], tmp_path / "s")
    statement = tmp_path / "s" / "statement.json"
    statement.write_text(json.dumps({**json.loads(statement.read_text()), "version": 9}))
    with pytest.raises(Refused, match="no trusted key"):
        verify_statement(folder_files(tmp_path / "s"), "s", [keys[0][1]])
    with pytest.raises(UsageError, match="names no public key"):
        verify_statement(folder_files(tmp_path / "s"), "s", [])


def test_signatures_travel_through_the_hub(store, strict, asset, keys, tmp_path, hub):
    ref = store.publish(asset)
    Hub(hub[0]).push(store, ref.digest, "org/unsigned")
    sign(ref.digest, 4, keys[0][0], tmp_path / "s")
    store.attach(tmp_path / "s")
    Hub(hub[0]).push(store, ref.digest, "org/signed")
    with pytest.raises(Refused, match="none was given"):
        Hub(hub[0]).pull(strict, "org/unsigned")
    assert Hub(hub[0]).pull(strict, "org/signed").signed_version == 4
