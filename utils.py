"""The parts of every sampler: logits to probabilities, drawing a token, and the residual distribution.

The last axis of every tensor here is the vocabulary, `V`. Probabilities are float32 whatever the model's dtype: a
half-precision distribution does not sum to 1 and loses its tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor


class UserError(Exception):
    """Invalid input of the user. The message is one line: the error and the remedy."""


def not_finite(name: str, dtype: torch.dtype) -> UserError:
    """The UserError for the model `name` whose logits are not finite, as some models' are in float16."""
    remedy = "its weights are broken, download it again" if dtype == torch.float32 else "use --dtype float32"
    kind = str(dtype).removeprefix("torch.")
    return UserError(f"{name} gives logits that are not finite in {kind} (nan or inf); {remedy}")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory is full. Each allocator has its own type or message."""
    words = ("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Lists of numbers as a tensor on `device`. The copy to a GPU is asynchronous, from pinned memory: no host sync."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def check_threshold(value: float) -> float:
    """A threshold, if it lies in [0, 1]. Raises UserError otherwise."""
    if not 0 <= value <= 1:
        raise UserError(f"threshold must lie in [0, 1], not {value}")
    return value


@dataclass(frozen=True)
class Sampling:
    """How a distribution is filtered before a token is drawn. A draft may have a temperature and a top-p of its own.

    temperature: 0 is greedy decoding, 1 leaves the model's distribution unchanged.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of most probable tokens that holds this much probability; 1 keeps all.
    repetition_penalty: divides positive logits, and multiplies negative ones, of tokens already in the text (CTRL,
        arXiv 1909.05858); 1 does nothing.
    """

    temperature: float = 0.85
    top_k: int = 0
    top_p: float = 0.9
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-4 <= self.temperature < math.inf):
            raise UserError(f"temperature must be 0 (greedy) or at least 0.0001, not {self.temperature}")
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or a whole number, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise UserError(f"repetition_penalty must lie in [0.01, 100], not {self.repetition_penalty}")

    def but(self, temperature: float | None, top_p: float | None) -> Sampling:
        """The same filters with another temperature and another top-p; None keeps the current value."""
        return replace(
            self,
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if top_p is None else top_p,
        )


GREEDY = Sampling(temperature=0.0, top_p=1.0)
BOUNDS = 1e-4, 1e-5  # The nucleus is searched among tokens above these probabilities before all tokens are sorted.
WORTHWHILE = 1 << 12  # In a smaller vocabulary, sorting all is faster.


def probabilities(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The distribution a token is drawn from: `logits[..., V]` to float32 probabilities `[..., V]`.

    Order: repetition penalty, temperature, top-k, top-p. `seen[..., V]` (bool) marks the tokens already in the text;
    only a repetition penalty needs it. Tokens exactly as probable as the last one kept by top-k or top-p are kept too,
    so the result does not depend on how a sort breaks ties. If the logits are not finite, the whole result is nan.
    """
    logits = penalised(logits.float(), sampling, seen)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        chance = logits.gather(-1, best).softmax(-1)  # 1, or nan if the logit is not finite.
        return (chance - 1).expand_as(logits).scatter(-1, best, chance)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        if logits.device.type == "cpu":  # numpy selects, torch sorts: numpy is 2 to 10 times faster.
            least = torch.from_numpy(np.partition(logits.numpy(), -sampling.top_k)[..., -sampling.top_k, None])
        else:
            least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = logits.softmax(-1)
    return nucleus(probs, sampling.top_p) if sampling.top_p < 1 else probs


def excluded(logits: Tensor) -> Tensor:
    """The tokens that a model excludes, by a logit of -inf or one far below all others: bool, as `logits[..., V]`."""
    return logits < logits.amax(-1, keepdim=True) - 1000


def penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """`logits[..., V]` after the repetition penalty on the tokens that `seen[..., V]` (bool) marks."""
    if sampling.repetition_penalty == 1:
        return logits
    if seen is None:
        raise ValueError("a repetition penalty needs `seen`, the tokens already in the text")
    weaker = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    return torch.where(seen, weaker, logits)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Top-p (nucleus) filter of `probs[..., V]`, renormalised (Holtzman et al., arXiv 1904.09751)."""
    if probs.device.type == "cpu" and probs.shape[-1] >= WORTHWHILE:
        rows = probs.reshape(-1, probs.shape[-1])
        least = torch.stack([least_kept(descending(row, top_p), top_p) for row in rows]).view(*probs.shape[:-1], 1)
    elif probs.device.type == "cpu":  # numpy's sort uses vector instructions and is 20 to 30 times faster than torch's.
        least = least_kept(torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1), top_p)
    else:
        least = least_kept(probs.sort(-1, descending=True).values, top_p)
    probs = probs.masked_fill(probs < least, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def least_kept(ordered: Tensor, top_p: float) -> Tensor:
    """The probability of the token that completes top_p, `[..., 1]`. ordered: distributions in descending order."""
    completes = (running_sums(ordered) < top_p).sum(-1, keepdim=True)
    return ordered.gather(-1, completes.clamp_(max=ordered.shape[-1] - 1))


def descending(row: Tensor, top_p: float) -> Tensor:
    """The probabilities `row[V]`, on a CPU, in descending order: only the first of them, if these hold top_p."""
    values = row.numpy()
    for bound in BOUNDS:
        ordered = torch.from_numpy(np.sort(values[values >= bound])).flip(-1)
        if len(ordered) and ordered.cumsum(-1)[-1] >= top_p:
            return ordered
    return torch.from_numpy(np.sort(values)).flip(-1)


def pick(probs: Tensor, u: Tensor) -> Tensor:
    """The token that the uniform number `u[...]` in [0, 1) selects from `probs[..., V]`, int64 `[...]`.

    Inverts the cumulative distribution at one uniform number a row. That is much cheaper than `torch.multinomial`,
    which draws V exponential numbers. A token of probability 0 is never drawn. If the distribution is nan, the result
    is V, which is no token: the host learns of it with the tokens, without another sync.
    """
    cumulative = running_sums(probs)
    total = cumulative[..., -1:]
    u = (u[..., None] * total).minimum(total.nextafter(torch.zeros_like(total)))  # Rounding must not reach the end.
    return torch.searchsorted(cumulative, u, right=True)[..., 0]


def running_sums(probs: Tensor) -> Tensor:
    """`probs.cumsum(-1)` of `probs[..., V]`. On a GPU, torch's result for one row differs from run to run (pytorch,
    issue 75240), and may rise at a token of probability 0 (21780). Several rows it sums by another algorithm."""
    if probs.device.type == "cuda" and probs.numel() == probs.shape[-1]:
        return probs.expand(2, *probs.shape).cumsum(-1)[0]
    return probs.cumsum(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) for `p, q [..., V]`: the distribution of the token that replaces a rejected guess (Leviathan
    et al., arXiv 2211.17192, Algorithm 1). If nothing is left, because p equals q up to rounding, the result is p."""
    left = (p - q).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left.div_(total), p)


def at_place(x: Tensor, place: Tensor) -> Tensor:
    """`x[B, n, V]` at one place of each row: int64 `place[B]` -> `[B, V]`."""
    return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


def seen_after(seen: Tensor | None, block: Tensor) -> Tensor | None:
    """The tokens in the text after each token of a block: `seen[B, V]` before it, `block[B, n]` -> `[B, n, V]` bool.
    None stays None."""
    if seen is None:
        return None
    hits = torch.zeros(*block.shape, seen.shape[-1], dtype=torch.int32, device=seen.device)
    return seen[:, None] | (hits.scatter_(-1, block[..., None], 1).cumsum(1) > 0)
