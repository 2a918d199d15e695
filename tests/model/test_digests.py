"""Digests change with what alters a cached value, and with nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, normalizers, pre_tokenizers

import kvbridge
from kvbridge import KVGeometry
from kvbridge.errors import CorruptFile
from kvbridge.geometry import digest_json, digest_parts, digest_text
from kvbridge.model.digests import CACHE_NAME, adapter_names, tensor_digest, tokenizer_digest
from tests.models import CONFIGS, TOKENIZERS, tiny, tiny_causal, tiny_tokenizer, wrapped


def test_tokenizers_differ():
    digests = {tokenizer_digest(tiny_tokenizer(kind)) for kind in TOKENIZERS}
    assert len(digests) == len(TOKENIZERS)
    assert tokenizer_digest(tiny_tokenizer()) == tokenizer_digest(tiny_tokenizer())


def test_settings_that_alter_no_id_do_not_count(tmp_path):
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(7)
    tokenizer.backend_tokenizer.enable_padding(length=12)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_digest(tokenizer) == before
    fresh = tiny_tokenizer()
    fresh.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    assert tokenizer_digest(kvbridge.model.load.AutoTokenizer.from_pretrained(tmp_path)) == before


def added(tokenizer):
    tokenizer.add_tokens([AddedToken("<think>", special=True)])


def normalised(tokenizer):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def split_otherwise(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_bos(tokenizer):
    tokenizer.backend_tokenizer.post_processor = tiny_tokenizer(
        "bos"
    ).backend_tokenizer.post_processor


@pytest.mark.parametrize("change", [added, normalised, split_otherwise, with_bos])
def test_what_alters_ids_counts(change):
    tokenizer = tiny_tokenizer()
    before = tokenizer_digest(tokenizer)
    change(tokenizer)
    assert tokenizer_digest(tokenizer) != before


@pytest.mark.parametrize("part", ["merges", "vocab"])
def test_model_of_the_tokenizer_counts(part):
    tokenizer = tiny_tokenizer()
    body = json.loads(tokenizer.backend_tokenizer.to_str())
    if part == "merges":
        body["model"]["merges"][0], body["model"]["merges"][1] = (
            body["model"]["merges"][1],
            body["model"]["merges"][0],
        )
    else:
        first, second = list(body["model"]["vocab"])[10:12]
        vocabulary = body["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: json.dumps(body)))
    assert tokenizer_digest(other) != tokenizer_digest(tokenizer)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_any_element_of_any_tensor_changes_its_layers_digest(kind):
    model = tiny_causal(kind)
    before = wrapped(model).geometry
    assert wrapped(tiny_causal(kind)).geometry.digest == before.digest
    decoder_layers = wrapped(model).layers
    owner = {id(p): i for i, layer in enumerate(decoder_layers) for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if ".0." not in name and ".3." not in name and id(parameter) in owner:
            continue
        flat = parameter.view(-1)
        at = len(flat) // 2
        kept = flat[at].clone()
        flat[at] += 1e-3
        after = wrapped(model).geometry
        flat[at] = kept
        assert after.weights_digest != before.weights_digest, name
        assert after.digest != before.digest, name
        changed = [i for i in range(4) if after.layers[i] != before.layers[i]]
        index = owner.get(id(parameter))
        assert changed == ([] if index is None else [index]), name
        enters = "embed" in name or "wte" in name or "wpe" in name
        assert (after.embedding_digest != before.embedding_digest) == enters, name
    assert wrapped(model).geometry.digest == before.digest


@torch.no_grad()
def test_layers_that_change_places_are_noticed():
    model = tiny_causal("llama")
    before = wrapped(model).geometry
    model.model.layers[1].mlp, model.model.layers[2].mlp = (
        model.model.layers[2].mlp,
        model.model.layers[1].mlp,
    )
    assert wrapped(model).geometry.weights_digest != before.weights_digest


def test_tensor_digests():
    a = torch.arange(6, dtype=torch.float32)
    same = [a, a.clone(), a.reshape(2, 3).T.contiguous().T.reshape(6)]
    assert len({tensor_digest(t) for t in same}) == 1
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert tensor_digest(transposed) == tensor_digest(transposed.contiguous())
    others = [
        a,
        a.reshape(2, 3),
        a.reshape(3, 2),
        a.int(),
        a.bfloat16(),
        a[:0],
        a[:0].int(),
        torch.tensor(1.0),
    ]
    assert len({tensor_digest(t) for t in others}) == len(others)
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


def test_parts_do_not_run_together():
    assert digest_parts([b"ab", b"c"]) != digest_parts([b"a", b"bc"])
    assert digest_parts([]) != digest_parts([b""])
    assert digest_text("é") != digest_text("e\u0301")
    assert digest_text("\ud800") != digest_text("\ufffd")
    assert digest_json({"b": 1, "a": [1.5, None]}) == digest_json({"a": [1.5, None], "b": 1})
    with pytest.raises(ValueError):
        digest_json({"a": float("nan")})


@pytest.mark.parametrize("kind", CONFIGS)
def test_geometry_through_json(kind):
    geometry = tiny(kind).geometry
    again = KVGeometry.from_json(json.loads(json.dumps(geometry.to_json())))
    assert again == geometry
    assert again.digest == geometry.digest


def test_names_do_not_alter_the_digest_and_everything_else_does():
    geometry = tiny("llama").geometry
    assert replace(geometry, model_id="x", commit="y", licence="z").digest == geometry.digest
    changes = {
        "dtype": "bfloat16",
        "hidden_size": 1,
        "attention_heads": 9,
        "max_positions": 7,
        "vocabulary": 3,
        "layers": geometry.layers[:-1],
        "tokenizer_digest": "t",
        "rope_digest": "r",
        "config_digest": "c",
        "embedding_digest": "e",
        "weights_digest": "w",
        "adapters": ("a",),
        "architecture": "b",
    }
    digests = {replace(geometry, **{k: v}).digest for k, v in changes.items()} | {geometry.digest}
    assert len(digests) == len(changes) + 1


@pytest.mark.parametrize("damage", ["missing", "extra", "type", "list", "none", "window", "flag"])
def test_damaged_geometry_is_corrupt(damage):
    body = tiny("llama").geometry.to_json()
    if damage == "missing":
        del body["rope_digest"]
    elif damage == "extra":
        body["more"] = "x"
    elif damage == "type":
        body["hidden_size"] = "48"
    elif damage == "window":
        body["layers"][0]["window_tokens"] = 1.5
    elif damage == "flag":
        body["layers"][0]["streams"][0]["rotated"] = 1
    else:
        body = [body] if damage == "list" else None
    with pytest.raises(CorruptFile):
        KVGeometry.from_json(body)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_causal("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def hashed(monkeypatch):
    """Counts tensors that are hashed."""
    calls = []
    original = kvbridge.model.digests.tensor_digest
    monkeypatch.setattr(
        "kvbridge.model.digests.tensor_digest", lambda t: calls.append(1) or original(t)
    )
    return calls


def test_cached_beside_the_files(folder, monkeypatch):
    first = kvbridge.load(folder).geometry
    assert first.weights_digest == tiny("llama").geometry.weights_digest
    calls = hashed(monkeypatch)
    assert kvbridge.load(folder).geometry == first
    assert calls == [], "valid: nothing is hashed again"
    assert not [
        p for p in folder.iterdir() if p.name.startswith(CACHE_NAME) and p.name != CACHE_NAME
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b'{"key": 1}',
        b'{"layers": 3, "embedding": "x", "whole": "y"}',
    ],
)
def test_a_corrupt_digest_cache_is_hashed_again(folder, content, monkeypatch):
    first = kvbridge.load(folder).geometry
    (folder / CACHE_NAME).write_bytes(content)
    calls = hashed(monkeypatch)
    assert kvbridge.load(folder).geometry == first
    assert calls
    assert json.loads((folder / CACHE_NAME).read_bytes())["whole"] == first.weights_digest


@pytest.mark.parametrize("field", ["whole", "layers", "embedding", "key"])
def test_a_damaged_entry_is_hashed_again(folder, field, monkeypatch):
    first = kvbridge.load(folder).geometry
    body = json.loads((folder / CACHE_NAME).read_bytes())
    body[field] = body[field][:-1] if isinstance(body[field], (str, list)) else None
    (folder / CACHE_NAME).write_text(json.dumps(body))
    calls = hashed(monkeypatch)
    assert kvbridge.load(folder).geometry == first
    assert calls


@torch.no_grad()
def test_changed_files_are_hashed_again(folder):
    first = kvbridge.load(folder).geometry
    model = tiny_causal("llama")
    model.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(folder)
    second = kvbridge.load(folder).geometry
    assert [a == b for a, b in zip(first.layers, second.layers, strict=True)] == [
        True,
        True,
        False,
        True,
    ]


def test_another_dtype_has_a_cache_entry_of_its_own_and_the_same_weights(folder, monkeypatch):
    """Weights are hashed in the dtype they are stored in: loading them wider or narrower changes
    the cache's dtype only."""
    shutil.rmtree(folder)
    tiny_causal("llama", dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    wide, narrow = kvbridge.load(folder), kvbridge.load(folder, dtype=torch.bfloat16)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert wide.geometry.weights_digest == narrow.geometry.weights_digest
    assert wide.geometry.digest != narrow.geometry.digest
    assert wide.geometry.weights_digest != tiny("llama").geometry.weights_digest


def test_a_lossy_dtype_does_not_pass_for_the_stored_weights(folder):
    """float32 files loaded in bfloat16 are other weights, whichever was loaded and cached first."""
    for first, second in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        (folder / CACHE_NAME).unlink(missing_ok=True)
        one, two = (
            kvbridge.load(folder, dtype=first).geometry,
            kvbridge.load(folder, dtype=second).geometry,
        )
        wide = one if first is torch.float32 else two
        assert wide.weights_digest == tiny("llama").geometry.weights_digest
        assert one.digest != two.digest


def test_a_folder_that_cannot_be_written_is_no_error(folder, monkeypatch):
    monkeypatch.setattr(
        "kvbridge.model.digests.tempfile.mkstemp",
        lambda **_: (_ for _ in ()).throw(PermissionError()),
    )
    assert kvbridge.load(folder).geometry.weights_digest == tiny("llama").geometry.weights_digest
    assert not (folder / CACHE_NAME).exists()


class Tuned(torch.nn.Module):
    """As much of a PEFT model as its digest looks at."""

    def __init__(self, active=("default",), disabled=False, **settings):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.layer.active_adapters = list(active)
        self.layer.disable_adapters = disabled
        body = {"r": 8, "lora_alpha": 16, "target_modules": {"q_proj", "v_proj"}, **settings}
        self.peft_config = {"default": SimpleNamespace(to_dict=lambda: body)}


def test_adapters_are_told_apart_by_what_alters_values():
    assert adapter_names(torch.nn.Linear(1, 1)) == ()
    plain = adapter_names(Tuned())
    assert len(plain) == 1
    assert plain[0].startswith("default@")
    assert (
        adapter_names(
            Tuned(base_model_name_or_path="/elsewhere", target_modules={"v_proj", "q_proj"})
        )
        == plain
    )
    others = [Tuned(lora_alpha=32), Tuned(use_dora=True), Tuned(active=()), Tuned(disabled=True)]
    assert plain not in [adapter_names(m) for m in others]
    assert adapter_names(others[2]) == adapter_names(others[3])
