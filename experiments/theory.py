"""The speed-up that theory predicts for speculative decoding (Leviathan et al., arXiv 2211.17192, section 3).

alpha: the acceptance rate. c: the cost of a draft step over that of a target forward. gamma: guesses in a round.
"""

from collections.abc import Sequence

from torch import Tensor


def expected_tokens(alpha: float, gamma: int) -> float:
    """The expected tokens of a round, equation 1: (1 - alpha^(gamma + 1)) / (1 - alpha)."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_chain(rates: Sequence[float]) -> float:
    """The expected tokens of a round of guesses one after the other: 1 + a_1 + a_1 a_2 + ..., where `rates` are a_1,
    a_2, ..., the acceptance of the guess at each position if all before it were accepted. Equation 1 where all are
    alpha."""
    tokens = reach = 1.0
    for rate in rates:
        reach *= rate
        tokens += reach
    return tokens


def improvement(alpha: float, gamma: int, c: float, scoring: float = 1.0) -> float:
    """The speed-up over plain decoding, theorem 3.8: `expected_tokens` over (gamma c + scoring).

    scoring: the cost of scoring gamma + 1 tokens in one forward, over the cost of scoring one. The paper assumes 1.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + scoring)


def best_gamma(alpha: float, c: float, longest: int = 32) -> int:
    """The gamma with the greatest improvement, from 0 (plain decoding) to `longest`."""
    return max(range(longest + 1), key=lambda gamma: improvement(alpha, gamma, c))


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a guess drawn from `q [..., V]` is accepted against `p [..., V]`: the sum of min(p, q)
    (corollary 3.6). Its mean over contexts is alpha."""
    return p.minimum(q).sum(-1)
