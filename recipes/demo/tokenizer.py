"""The byte-level BPE tokenizer that all three demo models share."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from recipes.demo.tasks import VOCABULARY

SIZE = 2048
SPECIALS = ["<pad>", "<bos>", "<eos>"]
POSITIONS = 2048
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] "
    "}}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Merges learnt from ``texts``; the task vocabulary is repeated until each of its words is one
    token."""
    texts = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def stream() -> Iterator[str]:
        yield from texts
        for _ in range(4000):
            yield "".join(VOCABULARY)

    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stream(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    split = [
        word
        for word in VOCABULARY
        if len(tokenizer.encode(word, add_special_tokens=False).ids) != 1
    ]
    if split:
        raise ValueError(
            f"expected one token for each task word, found several for {split}; repeat them more "
            "often"
        )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into ``folder``."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
