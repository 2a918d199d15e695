"""The first tokens of a long text are those of the whole text, and cost no more than they are."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from kvbridge.model.beginning import encode_beginning
from kvbridge.model.model import Model
from tests.models import SENTENCES, TOKENIZERS, tiny

PROSE = " ".join(SENTENCES) + "\n"
PIECES = {
    "prose": [PROSE],
    "chinese": [chr(code) for code in range(0x4E00, 0x4E80)],
    "thai": ["สวัสดี", "ครับ", "ก็", "น้ำ"],
    "emoji": ["👨‍👩‍👧", "🇩🇪", "👍🏽", "é", "e\u0301", "é"],
    "one letter": ["a"],
    "two letters": ["a", "b"],
    "white": [" ", "\n", "\t", "  "],
    "code": ["x=", "9" * 30, ";", "}{", "if(", "_"],
    "anything": [
        chr(code) for code in [*range(33, 127), *range(0xA0, 0x250), *range(0x900, 0x970)]
    ],
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", PIECES)
def test_the_beginning_is_that_of_the_whole(kind, text):
    model, rng = tiny("llama", tokenizer=kind), random.Random(f"{kind} {text}")
    for tokens in (1, 16, 64, 200):
        size = rng.randint(2_000, 9_000)
        whole = "".join(rng.choices(PIECES[text], k=size))[:size]
        beginning, every = encode_beginning(model, whole, tokens), model.encode(whole)
        assert torch.equal(beginning.ids, every.ids[:tokens])
        assert torch.equal(beginning.spans, every.spans[:tokens])


def test_one_token_for_very_many_characters():
    """Doubled until there are enough tokens, or the text ends."""
    model = tiny("llama")
    text = " " * 60_000 + PROSE
    assert torch.equal(encode_beginning(model, text, 64).ids, model.encode(text).ids[:64])


def test_a_long_text_is_not_tokenised(monkeypatch):
    model, sizes = tiny("llama"), []
    whole = Model.encode

    def counted(self, text):
        sizes.append(len(text))
        return whole(self, text)

    monkeypatch.setattr(Model, "encode", counted)
    encode_beginning(model, PROSE * 20_000, 64)
    assert sum(sizes) < 5_000


PROGRAM = """
import resource
from kvbridge import demo
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import read_documents
from kvbridge.fitting.rows import text_batches
from kvbridge.model.load import load
sender, receiver = load("demo:sender"), load("demo:receiver")
text = "The river rose twice that spring. " * 350_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
documents = (("train", document) for document in read_documents([text, text + "!"]))
(batch,) = text_batches(sender, receiver, documents, FitConfig(max_tokens=64))
assert batch.tokens == 128, batch.tokens
assert max(len(document.text) for document in batch.documents) < 1000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_the_memory_of_twelve_megabytes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200, "MiB; tokenised whole it took 2,800"
