"""What a head is trained for: the losses of a chain of guesses, and the acceptance on texts that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from scripts.headNetworks import GAMMA, Batch, Network
from scripts.headStates import OutputLayer, at_a_time
from scripts.training import DIVERGENCE, KEPT, SAMPLING, acceptance_gradient, divergence_gradient
from utils import probabilities

EDGE = 1e-5  # a logit that is less by so little is in the nucleus too: it is computed again, and rounded otherwise


class Labels(NamedTuple):
    """The target's distributions over the head's tokens. logits, plain (the model's own) and p (that tokens are drawn
    from with SAMPLING), each `[m, V]`."""

    logits: Tensor
    plain: Tensor
    p: Tensor

    @classmethod
    def of(cls, output: OutputLayer, last: Tensor, sums: Tensor) -> Labels:
        """From last hidden states `[m, d]` and their `sums[m, 3]`. The probabilities are those among all of the
        target's tokens: if the output layer is cut, they do not sum to 1."""
        logits = output(last)
        whole, kept, least = sums.split(1, -1)
        p = (logits / SAMPLING.temperature - kept).exp().masked_fill_(logits < least - EDGE, 0.0)
        return cls(logits, (logits - whole).exp(), p)


class ChainLoss(torch.autograd.Function):
    """The loss of a chain, and its gradient by the hidden states, computed together.

    Logits and distributions of all positions would fill gigabytes. So a few positions are computed at a time, in the
    processor's cache, and only the gradient by the hidden states is kept.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        last: Tensor,
        sums: Tensor,
        weights: Tensor,
        output: OutputLayer,
        finishing: bool,
    ) -> Tensor:
        """hidden `[steps, N, d]`, last `[N, d]`, sums `[N, 3]`, weights `[steps, N]`: of each position's loss.

        The loss is the cross-entropy to the target's distribution. finishing: it is that of `RejectionLoss`.
        """
        gradient, total, count = torch.empty_like(hidden), hidden.new_zeros(()), at_a_time(hidden.device)
        for at in range(0, len(last), count):
            part = slice(at, at + count)
            labels = Labels.of(output, last[part], sums[part])
            for step in range(len(hidden)):
                loss, descent = (rejection if finishing else cross_entropy)(output(hidden[step, part]), labels)
                share = weights[step, part, None]
                total += (loss * share).sum()
                gradient[step, part] = ((descent * share).to(output.weight.dtype) @ output.weight).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient kept by `forward`."""
        return ctx.saved_tensors[0] * gradients[0], None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """-sum_x p(x) log q(x) `[m, 1]`, at temperature 1, and its gradient by `logits[m, V]`."""
    logits = logits - logits.amax(-1, keepdim=True)
    q = logits.exp()
    whole = q.sum(-1, keepdim=True)
    among = labels.plain.sum(-1, keepdim=True)
    loss = among * whole.log() - (labels.plain * logits).sum(-1, keepdim=True)
    return loss, q.mul_(among / whole).sub_(labels.plain)


def rejection(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """1 - sum_x min(p(x), q(x)) `[m, 1]`, p and q as tokens are drawn from them, and the gradient by `logits[m, V]`
    of `scripts.training.RejectionLoss`."""
    kept = labels.logits.topk(min(KEPT, logits.shape[-1])).indices
    passed, descent = acceptance_gradient(logits, kept, labels.p.gather(-1, kept))
    descent.add_(divergence_gradient(logits, kept, labels.plain.gather(-1, kept)), alpha=DIVERGENCE)
    return 1 - passed, descent


class Quality(NamedTuple):
    """How good a head is at GAMMA guesses. acceptance: the share that passes of the guesses tested at each position.
    alpha: that of all. tokens_per_round: with the token that the target adds."""

    acceptance: list[float]
    alpha: float
    tokens_per_round: float


@torch.inference_mode()
def measure(network: Network, output: OutputLayer, texts: Sequence[Batch], autocast: torch.dtype) -> Quality:
    """The quality on texts (batches of one) that the target drew: what decoding would give, up to chance."""
    tested, passed, count = np.zeros(GAMMA), np.zeros(GAMMA), at_a_time(output.weight.device)
    for batch in texts:
        with torch.autocast(batch.tokens.device.type, autocast, autocast != torch.float32):
            hidden = network.chain(batch, GAMMA)[:, 0].float()
        parts = [
            chances(output, *few)
            for few in zip(
                hidden.split(count, 1),
                batch.last[0].split(count),
                batch.sums[0].split(count),
                F.pad(batch.tokens[0, 1:], (0, 1)).split(count),
            )
        ]
        overlap, ratio = (torch.cat(x, 1).cpu().double().numpy() for x in zip(*parts))
        counts = rounds(overlap, ratio, batch.drawn[0].tolist())
        tested, passed = tested + counts[0], passed + counts[1]
    tested = np.maximum(tested, 1e-9)
    return Quality((passed / tested).tolist(), float(passed.sum() / tested.sum()), float(1 + passed.sum() / tested[0]))


def chances(
    output: OutputLayer, hidden: Tensor, last: Tensor, sums: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """For each step and each of m positions, `[steps, m]`: the chance that a guess drawn there passes, sum_x min(p(x),
    q(x)); and min(1, q(x) / p(x)) of the token x in `following[m]`, which the text has next."""
    p, q = Labels.of(output, last, sums).p, probabilities(output(hidden), SAMPLING)
    place = torch.searchsorted(output.tokens, following).clamp(max=len(output.tokens) - 1)
    known = output.tokens[place] == following
    p_next = p.gather(-1, place[:, None])[:, 0]
    q_next = q.gather(-1, place.expand(len(q), -1)[..., None])[..., 0]
    ratio = torch.where(known & (p_next > 0), q_next / p_next, 0.0).clamp(max=1.0)
    return torch.minimum(p, q).sum(-1), ratio


def rounds(overlap: np.ndarray, ratio: np.ndarray, drawn: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """How many guesses of each position are tested and how many pass, if a text is decoded speculatively, `[steps]`
    each, expected values.

    overlap, ratio: `chances`, `[steps, n]`; row j is for the token after the place it stands at. A guess passes and is
    the token x with probability min(p(x), q(x)). The text's x was drawn from p. So among the decodings that write this
    text, a guess passes with probability min(1, q(x) / p(x)). Followed from the first drawn token on, that gives how
    probable it is that a round begins at each place.
    """
    steps, n = overlap.shape
    begins = np.zeros(n + steps + 2)  # how probable it is that a round begins with the token at this place as its last
    tested, passed = np.zeros(steps), np.zeros(steps)
    for s in range(n - steps - 1):
        if not drawn[s]:
            continue
        if s == 0 or not drawn[s - 1]:
            begins[s] = 1.0
        whole, reached = all(drawn[s + 1 : s + steps + 2]), begins[s]
        for j in range(steps):
            tested[j] += whole * reached
            passed[j] += whole * reached * overlap[j, s + j]
            begins[s + j + 1] += reached * (1 - ratio[j, s + j])
            reached *= ratio[j, s + j]
        begins[s + steps + 1] += reached
    return tested, passed
