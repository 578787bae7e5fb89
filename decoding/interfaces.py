"""What a model, a drafter, a draft-length rule and a verification rule must offer: the interfaces of a round.

`engine/` and `methods/` implement them. Nothing in `decoding/` imports those folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from utils import Sampling

if TYPE_CHECKING:
    from decoding.guesses import Guesses
    from decoding.rows import Rows
    from decoding.trees import Tree

# verify(p, q, drafts, u) -> (accepted, token), see verification.py.
VerificationRule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# verify(p, q, drafts, u, tree) -> (accepted, path, token), see treeVerification.py.
TreeRule = Callable[[Tensor, Tensor, Tensor, Tensor, "Tree"], tuple[Tensor, Tensor, Tensor]]
Rule = TypeVar("Rule", bound=Callable[..., tuple[Tensor, ...]])  # one of the two
# callback(row, tokens, guessed): a row has grown by `tokens`; the first `guessed` of them are accepted guesses.
Callback = Callable[[int, list[int], int], None]
# The id that ends a row, or ends(row, token): whether a row ends at the token it has grown by. Each is asked once.
EndOfText = int | Callable[[int, int], bool] | None


class Reader(Protocol):
    """What limits the texts a model can read."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...


class Model(Protocol):
    """A model as samplers see it: `engine.cachedModel.CachedModel`, or `methods.contrastive.Contrast`.

    graphs: the engine's graphs of this model's steps (`engine.graphs.Graphs`), or None when it was not compiled.
    operators: the functions that filter, draw and verify for this model.
    cache: the KV cache; None before the first prompt.
    """

    name: str
    vocabulary: int
    context: int
    device: torch.device
    dtype: torch.dtype
    graphs: Any
    operators: Operators
    cache: Any

    def reserve(self, rows: int, capacity: int) -> object: ...

    def read_prompt(self, rows: Rows) -> Tensor: ...

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    def score(self, tokens: Tensor) -> Tensor: ...


class TreeModel(Model, Protocol):
    """A model that reads trees of guesses: `engine.cachedModel.CachedModel`."""

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor: ...


class Operators(Protocol):
    """Filters, draws and verification for a model: in PyTorch (`operators.PyTorchOperators`), or its own kernels."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor: ...

    def pick(self, probs: Tensor, u: Tensor) -> Tensor: ...

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def rule(self, verify: Rule) -> Rule: ...


class LengthRule(Protocol):
    """How many tokens to guess in each round (draftLength.py, lengthRules.py).

    A rule may look at committed tokens, past rounds and guesses already drawn. A guess once drawn is always submitted
    to verification. This keeps every rule lossless.

    stop: `stop(q_x)` is asked after each guess, whose probability was `q_x[B]`: which rows guess no further, bool
        `[B]`. None: the rule never asks.
    """

    @property
    def stop(self) -> Callable[[Tensor], Tensor] | None: ...
    @property
    def sure(self) -> Callable[[Tensor], Tensor] | None: ...

    def begin(self, rows: Rows) -> None:
        """A new batch."""

    def gammas(self) -> Sequence[int]:
        """A round begins: the most tokens to guess for each row."""

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        """Learn from a round.

        drafted, accepted: {row: tokens guessed}, {row: guesses accepted}, of the rows that had not ended.
        sure: {row: what `sure` said of the token that the target drew last}, if the rule has a `sure`.
        """


class Drafter(Protocol):
    """What guesses (drafters.py, lookup.py, cascade.py and otherTokenizer.py in methods/). models: the models that must
    read the rows."""

    @property
    def models(self) -> Sequence[Model]: ...

    def begin(self, rows: Rows) -> None:
        """A new batch: read the prompts."""

    def rewind(self, count: int) -> None:
        """Up to `count` of the last tokens read were replaced, in addition to those of the round before."""

    def draft(
        self,
        rows: Rows,
        gamma: int,
        sampling: Sampling,
        generator: Generator | None = None,
        length: LengthRule | None = None,
    ) -> Guesses:
        """At most `gamma` guesses for each row, and the distributions that each was really drawn from. `length` may
        stop a row's guessing early."""
        ...
