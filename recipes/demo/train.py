"""Training of a demo model on the CPU.

A run that is cut resumes exactly: model, optimiser state and step are saved; rows are a function of
the step.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from kvbridge.demo import path
from recipes.demo import corpus, recipe
from recipes.demo.documents import Rows, sentences


@dataclass(frozen=True)
class Settings:
    """One run: a model of SHAPES, its schedule's `steps`, padded tokens of a batch, the peak
    learning rate, a checkpoint every so many minutes, and the weights of every `keep_every`-th step
    (0: of none) beside it."""

    model: str
    steps: int
    batch_tokens: int = 2048
    rate: float = 3e-3
    seed: int = 0
    checkpoint_minutes: float = 4.0
    keep_every: int = 0
    compiled: bool = False


def batch(rows: Rows, step: int, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[rows, length + 1]`` and loss weights of the same shape for a step."""
    phase = recipe.phase(settings.model, step, settings.steps)
    count = max(1, settings.batch_tokens // phase.length)
    drawn = [
        rows.row(step, index, phase.length, phase.shares, phase.words) for index in range(count)
    ]
    return torch.tensor([ids for ids, _ in drawn]), torch.tensor([weights for _, weights in drawn])


def loss_of(
    model: Any, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """The weighted loss, and the plain loss and accuracy on determined and on free tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1], use_cache=False).logits
    targets, weights = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    flat = logits.flatten(0, 1).float()
    each = torch.nn.functional.cross_entropy(flat, targets, reduction="none")
    with torch.no_grad():
        determined = weights > 1.0
        free = weights == 1.0
        hits = (flat[determined].argmax(-1) == targets[determined]).float()
        figures = {
            "recall_loss": each[determined].mean().item(),
            "recall": hits.mean().item(),
            "free_loss": each[free].mean().item(),
        }
    return (each * weights).sum() / weights.sum(), figures


class Run:
    """One training run in a folder: ``checkpoint.pt`` (everything to resume from) and
    ``log.jsonl``."""

    def __init__(self, model: LlamaForCausalLM, rows: Rows, settings: Settings, out: Path) -> None:
        self.model, self.rows, self.settings, self.out = model, rows, settings, out
        self.forward: Any = torch.compile(model, dynamic=False) if settings.compiled else model
        self.optimisers = recipe.optimisers(model, settings.rate)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        out.mkdir(parents=True, exist_ok=True)
        if (out / "checkpoint.pt").exists():
            self.load()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "counts": (self.step, self.seconds, self.tokens),
        }
        write(state, self.out / "checkpoint.pt")

    def load(self) -> None:
        state: dict[str, Any] = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.seconds, self.tokens = state["counts"]

    def advance(self) -> dict[str, float]:
        """One step of both optimisers; returns its figures."""
        ids, weights = batch(self.rows, self.step, self.settings)
        rate = recipe.rate_at(self.step, self.settings.steps, self.settings.rate)
        rare = ids.shape[1] > recipe.LONG_ROWS  # a shape not worth its compilation
        loss, figures = loss_of(self.model if rare else self.forward, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids[:, 1:].numel()
        return {"loss": loss.item(), "rate": rate, **figures}

    def train(self, until: int | None = None) -> None:
        """Advance to step ``until`` (default: all steps), with checkpoints on the way and at the
        end."""
        saved = time.monotonic()
        with (self.out / "log.jsonl").open("a") as log:
            while self.step < (self.settings.steps if until is None else until):
                began = time.monotonic()
                figures = self.advance()
                self.seconds += time.monotonic() - began
                if self.step % 20 == 0:
                    counts = {
                        "step": self.step,
                        "tokens": self.tokens,
                        "seconds": round(self.seconds, 1),
                    }
                    print(
                        json.dumps({**counts, **{k: round(v, 4) for k, v in figures.items()}}),
                        file=log,
                        flush=True,
                    )
                if self.settings.keep_every and self.step % self.settings.keep_every == 0:
                    kept = {
                        "model": self.model.state_dict(),
                        "counts": (self.step, self.seconds, self.tokens),
                    }
                    write(kept, self.out / f"weights-{self.step:06d}.pt")
                if time.monotonic() - saved > 60 * self.settings.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
        self.save()


def write(state: dict[str, Any], target: Path) -> None:
    """torch.save under a temporary name, flushed, then renamed: a cut leaves the old file."""
    temporary = target.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)


def pools(sources: Path, bible: bool) -> list[list[str]]:
    """Sentences of the documents that no shipped text contains, one list a document."""
    root = corpus.unpack(sources)
    documents = corpus.documents(corpus.bible(root) if bible else corpus.austen(root))
    return [sentences(document.paragraphs) for document in documents if document.split == "base"]


def train(settings: Settings, sources: Path, out: Path, until: int | None = None) -> None:
    """Trains on one thread, from where a cut run in `out` stopped."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(path("receiver") / "tokenizer.json"))
    tuned = settings.model == "tuned"
    if tuned:
        model = LlamaForCausalLM.from_pretrained(path("receiver"), dtype=torch.float32)
        recipe.freeze_all_but(model, recipe.upper_third(model.config.num_hidden_layers))
    else:
        model = recipe.build(settings.model, settings.seed)
    rows = Rows(tokenizer, pools(sources, tuned), settings.seed)
    Run(model, rows, settings, out).train(until)
