"""The tiny models of tests/models.py are fit for proving something."""

import pytest

from tests.models import CONFIGS, TEXT, TOKENIZERS, UNICODE_TEXT, tiny, tiny_tokenizer


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tiny_model_wraps(kind):
    model = tiny(kind)
    assert len(model.geometry.layers) == 4


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_tokenizer_fits_the_models(kind):
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer(TEXT + UNICODE_TEXT)["input_ids"]
    assert max(ids) < 384
    assert len(ids) > 40
