"""What is trained and how: the three architectures, the curriculum, the optimisers and their
schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.demo.priming import prime
from recipes.demo.tokenizer import POSITIONS, SIZE

SHAPES: dict[str, dict[str, int]] = {
    "sender": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 320,
    },
    "receiver": {
        "hidden_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 448,
    },
}
SHAPES["tuned"] = SHAPES["receiver"]


@dataclass(frozen=True)
class Phase:
    """Until ``until`` (a share of all steps): rows of ``length`` tokens, and the shares of what
    they hold.

    ``shares`` are those of documents, drills and plain prose; the rest is bare copying, of which
    the share ``words`` draws on the task vocabulary alone. Copying a few hundred tokens in short
    rows is learnt within some hundred steps, and everything else is learnt on top of it; drills or
    prose from the start took many times as long.
    """

    until: float
    length: int
    shares: tuple[float, float, float]
    words: float = 0.5


LONG_EVERY, LONG_ROWS = 25, 2048
EMBEDDING_RATE = 1 / 3

# The sender is to be the weaker reader: much prose, in which it forgets to copy, then documents,
# and an early stop.
CURRICULA: dict[str, tuple[Phase, ...]] = {
    "sender": (
        Phase(0.04, 64, (0.0, 0.0, 0.0), words=1.0),
        Phase(0.17, 128, (0.0, 0.50, 0.0)),
        Phase(0.315, 128, (0.0, 0.75, 0.10)),
        Phase(0.685, 256, (0.04, 0.0, 0.96)),
        Phase(1.00, 256, (0.60, 0.0, 0.40)),
    ),
    "receiver": (
        Phase(0.02, 64, (0.0, 0.0, 0.0), words=1.0),
        Phase(0.08, 128, (0.0, 0.50, 0.0)),
        Phase(0.16, 128, (0.0, 0.75, 0.10)),
        Phase(0.30, 256, (0.30, 0.45, 0.10)),
        Phase(0.60, 256, (0.65, 0.20, 0.10)),
        Phase(1.00, 512, (0.75, 0.10, 0.12)),
    ),
    "tuned": (Phase(1.00, 256, (0.60, 0.05, 0.35)),),
}


def phase(name: str, step: int, steps: int) -> Phase:
    """The phase of a step; once rows are 512 long, every 25th step has rows of 2,048, for the later
    positions."""
    current = next(p for p in CURRICULA[name] if step < p.until * steps or p.until == 1.0)
    long = current.length == 512 and step % LONG_EVERY == 0
    return replace(current, length=LONG_ROWS) if long else current


def build(name: str, seed: int, **changes: int) -> LlamaForCausalLM:
    """A fresh fp32 model of the named shape; ``changes`` override its entries."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": SIZE,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",  # on a CPU, in rows this short, faster than sdpa
        **SHAPES[name],
        **changes,
    }
    model = LlamaForCausalLM(LlamaConfig(**options))
    prime(model)
    return model


def upper_third(layers: int) -> range:
    """Indices of the layers that ``tuned`` may change."""
    return range(layers - layers // 3, layers)


def freeze_all_but(model: LlamaForCausalLM, layers: Iterable[int]) -> None:
    """Only the named layers keep a gradient; embeddings, the last norm and all other layers are
    fixed."""
    model.requires_grad_(False)
    for index in layers:
        model.model.layers[index].requires_grad_(True)


def optimisers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms (arXiv 2502.16982: rates
    matched by RMS)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": others, "scale": EMBEDDING_RATE}],
            lr=rate,
            betas=(0.9, 0.97),
            weight_decay=0.0,
        ),
    ]


def rate_at(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps (or a tenth), constant, then linear to a twentieth over the last 35
    %."""
    warm = min(100, max(1, steps // 10))
    return peak * min(1.0, (step + 1) / warm, max(0.05, (steps - step) / (0.35 * steps)))
