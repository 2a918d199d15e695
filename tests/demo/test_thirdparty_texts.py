"""The texts of the third-party pair: paragraphs out of HTML, items out of paragraphs, splits of
pages."""

import io
import json
import shutil
import subprocess
import tarfile

import pytest

from kvbridge.errors import DataError
from recipes.thirdparty import html as thirdparty_html
from recipes.thirdparty import texts as thirdparty_texts
from recipes.thirdparty.html import Package, is_prose, pages, paragraphs
from recipes.thirdparty.texts import (
    ITEM_CHARS,
    ITEMS_PER_PAGE,
    Document,
    cut,
    documents,
    rows,
    split_of,
)

SENTENCE = (
    "The keeper of the lighthouse is on the stairs in the evening, and the lamp is lit by "
    "the hand of a child."
)

SPHINX = f"""<html><head><title>T</title><script>var x = "the of to and";</script></head><body>
<nav><p>Navigation: {SENTENCE}</p></nav>
<div class="body" role="main">
<h1>Heading that is as long as a paragraph and has the words of the language in it.<a
class="headerlink">¶</a></h1>
<p>The <em>first</em> paragraph of <code class="docutils">the page</code> is &lt;long&gt;
enough,<br/>and it has an end.</p>
<pre><p>{SENTENCE}</p></pre>
<div class="highlight"><pre>for the of to and in is that it as with be</pre></div>
<p>Too short to be of use.</p>
<p>Not ended, although it is a long line with the words of the language in it and no full stop</p>
<ul><li><p>A paragraph in a list is prose as well when it is long enough and has an
end.</p></li></ul>
<dl><dt>signature(of, the, function) -&gt; is that a paragraph or not, it is not, as it is
code.</dt>
<dd><p>What the function is for is said in the paragraph that stands below the
signature.</p></dd></dl>
<div class="versionchanged"><p><span>Changed in version 3.9:</span> {SENTENCE}</p></div>
<p>New in version 3.2: {SENTENCE}</p>
<table><tr><td><p>{SENTENCE}</p></td></tr></table>
<div class="sphinxsidebar"><div><p>{SENTENCE}</p></div></div>
<p>The last paragraph comes after all of the silent blocks, and it is found in spite of them.</p>
</div></body></html>"""


def test_only_prose_is_taken_from_a_sphinx_page():
    assert paragraphs(SPHINX) == [
        "The first paragraph of the page is <long> enough, and it has an end.",
        "A paragraph in a list is prose as well when it is long enough and has an end.",
        "What the function is for is said in the paragraph that stands below the signature.",
        "The last paragraph comes after all of the silent blocks, and it is found in spite of "
        "them.",
    ]


def test_docbook_paragraphs_are_divs_and_end_at_a_block_inside_them():
    html = f"""<html><body><div class="titlepage"><div class="para">{SENTENCE}</div></div><div
      class="para">
      The text before the list is a paragraph of its own, as it is interrupted here:
      <div class="itemizedlist"><ul><li><div class="para">An item of the list is one too, and it is
      not glued to the text that stands around it.</div></li></ul></div>
      The text after the list is a paragraph again, since the block of it is still open.</div>
      <div class="other">{SENTENCE}</div></body></html>"""
    assert [text[:24] for text in paragraphs(html)] == [
        "The text before the list",
        "An item of the list is o",
        "The text after the list ",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Die Wärterin des Leuchtturms ging am Abend über die Treppe nach oben, um die Lampe "
        "anzuzünden.",
        "CONFIG_A=1 CONFIG_B=2 0x0001 0x0002 0x0003 0x0004 0x0005 0x0006 the of to and is it a.",
        "Copyright the authors of the book, who are all named in the list at the end of the "
        "volume.",
        "Short, but of the language.",
    ],
)
def test_what_is_not_english_prose(text):
    assert not is_prose(text)


def essay(seed: str, sentences: int) -> list[str]:
    """Paragraphs of three sentences, none of which any other seed has."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    made = []
    for number in range(sentences):
        word = "".join(letters[int(digit)] for digit in str(number))
        made.append(
            f"The {seed} of {word} is one of the things that the keeper has in the tower by the "
            "sea."
        )
    return [" ".join(made[start : start + 3]) for start in range(0, sentences, 3)]


def test_items_are_cut_between_sentences_and_do_not_overlap():
    texts = essay("lamp", 120)
    items = cut(texts)
    assert len(items) > 3
    assert all(ITEM_CHARS[0] <= len(item) <= ITEM_CHARS[1] and item.endswith(".") for item in items)
    source = " ".join(texts)
    assert source.startswith(" ".join(items).replace("\n\n", " "))
    assert cut([*texts, "A sentence without any end " + "and on " * 200 + "."]) == items


def test_a_sentence_on_two_pages_takes_its_paragraph_from_both():
    shared = "This manual is free documentation, and it is given under the licence of year 2001."
    again = shared.replace("2001", "2022").upper()
    site = documents(
        [
            ("p/a", ["Own text of the first page is kept as it is.", f"Hello. {shared}"]),
            ("p/b", [again]),
        ]
    )
    assert site == [
        Document("p/a", ["Own text of the first page is kept as it is."]),
        Document("p/b", []),
    ]


def test_a_paragraph_twice_on_a_page_is_kept_once():
    assert documents([("p/a", [SENTENCE, SENTENCE])]) == [Document("p/a", [SENTENCE])]


@pytest.fixture
def site():
    names = [f"doc-{number % 3}/page{number}.html" for number in range(200)]
    return [
        Document(name, essay(f"item {chr(97 + i // 26)}{chr(97 + i % 26)}", 150))
        for i, name in enumerate(names)
    ]


def test_splits_are_disjoint_by_page_and_have_unique_ids(site):
    split = rows(site)
    pages_of = {name: {row["document"] for row in items} for name, items in split.items()}
    assert (
        sum(len(names) for names in pages_of.values())
        == len(set().union(*pages_of.values()))
        == 200
    )
    assert all(split_of(row["document"]) == name for name, items in split.items() for row in items)
    ids = [row["id"] for items in split.values() for row in items]
    assert len(ids) == len(set(ids))
    assert all(
        set(row) == {"id", "document", "kind", "text"} for items in split.values() for row in items
    )
    texts = [row["text"] for items in split.values() for row in items]
    assert len(texts) == len(set(texts))
    assert 0.2 < len(pages_of["test"]) / 200 < 0.4


def test_rows_do_not_depend_on_the_order_of_pages(site):
    assert rows(site) == rows(list(reversed(site)))


def test_first_rows_come_from_as_many_pages_as_possible(site):
    for name, items in rows(site).items():
        pages_of = [row["document"] for row in items]
        count = len(set(pages_of))
        assert len(set(pages_of[:count])) == count
        assert max(pages_of.count(page) for page in pages_of) <= ITEMS_PER_PAGE[name]
        assert len({row["kind"] for row in items[:20]}) == 3


def tar_of(members: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in members.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("./usr/share/doc/p/html/link.html")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def no_dpkg(tmp_path, monkeypatch):
    """dpkg-deb --fsys-tarfile FILE replaced by cat FILE."""
    original = subprocess.Popen
    monkeypatch.setattr(
        thirdparty_html.subprocess,
        "Popen",
        lambda command, **options: original(["cat", command[-1]], **options),
    )


@pytest.mark.usefixtures("no_dpkg")
def test_pages_are_the_english_html_files_of_the_package(tmp_path):
    root = "./usr/share/doc/p/html/"
    names = [
        "a/b.html",
        "c.html",
        "genindex-A.html",
        "a/index.html",
        "translations/zh_CN/x.html",
        "whatsnew/3.html",
    ]
    members = {root + name: "<p>é</p>" for name in names} | {
        root + "c.txt": "",
        "./usr/share/doc/q/html/d.html": "",
    }
    (tmp_path / "p.deb").write_bytes(tar_of(members))
    site = dict(pages(tmp_path / "p.deb", Package("p", "usr/share/doc/p/html/")))
    assert site == {"p/a/b.html": "<p>é</p>", "p/c.html": "<p>é</p>"}


@pytest.mark.usefixtures("no_dpkg")
def test_write_gives_three_files_and_their_counts(tmp_path, monkeypatch):
    package = Package("p", "usr/share/doc/p/html/")
    monkeypatch.setattr(thirdparty_texts, "PACKAGES", (package,))
    members = {
        f"./usr/share/doc/p/html/{i}.html": "".join(
            f"<p>{text}</p>" for text in essay(f"page {chr(97 + i)}", 60)
        )
        for i in range(20)
    }
    (tmp_path / "p.deb").write_bytes(tar_of(members))
    counts = thirdparty_texts.write({"p": tmp_path / "p.deb"}, tmp_path)
    for split, count in counts.items():
        lines = (tmp_path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == count > 0
        assert all(json.loads(line)["kind"] == "p" for line in lines)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_file_that_is_no_package_is_a_data_error(tmp_path):
    (tmp_path / "p.deb").write_bytes(b"no package")
    with pytest.raises(DataError, match="should be a Debian package"):
        list(pages(tmp_path / "p.deb", Package("p", "usr/")))
