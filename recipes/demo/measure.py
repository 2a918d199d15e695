"""What the model cards state, measured from the shipped files."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from kvbridge.demo import path, texts

CONTEXT, CONTINUATION = 192, 48
BATCH = 32


def load(name: str) -> LlamaForCausalLM:
    """A shipped model in fp32, ready to be evaluated."""
    return LlamaForCausalLM.from_pretrained(path(name), dtype=torch.float32).eval()


def read(split: str) -> list[dict[str, Any]]:
    with texts(split).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@torch.no_grad()
def logits(model: LlamaForCausalLM, rows: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
    """Logits ``[rows, keep, vocabulary]`` at each row's last ``keep`` tokens; rows are padded on
    the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(
        ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep, use_cache=False
    ).logits.float()


def losses(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    split: str,
    context: int,
    limit: int | None = None,
) -> float:
    """Mean loss in nats per token on the CONTINUATION tokens that follow the first CONTEXT tokens
    of each text.

    The model sees <bos> and the last ``context`` of those tokens. Texts that are too short are left
    out.
    """
    rows = []
    for item in read(split)[:limit]:
        ids = tokenizer.encode(item["text"]).ids
        if len(ids) >= 1 + CONTEXT + CONTINUATION:
            rows.append([ids[0], *ids[1 + CONTEXT - context : 1 + CONTEXT + CONTINUATION]])
    total = 0.0
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        predicted = logits(model, part, CONTINUATION + 1)[:, :-1]
        following = torch.tensor([row[-CONTINUATION:] for row in part])
        total += torch.nn.functional.cross_entropy(
            predicted.flatten(0, 1), following.flatten(), reduction="sum"
        ).item()
    return total / (len(rows) * CONTINUATION)


def recall(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    items: Sequence[dict[str, Any]],
    context: bool = True,
) -> list[bool]:
    """Whether the likeliest next token of all the vocabulary is the answer, item by item, with or
    without the text."""
    rows, hits = [], []
    for item in items:
        text = (item["context"] if context else "") + item["question"]
        rows.append(tokenizer.encode(text).ids)
    for start in range(0, len(rows), BATCH):
        best = logits(model, rows[start : start + BATCH], 1)[:, 0].argmax(-1)
        part = items[start : start + BATCH]
        answers = [tokenizer.encode(i["answer"], add_special_tokens=False).ids for i in part]
        hits += [[token] == answer for token, answer in zip(best.tolist(), answers, strict=True)]
    return hits


def figures(name: str) -> dict[str, float]:
    """Everything a card states of a model, from the shipped files alone."""
    model, tokenizer = load(name), Tokenizer.from_file(str(path(name) / "tokenizer.json"))
    items = read("recall")
    hits, blind = recall(model, tokenizer, items), recall(model, tokenizer, items, context=False)
    with_context = losses(model, tokenizer, "test", CONTEXT)
    without = losses(model, tokenizer, "test", 0)
    measured = {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        "loss_192": with_context,
        "loss_0": without,
        "gain": without - with_context,
        "recall": sum(hits) / len(items),
        "recall_without_text": sum(blind) / len(items),
        "chance": sum(item["chance"] for item in items) / len(items),
        "register_loss": losses(model, tokenizer, "register", CONTEXT),
    }
    for kind in sorted({item["kind"] for item in items}):
        of_kind = [hit for hit, item in zip(hits, items, strict=True) if item["kind"] == kind]
        measured[f"recall_{kind}"] = sum(of_kind) / len(of_kind)
    return measured
