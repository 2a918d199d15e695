"""Conditions: the ways past a prompt that every number is compared across. A new one is one file
and one line here."""

from kvbridge.eval.conditions.base import Condition
from kvbridge.eval.conditions.gated import GATED
from kvbridge.eval.conditions.native import NATIVE
from kvbridge.eval.conditions.raw_sender import RAW_SENDER
from kvbridge.eval.conditions.sender import SENDER
from kvbridge.eval.conditions.tail_only import NO_CONTEXT, TAIL_ONLY
from kvbridge.eval.conditions.token_only import TOKEN_ONLY
from kvbridge.eval.conditions.translated import TRANSLATED
from kvbridge.eval.conditions.wrong_document import WRONG_DOCUMENT

CONDITIONS: dict[str, Condition] = {
    "native": NATIVE,
    "sender": SENDER,
    "translated": TRANSLATED,
    "gated": GATED,
    "token_only": TOKEN_ONLY,
    "wrong_document": WRONG_DOCUMENT,
    "tail_only": TAIL_ONLY,
    "no_context": NO_CONTEXT,
    "raw_sender": RAW_SENDER,
}
"""By name, in the order in which a subject is compared with them; where they stand in tables is
their `order`."""

__all__ = ["CONDITIONS", "Condition"]
