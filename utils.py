"""Logits to probabilities, drawing a token, and the residual distribution: what every sampler is made of.

Every tensor here ends in the vocabulary axis `V`; probabilities are float32 whatever the model's dtype, since a
half-precision distribution does not sum to 1 and loses its tail.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch


class UserError(Exception):
    """Something the user gave cannot be used. The message is one line: what is wrong, and the remedy."""


def not_finite(model):
    """The UserError for a model whose arithmetic broke down, as some models' does in float16."""
    dtype = str(model.dtype).removeprefix("torch.")
    remedy = "its weights are broken, download it again" if dtype == "float32" else "use --dtype float32"
    return UserError(f"{model.name} gives logits that are not finite in {dtype} (nan or inf); {remedy}")


def out_of_memory(error):
    """Whether an exception says that memory is full: each allocator has a type or words of its own."""
    words = ("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def check_share(name, value):
    """`value` if it lies in [0, 1], else a UserError."""
    if not 0 <= value <= 1:
        raise UserError(f"{name} must lie in [0, 1], not {value}")
    return value


@dataclass(frozen=True)
class Sampling:
    """How a distribution is shaped before a token is drawn. The same shape is given to the target and to the draft.

    temperature: 0 takes the most probable token, 1 leaves the model's distribution alone.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of most probable tokens that holds this much probability; 1 keeps all.
    repetition_penalty: divides the positive logits (multiplies the negative ones) of tokens already in the text
        (CTRL, arXiv 1909.05858); 1 does nothing.
    """

    temperature: float = 0.85
    top_k: int = 0
    top_p: float = 0.9
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not (self.temperature == 0 or 1e-4 <= self.temperature < math.inf):
            raise UserError(f"temperature must be 0 (greedy) or at least 0.0001, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise UserError(f"repetition_penalty must lie in [0.01, 100], not {self.repetition_penalty}")


kernels = None  # what does the work of `probabilities` and `pick` on a CPU once nativeKernels.py has built it
GREEDY = Sampling(temperature=0.0, top_p=1.0)
BOUNDS = 1e-4, 1e-5  # probabilities above which a nucleus is looked for before everything is sorted
WORTHWHILE = 1 << 14  # fewer probabilities than this are sorted sooner than candidates are picked


def probabilities(logits, sampling, seen=None):
    """The distribution a token is drawn from: `logits[..., V]` to float32 probabilities `[..., V]`.

    Order: repetition penalty, temperature, top-k, top-p. `seen[..., V]` (bool) marks the tokens already in the text;
    it is needed only with a repetition penalty. Tokens exactly as probable as the last one kept by top-k or top-p are
    kept too, so the result does not depend on how a sort breaks ties. Of logits that are not finite it is nan.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1:
        penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if by := kernels_for(logits):
        return by.probabilities(logits, as_tensor(sampling))
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)  # its probability is 1, but nan where its logit is not finite
        return torch.zeros_like(logits).scatter_(-1, best, logits.gather(-1, best).softmax(-1))
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < kth_largest(logits, sampling.top_k), -math.inf)
    probs = logits.softmax(-1)
    return nucleus(probs, sampling.top_p) if sampling.top_p < 1 else probs


def kernels_for(tensor):
    """The kernels, where there are some for such a tensor; else None."""
    return kernels if tensor.device.type == "cpu" and tensor.dtype == torch.float32 else None


@functools.cache
def as_tensor(sampling):
    """Temperature, top_k and top_p as float64 `[3]`, which a compiled graph can be given anew at each call."""
    return torch.tensor([sampling.temperature, sampling.top_k, sampling.top_p], dtype=torch.float64)


def kth_largest(logits, k):
    """The k-th largest of `logits[..., V]`, `[..., 1]`."""
    if logits.device.type == "cpu":  # numpy selects where torch sorts k of them: 2 to 10 times faster
        return torch.from_numpy(np.partition(logits.numpy(), -k, axis=-1)[..., -k, None])
    return logits.topk(k).values[..., -1:]


def nucleus(probs, top_p):
    """Top-p (nucleus) filter of `probs[..., V]`, renormalised (Holtzman et al., arXiv 1904.09751)."""
    if probs.device.type == "cpu":
        for bound in BOUNDS if probs.numel() >= WORTHWHILE else ():
            kept = nucleus_above(probs, top_p, bound)
            if kept is not None:
                return kept
        # numpy's sort uses vector instructions: 20 to 30 times faster than torch's
        ordered = torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
    else:  # to select candidates the host would have to wait for their number
        ordered = probs.sort(-1, descending=True).values
    probs = probs.masked_fill(probs < least_kept(ordered, top_p), 0.0)
    return probs / probs.sum(-1, keepdim=True)


def least_kept(ordered, top_p):
    """The probability of the token with which top_p is reached, `[..., 1]`, of distributions in descending order."""
    completes = (ordered.cumsum(-1) < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, completes.clamp_(max=ordered.shape[-1] - 1))


def nucleus_above(probs, top_p, bound):
    """`nucleus` on a CPU, sorting only tokens with a probability of at least `bound`, at most 1 / bound in a row. They
    come first in the order, so if they hold top_p the nucleus is among them, and the same. None if in some row they do
    not."""
    rows = probs.numpy().reshape(-1, probs.shape[-1])
    where = np.flatnonzero(rows >= bound)
    found = rows.ravel()[where]
    ends = np.searchsorted(where, np.arange(len(rows) + 1) * rows.shape[1])
    counts = np.diff(ends)
    if not counts.all():
        return None
    ragged = np.zeros((len(rows), counts.max()), np.float32)
    ragged[np.arange(ragged.shape[1]) < counts[:, None]] = found
    ordered = torch.from_numpy(np.sort(ragged, axis=-1)[:, ::-1].copy())
    # Summed as in the full sort, term by term: rounding decides alike.
    if not (ordered.cumsum(-1)[:, -1] >= top_p).all():
        return None
    least = least_kept(ordered, top_p).numpy()
    found *= found >= np.repeat(least[:, 0], counts)
    kept = np.zeros_like(rows)
    kept.ravel()[where] = found / np.repeat(np.add.reduceat(found, ends[:-1]), counts)
    return torch.from_numpy(kept).view(probs.shape)


def draw(probs, generator=None):
    """One token index for each distribution of `probs[..., V]`; shape `[...]`."""
    return pick(probs, torch.rand(probs.shape[:-1], device=probs.device, generator=generator))


def pick(probs, u):
    """The token in whose share of `probs[..., V]` the number `u[...]` of [0, 1) lies, int64 `[...]`.

    Inverts the cumulative distribution at one uniform number a row: much cheaper than `torch.multinomial`, which draws
    V exponential numbers. A token of probability 0 is never drawn. Of a distribution that is nan it is V, which is
    no token: so the host hears of it with the tokens, and need not wait to ask."""
    if by := kernels_for(probs):
        return by.pick(probs, u)
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    u = (u[..., None] * total).minimum(total.nextafter(torch.zeros_like(total)))  # rounding must not reach the end
    return torch.searchsorted(cumulative, u, right=True)[..., 0]


def residual(p, q):
    """norm(max(0, p - q)) for `p, q [..., V]`: what is left of the target once the draft has had its share
    (Leviathan et al., arXiv 2211.17192, Algorithm 1). Where nothing is left (p equals q up to rounding) it is p."""
    left = (p - q).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left.div_(total), p)


def seen_after(seen, block):
    """The tokens in the text after each token of a block: `seen[B, V]` before it, `block[B, n]` -> `[B, n, V]` bool.
    None (nobody asks) stays None."""
    if seen is None:
        return None
    hits = torch.zeros(*block.shape, seen.shape[-1], dtype=torch.int32, device=seen.device)
    return seen[:, None] | (hits.scatter_(-1, block[..., None], 1).cumsum(1) > 0)
