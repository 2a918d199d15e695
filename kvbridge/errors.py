"""Every exception kvbridge raises on purpose.

    KVBridgeError
    ├── UsageError          the API was called in a way that cannot mean anything
    ├── LoadError           a model or tokenizer could not be loaded
    │   ├── UnsupportedModel    it loaded, but its cache cannot be translated (recurrent, shared, …)
    │   └── RotationMismatch    undoing RoPE does not give the pre-RoPE projection back
    ├── DataError           texts or rows that cannot be used as given
    ├── FitError            a fit that must not go on
    │   ├── NotEnoughRows       fewer rows than twice the features
    │   ├── OverBudget          the plan needs more memory or disk than allowed
    │   └── PairRefused         the two tokenizers share too few token ends
    ├── FileError           something on disk is not what it claims to be
    │   ├── CorruptFile         digest, header, size or structure is wrong
    │   ├── UnknownSchema       written by another version
    │   └── AlreadyExists       other content stands where this was to be written
    ├── StoreError          the asset store could not do what was asked; what it held is intact
    │   ├── NotInStore          no such asset, tag or attachment
    │   ├── Refused             admission refused an asset
    │   └── TransferFailed      the Hub could not be reached, is switched off, or refused
    └── EvalError           an evaluation that cannot be computed from what is there

What depends on one request (no asset, another text, positions out of range, …) is not here:
it is a `kvbridge.Decision` with a reason, and the caller prefills.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KVBridgeError(Exception):
    """Base of all; its message says what was expected, what was found and what to do."""


class UsageError(KVBridgeError, ValueError):
    """The call itself is wrong."""


class LoadError(KVBridgeError):
    """A model or tokenizer could not be loaded."""


class UnsupportedModel(LoadError):
    """The model's cache is of a kind that cannot be translated token by token."""


class RotationMismatch(LoadError):
    """Undoing RoPE on the model's own cache does not give its pre-RoPE keys."""


class DataError(KVBridgeError, ValueError):
    """Texts or rows that cannot be used as given."""


class FitError(KVBridgeError):
    """A fit that must not go on."""


class NotEnoughRows(FitError):
    """Fewer rows than twice the features of some map."""


class OverBudget(FitError):
    """The plan needs more memory or disk than the stated budget."""


class PairRefused(FitError):
    """The two tokenizers cut text too differently."""


class FileError(KVBridgeError):
    """Something on disk is not what it claims to be."""


class CorruptFile(FileError):
    """Digest, header, size or structure is wrong."""


class UnknownSchema(FileError):
    """Written by another version of kvbridge."""


class AlreadyExists(FileError):
    """Other content stands where this was to be written."""


class StoreError(KVBridgeError):
    """The asset store could not do what was asked; what it held before is intact."""


class NotInStore(StoreError):
    """No such asset, tag or attachment."""


class Refused(StoreError):
    """Admission refused an asset."""


class TransferFailed(StoreError):
    """The Hub could not be reached, is switched off, or answered something else."""


class EvalError(KVBridgeError):
    """An evaluation that cannot be computed from what is there."""


def unknown_names(what: str, unknown: Iterable[str], known: Iterable[str], hint: str = "") -> str:
    """The message on names that are none of `known`: what there is, what was found, and the nearest
    name to each."""
    unknown, known = [str(name) for name in unknown], list(known)
    expected = f"expected {what} of {', '.join(known)}{hint}"
    message = f"{expected}, found {', '.join(unknown) or 'none'}"
    near = [close[0] for name in unknown if (close := get_close_matches(name, known, n=1))]
    if near:
        message += f"; did you mean {', '.join(dict.fromkeys(near))}?"
    return message
