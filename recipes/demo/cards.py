"""The model cards: what each demo model is, how it was made and what it measures."""

import json
import os

from kvbridge.demo import path

ABOUT = {
    "sender": "The small model of the demo pair: its KV cache is what kvbridge translates.",
    "receiver": "The larger model of the demo pair: it receives the translated KV cache.",
    "tuned": (
        "`receiver` with only its upper third of layers tuned on the King James Bible mixed with "
        "tasks: embeddings,"
        " norms outside of these layers and all lower layers are bit for bit those of `receiver`."
    ),
}
DATA = {
    "base": "Jane Austen's six novels (Debian package `r-cran-janeaustenr`)",
    "tuned": "The King James Bible (Debian package `bible-kjv-text`)",
}
LINES = {
    "parameters": "parameters",
    "loss_192": "loss after 192 tokens of context, nats per token, held-out texts (48 tokens each)",
    "loss_0": "the same 48 tokens with no context",
    "gain": "gain from context",
    "recall": "recall: the likeliest token of all the vocabulary is the answer, 20 to 180 tokens "
    "back",
    "recall_without_text": "recall when only the question is seen",
    "chance": "chance (one value of the relation, drawn at random)",
    "register_loss": "loss after 192 tokens of context, held-out chapters of the King James Bible",
}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# kvbridge demo: {name}

{about}

It exists to try kvbridge on a trained model without a download. It is no assistant and knows
nothing of the world.

- Architecture: Llama, {layers} layers, width {width}, {heads} query heads, {kv} KV heads, head_dim
  {head_dim}, {vocabulary} byte-level BPE tokens (shared by all three demo models), positions to
  2,048, bf16 weights.
- Data: {data}, in the public domain, mixed with generated tasks whose answers stand earlier in the
  text (`recipes/demo/tasks.py`). The documents of the shipped texts were left out of training.
- Recipe: `python -m recipes.demo train --model {name}{flags}`: {steps:,} steps, {tokens:.1f}
  million tokens, {hours:.2f} hours on one thread of a shared two-thread CPU core; {start}Muon and
  AdamW, bf16 autocast, the curriculum of `recipes/demo/recipe.py`. The shipped run: {note}.

| measured on the shipped texts | |
|---|---|
{table}

`python -m recipes.demo measure --model {name}` prints these figures again from the shipped files.
"""


def write(name: str, figures: dict[str, float]) -> None:
    """Write the README.md of a model from its config.json, its training.json and ``figures``."""
    folder = path(name)
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    labels = {**LINES, **{key: "recall, " + key[7:] for key in figures if key not in LINES}}
    shown = [
        (labels[key], f"{value:,.0f}" if key == "parameters" else f"{value:.3f}")
        for key, value in figures.items()
    ]
    text = CARD.format(
        name=name,
        about=ABOUT[name],
        data=DATA["tuned" if name == "tuned" else "base"],
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        start="from the shipped receiver, "
        if name == "tuned"
        else "from the weights of `recipes/demo/priming.py`, ",
        flags=training["flags"],
        note=training["note"],
        steps=training["steps"],
        tokens=training["tokens"] / 1e6,
        hours=training["seconds"] / 3600,
        table="\n".join(f"| {label} | {value} |" for label, value in shown),
    )
    temporary = folder / "README.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / "README.md")
