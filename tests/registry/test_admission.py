"""Nothing broken or hostile gets in, and refusing it costs little."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile, FileError, NotInStore, Refused, UnknownSchema
from kvbridge.files import sums_of
from kvbridge.format import MAX_PARSE_BYTES, SUMS
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.admission import AdmissionPolicy, admit
from kvbridge.registry.store.finite import FiniteScan
from kvbridge.registry.store.kinds import folder_files
from tests.registry import assets

CHUNK_BYTES = 1 << 20


def write(folder, files, *, sums=None):
    """Files with matching sums, however wrong they are."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (folder / SUMS).write_bytes(sums_of(listed) if sums is None else sums)
    return folder


def refused(store, folder, match=None, error=(CorruptFile, Refused, UnknownSchema)):
    with pytest.raises(error, match=match) as raised:
        store.publish(folder)
    assert "\n" not in str(raised.value)
    assert store.entries() == []
    assert not any((store.home / "tmp").iterdir() if store.home.exists() else ())


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json", "README.md", SUMS])
def test_every_flipped_bit_and_every_truncation_is_refused(store, asset, name):
    whole = (asset / name).read_bytes()
    spots = range(0, len(whole), max(1, len(whole) // 12))
    for spot in spots:
        (asset / name).write_bytes(
            whole[:spot] + bytes([whole[spot] ^ 1 << spot % 8]) + whole[spot + 1 :]
        )
        refused(store, asset)
        (asset / name).write_bytes(whole[:spot])
        refused(store, asset)
    (asset / name).write_bytes(whole + b"\0")
    refused(store, asset)
    (asset / name).write_bytes(whole)
    assert store.publish(asset)


def header(files, change):
    """The weights with their header changed, sums to match."""
    data = files["weights.safetensors"]
    length = int.from_bytes(data[:8], "little")
    body = json.loads(data[8 : 8 + length])
    change(body)
    raw = json.dumps(body).encode()
    return {
        **files,
        "weights.safetensors": len(raw).to_bytes(8, "little") + raw + data[8 + length :],
    }


def first(body):
    return body[min(k for k in body if k != "__metadata__")]


LIES = {
    "offsets beyond the end": lambda b: first(b).update(data_offsets=[0, 1 << 50]),
    "offsets backwards": lambda b: first(b).update(data_offsets=[16, 0]),
    "negative offsets": lambda b: first(b).update(data_offsets=[-8, 16]),
    "another shape": lambda b: first(b).update(shape=[1, *first(b)["shape"]]),
    "a huge shape": lambda b: first(b).update(shape=[1 << 62, 1 << 62]),
    "a float shape": lambda b: first(b).update(shape=[2.0]),
    "integers": lambda b: first(b).update(dtype="I32"),
    "an unknown dtype": lambda b: first(b).update(dtype="F8_PICKLE"),
    "one tensor more": lambda b: b.update(
        extra={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ),
    "one tensor less": lambda b: b.pop(min(k for k in b if k != "__metadata__")),
    "a path as name": lambda b: b.update(
        {"../../x": b.pop(min(k for k in b if k != "__metadata__"))}
    ),
    "other metadata": lambda b: b.update(__metadata__={"kvbridge": "0" * 64}),
    "metadata of another type": lambda b: b.update(__metadata__=[1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(store, tmp_path, lie):
    refused(store, write(tmp_path / "bad", header(assets.files(), LIES[lie])))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_length_that_lies(store, tmp_path, length):
    files = assets.files()
    data = files["weights.safetensors"]
    refused(
        store,
        write(
            tmp_path / "bad",
            {**files, "weights.safetensors": length.to_bytes(8, "little") + data[8:]},
        ),
    )


def test_a_hundred_thousand_tensors_and_a_hundred_thousand_layers(store, tmp_path):
    files = assets.files()
    body = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
    raw = json.dumps(body).encode()
    many = write(
        tmp_path / "tensors", {**files, "weights.safetensors": len(raw).to_bytes(8, "little") + raw}
    )
    refused(store, many, "tensors, more than|MiB|bytes, the manifest")
    manifest = json.loads(files["manifest.json"])
    manifest["receiver"]["layers"] *= 25_000
    refused(
        store, write(tmp_path / "layers", {**files, "manifest.json": json.dumps(manifest).encode()})
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_weights_that_are_not_finite(store, tmp_path, kind, value):
    files = assets.files(dtype=kind)
    data = bytearray(files["weights.safetensors"])
    data[-np.dtype(kind).itemsize :] = np.asarray([value], kind).tobytes()
    refused(
        store,
        write(tmp_path / "bad", {**files, "weights.safetensors": bytes(data)}),
        "NaN or infinity",
    )


def test_finiteness_of_bfloat16_across_any_chunks():
    from kvbridge.headers import Header

    head = Header(
        {},
        {"a": ("BF16", (9,), (0, 18)), "b": ("F64", (2,), (18, 34)), "c": ("U8", (1,), (34, 35))},
    )
    good = np.full(9, 0x7F7F, "<u2").tobytes() + np.full(2, 1e308).tobytes() + b"\xff"
    for spot, pattern in {
        6: b"\x80\x7f",
        8: b"\xc1\xff",
        16: b"\x80\xff",
        18: np.float64("nan").tobytes(),
    }.items():
        bad = good[:spot] + pattern + good[spot + len(pattern) :]
        for chunk in (1, 2, 3, 5, 16, 99):
            for data, expected in ((good, False), (bad, True)):
                scan = FiniteScan(head)
                for start in range(0, len(data), chunk):
                    scan.update(data[start : start + chunk])
                assert (scan.bad is not None) == expected


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "dangling"])
@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json", SUMS])
def test_links_folders_and_pipes(store, asset, tmp_path, name, kind):
    data = (asset / name).read_bytes()
    (asset / name).unlink()
    if kind == "file":
        (tmp_path / "elsewhere").write_bytes(data)
        (asset / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "dangling":
        (asset / name).symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        (asset / name).mkdir()
    else:
        os.mkfifo(asset / name)
    refused(store, asset, "regular file")


@pytest.mark.parametrize(
    "line",
    [
        b"0" * 64 + b"  ../manifest.json\n",
        b"0" * 64 + b"  /etc/passwd\n",
        b"0" * 64 + b"  a\0b\n",
        b"0" * 64 + b"  Manifest.json\n",
        b"0" * 64 + "  manife\u0301st.json\n".encode(),
        b"0" * 64 + b"  README.md\n" * 2,
        b"nonsense\n",
        b"\xff\xfe\n",
    ],
)
def test_sums_with_paths_case_collisions_and_nonsense(store, tmp_path, line):
    files = assets.files()
    listed = sums_of({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    refused(store, write(tmp_path / "bad", files, sums=listed + line))


def bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights", bytes(50_000_000))
    return packed.getvalue()


@pytest.mark.parametrize(
    "name",
    ["weights.bin", "weights.pkl", "data.zip", "MANIFEST.JSON", "manifest.json ", ".hidden", "é"],
)
def test_more_files_than_an_asset_has(store, tmp_path, name):
    refused(store, write(tmp_path / "bad", {**assets.files(), name: b"x"}), "found")


def test_a_pickle_or_an_archive_instead_of_weights_is_not_opened(store, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    for index, data in enumerate((pickle.dumps(Payload()), bomb())):
        refused(
            store, write(tmp_path / f"bad{index}", {**assets.files(), "weights.safetensors": data})
        )
    assert not (tmp_path / "pwned").exists()


def test_a_sparse_giant_is_refused_unread(store, asset):
    with (asset / "weights.safetensors").open("r+b") as file:
        file.truncate(1 << 41)
    refused(store, asset, "more than the")


CHANGES = {
    "another schema": lambda b: b.update(schema="kvbridge.translator/2"),
    "no scores": lambda b: b.update(scores={"split": "test"}),
    "scores that are not numbers": lambda b: b["scores"].update(v_r2=["0.9"]),
    "scores of fewer layers": lambda b: b["scores"].update(v_r2=[]),
    "scores of no layer": lambda b: b["scores"].update(
        layers=[], k_r2=[], v_r2=[], attention_cosine=[]
    ),
    "control scores that are not numbers": lambda b: b["scores"]["token_only"].update(v_r2=["0.9"]),
    "control scores of fewer layers": lambda b: b["scores"]["token_only"].update(k_r2=[]),
    "half of the control's scores": lambda b: b["scores"]["token_only"].pop("k_r2"),
    "a control that is none": lambda b: b["scores"].update(token_only=[0.5]),
    "no sender": lambda b: b.pop("sender"),
    "a receiver without layers": lambda b: b["receiver"].update(layers=[]),
    "a branch instead of a commit": lambda b: b["sender"].update(commit="main"),
    "control characters in a name": lambda b: b["sender"].update(model_id="org/\x1b[2Jx"),
    "an empty name": lambda b: b["sender"].update(model_id=""),
    "a field more": lambda b: b.update(extra=1),
    "another size": lambda b: b.update(weights_bytes=1),
    "other parameters": lambda b: b.update(parameters=1),
    "a head that is not there": lambda b: b["maps"][0]["groups"][0].update(heads=[0, 7]),
    "a layer that is not there": lambda b: b["maps"][0]["groups"][0].update(
        blocks=[[9, "k", None]]
    ),
    "a trillion heads": lambda b: b["receiver"]["layers"][1]["streams"][0].update(heads=10**12),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_is_wrong(store, tmp_path, change):
    files = assets.files()
    body = json.loads(files["manifest.json"])
    CHANGES[change](body)
    refused(store, write(tmp_path / "bad", {**files, "manifest.json": json.dumps(body).encode()}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 200_000,
        b'{"schema": NaN}',
        b'{"a":1,"a":2}',
        b'{"a":1e999}',
        b'"\\ud800"',
        b"\xff",
        b"9" * 5000,
    ],
)
def test_json_that_is_none(raw):
    with pytest.raises(CorruptFile):
        parse_json(raw, "x")


COSTLY = {
    "many keys": lambda: b"{" + b",".join(b'"%d":0' % i for i in range((1 << 20) - 4)) + b"}",
    "wide characters": lambda: b'["' + "\U0001f600".encode() + b"a" * ((16 << 20) - 8) + b'"]',
    "wide strings": lambda: (
        b"[" + b",".join(b'"%d\xf0\x9f\x98\x80"' % i for i in range((1 << 20) - 4)) + b"]"
    ),
}
MEASURE = """
import pathlib, re, sys
from kvbridge.codec import parse_json

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) << 10

raw = pathlib.Path(sys.argv[1]).read_bytes()
before = peak()
parse_json(raw, "x")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sort", COSTLY)
def test_reading_json_stays_within_twice_the_declared_memory(tmp_path, sort):
    """The costliest documents of the largest size: one object of a million keys, text of four bytes
    a character."""
    (tmp_path / "raw").write_bytes(COSTLY[sort]())
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "raw")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 16 << 20 < int(done.stdout) <= 2 * MAX_PARSE_BYTES


def test_admission_holds_chunks_not_files(tmp_path, monkeypatch):
    """The memory of a check does not grow with the weights: some chunks, of whatever size."""
    monkeypatch.setattr("kvbridge.registry.store.stream.CHUNK_BYTES", CHUNK_BYTES)
    sender, receiver = assets.geometry("a/s", width=256), assets.geometry("a/r", width=256)
    folder = assets.build(tmp_path / "big", sender, receiver, dtype=np.float64)
    size = (folder / "weights.safetensors").stat().st_size
    admit(folder_files(folder), "x", AdmissionPolicy())
    tracemalloc.start()
    admit(folder_files(folder), "x", AdmissionPolicy())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 12 * CHUNK_BYTES
    assert peak < 8 * CHUNK_BYTES


def test_a_file_that_changes_while_it_is_read(store, asset, monkeypatch):
    real = FiniteScan.update

    def update(self, data):
        with (asset / "weights.safetensors").open("ab") as file:
            file.truncate(100)
        real(self, data)

    monkeypatch.setattr("kvbridge.registry.store.stream.CHUNK_BYTES", 256)
    monkeypatch.setattr(FiniteScan, "update", update)
    refused(store, asset, "changed while", FileError)


def test_controls_that_fit_another_translator_are_refused(store, asset, newer, tmp_path):
    ref, other = store.publish(asset), store.publish(newer, tag="other")
    folder = assets.controls(tmp_path / "c", ref.digest)
    body = json.loads((folder / "manifest.json").read_bytes())
    body["translator"] = other.digest
    files = {"manifest.json": json.dumps(body).encode()}
    files["controls.safetensors"] = (folder / "controls.safetensors").read_bytes()
    with pytest.raises(CorruptFile, match="not of this manifest"):
        store.attach(write(tmp_path / "swapped", files))


def test_a_calibration_is_bound_and_its_gate_is_checked(store, asset, tmp_path):
    ref = store.publish(asset)
    sound = assets.calibration(tmp_path / "sound", ref.digest)
    assert store.attached(ref.digest, "calibration") is None
    attached = store.attach(sound)
    assert store.attached(ref.digest, "calibration") == store.path(attached.digest)
    for name, match, options in (
        ("nan", "NaN", {"tensors": {"factor": np.full(2, np.nan, np.float32)}}),
        ("integers", "floating-point", {"tensors": {"factor": np.ones(2, np.int32)}}),
        ("unbound", "not of this manifest", {"binding": "0" * 64}),
        ("other", "other models", {"change": {"receiver": "0" * 64}}),
        ("older", "expected schema", {"change": {"schema": "kvbridge.calibration/1"}}),
        ("nobody", "NotInStore|not in the store", {"change": {"translator": "0" * 64}}),
    ):
        with pytest.raises((CorruptFile, UnknownSchema, NotInStore), match=match):
            store.attach(assets.calibration(tmp_path / name, ref.digest, **options), tag=name)
    (sound / "gate.safetensors").unlink()
    with pytest.raises(Refused, match="expected the files"):
        store.attach(sound)
    assert [r.tag for r in store.bound(ref.digest)] == ["main"]


def test_a_calibration_is_bounded(tmp_path, asset):
    for policy in (AdmissionPolicy(max_tensors=4), AdmissionPolicy(max_weights_bytes=2000)):
        store = LocalStore(tmp_path / "home", policy)
        ref = LocalStore(store.home).publish(asset)
        many = {f"t{i}": np.ones(100, np.float32) for i in range(8)}
        with pytest.raises((CorruptFile, Refused), match="more than the"):
            store.attach(
                assets.calibration(tmp_path / str(policy.max_tensors), ref.digest, tensors=many)
            )
