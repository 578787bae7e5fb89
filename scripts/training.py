"""One training loop, for the bundled models and for heads: a `Recipe` has every knob, a `Trainer` runs the steps."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from inputs.commandLine import one_line
from inputs.progress import Bar
from utils import UserError

GAMMA = 4  # guesses of a round that a head is trained and measured for
LOG_LINES = 20  # of a training
CHECKPOINT_EVERY = 120.0  # seconds
LAST = 0.8  # share of a training after which its last row lengths are used


@dataclass(frozen=True)
class Recipe:
    """Every knob of a training, or of one stage of it. A share is one of the whole training."""

    # The training ends after this number of tokens or this time, whichever is first.
    tokens: float = math.inf
    seconds: float = math.inf

    # What a step reads: rows of one length.
    batch: int = 2048  # tokens
    lengths: tuple[int, ...] = (256,)  # of the rows of each step, cyclically
    last_lengths: tuple[int, ...] | None = None  # those of the last fifth; None: the same
    labelled: Mapping[int, int] | None = None  # {row length: how many rows} that a teacher labels once for acceptance

    # Muon trains matrices, AdamW all other weights and both embeddings. The rates rise, then fall to zero on a cosine.
    muon_rate: float = 0.02  # the highest
    adam_rate: float = 3e-3
    peak: float = 1.0  # multiplies both
    warm_up: float = 0.02  # share over which they rise
    head_start: float = 0.0  # share by which they are ahead: with 0, the first step changes nothing
    weight_decay: float = 0.0  # of matrices
    fused: bool = True  # AdamW as one kernel, which rounds otherwise and is faster for embeddings
    clip: float = math.inf  # the longest gradient
    averaged: bool = False  # the result is the mean of the weights before and after

    # A head only.
    kind: str = "head"  # or "medusa"
    layers: str = "three"  # of the target, whose hidden states make a feature: a key of headNetworks.LAYERS
    unroll: int = GAMMA  # steps of the training-time test; with 1, it is trained on true features alone
    opening: float = 0.6  # the first share, with one step: on true features alone, which is several times faster
    finish: float = 0.15  # the last share, whose loss is the share of guesses that the target rejects
    feature_loss: bool = False  # also learn the target's last hidden states (EAGLE, arXiv 2401.15077, section 4.2)


class Trainer(ABC):
    """Trains the weights of `network` that require a gradient. label: its name in the log."""

    checkpoint: Path | None = None  # written every CHECKPOINT_EVERY seconds; `train` resumes from it
    about: Mapping[str, Any] = {}  # what a checkpoint must have in common with this training

    def __init__(self, recipe: Recipe, network: nn.Module, label: str) -> None:
        self.recipe, self.network, self.label = recipe, network, label
        self.weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.device = next(iter(self.weights.values())).device
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in self.weights.items():
            is_matrix = weight.ndim == 2 and not re.search("embed|lm_head", name)
            (matrices if is_matrix else others).append(weight)
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.0, weight_decay=recipe.weight_decay, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=recipe.fused),
        ]
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []  # lines of the log

    @abstractmethod
    def batch(self, rows: int, length: int) -> Any:
        """The input of the next step: `rows` rows of `length` tokens."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of the step. Its value is logged."""

    def measure(self) -> Mapping[str, Any]:
        """More figures for the log."""
        return {}

    @property
    def share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        return max(self.step * self.recipe.batch / self.recipe.tokens, self.seconds / self.recipe.seconds)

    def train(self) -> None:
        """Train to the end, from the checkpoint if there is one."""
        before = [p.detach().clone() for p in self.weights.values()] if self.recipe.averaged else []
        if self.checkpoint and self.checkpoint.exists():
            self.resume(self.checkpoint)
        saved = time.monotonic()
        with Bar(f"{self.label} is trained", 100, " %") as bar:
            while (share := self.share) < 1:
                self.one_step()
                bar.update(int(100 * min(1.0, self.share)) - bar.done)
                if log := int(LOG_LINES * share) != int(LOG_LINES * self.share):
                    self.log()
                if log or time.monotonic() - saved > CHECKPOINT_EVERY:
                    self.save()
                    saved = time.monotonic()
        if not self.history or self.history[-1]["step"] != self.step:  # A checkpoint was already beyond the end.
            self.log()
            self.save()
        with torch.no_grad():
            for weight, earlier in zip(self.weights.values(), before):
                weight.lerp_(earlier, 0.5)

    def one_step(self) -> None:
        """Read a batch, and change the weights."""
        recipe, share, begin = self.recipe, self.share, time.monotonic()
        lengths = recipe.last_lengths if recipe.last_lengths and share > LAST else recipe.lengths
        length = lengths[self.step % len(lengths)]
        loss = self.loss(self.batch(recipe.batch // length, length))
        loss.backward()
        if recipe.clip < math.inf:
            nn.utils.clip_grad_norm_(self.weights.values(), recipe.clip)
        factor = min((share + recipe.head_start) / recipe.warm_up, 0.5 + 0.5 * math.cos(math.pi * share))
        for optimizer, rate in zip(self.optimizers, (recipe.muon_rate, recipe.adam_rate)):
            optimizer.param_groups[0]["lr"] = rate * recipe.peak * factor
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step += 1
        self.seconds += time.monotonic() - begin

    def log(self) -> None:
        """Add a line to `history`, and show it."""
        tokens = self.step * self.recipe.batch
        line = {
            "step": self.step,
            "tokens": tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(tokens / max(self.seconds, 1e-3)),
            "memory": psutil.Process().memory_info().rss,
            "loss": float(np.mean(self.losses[-100:])),
            **self.measure(),
        }
        self.history.append(line)
        figures = ", ".join(f"{name} {np.round(value, 4)}" for name, value in line.items())
        print(f"{self.label}: {figures}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the checkpoint in one step, so that it is never incomplete."""
        if not self.checkpoint:
            return
        state = {
            **self.about,
            "weights": {name: p.detach() for name, p in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "losses": self.losses[-100:],
        }
        temporary = self.checkpoint.with_name(f".{self.checkpoint.name}")
        torch.save(state, temporary)
        os.replace(temporary, self.checkpoint)

    def resume(self, file: Path) -> None:
        """Resume from a checkpoint. Raises UserError if it is of another training, or broken."""
        try:
            state = torch.load(file, map_location=self.device, weights_only=True)
        except Exception as error:  # A broken file can raise nearly anything.
            raise UserError(f"{file} cannot be read ({one_line(error)}); remove it to train anew") from None
        for name, value in self.about.items():
            if not (torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value):
                raise UserError(f"{file.parent} holds a training with other flags; name another OUT, or remove {file}")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for optimizer, earlier in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(earlier)
        self.step, self.seconds = state["step"], state["seconds"]
        self.losses, self.history = state["losses"], state["history"]
