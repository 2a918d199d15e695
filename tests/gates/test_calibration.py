"""The sealed object: same bytes for the same content, verified on load, and every forgery
refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace

import pytest
import torch

from kvbridge.errors import AlreadyExists, CorruptFile, FileError, UnknownSchema
from kvbridge.gates.decide.calibration import BODY, TENSORS, load_calibration, save_calibration
from kvbridge.geometry import digest_json
from tests.gates.conftest import made_calibration
from tests.hostile.forge import join_weights, reseal, split_weights


def test_round_trip_and_same_bytes(pair, saved, tmp_path):
    folder, loaded = saved
    again = tmp_path / "again"
    assert save_calibration(loaded, again) == loaded.digest
    assert (again / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    assert save_calibration(loaded, folder) == loaded.digest
    assert loaded.body() == made_calibration(pair).body()
    assert torch.equal(loaded.extras.centre["k"], pair.extras.centre["k"])
    assert loaded.rungs[0].score(dict.fromkeys(loaded.rungs[0].score.columns, 1.0)) == 0.5
    with pytest.raises(AlreadyExists):
        save_calibration(replace(loaded, alpha=0.03), folder)


def test_another_translator_is_refused(pair, saved, tmp_path):
    folder, _ = saved
    other = replace(pair.asset, digest="0" * 64)
    with pytest.raises(CorruptFile, match="another translator"):
        load_calibration(folder, other)
    with pytest.raises(CorruptFile):
        load_calibration(tmp_path / "nothing", pair.asset)


@pytest.mark.parametrize("name", [BODY, TENSORS, "SHA256SUMS"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone", "link"])
def test_damage_is_refused(pair, saved, name, how, tmp_path):
    folder, _ = saved
    path = folder / name
    data = path.read_bytes()
    if how == "flip":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
        if how == "link":
            (tmp_path / "other").write_bytes(data)
            path.symlink_to(tmp_path / "other")
    with pytest.raises(FileError):
        load_calibration(folder, pair.asset)


def put(*path):
    """A change that sets body[path[0]][path[1]]… to the last of `path`."""

    def change(body):
        *keys, last, value = path
        for key in keys:
            body = body[key]
        body[last] = value

    return change


FORGED = {
    "nan score": put("rungs", 0, "score", "intercept", float("nan")),
    "huge weight": put("rungs", 0, "score", "weights", 0, 1e300),
    "short weights": lambda b: b["rungs"][0]["score"]["weights"].pop(),
    "zero scale": put("rungs", 0, "score", "scale", 0, 0.0),
    "text as number": put("rungs", 0, "score", "mean", 0, "1"),
    "true as number": put("rungs", 0, "score", "mean", 0, True),
    "unknown column": put("rungs", 0, "score", "columns", 0, "os.system"),
    "column twice": lambda b: put(
        "rungs", 0, "score", "columns", 0, b["rungs"][0]["score"]["columns"][1]
    )(b),
    "unknown signal": put("signals", 0, "psychic"),
    "signal twice": lambda b: b["signals"].append(b["signals"][0]),
    "no rung": put("rungs", []),
    "rung twice": lambda b: b["rungs"].append(b["rungs"][0]),
    "rung is a list": put("rungs", 0, []),
    "negative tail": put("rungs", 0, "plan", "tail", -1),
    "tail of a bool": put("rungs", 0, "plan", "tail", True),
    "endless tail": put("rungs", 0, "plan", "tail", 1 << 70),
    "limit of nan": put("rungs", 0, "limits", "sender_first", float("nan")),
    "limit of an unknown column": put("rungs", 0, "limits", {"x": 1.0}),
    "limits as list": put("rungs", 0, "limits", [1]),
    "alpha of 2": put("alpha", 2),
    "delta null": put("delta", None),
    "p above delta": put("lenient", "p", 0.9),
    "failures above items": put("lenient", "failures", 401),
    "threshold of 7": put("lenient", "threshold", 7.0),
    "stop of nan": put("stop", float("nan")),
    "one rung that stops below 1": put("stop", 0.9),
    "two rungs that stop at 1": lambda b: b["rungs"].append(
        {**b["rungs"][0], "plan": {**b["rungs"][0]["plan"], "tail": 40}}
    ),
    "threshold above the stop": lambda b: (
        b["rungs"].append({**b["rungs"][0], "plan": {**b["rungs"][0]["plan"], "tail": 40}}),
        put("stop", 0.5)(b),
    ),
    "threshold missing": lambda b: b["lenient"].pop("threshold"),
    "label": put("label", "vibes"),
    "label unhashable": put("label", ["x"]),
    "tau inf": put("tau", float("inf")),
    "counts negative": put("counts", "score", -1),
    "report as list": put("report", []),
    "needed 0": put("needed", 0),
    "digest as number": put("corpus_digest", 5),
    "documents as text": put("documents", "0123456789abcdef"),
    "document by its name": put("documents", ["d0"]),
    "document as number": put("documents", [5]),
    "centre of another stream": put("extras", "centre", ["latent"]),
    "centre of no list": put("extras", "centre", "k"),
    "a centre missing": put("extras", "centre", ["v"]),
    "three halves": put("extras", "half_layers", [[0], [1], [2]]),
    "residual stream": put("extras", "residual", ["q"]),
    "layers negative": put("extras", "targets", [-1]),
    "extra field": put("trust", "me"),
    "missing field": lambda b: b.pop("needed"),
    "conformal text": put("conformal", "0.5"),
}


def forge(folder, change, *, bind=True):
    body = json.loads((folder / BODY).read_text("utf-8"))
    change(body)
    (folder / BODY).write_text(json.dumps(body))
    if bind:
        header, data = split_weights(folder / TENSORS)
        with contextlib.suppress(ValueError):
            header["__metadata__"] = {"kvbridge": digest_json(body)}
        join_weights(folder / TENSORS, header, data)
    reseal(folder)


def test_forging_nothing_still_loads(pair, saved):
    folder, _ = saved
    forge(folder, lambda body: None)
    assert load_calibration(folder, pair.asset).usable


@pytest.mark.parametrize("name", FORGED)
def test_forged_with_sound_sums_is_refused(pair, saved, name):
    folder, _ = saved
    forge(folder, FORGED[name])
    with pytest.raises(CorruptFile) as refusal:
        load_calibration(folder, pair.asset)
    assert len(str(refusal.value)) < 1000


def test_another_schema_and_swapped_tensors(pair, saved, tmp_path):
    folder, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    forge(copy, put("schema", "kvbridge.calibration/2"))
    with pytest.raises(UnknownSchema):
        load_calibration(copy, pair.asset)
    forge(folder, put("delta", 0.06), bind=False)
    with pytest.raises(CorruptFile, match="not of this calibration"):
        load_calibration(folder, pair.asset)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(pair, tmp_path, value):
    centre = {stream: t.clone() for stream, t in pair.extras.centre.items()}
    centre["v"][0] = value
    save_calibration(
        made_calibration(pair, extras=replace(pair.extras, centre=centre)), tmp_path / "g"
    )
    with pytest.raises(CorruptFile, match=r"centre\.v"):
        load_calibration(tmp_path / "g", pair.asset)


def test_wrong_shape(pair, tmp_path):
    centre = {**pair.extras.centre, "k": pair.extras.centre["k"][:3]}
    save_calibration(
        made_calibration(pair, extras=replace(pair.extras, centre=centre)), tmp_path / "g"
    )
    with pytest.raises(CorruptFile, match=r"centre\.k"):
        load_calibration(tmp_path / "g", pair.asset)


@pytest.mark.parametrize("stream", ["k", "v"])
def test_squares_below_zero(pair, tmp_path, stream):
    name = f"residual_{stream}"
    spoiled = {layer: t.clone() for layer, t in getattr(pair.extras, name).items()}
    next(iter(spoiled.values())).view(-1)[0] = -1.0
    save_calibration(
        made_calibration(pair, extras=replace(pair.extras, **{name: spoiled})), tmp_path / "g"
    )
    with pytest.raises(CorruptFile, match="squares"):
        load_calibration(tmp_path / "g", pair.asset)
