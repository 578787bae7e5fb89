"""One training loop, for the bundled models and for heads: a `Recipe` has every knob, a `Trainer` runs the steps. Below
them are the losses, with gradients written by hand: autograd takes several times as long on a CPU.

A guess drawn from q passes with probability a = sum_x min(p(x), q(x)), where p and q are the distributions that tokens
are drawn from, after temperature and top-p. Distillation makes q close to p over the whole vocabulary instead. So a
draft learns from the target's distribution first, and last from `rejection`: from -a and from that distribution
together (DistillSpec, arXiv 2310.08461; LK losses, arXiv 2602.23881).
"""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from engine.sharedWeights import RestrictedHead
from inputs.files import library_errors
from inputs.progress import Bar
from utils import Sampling, UserError, least_kept, probabilities

GAMMA = 4  # guesses of a round that a head is trained and measured for
LAYERS = 1 / 6, 1 / 2, 1.0  # where in the target a feature of a head comes from
LOG_LINES = 20  # of a training, each with a checkpoint
PROGRESS = "step", "seconds", "history", "losses"  # what a checkpoint has of a training, beside weights and optimizers
MUON_RATE = 0.02  # the highest
WARM_UP, HEAD_START = 0.02, 1e-4  # share of a training over which the rates rise, and by which they are ahead
CLIP = 1.0  # the longest gradient
SAMPLING = Sampling()  # temperature 0.85, top-p 0.9: what a draft meets if no flag says otherwise
DIVERGENCE = 0.3  # weight of the divergence at temperature 1 beside -a
SHARPNESS = 4  # a token is inside the draft's nucleus by sigmoid(SHARPNESS * log(probability / edge))
WIDEST = 0.2  # the edge is at least this share of the least probable token inside
ROUNDING = 1e-5  # a logit that is less by so little is in the nucleus too: it is computed again, and rounded otherwise


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Every knob of a training, or of one stage of it. A share is one of the whole training."""

    tokens: float = math.inf
    seconds: float = math.inf  # The training ends after this number of tokens or this time, whichever is first.

    # What a step reads: rows of one length.
    batch: int = 2048  # tokens
    lengths: tuple[int, ...] = (256,)  # of the rows of each step, cyclically
    acceptance: bool = False  # on texts that the teacher writes, the loss is the share of guesses that it rejects

    # Muon trains matrices, AdamW all other weights and both embeddings. The rates rise, then fall to zero on a cosine.
    adam_rate: float = 3e-3  # the highest
    weight_decay: float = 0.0  # of matrices

    # A head only.
    kind: str = "eagle-3"  # a key of `scripts.trainHead.RECIPES`
    opening: float = 0.6  # the first share, with one step: on true features alone, which is several times faster
    finish: float = 0.15  # the last share, whose loss is the share of guesses that the target rejects


@dataclass
class Trainer:
    """Trains the weights of `network` that require a gradient."""

    recipe: Recipe
    network: nn.Module
    label: str  # in the log
    loss: Callable[["Trainer", int, int], Tensor]  # of the next step, on so many rows of so many tokens
    measure: Callable[["Trainer"], dict[str, Any]] = lambda trainer: {}  # more figures for the log
    checkpoint: Path | None = None  # a file, written with each line of the log, from which `train` resumes
    about: Mapping[str, Any] = field(default_factory=dict)  # what a checkpoint must have in common with this training

    def __post_init__(self) -> None:
        self.weights = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        matrices = {n: p for n, p in self.weights.items() if p.ndim == 2 and not re.search("embed|lm_head", n)}
        others, decay = [p for n, p in self.weights.items() if n not in matrices], self.recipe.weight_decay
        self.optimizers = [
            torch.optim.Muon([*matrices.values()], lr=0.0, weight_decay=decay, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.history: list[dict[str, Any]] = []  # lines of the log

    @property
    def share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        return max(self.step * self.recipe.batch / self.recipe.tokens, self.seconds / self.recipe.seconds)

    def train(self) -> None:
        """Train to the end, from a checkpoint if there is one. Raises UserError if that is broken or another's."""
        if (file := self.checkpoint) and file.exists():
            with library_errors(f"{file} cannot be read", "name another OUT"):
                state = torch.load(file, map_location=next(iter(self.weights.values())).device, weights_only=True)
                if state["about"] != self.about:
                    raise UserError(f"{file.parent} holds a training with other flags; name another OUT")
                self.network.load_state_dict(state["weights"], strict=False)
                for optimizer, earlier in zip(self.optimizers, state["optimizers"]):
                    optimizer.load_state_dict(earlier)
                for name in PROGRESS:
                    setattr(self, name, state[name])
        elif file:
            self.save(file)
        with Bar(f"{self.label} is trained", 100, " %") as bar:
            while (share := self.share) < 1:
                self.one_step()
                bar.update(int(100 * min(1.0, self.share)) - bar.n)
                if int(LOG_LINES * share) != int(LOG_LINES * self.share):
                    self.log()

    def one_step(self) -> None:
        recipe, share, begin = self.recipe, self.share, time.monotonic()
        length = recipe.lengths[self.step % len(recipe.lengths)]
        loss = self.loss(self, recipe.batch // length, length)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights.values(), CLIP)
        factor = min((share + HEAD_START) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * share))
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, recipe.adam_rate)):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step += 1
        self.seconds += time.monotonic() - begin

    def log(self) -> None:
        """Add a line to `history`, show it, and write the checkpoint."""
        line = {"step": self.step, "tokens": self.step * self.recipe.batch, "seconds": round(self.seconds, 1)}
        line |= {"memory": psutil.Process().memory_info().rss, "loss": float(np.mean(self.losses[-100:]))}
        self.history.append(line | self.measure(self))
        figures = ", ".join(f"{name} {np.round(value, 4)}" for name, value in self.history[-1].items())
        print(f"{self.label}: {figures}", file=sys.stderr, flush=True)
        if self.checkpoint:
            self.save(self.checkpoint)

    def save(self, checkpoint: Path) -> None:
        """Write the checkpoint, as a whole."""
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {name: getattr(self, name) for name in PROGRESS} | {"about": self.about}
        state |= {"weights": {name: p.detach() for name, p in self.weights.items()}}
        state |= {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}
        temporary = checkpoint.with_name(f".{checkpoint.name}")
        with library_errors(f"{checkpoint} cannot be written", "free some space; the same command goes on"):
            torch.save(state, temporary)
        os.replace(temporary, checkpoint)


def at_a_time(device: torch.device) -> int:
    """How many distributions are computed at a time: on a CPU, those that its cache holds."""
    return 64 if device.type == "cpu" else 2048


def rejection(logits: Tensor, plain: Tensor, drawn: Tensor) -> Pair:
    """1 - a `[N, 1]`, and the gradient of -a + DIVERGENCE * KL(target || draft at temperature 1) by `logits[N, V]`.

    plain, drawn: the target's `distributions`. Top-p has no gradient. So the edge of the draft's nucleus is soft in a
    (`soft_nucleus`), and moves such that the nucleus always holds the same share.
    """
    probs = (logits / SAMPLING.temperature).softmax(-1)
    inside, _ = soft_nucleus(probs)
    held = (inside * probs).sum(-1, keepdim=True)
    near = SHARPNESS * (1 - inside)  # d log inside / d log (probability / edge)
    # If a token's probability rises, the edge rises by `shift`: what the nucleus holds stays the same share.
    crowd = (probs * inside * near).sum(-1, keepdim=True).clamp(min=0.05)
    shift = probs * (inside + inside * near - held) / crowd
    q = inside * probs / held
    pull = torch.where(q < drawn, q, 0.0)  # d a / d log q
    gradient = probs * pull.sum(-1, keepdim=True) + shift * (pull * near).sum(-1, keepdim=True) - pull * (1 + near)
    _, divergence_gradient = cross_entropy(logits, plain)
    gradient = gradient.div_(SAMPLING.temperature).add_(divergence_gradient, alpha=DIVERGENCE)
    return 1 - torch.minimum(drawn, q).sum(-1, keepdim=True), gradient


def soft_nucleus(probs: Tensor) -> Pair:
    """How far each token is inside the nucleus of `probs[N, V]`, from 0 to 1 `[N, V]`, and the edge of the nucleus
    `[N, 1]`.

    A token is inside the nucleus or outside; a step from 0 to 1 has no gradient. So the step is replaced by a slope.
    Its middle, the edge, is the geometric mean of the least probability inside and of the greatest one outside, and at
    least WIDEST times the former. A token at the edge counts as half inside, and one of twice its probability as 0.94.

    With top-p 0.9 and the probabilities 0.5, 0.3, 0.15 and 0.05, the first three tokens are the nucleus. The edge is
    (0.15 * 0.05) ** 0.5 = 0.087. The tokens are inside by 0.999, 0.993, 0.9 and 0.1, where top-p says 1, 1, 1 and 0.
    """
    on_cpu = probs.device.type == "cpu"  # There numpy's sort is 20 to 30 times faster than torch's.
    ordered = torch.from_numpy(np.sort(probs.numpy(), axis=-1)) if on_cpu else probs.sort(-1).values
    inside = least_kept(ordered.flip(-1), SAMPLING.top_p)
    outside = probs.masked_fill(probs >= inside, 0.0).amax(-1, keepdim=True)
    edge = torch.maximum((inside * outside).sqrt(), WIDEST * inside)
    return (SHARPNESS * (probs.clamp(min=1e-30) / edge).log()).sigmoid_(), edge


def output_logits(output: RestrictedHead, hidden: Tensor) -> Tensor:
    """The logits of last hidden states `[..., d]` for the V tokens of the target's output layer, float32 `[..., V]`.
    What has V columns are logits already: those of a draft model, or of `MedusaHeads`."""
    is_hidden = hidden.shape[-1] == output.weight.shape[1]
    return (output.inner(hidden.to(output.weight.dtype)) if is_hidden else hidden).float()


def sums_of(output: RestrictedHead, last: Tensor) -> Tensor:
    """Sums that normalize the logits l of last hidden states `[..., d]`, without all of them, `[..., 3]`: log sum
    exp l; log sum exp l / temperature, over the nucleus; and the least l in the nucleus."""
    logits = output_logits(output, last.to(torch.bfloat16))  # as they are stored
    p = probabilities(logits, SAMPLING)
    nucleus = logits.amax(-1) / SAMPLING.temperature - p.amax(-1).log()  # as p(x) = exp(l(x) / temperature - nucleus)
    least = logits.masked_fill(p == 0, torch.inf).amin(-1)
    return torch.stack([logits.logsumexp(-1), nucleus, least], -1)


def distributions(logits: Tensor, sums: Tensor) -> Pair:
    """The target's own distribution, and the one that tokens are drawn from with SAMPLING, of `logits[n, V]` for the
    head's tokens and the `sums[n, 3]` over all tokens: if the output layer is cut, they do not sum to 1."""
    whole, nucleus, least = sums.split(1, -1)
    drawn = (logits / SAMPLING.temperature - nucleus).exp().masked_fill_(logits < least - ROUNDING, 0.0)
    return (logits - whole).exp(), drawn


def cross_entropy(logits: Tensor, plain: Tensor) -> Pair:
    """-sum_x p(x) log q(x) `[n, 1]`, at temperature 1, and its gradient by `logits[n, V]`."""
    log_q = logits.log_softmax(-1)
    loss = -(plain * log_q).sum(-1, keepdim=True)
    return loss, log_q.exp_().mul_(plain.sum(-1, keepdim=True)).sub_(plain)


def chain_loss(
    hidden: Tensor, last: Tensor, sums: Tensor, weights: Tensor, output: RestrictedHead, finishing: bool
) -> Tensor:
    """The loss of a chain of guesses, with its gradient by the head's hidden states `[steps, N, d]`, or by a network's
    own logits `[steps, N, V]`.

    last `[N, d]`, sums `[N, 3]`: of the target, whose output layer is `output`. weights `[steps, N]`: of each place's
    loss, which is `cross_entropy`, or in the end `rejection`.
    """
    are_logits = hidden.shape[-1] != last.shape[-1]
    gradient, total = torch.empty_like(hidden), hidden.new_zeros((), dtype=torch.float32)
    with torch.no_grad():
        for first in range(0, hidden.shape[1], at_a_time(hidden.device)):
            at = slice(first, first + at_a_time(hidden.device))
            plain, drawn = distributions(output_logits(output, last[at]), sums[at])
            for step, weight in enumerate(weights[:, at, None]):
                logits = output_logits(output, hidden[step, at])
                loss, by_logits = rejection(logits, plain, drawn) if finishing else cross_entropy(logits, plain)
                total += (loss * weight).sum()
                by_logits = by_logits * weight
                gradient[step, at] = by_logits if are_logits else by_logits.to(output.weight.dtype) @ output.weight
    differentiable = (hidden * gradient).sum()  # Only its gradient counts.
    return total + (differentiable - differentiable.detach())
