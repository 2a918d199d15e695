"""What a snapshot and a prompt that is not simply its continuation have in common."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.cache.align import Stretch
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.engines.port import Engine
from kvbridge.geometry import digest_text
from kvbridge.model.passages import Passage

WORTH = 0.95
"""Share of a prefill's FLOPs that a handoff from an edited text's common beginning may take."""


@dataclass(frozen=True)
class Common:
    """`stretches` of text that both have, ascending on both sides. `edited`: the snapshot goes on
    with a text that the prompt does not have, so that what they share may be too little."""

    stretches: tuple[Stretch, ...]
    edited: bool

    @property
    def characters(self) -> int:
        """How much text they share."""
        return sum(stretch.length for stretch in self.stretches)

    @property
    def beginning(self) -> int | None:
        """Characters of the one common beginning; None where messages are taken one by one."""
        first = self.stretches[0]
        alone = len(self.stretches) == 1 and first.cut and first.sender == first.receiver == 0
        return first.length if alone else None


def common_text(
    sender: Engine,
    snapshot: KVSnapshot,
    text: str,
    passages: tuple[Passage, ...],
    *,
    translates: bool,
) -> Common | None:
    """What `text`, whose messages stand at `passages`, shares with the snapshot's: their common
    beginning, or message by message where both are chats and something can be translated
    (`translates`), whichever is more. None where that is nothing.

    The snapshot's text is decoded from its ids and held against its digest. Rows after the first
    difference have read it, and are not used.
    """
    spelt = _spelt(sender, snapshot)
    ways = [_beginning(spelt, text, passages)]
    if translates and snapshot.passages and passages:
        ways.append(_by_message(snapshot.passages, passages, spelt, text))
    return max(
        (way for way in ways if way is not None), key=lambda way: way.characters, default=None
    )


def _spelt(sender: Engine, snapshot: KVSnapshot) -> str | None:
    """The text of the snapshot's ids; None where decoding does not give the text that it is of."""
    text, _ = sender.encode_ids(snapshot.token_ids)
    text = text[: snapshot.characters]
    return text if digest_text(text) == snapshot.text_digest else None


def _beginning(spelt: str | None, text: str, passages: tuple[Passage, ...]) -> Common | None:
    """The characters before the first that differs. A plain text that merely ends sooner than the
    snapshot's is none of these: nothing of it is new."""
    length = 0 if spelt is None else _alike(spelt, text)
    if length == 0 or (length == len(text) and not passages):
        return None
    return Common((Stretch(0, 0, length, cut=True),), edited=length < len(text))


def _by_message(
    held: tuple[Passage, ...], wanted: tuple[Passage, ...], spelt: str | None, text: str
) -> Common | None:
    """Message by message, up to the first that differs and as far as that one is the same."""
    stretches: list[Stretch] = []
    edited = False
    for sender, receiver in zip(held, wanted, strict=False):
        located = sender.located and receiver.located
        if sender.digest == receiver.digest and located:
            length = receiver.end - receiver.start
            stretches.append(Stretch(sender.start, receiver.start, length, cut=False))
        elif sender.digest != receiver.digest or sender.located != receiver.located:
            edited = True
            if located and spelt is not None:
                before = spelt[sender.start : sender.end]
                length = _alike(before, text[receiver.start : receiver.end])
                stretches.append(Stretch(sender.start, receiver.start, length, cut=True))
            break
    stretches = [stretch for stretch in stretches if stretch.length]
    return Common(tuple(stretches), edited) if stretches else None


def _alike(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
