"""A checkpoint as a transformers folder in the package."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from kvbridge.demo import path
from recipes.demo import recipe


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, bf16 weights and generation config of ``model`` into ``folder``, each file
    renamed into place.

    The tokenizer and the card that stand there are left as they are; ``model`` itself is not
    changed.
    """
    copy = LlamaForCausalLM(type(model.config).from_dict(model.config.to_dict())).bfloat16()
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        copy.save_pretrained(temporary)
        for file in sorted(Path(temporary).iterdir()):
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    for file_name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (folder / file_name).exists():
            shutil.copy(path("receiver") / file_name, folder / file_name)


def ship(name: str, checkpoint: Path, flags: str, note: str) -> None:
    """Exports a training checkpoint into the package and notes how it was trained, for the card."""
    state = torch.load(checkpoint, weights_only=True)
    model = recipe.build(name, 0)
    model.load_state_dict(state["model"])
    export(model, path(name))
    steps, seconds, tokens = state["counts"]
    training = {
        "steps": steps,
        "seconds": seconds,
        "tokens": tokens,
        "flags": flags,
        "note": note,
    }
    (path(name) / "training.json").write_text(json.dumps(training, indent=1) + "\n")
