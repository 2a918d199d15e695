"""The readers of the two packages' formats, on bytes made here; and the cut into documents."""

import struct
import zlib
from pathlib import Path

from recipes.demo import corpus


def lzw_encode(data: bytes) -> bytes:
    """A plain Unix ``compress`` encoder without clear codes, written after its format alone."""
    table = {bytes([i]): i for i in range(256)}
    bits, width, start, following, held = "", 9, 0, 257, b""

    def emit(code: int) -> None:
        nonlocal bits
        bits += format(code, f"0{width}b")[::-1]

    for byte in data:
        longer = held + bytes([byte])
        if longer in table:
            held = longer
            continue
        emit(table[held])
        table[longer] = following
        following += 1
        held = bytes([byte])
        if following > 1 << width:  # the reader's table lags one entry behind the writer's
            bits += "0" * (-(len(bits) - start) % (width * 8))
            start, width = len(bits), width + 1
    emit(table[held])
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def test_lzw_reads_repeats_and_growing_widths() -> None:
    for data in (b"abababababa", b"In the beginning " * 20, bytes(range(256)) * 6):
        assert corpus._lzw(lzw_encode(data)) == data


def test_novels_are_read_out_of_an_r_database(tmp_path: Path) -> None:
    lines = [
        "CHAPTER I",
        "",
        "It was a fine day, and Emma _went_ out with the others",
        "to see the garden.",
        "",
    ]
    record = b"X\n" + struct.pack(">III", 3, 0x40201, 0x30500) + struct.pack(">I", 5) + b"UTF-8"
    record += struct.pack(">II", 0x10, len(lines))
    for line in lines:
        record += struct.pack(">II", 0x40009, len(line)) + line.encode()
    database = tmp_path / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    database.parent.mkdir(parents=True)
    database.write_bytes((struct.pack(">I", len(record)) + zlib.compress(record)) * 2)
    expected = ["It was a fine day, and Emma went out with the others to see the garden."]
    assert list(corpus.austen(tmp_path)) == [("emma", expected), ("mansfieldpark", expected)]


def test_documents_hold_every_paragraph_once_and_their_split_depends_on_the_id_alone() -> None:
    paragraphs = [f"Paragraph {i} " + "and so on " * 40 for i in range(30)]
    documents = corpus.documents(iter([("book", paragraphs)]))
    assert [p for document in documents for p in document.paragraphs] == paragraphs
    assert all(document.split == corpus.split_of(document.id) for document in documents)
    assert len({document.id for document in documents}) == len(documents) > 3
