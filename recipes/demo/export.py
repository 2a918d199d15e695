"""Ship a checkpoint as a transformers folder: ``python -m recipes.demo.export --model receiver --checkpoint FILE``."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from kvbridge.demo import path
from recipes.demo import recipe


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, bf16 weights and generation config of ``model`` into ``folder``, each file renamed into place.

    The tokenizer and the card that stand there are left as they are; ``model`` itself is not changed.
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(recipe.SHAPES), required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument(
        "--flags", default="", help="further flags of the training command, for the card"
    )
    parser.add_argument("--note", default="not cut", help="how the run went, for the card")
    given = parser.parse_args(arguments)
    state = torch.load(given.checkpoint, weights_only=True)
    model = recipe.build(given.model, 0)
    model.load_state_dict(state["model"])
    export(model, path(given.model))
    steps, seconds, tokens = state["counts"]
    training = {
        "steps": steps,
        "seconds": seconds,
        "tokens": tokens,
        "flags": given.flags,
        "note": given.note,
    }
    (path(given.model) / "training.json").write_text(json.dumps(training, indent=1) + "\n")


if __name__ == "__main__":
    main()
