"""Whole fits on tiny models: every family and feature, splits kept apart, one model at a time, the
same bytes twice."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import kvbridge
from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import DenseMaps
from kvbridge.errors import DataError, NotEnoughRows, OverBudget, PairRefused, UsageError
from kvbridge.fitting.data import Document
from kvbridge.fitting.families import FAMILIES, Group
from kvbridge.fitting.families.head_local import head_local
from kvbridge.fitting.solve import SOLVERS
from kvbridge.fitting.spill import Spill
from tests.fitting.pairs import content_rows, documents, fitted, plain_r2, receiver, sender
from tests.models import tiny, tiny_causal, wrapped

FEATURES = ("none", "embeddings", "hidden:1")


def bytes_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def check_family(name: str, features: str) -> None:
    """A fit of one family: heads partitioned, blocks as announced, scores everywhere, the control
    without a sender."""
    fit = fitted(family=name, receiver_features=features)
    translator = fit.translator
    maps = translator.maps
    assert isinstance(maps, DenseMaps)
    assert set(maps.groups) == {(i, s) for i in range(3) for s in ("k", "v")}
    assert maps.features == (features != "none")
    for (_, stream), groups in maps.groups.items():
        assert sorted(h for g in groups for h in g.heads) == [0, 1, 2, 3]
        assert all(b.stream == stream for g in groups for b in g.blocks)
    assert set(translator.tensors) == set(maps.shapes)
    assert all(tensor.isfinite().all() for tensor in translator.tensors.values())
    assert fit.controls is not None
    assert fit.controls.sender_layers == ()
    assert fit.controls.receiver_features == ("embeddings" if features == "none" else features)
    assert set(fit.scores.r2) == set(maps.groups)
    assert all(v.shape == (4, 8) and not v.isnan().all() for v in fit.scores.r2.values())
    assert all(c is not None and -1 <= c <= 1 for c in fit.scores.attention_cosine)
    assert set(fit.lambdas) == set(fit.jitter) == {f"{i}.{s}" for i in range(3) for s in ("k", "v")}
    assert set(fit.lambdas.values()) <= set(fit.config.lambdas)
    assert fit.marks == ()
    assert fit.alignment_exact_share == 1.0


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_receiver_feature(family, features):
    check_family(family, features)


def test_a_new_family_is_one_function_and_one_line(monkeypatch):
    def halves(sender, receiver, layer, stream, support):
        heads = receiver.layers[layer].stream(stream).heads
        middle = heads // 2
        return (
            Group(tuple(range(middle)), (Block(support[0], stream),)),
            Group(tuple(range(middle, heads)), tuple(Block(i, stream) for i in support)),
        )

    monkeypatch.setitem(FAMILIES, "halves", halves)
    check_family("halves", "embeddings")


@pytest.mark.parametrize(
    ("sender_heads", "receiver_heads", "expected"),
    [
        (2, 2, [0, 1]),
        (2, 4, [0, 0, 1, 1]),
        (4, 2, [0, 2]),
        (3, 5, [0, 0, 1, 1, 2]),
        (8, 1, [0]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_head_local_reads_the_matching_head(geometry, sender_heads, receiver_heads, expected):
    groups = head_local(
        geometry("s", 4, sender_heads), geometry("r", 2, receiver_heads), 1, "k", (1, 3)
    )
    assert [g.heads for g in groups] == [(h,) for h in range(receiver_heads)]
    assert [[b.heads for b in g.blocks] for g in groups] == [[(h,)] * 2 for h in expected]
    assert all([b.layer for b in g.blocks] == [1, 3] for g in groups)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_give_the_same_translator(solver):
    other, base = fitted(solver=solver, precision="float64"), fitted(precision="float64")
    for name, tensor in base.translator.tensors.items():
        if name.endswith(".W"):
            torch.testing.assert_close(other.translator.tensors[name], tensor, rtol=1e-3, atol=1e-4)


def test_scores_are_of_the_test_split_alone():
    """Maps of 64 inputs on few more rows: R² on the train texts is far above the reported one,
    which is the test's."""
    texts = documents(train=2, held=3, characters=100)
    fit = fitted(texts, receiver_features="none", force=True, lambdas=(1e-6,), precision="float64")
    by_split = {
        split: plain_r2(fit, [d.text for d in texts if d.split == split], sender(), receiver())
        for split in ("train", "test")
    }
    for key, r2 in fit.scores.r2.items():
        torch.testing.assert_close(r2.double(), by_split["test"][key], rtol=1e-3, atol=1e-3)
        assert float(by_split["train"][key].mean()) > float(r2.mean()) + 0.5
    assert fit.scores.documents == 3
    assert fit.scores.rows == fit.splits["test"]["rows"] > 0
    assert float(min(v.min() for v in fit.scores.r2.values())) < 0, (
        "an overfitted map scores below zero; never clipped"
    )


@pytest.mark.parametrize("features", ["none", "embeddings"])
def test_the_control_is_scored_on_the_same_rows(features):
    """Against a plain loop over the test texts: the control's maps on the receiver's own
    embeddings, no sender."""
    fit, model = fitted(receiver_features=features, precision="float64"), receiver()
    wanted, mapped = {}, {}
    for text in (d.text for d in documents() if d.split == "test"):
        snapshot, y = content_rows(model, text)
        with torch.no_grad():
            embedded = model.model.get_input_embeddings()(snapshot.token_ids)
        out = fit.controls({}, embedded)
        for layer, name in fit.controls.maps.groups:
            mapped.setdefault((layer, name), []).append(
                out[layer][name][fit.config.sinks :].double()
            )
            wanted.setdefault((layer, name), []).append(y[layer][name][fit.config.sinks :].double())
    for key, rows in wanted.items():
        true = torch.cat(rows)
        r2 = 1 - (true - torch.cat(mapped[key])).square().sum(0) / (
            true - true.mean(0)
        ).square().sum(0)
        torch.testing.assert_close(fit.scores.token_only_r2[key].double(), r2, rtol=1e-3, atol=1e-3)
    body = fit.scores.to_json()["token_only"]
    assert body["v_r2"][1] == pytest.approx(
        float(fit.scores.token_only_r2[1, "v"].nanmean()), rel=1e-4
    )
    assert not torch.equal(fit.scores.token_only_r2[1, "v"], fit.scores.r2[1, "v"])


def test_test_texts_do_not_alter_the_maps():
    other = tuple(
        Document(d.id, d.text[::-1] if d.split == "test" else d.text, d.group, d.split)
        for d in documents()
    )
    a, b = fitted(), fitted(other)
    assert torch.equal(a.translator.tensors["target.1.v.W"], b.translator.tensors["target.1.v.W"])
    assert not torch.equal(a.scores.r2[1, "v"], b.scores.r2[1, "v"])


def test_batching_does_not_alter_the_rows():
    a, b = (
        fitted(precision="float64", batch_tokens=100_000),
        fitted(precision="float64", batch_tokens=1),
    )
    assert a.splits == b.splits
    for name, tensor in a.translator.tensors.items():
        if name.endswith(".W"):
            torch.testing.assert_close(tensor, b.translator.tensors[name], rtol=1e-2, atol=1e-3)


def test_stride_and_sinks_thin_the_rows():
    whole, thin = fitted(sinks=0, force=True), fitted(sinks=0, stride=3, force=True)
    tokens = sum(len(receiver().encode(d.text)) for d in documents() if d.split == "train")
    assert whole.splits["train"] == {"documents": 24, "rows": tokens}
    assert tokens / 3 <= thin.splits["train"]["rows"] < tokens / 3 + 24
    cut = fitted(sinks=5, max_tokens=20, force=True)
    assert cut.splits["train"]["rows"] == 24 * 15


def test_the_same_fit_writes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        kvbridge.save_asset(fitted(), tmp_path / name)
    for suffix in ("", ".controls"):
        assert bytes_of(tmp_path / f"a{suffix}") == bytes_of(tmp_path / f"b{suffix}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_model_at_a_time_gives_the_same_bytes(tmp_path, dtype):
    pair = (wrapped(tiny_causal("llama", dtype=dtype), name="s"), receiver())
    both = fitted(pair=pair, family="full-head")
    apart = fitted(pair=pair, family="full-head", one_at_a_time=True, spill_folder=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    for name, tensor in both.translator.tensors.items():
        assert torch.equal(tensor, apart.translator.tensors[name])
    digests = [kvbridge.save_asset(f, tmp_path / f"asset{i}") for i, f in enumerate((both, apart))]
    assert digests[0] == digests[1]


def test_the_spill_stays_within_its_budget_and_leaves_nothing(tmp_path, monkeypatch):
    written: list[int] = []
    append = Spill.append

    def counted(self, batch):
        append(self, batch)
        written.append(self.nbytes)
        assert (
            sum(p.stat().st_size for p in self.folder.iterdir()) < self.nbytes + 4096 * self.count
        )

    monkeypatch.setattr(Spill, "append", counted)
    folder = tmp_path / "spill"
    folder.mkdir()
    fitted(one_at_a_time=True, spill_folder=str(folder))
    needed = written[-1]
    fitted(one_at_a_time=True, spill_folder=str(folder), spill_bytes=needed)
    with pytest.raises(OverBudget, match="--spill-bytes"):
        fitted(one_at_a_time=True, spill_folder=str(folder), spill_bytes=needed - 1)
    assert list(folder.iterdir()) == []


def test_an_error_on_the_way_leaves_no_spilled_rows(tmp_path):
    def broken(part: str, tokens: int, seconds: float) -> None:
        if part == "receiver":
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fitted(one_at_a_time=True, spill_folder=str(tmp_path), progress=broken)
    assert list(tmp_path.iterdir()) == []


def test_over_budget_is_refused_before_anything_runs():
    def loud(*_: object) -> None:
        raise AssertionError("a forward ran")

    with pytest.raises(OverBudget, match="allowed"):
        fitted(memory_bytes=1000, progress=loud)


def test_too_few_rows_are_refused_with_the_tokens_needed_and_force_marks_the_asset(tmp_path):
    few = documents(train=2)
    with pytest.raises(NotEnoughRows) as refusal:
        fitted(few, receiver_features="embeddings", stride=2)
    assert "maps of 96 inputs" in str(refusal.value)
    assert "at least 192 rows" in str(refusal.value)
    assert "384 tokens" in str(refusal.value)
    fit = fitted(few, receiver_features="embeddings", force=True)
    assert len(fit.marks) == 1
    kvbridge.save_asset(fit, tmp_path / "asset")
    asset = kvbridge.load_asset(tmp_path / "asset")
    assert asset.manifest.body["marks"] == list(fit.marks)
    assert fit.marks[0] in (tmp_path / "asset" / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    "tokenizers", [("bytes", "metaspace"), ("wordpiece", "bytes"), ("bos", "bytes_other")]
)
def test_a_pair_with_different_tokenizers(tokenizers):
    pair = (tiny("llama", tokenizer=tokenizers[0]), tiny("qwen3", 3, tokenizers[1]))
    fit = fitted(pair=pair, receiver_features="embeddings")
    assert 0.2 <= fit.alignment_exact_share <= 1
    assert fit.splits["train"]["rows"] > 0
    assert all(c is not None for c in fit.scores.attention_cosine)
    with pytest.raises(PairRefused, match="min-exact-share"):
        fitted(pair=pair, min_exact_share=1.01)


@pytest.mark.parametrize("kinds", [("gpt2", "gemma3"), ("gemma3", "gpt2"), ("phi3", "llama_yarn")])
def test_pairs_across_architectures(kinds):
    fit = fitted(pair=(tiny(kinds[0]), tiny(kinds[1], 5)), receiver_features="hidden:1")
    assert all(c is not None and -1 <= c <= 1 for c in fit.scores.attention_cosine)


def test_timings_are_there_and_sane():
    seen: list[tuple[str, int, float]] = []
    fit = fitted(progress=lambda *call: seen.append(call))
    parts = ("forward_sender_s", "forward_receiver_s", "moments_s", "solve_s", "scores_s")
    assert all(fit.timings[name] > 0 for name in parts)
    assert sum(fit.timings[name] for name in parts) <= fit.timings["total_s"] < 60
    forward = fit.timings["forward_sender_s"] + fit.timings["forward_receiver_s"]
    assert fit.timings["ratio_to_forward"] == pytest.approx(fit.timings["total_s"] / forward)
    assert fit.timings["peak_bytes"] > 1 << 20
    for part, model in (("sender", sender()), ("receiver", receiver())):
        tokens = sum(len(model.encode(d.text)) for d in documents())
        assert sum(n for p, n, _ in seen if p == part) == tokens
        seconds = [s for p, _, s in seen if p == part]
        assert seconds == sorted(seconds)


def test_what_cannot_be_fitted():
    with pytest.raises(UsageError, match="same model"):
        fitted(pair=(sender(), sender()))
    with pytest.raises(UsageError, match="hidden:3"):
        fitted(receiver_features="hidden:3")
    with pytest.raises(DataError, match="none for train, validation, test"):
        fitted([])
    with pytest.raises(DataError, match="none for test"):
        fitted([d for d in documents() if d.split != "test"])
    for split in ("train", "validation", "test"):
        short = [
            Document(d.id, "The" if d.split == split else d.text, d.group, d.split)
            for d in documents()
        ]
        with pytest.raises(DataError, match="rows"):
            fitted(short)
    with pytest.raises(UsageError, match="spill"):
        fitted(one_at_a_time=True, spill_folder="/nowhere/at/all")


def test_a_spread_over_splits_without_marks_is_by_group():
    texts = [
        {"text": d.text, "document": f"g{i // 2}"}
        for i, d in enumerate(documents(train=40, held=10))
    ]
    fit = fitted(texts)
    assert sum(s["documents"] for s in fit.splits.values()) == 60
    assert all(s["documents"] % 2 == 0 for s in fit.splits.values())


def test_heads_of_a_group_need_not_follow_one_another(monkeypatch):
    def every_second(sender, receiver, layer, stream, support):
        heads = receiver.layers[layer].stream(stream).heads
        return tuple(
            Group(tuple(range(start, heads, 2)), tuple(Block(i, stream) for i in support))
            for start in (0, 1)
        )

    monkeypatch.setitem(FAMILIES, "every-second", every_second)
    apart, whole = fitted(family="every-second", lambdas=(1e-3,)), fitted(lambdas=(1e-3,))
    for (layer, stream), groups in apart.translator.maps.groups.items():
        width = apart.translator.receiver.layers[layer].stream(stream).width
        name = f"target.{layer}.{stream}"
        for number, group in enumerate(groups):
            columns = torch.cat([torch.arange(h * width, (h + 1) * width) for h in group.heads])
            part = apart.translator.tensors[f"{name}.{number}.W"]
            expected = whole.translator.tensors[f"{name}.W"][:, columns]
            assert torch.allclose(part, expected, rtol=1e-4, atol=1e-6)
