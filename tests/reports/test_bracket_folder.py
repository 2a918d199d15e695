"""A folder whose name holds [ ] ? { } or *: exactly its files are read, never those of a folder
that the name would match as a pattern."""

from __future__ import annotations

import json

import pytest

from kvbridge.fitting.data import read_documents

FOLDERS = ("run[1]", "run1", "what?", "whatX", "alone[2]", "a{b,c}")


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_what_is_named_is_read(tmp_path, folder):
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        rows = (json.dumps({"text": f"text {i} of {name}"}) + "\n" for i in range(3))
        (tmp_path / name / "train.jsonl").write_text("".join(rows))
    texts = [document.text for document in read_documents(str(tmp_path / folder))]
    assert texts == [f"text {i} of {folder}" for i in range(3)]
