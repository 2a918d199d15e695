"""The model card: metadata only for what the Hub knows, scores beside those of the control."""

from __future__ import annotations

import json

import pytest

from kvbridge.asset.card import hub_id, model_card
from kvbridge.asset.manifest import Manifest
from tests.registry import assets

COMMIT = "a" * 40


def card(
    sender="org/sender", receiver="org/receiver", *, commits=(COMMIT, COMMIT), change=None
) -> str:
    sender_geometry, receiver_geometry = (
        assets.geometry(sender, commit=commits[0]),
        assets.geometry(receiver, layers=3, commit=commits[1]),
    )
    body = json.loads(
        assets.files(sender_geometry, receiver_geometry, change=change)["manifest.json"]
    )
    return model_card(Manifest.from_json(body, "x"))


def metadata(text: str) -> list[str]:
    return text.split("---\n")[1].splitlines()


def test_both_models_with_their_commits_and_licences():
    text = card("org/sender@v1.0")
    assert metadata(text) == [
        "library_name: kvbridge",
        "base_model:",
        "- org/sender",
        "- org/receiver",
        "tags:",
        "- kv-cache",
    ]
    assert f"`org/sender@v1.0` at `{COMMIT}`" in text
    assert "apache-2.0 (sender), apache-2.0 (receiver)" in text


@pytest.mark.parametrize(
    "name",
    ["demo:sender", "models/llama/8b", "/models/x", "x\n- org/other", "org/a--b", "org/..", ""],
)
def test_what_is_not_on_the_hub_is_named_in_the_text_alone(name):
    assert metadata(card(name)) == [
        "library_name: kvbridge",
        "base_model:",
        "- org/receiver",
        "tags:",
        "- kv-cache",
    ]
    assert f"`{name}`" in card(name)


def test_a_folder_that_looks_like_an_id_has_no_commit():
    assert hub_id(assets.geometry("models/llama")) is None
    assert "base_model" not in card("models/llama", "models/gemma", commits=("", ""))


def test_scores_stand_beside_the_control_s():
    text = card(change=lambda body: body["scores"].update(v_r2=[0.6, 0.8]))
    assert (
        "| receiver layer | K R² | K R², token-only | V R² | V R², token-only "
        "| attention-output cosine |" in text
    )
    assert "| 1 | 0.700 | 0.500 | 0.600 | 0.250 | 0.900 |" in text
    assert "| mean | 0.700 | 0.500 | 0.700 | 0.250 | 0.900 |" in text


def test_an_older_asset_has_no_control_scores_and_says_so():
    text = card(change=lambda body: body["scores"].pop("token_only"))
    assert "| 1 | 0.700 | – | 0.600 | – | 0.900 |" in text
