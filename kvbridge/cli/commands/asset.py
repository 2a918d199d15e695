"""`kvbridge inspect` and `kvbridge verify`: one translator on disk."""

from __future__ import annotations

from rich.console import Console

from kvbridge.cli.options import AssetFolder, Json
from kvbridge.cli.output import emit


def inspect(asset: AssetFolder, as_json: Json = False) -> None:
    """Show what a translator says of itself.

    That is: its two models and their licences, how it was fitted, and its scores on held-out texts.
    Only the description is read, neither the weights nor the models; use `verify` to check them.
    """
    from kvbridge.asset.card import model_card
    from kvbridge.asset.manifest import Manifest
    from kvbridge.codec import read_json
    from kvbridge.format import TRANSLATOR

    path = asset / TRANSLATOR.description
    manifest = Manifest.from_json(read_json(path), str(path))
    if as_json:
        emit(manifest.body)
    else:
        Console(highlight=False).print(model_card(manifest), markup=False)


def verify(asset: AssetFolder, as_json: Json = False) -> None:
    """Check that a translator is whole and unchanged.

    Every file is compared with its SHA-256 digest, every tensor with the shape it should have, and
    every weight must be a finite number. This says nothing of how well the translator works; `eval
    run` measures that.
    """
    from kvbridge.asset.folder import load_asset

    loaded = load_asset(asset)
    parameters = loaded.translator.parameters
    if as_json:
        emit({"digest": loaded.digest, "verified": True, "parameters": parameters})
    else:
        Console(highlight=False).print(
            f"{asset}: sound, {parameters:,} parameters, digest {loaded.digest}"
        )
