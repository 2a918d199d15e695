"""Caches that are not of their prompt, under the prompt's own ids, spans and text digest: only
content can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import torch

from kvbridge.cache.prefill import capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.gates.calibrate.passing import CalibrationPrompt
from kvbridge.model.model import Model

Wrong = Callable[[CalibrationPrompt, KVSnapshot, Random, Model], KVSnapshot]
SINKS = 5


def wrong_document(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """Another document's cache."""
    del rng, sender
    count = len(request.snapshot)
    return replace(
        request.snapshot, layers=tuple({n: t[:count] for n, t in x.items()} for x in donor.layers)
    )


def shuffled(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """The right rows in another order."""
    del donor, sender
    order = torch.tensor(rng.sample(range(len(request.snapshot)), len(request.snapshot)))
    return replace(
        request.snapshot,
        layers=tuple({n: t[order] for n, t in x.items()} for x in request.snapshot.layers),
    )


def half_wrong(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """The first half another document's, the second half right: as when a text was edited and its
    cache kept."""
    del rng, sender
    half = len(request.snapshot) // 2
    layers = tuple(
        {n: torch.cat((d[n][:half], t[half:])) for n, t in x.items()}
        for x, d in zip(request.snapshot.layers, donor.layers, strict=True)
    )
    return replace(request.snapshot, layers=layers)


def one_token(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """One row of another document: the least edit there is."""
    del sender
    at = rng.randrange(SINKS, len(request.snapshot))
    layers = []
    for x, d in zip(request.snapshot.layers, donor.layers, strict=True):
        layers.append(
            {n: torch.cat((t[:at], d[n][at : at + 1], t[at + 1 :])) for n, t in x.items()}
        )
    return replace(request.snapshot, layers=tuple(layers))


def late_layers(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """The first quarter of the layers right, the others another document's: a transfer of layer
    buffers that stopped."""
    del rng, sender
    count, right = len(request.snapshot), max(1, len(donor.layers) // 4)
    late = tuple({n: t[:count] for n, t in x.items()} for x in donor.layers[right:])
    return replace(request.snapshot, layers=(*request.snapshot.layers[:right], *late))


def truncated(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """The last quarter's rows are zeros: a buffer that was not filled to its end."""
    del donor, rng, sender
    keep = torch.arange(len(request.snapshot)) < len(request.snapshot) * 3 // 4
    layers = tuple(
        {n: t * keep[:, None, None] for n, t in x.items()} for x in request.snapshot.layers
    )
    return replace(request.snapshot, layers=layers)


def noisy(scale: float) -> Wrong:
    """Every row off by noise of `scale` times its size: a cache that another version of the model
    would give."""

    def run(
        request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
    ) -> KVSnapshot:
        del donor, sender
        draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
        layers = tuple(
            {
                n: t + scale * t.abs().mean() * torch.randn(t.shape, generator=draw)
                for n, t in x.items()
            }
            for x in request.snapshot.layers
        )
        return replace(request.snapshot, layers=layers)

    return run


@cache
def disturbed(sender: Model) -> Model:
    """The sender with every weight a tenth off: another model with caches of the same shape."""
    draw = torch.Generator().manual_seed(0)
    other = copy.deepcopy(sender.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                0.1 * parameter.abs().mean() * torch.randn(parameter.shape, generator=draw)
            )
    return replace(sender, model=other)


def other_model(
    request: CalibrationPrompt, donor: KVSnapshot, rng: Random, sender: Model
) -> KVSnapshot:
    """The right text's cache, by the disturbed sender, under the sender's name."""
    del donor, rng
    snapshot = capture(disturbed(sender), input_ids=request.snapshot.token_ids)
    return replace(request.snapshot, layers=snapshot.layers)


ATTACKS: dict[str, Wrong] = {
    "other_model": other_model,
    "truncated": truncated,
    "shuffled": shuffled,
    "half_wrong": half_wrong,
    "one_token": one_token,
    "late_layers": late_layers,
    "noise_2%": noisy(0.02),
    "noise_20%": noisy(0.2),
}
