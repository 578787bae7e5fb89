"""Which guesses to accept, so that the tokens committed are distributed exactly as the target's own.

A rule is a pure function of p, q, the drafts and uniform random numbers u. It must not synchronise with the host, nor
keep state: an engine may record its work and repeat it. If it must, set `verify.waits = True`.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from utils import at_place, pick, residual

# verify(p, q, drafts, u) -> (accepted, token), see `token_rule`.
VerificationRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Rule = TypeVar("Rule", bound=Callable[..., tuple[Tensor, ...]])  # a rule for chains, or one for trees


def acceptance(p_x: Tensor, q_x: Tensor) -> Tensor:
    """The probability that `token_rule` accepts a guess x: min(1, p(x) / q(x)) for `p_x, q_x` of any shape.

    It is 0 where q(x) is 0, for no such guess is ever drawn.
    """
    return torch.where(q_x > 0, (p_x / q_x).clamp_(max=1), 0)


def emitted(p: Tensor, q: Tensor) -> Tensor:
    """The distribution of the token that `token_rule` writes where a guess is drawn from q: `p, q [..., V]`.

    Token x comes as an accepted guess, or after a rejection from the residual p':
    P(x) = q(x) a(x) + p'(x) sum_y q(y) (1 - a(y)), where a is `acceptance`. If the rule is right, P is p (Leviathan et
    al., arXiv 2211.17192, Appendix A.1). It is computed with the functions that sample, so a mistake in them shows.
    """
    passed = q * acceptance(p, q)
    return passed + (q - passed).sum(-1, keepdim=True) * residual(p, q)


def token_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative sampling's rule, token by token (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    p: float32 `[B, gamma + 1, V]`, the target's distribution before each draft token and after the last.
    q: float32 `[B, gamma, V]`, the distributions `drafts[B, gamma]` were drawn from. If a row has fewer guesses than
        others, its q is 0 beyond them.
    u: float32 `[B, gamma + 1]`, uniform on [0, 1): one number for each draft, and one for the token after them.
    Returns `accepted[B]`, how many drafts are accepted, and `token[B]`, the token after them. That token is drawn from
    norm(max(0, p - q)) at the first rejection, and from p if all drafts are accepted. With gamma 0 this is plain
    sampling.
    """
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    passed = u[:, :-1] < acceptance(p_x, q_x)
    accepted = passed.long().cumprod(1).sum(1)
    # Past the last draft q is 0, and the residual there is p itself: the bonus token is no special case.
    q = F.pad(q, (0, 0, 0, 1))
    return accepted, pick(residual(at_place(p, accepted), at_place(q, accepted)), u[:, -1])


def block_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification: verifies the guesses of a round jointly; accepts at least as many on average (Sun et al.,
    arXiv 2403.10444, Algorithm 2). Arguments and results are those of `token_rule`.

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). Draft i ends the accepted part with probability
    h_i = S_i / (S_i + 1 - w_i), where S_i is the sum of max(0, w_i p - q) over the vocabulary after draft i. The last i
    that passes counts. The token after it is drawn from norm(max(0, w_i p - q)).
    """
    p_x, q_x = (d[:, : drafts.shape[1]].gather(-1, drafts[..., None])[..., 0] for d in (p, q))
    weights = [torch.ones_like(p[:, 0, 0])]
    for ratio in (p_x / q_x.clamp(min=torch.finfo(q.dtype).tiny)).unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    w = torch.stack(weights, 1)
    # Past the last draft q is 0, so S is w there and h is w, as the algorithm requires.
    weighted, q = w[..., None] * p, F.pad(q, (0, 0, 0, 1))
    s = (weighted - q).clamp_(min=0).sum(-1)
    # If p equals q here and at all later drafts, any choice is right.
    h = (s / (s + 1 - w)).masked_fill_(s + 1 - w == 0, 1.0)
    passed = (u[:, :-1] < h[:, 1:]) & (q_x > 0)
    order = torch.arange(1, drafts.shape[1] + 1, device=p.device)
    accepted = F.pad(passed * order, (1, 0)).amax(1)
    return accepted, pick(residual(at_place(weighted, accepted), at_place(q, accepted)), u[:, -1])


@functools.cache  # The same arguments give the same rule: an engine may have recorded its work.
def synthetic(alpha: float, rule: VerificationRule = token_rule) -> VerificationRule:
    """A rule that accepts each guess with probability `alpha`, whatever p and q are: for models with random weights,
    whose agreement is an accident. The text is not the target's. rule: the token rule, or an engine's version of it,
    which is computed as usual."""

    def verify(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        at, before = drafts[..., None], p[:, : drafts.shape[1]]
        q_x = q.gather(-1, at)  # 0 where a row has no guess: p stays what it is.
        p_x = max(alpha, 1e-15) * q_x  # Not 0: p may have no other token.
        before.scatter_(-1, at, torch.where(q_x > 0, p_x, before.gather(-1, at)))
        return rule(p, q, drafts, u)

    return verify


def drawn_with(p: Tensor, accepted: Tensor, token: Tensor) -> Tensor:
    """The target's probability of the token after the accepted drafts, float32 `[B]`; 0 or nan if p was nan."""
    rows = torch.arange(len(p), device=p.device)
    return p[rows, accepted, token.clamp(max=p.shape[-1] - 1)]


RULES: dict[str, VerificationRule] = {"token": token_rule, "block": block_rule}
