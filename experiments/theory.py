"""The speed-up that theory predicts for speculative decoding (Leviathan et al., arXiv 2211.17192, section 3), and the
acceptance it follows from: the overlap of p and q, the sum of min(p, q), in the contexts that texts visit.

alpha: the acceptance rate. c: the cost of a draft step over that of a target forward. gamma: guesses in a round.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from decoding.drafter import Guesses
from decoding.rows import Rows
from decoding.tree import Tree
from decoding.treeRules import after_child
from experiments.intervals import in_order, interval, sources, speedup, summarize, tested_and_passed
from experiments.schema import BatchCostsLine, CostsLine, Line, Positions, QueueLine, TimedText, of_kind
from methods.samplers import Sampler
from utils import Sampling

GAMMAS, MOST_GUESSES = range(1, 11), 32
# Of a round: the chances of the children of each node on the accepted path, guesses drafted, guesses accepted.
RoundChances = tuple[Sequence[Sequence[float]], int, int]


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a guess drawn from `q [..., V]` is accepted against `p [..., V]`: the sum of min(p, q)
    (corollary 3.6). Its mean over contexts is alpha."""
    return p.minimum(q).sum(-1)


def expected_chain(rates: Iterable[float]) -> float:
    """The expected tokens of a round of guesses one after the other: 1 + a_1 + a_1 a_2 + ..., where `rates` are a_1,
    a_2, ..., the acceptance of the guess at each position if all before it were accepted. Where all are alpha this is
    equation 1, (1 - alpha^(gamma + 1)) / (1 - alpha)."""
    return sum(accumulate(rates, operator.mul, initial=1.0))


def expected_in_text(rates: Sequence[float], gamma: int, tokens: int) -> float:
    """The expected tokens of a round, if rounds of `gamma` guesses write `tokens` tokens. Without an end this is
    `expected_chain`; the last rounds guess less, because the last token that a text may add needs no guess."""
    reach = np.cumprod([1.0, *rates[:gamma]])  # of a round that has every guess
    reach = np.pad(reach, (0, gamma + 1 - len(reach)))
    rounds = [0.0]  # expected, for each number of tokens that are left
    for left in range(1, tokens + 1):
        guesses = min(gamma, left - 1)
        accepts = -np.diff(reach[: guesses + 1], append=0.0)  # the probabilities of 0, 1, ... accepted guesses
        rounds.append(1 + float(accepts @ rounds[left - 1 - guesses : left][::-1]))
    return tokens / rounds[tokens]


def improvement(alpha: float, gamma: int, c: float, scoring: float = 1.0) -> float:
    """The speed-up over plain decoding, theorem 3.8: the expected tokens of a round over (gamma c + scoring).

    scoring: the cost of scoring gamma + 1 tokens in one forward, over the cost of scoring one. The paper assumes 1.
    """
    return expected_chain([alpha] * gamma) / (gamma * c + scoring)


def overlaps_of(
    sampler: Sampler,
    prompts: Sequence[list[int]],
    device: str | torch.device,
    sampling: Sampling,
    max_len: int,
    seed: int,
    spread: Callable[..., Iterable[Any]] = map,
    ends: bool = True,
) -> dict[str, Any]:
    """The overlaps at each depth of a round, over one text of `max_len` tokens after each of `prompts`, and the rounds
    and accepted guesses of these texts: the fields of an `OverlapLine`. ends: whether a round that the end of a text
    cuts off counts as one whose next guess was rejected. So it does in the tokens of a round of these texts.

    sampler: one that is not timed: what it learns from these texts must not affect the times. device: the target's.
    spread: applies a function to each item, as the builtin `map`.
    """

    def rounds_of(number: int) -> list[RoundChances]:
        generator = Generator(device).manual_seed(seed + number)
        options: dict[str, Any] = {"max_len": max_len, "sampling": sampling, "generator": [generator]}
        rounds = rounds_along(sampler, [prompts[number]], **options)[0]
        return rounds if ends else list(uncut(rounds, max_len))

    rounds = [one for text in spread(rounds_of, range(len(prompts))) for one in text]
    accepted = sum(accepted for *_, accepted in rounds)
    return {"overlap_by_position": by_position(rounds), "rounds": len(rounds), "accepted": accepted}


def rounds_along(sampler: Sampler, prompts: Sequence[list[int]], **options: Any) -> list[list[RoundChances]]:
    """The rounds of one text after each of `prompts`, which are decoded together."""
    paths: list[list[list[list[float]]]] = [[] for _ in prompts]

    def observer(rows: Rows, guesses: Guesses, p: Tensor, last: Tensor) -> None:
        for row, number in enumerate(rows.numbers):
            if not rows.ended[row]:
                paths[number].append(chances_on_path(guesses, p[row], int(last[row]), row))

    _, records = sampler(prompts, observer=observer, **options)
    return [list(zip(path, record.drafted[1:], record.accepted[1:])) for path, record in zip(paths, records)]


def chances_on_path(guesses: Guesses, p: Tensor, last: int, row: int = 0) -> list[list[float]]:
    """`chances` of the children of each node on the accepted path of a round, from the root to `last`. p
    `[nodes + 1, V]`: the target's distribution after the root and after each guess of the row."""
    tree = guesses.tree or Tree.chain(guesses.drafts.shape[1])
    children = {node: [child - 1 for child in tree.children[node]] for node in [0, *tree.path(last)]}  # in drafts and q
    return [
        chances(p[node], guesses.q[row, below], guesses.drafts[row, below]) if below else []
        for node, below in children.items()
    ]


def chances(p: Tensor, q: Tensor, drafts: Tensor) -> list[float]:
    """The probability that each of k siblings is the one accepted, if they are judged one by one (`top_down_rule`).

    p `[V]`: the target's distribution. q `[k, V]`: the law of each sibling. drafts `[k]`: their tokens. The share of
    the first is the overlap of p and q. That of a later one is given the tokens before it, and whether these are
    rejected: its mean over rounds is the probability.
    """
    mass, w = p[None, None], torch.ones_like(p[None, :1])
    rejected, shares = torch.ones_like(w), []
    for law, x in zip(q, drafts):
        shares.append(rejected * overlap(mass, law))
        ratio, mass, w = after_child(mass, w, law[None, None], x[None, None])
        rejected = rejected * (1 - ratio)
    return torch.cat(shares, 1)[0].tolist()


def uncut(rounds: Sequence[RoundChances], tokens: int) -> Iterator[RoundChances]:
    """The rounds of a text of at most `tokens` tokens, without what its end cut off: where the text had no room for a
    guess, none was rejected."""
    left = tokens - 1  # The first token has no round, and the last one needs no guess.
    for number, (path, drafted, accepted) in enumerate(rounds, 1):
        cut = drafted == left - 1 or (number == len(rounds) and drafted > 0)
        yield path, drafted, min(accepted, drafted - 1) if cut else accepted
        left -= accepted + 1


def by_position(rounds: Iterable[RoundChances]) -> Positions:
    """The sums over rounds at each depth that had a guess. A text may end before the last accepted guess of a round:
    only as many depths count as its record drafted and accepted."""
    table: list[list[float]] = []
    for path, drafted, accepted in rounds:
        for depth in range(accepted + 1):
            if depth == len(table):
                table.append([0, 0, 0.0])
            row, children = table[depth], path[depth] if depth < drafted else []
            row += [0, 0.0] * (len(children) - len(row) // 2)
            row[0] += 1
            for rank, chance in enumerate(children):
                row[2 * rank + 1] += 1
                row[2 * rank + 2] += chance
    return [row for row in table if row[1]]


def expectations(positions: Positions) -> dict[str, float]:
    """The expectations that follow from `positions`. "overlap": the mean over all guesses that were tested (in a tree,
    over first children), which is the probability that one guess is accepted. "tokens": the tokens a round that should
    follow if guesses are judged one by one. nan where nothing was guessed."""
    if not positions:
        return {"overlap": float("nan"), "tokens": float("nan")}
    tested = sum(position[1] for position in positions)
    rates = [sum(position[2::2]) / position[0] for position in positions]
    return {"overlap": sum(position[2] for position in positions) / tested, "tokens": expected_chain(rates)}


def predict(texts: Sequence[TimedText], costs: CostsLine) -> dict[str, Any]:
    """The measurements at one temperature, and the predictions of theory.

    "rows": for each gamma the measured figures of `intervals.summarize`, with "expected", the tokens a round that
    follow from the overlaps of p and q at each position of a round, where a round without a guess there accepts none,
    for texts as long as those that were timed; "theory", these over the measured costs of drafting and scoring as many
    tokens as the rounds had; and "paper", theorem 3.8, which takes each round to have gamma guesses, each of them to be
    accepted with the same probability alpha, independently of the others, and scoring to cost what one token costs.
    "alpha", "c": the inputs of theory; alpha is that of the run, by counting. "plain": the target alone. "best": the
    gamma that is best by the paper's theorem, of those up to MOST_GUESSES.
    """
    by_method = {row["method"]: row for row in summarize(texts)}
    c = costs["drafting"]
    tested, passed = map(sum, tested_and_passed([text for text in texts if text["method"].startswith("gamma")]))
    alpha = passed / tested if tested else float("nan")
    rates = [overlap / reached for reached, _, overlap in costs["overlap_by_position"]]
    longest = max(1, max(text["tokens"] for text in texts) - 1)  # The first token has no round.
    rows = []
    for gamma in GAMMAS:
        if row := by_method.get(f"gamma {gamma}"):  # Some are missing in a run that was stopped.
            expected = expected_in_text(rates, gamma, longest)
            theory = expected / cost_of_round(row["drafted"] / row["rounds"], c, costs["scoring"])
            paper = improvement(alpha, gamma, c)
            rows.append(row | {"gamma": gamma, "expected": expected, "theory": theory, "paper": paper})
    best = max(range(MOST_GUESSES + 1), key=lambda gamma: improvement(alpha, gamma, c))
    return {"alpha": alpha, "c": c, "rows": rows, "plain": by_method["target"], "best": best}


def cost_of_round(drafted: float, drafting: float, scoring: Sequence[float]) -> float:
    """The cost of a round, in units of a plain step. drafted: its guesses, a mean. drafting: the cost of one. scoring:
    the costs of scoring 1, 2, ... tokens."""
    return drafted * drafting + float(np.interp(drafted + 1, range(1, len(scoring) + 1), scoring))


def predict_batches(lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
    """{batch: the measurements, and the predictions of theory}.

    "plain": tokens per second of plain decoding, an `Interval`. "rows": for each other method "gamma", its "speedup"
    over plain decoding of the same batch (median of ratios, repeat by repeat), and "theory": tokens a round over what
    drafting and scoring cost. "best": the fastest cell, "controller": the speed of costAware over it, repeat by repeat.
    """
    predictions: dict[int, dict[str, Any]] = {}
    costs_of = {line["batch"]: line for line in of_kind(lines, BatchCostsLine)}
    queued = of_kind(lines, QueueLine)
    # A run may be stopped before plain decoding was timed.
    for batch in dict.fromkeys(line["batch"] for line in queued if line["method"] == "target"):
        queues = [line for line in queued if line["batch"] == batch]
        by_method = {name: [line for line in queues if line["method"] == name] for name in in_order(queues)}
        speeds = {
            name: interval([line["throughput"] for line in of], clusters=sources(of)) for name, of in by_method.items()
        }
        rows = []
        for name in [name for name in by_method if name != "target"]:
            tokens, drafted = (
                float(np.mean([line[figure] or 0 for line in by_method[name]]))
                for figure in ("tokens_per_round", "drafted_per_round")
            )
            theory = float("nan")
            if costs := costs_of.get(batch):
                theory = tokens / cost_of_round(drafted, costs["drafting"], costs["scoring"])
            ratio = speedup(queues, name, "target")
            rows.append({"gamma": name.removeprefix("gamma "), "speedup": ratio, "theory": theory})
        best = max((name for name in speeds if name != "costAware"), key=lambda name: speeds[name].middle)
        share = speedup(queues, "costAware", best)
        predictions[batch] = {"plain": speeds["target"], "rows": rows, "best": best, "controller": share}
    return predictions
