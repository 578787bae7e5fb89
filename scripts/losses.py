"""The losses of networks, with gradients written by hand: autograd takes several times as long on a CPU.

A guess drawn from q passes with probability a = sum_x min(p(x), q(x)), where p and q are the distributions that tokens
are drawn from, after temperature and top-p. Distillation makes q close to p over the whole vocabulary instead. So a
draft learns from the target's distribution first, and last from `rejection`: from -a and from that distribution
together (DistillSpec, arXiv 2310.08461; LK losses, arXiv 2602.23881). A short run without the second part agreed less
at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from engine.sharedWeights import RestrictedHead
from utils import Sampling, least_kept, probabilities

SAMPLING = Sampling()  # temperature 0.85, top-p 0.9: what a draft meets if no flag says otherwise
TOP = 256  # tokens of the target's distribution that `rejection` compares, the most probable ones
DIVERGENCE = 0.3  # weight of the divergence at temperature 1 beside -a
SHARPNESS = 4  # a token is inside the draft's nucleus by sigmoid(SHARPNESS * log(probability / edge))
WIDEST = 0.2  # the edge is at least this share of the least probable token inside
ROUNDING = 1e-5  # a logit that is less by so little is in the nucleus too: it is computed again, and rounded otherwise


def at_a_time(device: torch.device) -> int:
    """How many distributions are computed at a time: on a CPU, those that its cache holds."""
    return 64 if device.type == "cpu" else 2048


class InParts(torch.autograd.Function):
    """A loss summed over the N places of `inputs[..., N, d]`, a few at a time, and its gradient.

    loss_of(inputs of a few places `[..., n, d]`, their slice of N) -> (their loss, its gradient by these inputs).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, loss_of: Callable[[Tensor, slice], tuple[Tensor, Tensor]]) -> Tensor:
        gradient, total = torch.empty_like(inputs), inputs.new_zeros((), dtype=torch.float32)
        count = at_a_time(inputs.device)
        for at in range(0, inputs.shape[-2], count):
            part = slice(at, at + count)
            loss, gradient[..., part, :] = loss_of(inputs[..., part, :], part)
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0], None


# Acceptance.


def rejection(logits: Tensor, top: Tensor, p: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """1 - a `[N, 1]`, and the gradient of -a + DIVERGENCE * KL(target || draft at temperature 1) by `logits[N, V]`.

    top: the target's most probable tokens `[N, K]`. p: the probabilities they are drawn with, plain: those at
    temperature 1 without top-p, `[N, K]`. In the divergence, all other tokens count as one.
    """
    accepted, gradient = acceptance_gradient(logits, top, p)
    probs = logits.softmax(-1)
    q = probs.gather(-1, top)
    rest = (1 - plain.sum(-1, keepdim=True)).clamp(min=0) / (1 - q.sum(-1, keepdim=True)).clamp(min=1e-4)
    divergence_gradient = probs.mul_(1 - rest).scatter_(-1, top, q - plain)
    return 1 - accepted, gradient.add_(divergence_gradient, alpha=DIVERGENCE)


def acceptance_gradient(logits: Tensor, top: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """a `[N, 1]`, and the gradient of -a by `logits[N, V]`.

    Top-p has no gradient. So the edge of the draft's nucleus is soft in a (`soft_nucleus`), and moves such that the
    nucleus always holds the same share.
    """
    probs = (logits / SAMPLING.temperature).softmax(-1)
    inside, _ = soft_nucleus(probs)
    held = (inside * probs).sum(-1, keepdim=True)
    near = SHARPNESS * (1 - inside)  # d log inside / d log (probability / edge)
    # If a token's probability rises, the edge rises by `shift`: what the nucleus holds stays the same share.
    crowd = (probs * inside * near).sum(-1, keepdim=True).clamp(min=0.05)
    shift = probs * (inside + inside * near - held) / crowd
    q = (inside * probs / held).gather(-1, top)
    accepted = torch.minimum(p, q).sum(-1, keepdim=True)
    pull, near = torch.where(q < p, q, 0.0), near.gather(-1, top)  # pull: d a / d log q
    gradient = probs * pull.sum(-1, keepdim=True) + shift * (pull * near).sum(-1, keepdim=True)
    return accepted, gradient.scatter_add_(-1, top, -pull * (1 + near)).div_(SAMPLING.temperature)


def soft_nucleus(probs: Tensor) -> tuple[Tensor, Tensor]:
    """How far each token is inside the nucleus of `probs[N, V]`, from 0 to 1 `[N, V]`, and the edge of the nucleus
    `[N, 1]`.

    A token is inside the nucleus or outside; a step from 0 to 1 has no gradient. So the step is replaced by a slope.
    Its middle, the edge, is the geometric mean of the least probability inside and of the greatest one outside, and at
    least WIDEST times the former. A token at the edge counts as half inside, and one of twice its probability as 0.94.

    With top-p 0.9 and the probabilities 0.5, 0.3, 0.15 and 0.05, the first three tokens are the nucleus. The edge is
    (0.15 * 0.05) ** 0.5 = 0.087. The tokens are inside by 0.999, 0.993, 0.9 and 0.1, where top-p says 1, 1, 1 and 0.
    """
    if probs.device.type == "cpu":  # numpy's sort is 20 to 30 times faster than torch's.
        ordered = torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    else:
        ordered = probs.sort(-1, descending=True).values
    inside = least_kept(ordered, SAMPLING.top_p)
    outside = probs.masked_fill(probs >= inside, 0.0).amax(-1, keepdim=True)
    edge = torch.maximum((inside * outside).sqrt(), WIDEST * inside)
    return (SHARPNESS * (probs.clamp(min=1e-30) / edge).log()).sigmoid_(), edge


# Of a draft model.


def most_probable(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The input of `rejection` from the target's `logits[N, V]`: top, int16, p and plain, float16, each `[N, TOP]`. A
    nucleus of more than TOP tokens loses the least probable of them; the others keep their probabilities, about."""
    logits = logits.float()
    values, top = logits.topk(min(TOP, logits.shape[-1]))
    plain = (values - logits.logsumexp(-1, keepdim=True)).exp()
    logits = logits / SAMPLING.temperature
    p = (values / SAMPLING.temperature - logits.logsumexp(-1, keepdim=True)).exp()
    p = p.masked_fill(p.cumsum(-1) - p >= SAMPLING.top_p, 0.0)
    return top.to(torch.int16), (p / p.sum(-1, keepdim=True).clamp(min=SAMPLING.top_p)).half(), plain.half()


def rejection_loss(logits: Tensor, top: Tensor, p: Tensor, plain: Tensor) -> Tensor:
    """The mean of `rejection` over all places of `logits[N, V]`, with its gradient."""

    def of_part(logits_of_part: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        loss, gradient = rejection(logits_of_part.float(), top[part].long(), p[part].float(), plain[part].float())
        return loss.sum() / len(logits), gradient / len(logits)

    return InParts.apply(logits, of_part)


# Of a head.


def output_logits(output: RestrictedHead, hidden: Tensor) -> Tensor:
    """The logits of last hidden states `[..., d]` for the V tokens of the target's output layer, float32 `[..., V]`."""
    return output.inner(hidden.to(output.weight.dtype)).float()


def sums_of(output: RestrictedHead, last: Tensor) -> Tensor:
    """Sums that normalize the logits l of last hidden states `[..., d]`, without all of them, `[...,
    3]`: log sum exp l; log sum exp l / temperature, over the nucleus; and the least l in the nucleus."""
    logits = output_logits(output, last.to(torch.bfloat16))  # as they are stored
    p = probabilities(logits, SAMPLING)
    most, in_nucleus = logits.amax(-1), p.masked_fill(p == 0, torch.inf)
    nucleus = most / SAMPLING.temperature - p.amax(-1).log()  # as p(x) = exp(l(x) / temperature - nucleus)
    least = logits.gather(-1, in_nucleus.argmin(-1, keepdim=True))[..., 0]
    whole = most + (logits - most[..., None]).exp_().sum(-1).log()
    return torch.stack([whole, nucleus, least], -1)


def distributions(logits: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own distribution, and the one that tokens are drawn from with SAMPLING, of `logits[n, V]` for the
    head's tokens and the `sums[n, 3]` over all tokens: if the output layer is cut, they do not sum to 1."""
    whole, nucleus, least = sums.split(1, -1)
    drawn = (logits / SAMPLING.temperature - nucleus).exp().masked_fill_(logits < least - ROUNDING, 0.0)
    return (logits - whole).exp(), drawn


def cross_entropy(logits: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_x p(x) log q(x) `[n, 1]`, at temperature 1, and its gradient by `logits[n, V]`."""
    logits = logits - logits.amax(-1, keepdim=True)
    q = logits.exp()
    whole = q.sum(-1, keepdim=True)
    among = plain.sum(-1, keepdim=True)
    loss = among * whole.log() - (plain * logits).sum(-1, keepdim=True)
    return loss, q.mul_(among / whole).sub_(plain)


def chain_loss(
    hidden: Tensor, last: Tensor, sums: Tensor, weights: Tensor, output: RestrictedHead, finishing: bool
) -> Tensor:
    """The loss of a chain of guesses, with its gradient by the head's hidden states `[steps, N, d]`.

    last `[N, d]`, sums `[N, 3]`: of the target. weights `[steps, N]`: of each place's loss, which is `cross_entropy`,
    or in the end `rejection`.
    """

    def of_part(states: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        target = output_logits(output, last[part])
        plain, drawn = distributions(target, sums[part])
        if finishing:
            top = target.topk(min(TOP, target.shape[-1])).indices
            labels = top, drawn.gather(-1, top), plain.gather(-1, top)
        total, gradients = states.new_zeros(()), []
        for x, weight in zip(states, weights[:, part, None]):
            logits = output_logits(output, x)
            loss, gradient = rejection(logits, *labels) if finishing else cross_entropy(logits, plain)
            total += (loss * weight).sum()
            gradients.append((gradient * weight).to(output.weight.dtype) @ output.weight)
        return total, torch.stack(gradients)

    return InParts.apply(hidden, of_part)
