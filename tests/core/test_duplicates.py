"""Near duplicates: what repeats an earlier text is told, and what merely resembles it is not."""

from __future__ import annotations

import json

import pytest

from kvbridge import demo
from kvbridge.duplicates import MOST_CANDIDATES, NearDuplicates, clustered


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with open(demo.texts("test"), encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines][:200]


def changed(text: str) -> dict[str, str]:
    words = text.split(" ")
    middle = len(words) // 2
    return {
        "an inserted sentence": " ".join([*words[:middle], "Nobody saw it.", *words[middle:]]),
        "another first word": " ".join(["Yesterday,", *words]),
        "a dropped word in the middle": " ".join(words[:middle] + words[middle + 1 :]),
        "another case": text.upper(),
        "a longer end": text + " And so it went on for a while.",
    }


@pytest.mark.parametrize("kind", changed("a b c"))
def test_repeats_are_told(texts, kind):
    long = [text for text in texts if len(text) > 600][:50]
    seen = NearDuplicates()
    for number, text in enumerate(long):
        assert seen.repeated(text, str(number)) is None
    told = [seen.repeated(changed(text)[kind], "new") for text in long]
    expected = [str(number) for number in range(len(long))]
    if kind == "a longer end":
        # What stands after the common beginning is new: rows of the beginning are told by it.
        assert told == [None] * len(long)
    else:
        assert sum(a == b for a, b in zip(told, expected, strict=True)) >= 0.95 * len(long)


def test_texts_of_one_kind_do_not_repeat_one_another(texts):
    seen = NearDuplicates()
    assert [seen.repeated(text, "x") for text in texts] == [None] * len(texts)


def test_a_long_common_beginning_alone_is_no_repetition(texts):
    system = texts[0][:900]
    seen = NearDuplicates()
    told = [seen.repeated(f"{system}\nUser: {text[:400]}", "x") for text in texts[1:]]
    assert told == [None] * len(told)
    assert MOST_CANDIDATES <= len(seen._sketches) < len(told)


def test_scripts_without_spaces():
    text = "日本の首都は東京です。東京は世界でも大きな都市の一つで、多くの人が住んでいます。" * 3
    seen = NearDuplicates()
    assert seen.repeated("前書き。" + text, "a") is None
    assert seen.repeated("後書き。" + text, "b") == "a"


def test_short_and_empty_texts_say_nothing():
    seen = NearDuplicates()
    assert [seen.repeated(t, "x") for t in ("", "short", "short", "\udcff")] == [None] * 4


def test_documents_that_repeat_one_another_are_one_cluster(texts):
    a, b, c = [text for text in texts if len(text) > 600][:3]
    stands = [("a", a), ("b", b), ("a2", "Again: " + a), ("c", c), ("copy", b), ("c", "So: " + b)]
    cluster = clustered(stands)
    assert cluster["a2"] == cluster["a"]
    assert cluster["copy"] == cluster["b"] == cluster["c"]
    assert cluster["a"] != cluster["b"]
    assert set(cluster.values()) <= set(cluster)
    assert clustered([(str(n), text) for n, text in enumerate(texts)]) == {
        str(n): str(n) for n in range(len(texts))
    }
