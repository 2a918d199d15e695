"""The table of an evaluation on a repository's card: of this very translator, with its controls,
the asset untouched."""

from __future__ import annotations

import json

import pytest

from kvbridge.errors import CorruptFile, Refused, UnknownSchema
from kvbridge.registry.hub import Hub
from kvbridge.registry.hub.evaluation import SHOWN_CONTROLS, evaluation
from kvbridge.registry.store import LocalStore
from tests.registry import assets

REPO = "org/pair"


def figures(recovery):
    return {
        "n": 12,
        "recovery": recovery,
        "recovery_ci": [recovery - 0.05, recovery + 0.05],
        "kl": None,
        "kl_ci": None,
    }


def summary(path, digest, *, change=None):
    """What `kvbridge eval run` writes, as far as the card reads it."""
    body = {
        "schema": 1,
        "pair": {
            "translator_digest": digest,
            "sender_digest": assets.geometry("org/sender").digest,
            "receiver_digest": assets.geometry("org/receiver", width=6).digest,
        },
        "n": 12,
        "documents": 7,
        "headline": "Cascade instead: <b>nothing</b>\x1b[2J gained",
        "verdict": "cascade instead",
        "conditions": {name: figures(0.25) for name in SHOWN_CONTROLS}
        | {"translated": figures(0.35)},
    }
    if change is not None:
        change(body)
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def published(store, asset):
    return store.publish(asset).digest


def test_every_condition_stands_in_the_table(store, published, tmp_path):
    text = evaluation(summary(tmp_path / "s.json", published), published, store.manifest(published))
    assert "| `translated` | 12 | 35 % [30, 40] | – |" in text
    assert all(f"| `{name}` | 12 | 25 % [20, 30] |" in text for name in SHOWN_CONTROLS)
    assert "12 items from 7 documents" in text
    assert "<b>" not in text
    assert "\x1b" not in text


CHANGES = {
    "another translator": (
        lambda b: b["pair"].update(translator_digest="0" * 64),
        Refused,
        "expected",
    ),
    "another sender": (
        lambda b: b["pair"].update(sender_digest="0" * 64),
        Refused,
        "sender_digest",
    ),
    "no pair": (lambda b: b.pop("pair"), CorruptFile, "summary.json"),
    "another schema": (lambda b: b.update(schema=2), UnknownSchema, "schema"),
    "a control less": (
        lambda b: b["conditions"].pop("token_only"),
        Refused,
        "token_only was not measured",
    ),
    "no translation": (
        lambda b: b["conditions"].pop("translated"),
        Refused,
        "translated was not measured",
    ),
    "a hostile name": (
        lambda b: b["conditions"].update({"a | b\n": figures(0.1)}),
        CorruptFile,
        "by name",
    ),
    "text for a number": (
        lambda b: b["conditions"]["native"].update(recovery="1 | x"),
        CorruptFile,
        "not a number",
    ),
    "a huge number": (
        lambda b: b["conditions"]["native"].update(recovery_ci=[1e308, 2]),
        CorruptFile,
        "not a number",
    ),
    "figures of another type": (
        lambda b: b["conditions"].update(native=[1]),
        CorruptFile,
        "figures of native",
    ),
    "a headline of another type": (lambda b: b.update(headline=None), CorruptFile, "headline"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_summary_that_does_not_belong_here(store, published, tmp_path, name):
    change, error, match = CHANGES[name]
    with pytest.raises(error, match=match) as raised:
        evaluation(
            summary(tmp_path / "s.json", published, change=change),
            published,
            store.manifest(published),
        )
    assert "\n" not in str(raised.value)


def test_the_repository_s_card_has_the_table_and_the_asset_its_own_card(
    store, published, hub, tmp_path
):
    section = evaluation(
        summary(tmp_path / "s.json", published), published, store.manifest(published)
    )
    plain = Hub(hub[0]).push(store, published, REPO)
    pushed = Hub(hub[0]).push(store, published, REPO, section=section)
    assert pushed.tag != plain.tag
    files = hub[1].repos[REPO].commits[pushed.commit]
    own = (store.path(published) / "README.md").read_bytes()
    assert files["asset/README.md"] == own
    assert files["README.md"].startswith(own)
    assert b"| `token_only` |" in files["README.md"]
    other = LocalStore(tmp_path / "other")
    assert Hub(hub[0]).pull(other, REPO, expect=published).digest == published
    assert (other.path(published) / "README.md").read_bytes() == own
    again = Hub(hub[0]).push(store, published, REPO)
    assert "asset/README.md" not in hub[1].repos[REPO].commits[again.commit]
    assert Hub(hub[0]).pull(LocalStore(tmp_path / "third"), REPO).digest == published
