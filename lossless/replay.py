"""`guesses_along`: the guesses of a method along texts that are already written.

The guess that helped to draw a token depends on it: an accepted one is the token. So the method runs once more, with
random numbers of its own, on a target that writes these texts whatever the guesses. Each guess is then drawn as the
drafter really draws it after that text, and independently of the token that stands there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from decoding.drafter import Guesses
from decoding.model import Model
from decoding.rows import Rows, upload
from decoding.tree import Tree
from decoding.verification import VerificationRule
from utils import Sampling

PLACES = 8  # Places in a round, or siblings, that are told apart; those beyond count with the last.


class FollowingTarget:
    """A target that reads as `target` does, and writes `texts`.

    guesses: int64 `[texts, tokens of the longest, PLACES]`, what was guessed for each token, -1 where nothing was. A
    guess of a chain stands at its place in the round, one of a tree at its place among its siblings.
    """

    def __init__(self, target: Model, texts: Sequence[Sequence[int]]) -> None:
        self.target, self.texts, self.cache_of = target, texts, target.cache_of or target
        self.guesses = np.full((len(texts), max(map(len, texts)), PLACES), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def first_token(self, rows: Rows, sampling: Sampling) -> None:
        self.rows = rows
        self.target.prefill(rows)
        rows.commit_first(upload([self.texts[rows.numbers[row]][0] for row in rows.fresh], rows.device))

    def score_and_verify(
        self, rows: Rows, guesses: Guesses, u: Tensor, sampling: Sampling, verify: VerificationRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        p, _, _ = self.target.score_and_verify(rows, guesses, u, sampling, verify)
        path, token = self.follow(guesses.drafts, guesses.of_drafts(), None)
        return p, (path > 0).sum(1), token

    def score_tree(
        self, tree: Tree, block: Tensor, places: Any, q: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p = self.target.score_tree(tree, block, places, q, *args)[0]
        drafts = block[:, 1:]
        path, token = self.follow(drafts, q.gather(-1, drafts[..., None])[..., 0], tree)
        return p, (path > 0).sum(1), path[:, : tree.depth], token

    def follow(self, drafts: Tensor, q_x: Tensor, tree: Tree | None) -> tuple[Tensor, Tensor]:
        """Note the guesses `drafts[B, n]` on the way of each text, and return the nodes that the text goes through,
        int64 `[B, n]` with 0 after the last, and the token after them, `[B]`. tree: None: a chain."""
        paths, tokens = [], []
        for number, guessed, is_guess in zip(self.rows.numbers, drafts.tolist(), (q_x > 0).tolist()):
            text, node = self.texts[number][len(self.rows.tokens[number]) :], 0
            path: list[int] = []
            while len(path) < len(text):
                below = tree.children[node] if tree else range(node + 1, min(node + 1, len(guessed)) + 1)
                children = [child for child in below if is_guess[child - 1]]
                at = len(self.texts[number]) - len(text) + len(path)
                for child in children:
                    place = tree.ranks[child - 1] if tree else child - 1
                    self.guesses[number, at, min(place, PLACES - 1)] = guessed[child - 1]
                node = next((child for child in children if guessed[child - 1] == text[len(path)]), 0)
                if not node:
                    break
                path.append(node)
            paths.append(path + [0] * (drafts.shape[1] - len(path)))
            tokens.append(text[len(path)] if len(path) < len(text) else 0)
        return upload(paths, drafts.device).long().reshape(drafts.shape), upload(tokens, drafts.device)


def guesses_along(
    sampler: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], sampling: Sampling, **options: Any
) -> np.ndarray:
    """`FollowingTarget.guesses` of a method along `texts`, which follow `prompts`.

    sampler: a partial function of `specSampling` or `treeSampling`, that wrote none of them: otherwise where it guesses
    could depend on them. options: its other arguments.
    """
    target = FollowingTarget(sampler.keywords["target"], texts)
    counts = [itertools.count(1) for _ in texts]

    def ends(number: int, token: int) -> bool:
        """Whether this is the last token of text `number`."""
        return next(counts[number]) == len(texts[number])

    context = min(model.context for model in (sampler.keywords["target"], *sampler.keywords["drafter"].models))
    most = min(max(map(len, texts)), context - max(map(len, prompts)))  # What is beyond has no guesses.
    sampler(prompts, target=target, max_len=most, sampling=sampling, end_of_text=ends, **options)
    return target.guesses
