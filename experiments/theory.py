"""What speculative decoding should gain (Leviathan et al., arXiv 2211.17192, section 3).

alpha: acceptance rate; c: cost of a draft step over that of a target forward; gamma: guesses in a round.
"""


def expected_tokens(alpha, gamma):
    """Tokens a round yields on average, equation 1: (1 - alpha^(gamma + 1)) / (1 - alpha)."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def improvement(alpha, gamma, c, scoring=1.0):
    """Speed-up over plain decoding, theorem 3.8: the above over (gamma c + 1). The 1 is the cost of scoring gamma + 1
    tokens, which the paper takes for that of one; `scoring` says what it really is, in units of one token's."""
    return expected_tokens(alpha, gamma) / (gamma * c + scoring)


def best_gamma(alpha, c, longest=32):
    """The gamma, 0 included, with the greatest improvement."""
    return max(range(longest + 1), key=lambda gamma: improvement(alpha, gamma, c))


def overlap(p, q):
    """Probability that a guess from `q [..., V]` passes against `p`: the sum of min(p, q) (their corollary 3.6). Its
    mean over contexts is alpha."""
    return p.minimum(q).sum(-1)
