"""Samplers with a planted mistake: a proof of losslessness is worth as much as the mistakes it catches.

Real samplers have been written with each of them. Each is the project's own loop, for chains or for trees of guesses,
with one part replaced: the target, the drafter, the verification rule, or the sampling that the target is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Drafter, Guesses, WrappedDrafter
from decoding.rows import Rows, upload
from decoding.trees.rules import in_postorder, judge, traversal_rule
from decoding.trees.tree import Places, Tree
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from methods.samplers import Sampler
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling
from utils import Sampling, pick, residual

T = TypeVar("T")

HEAT = 1.2  # The wrong temperature over the right one: 0.85 becomes 1.02.
SHAPE = Tree.of("4,2")
UNSURE = 0.4  # A guess of a tree whose q is below this is dropped.
# The draft's temperature over the wanted one, where siblings are not renormalised. The mistake is a factor of
# 1 - q(x_1) - q(x_2) - ... in a later sibling's q, which is near 1 where the draft is unsure. On the bundled pair it
# moves 0.020 of the probability of the token after four siblings, and 0.079 with a draft at half the temperature.
COLD = 0.5


# Verification rules for chains. Arguments and results are those of decoding/verification.py.


def after(p: Tensor, accepted: Tensor) -> Tensor:
    """The distribution of the token after the accepted guesses: `p[B, n + 1, V]`, `accepted[B]` -> `[B, V]`."""
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def always_accept(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts all guesses. Where a row has none, q is 0."""
    accepted = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
    return accepted, pick(after(p, accepted), u[:, -1])


def replace_from_p(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draws the token after a rejection from p, not from the residual."""
    accepted, _ = token_rule(p, q, drafts, u)
    return accepted, pick(after(p, accepted), u[:, -1])


def p_shifted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Compares q of each guess with p of the place before it."""
    return token_rule(p.roll(1, 1), q, drafts, u)


def bonus_from_q(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the last guess unverified, as the token after the others, if all others are accepted."""
    if not drafts.shape[1]:
        return token_rule(p, q, drafts, u)
    last = q[:, -1:].sum((1, 2)) > 0  # the rows that have a last guess
    q = torch.cat([q[:, :-1], torch.zeros_like(q[:, -1:])], 1)
    accepted, token = token_rule(p, q, drafts, u)
    return accepted, torch.where(last & (accepted == q.shape[1] - 1), drafts[:, -1], token)


def wrong_temperature(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts guesses by p at a higher temperature. The token after a rejection is drawn from the right residual."""
    hotter = p ** (1 / HEAT)
    accepted, _ = token_rule(hotter / hotter.sum(-1, keepdim=True), q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])


# Verification rules for trees. Arguments and results are those of decoding/trees/rules.py.


def siblings_not_renormalised(
    p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges a later sibling by q without the siblings before it, but does not renormalise it."""
    unnormalised = []
    for node, rank in enumerate(tree.ranks):
        first = node - rank  # the first sibling
        has_guess = q[:, node].sum(1, keepdim=True) > 0
        unnormalised.append(q[:, first].scatter(1, drafts[:, first:node], 0) * has_guess)
    return traversal_rule(p, torch.stack(unnormalised, 1), drafts, u, tree)


def unsure_node_dropped(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Drops a node after it was drawn: if its q is low, it is not verified."""
    q_x = q.gather(-1, drafts[..., None])
    return traversal_rule(p, q * (q_x >= UNSURE), drafts, u, tree)


def mass_not_updated(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Judges each child, and each node after its children, with the mass from before a subtree was rejected. The token
    comes from the right residual."""
    p_x = p[:, list(tree.parents)].gather(-1, drafts[..., None])[..., 0]
    q_x = q.gather(-1, drafts[..., None])[..., 0]
    weights = [torch.ones_like(p_x[:, 0])]
    for node, parent in enumerate(tree.parents):
        ratio = torch.where(q_x[:, node] > 0, p_x[:, node] / q_x[:, node], 0)
        weights.append((weights[parent] * ratio).clamp(max=1))
    passed = u[:, :-1] < torch.stack(weights[1:], 1)
    route = torch.ones_like(drafts[:, 0])
    for node in reversed(list(in_postorder(tree))[:-1]):
        route = torch.where(passed[:, node - 1], tree.ancestors[node], route)
    return judge(p, q, drafts, tree, carried=True).end(route, u[:, -1], tree)


# Targets.


class FlawedTarget(CachedModel):
    """A target with a mistake in how it runs: the weights of `model`, and a cache of its own."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__(model.model, model.vocabulary, model.name)


class StaleSlotTarget(FlawedTarget):
    """A target whose cache keeps a rejected guess: the token that replaces it does not overwrite its slot."""

    def prefill(self, rows: Rows) -> Tensor:
        """As `CachedModel.prefill`."""
        self.highest: Tensor | None = None
        logits = super().prefill(rows)
        self.highest = upload([[length - 1] for length in rows.prompt_lengths], self.device)
        return logits

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """As `CachedModel.forward`, but the first token's slot keeps its old content if it was written before."""
        if self.highest is None:
            return super().forward(tokens, positions, places, keep)
        assert self.cache is not None
        slot = positions[:, :1, None, None]
        stale = slot <= self.highest[..., None, None]
        states = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        before = [states_at(tensor, slot) for tensor in states]
        logits = super().forward(tokens, positions, places, keep)
        for tensor, old in zip(states, before):
            kept = torch.where(stale, old, states_at(tensor, slot))
            tensor.scatter_(2, slot.expand_as(kept), kept)
        self.highest = torch.maximum(self.highest, positions[:, -1:])
        return logits


def states_at(states: Tensor, slot: Tensor) -> Tensor:
    """`states[B, heads, capacity, d]` at `slot[B, 1, 1, 1]`: `[B, heads, 1, d]`."""
    return states.gather(2, slot.expand(-1, states.shape[1], -1, states.shape[3]))


class SiblingMaskTarget(FlawedTarget):
    """A target whose ancestor masks have siblings in them: a node attends to all nodes before it."""

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """As `CachedModel.forward`, but a node of a tree attends to all nodes before it."""
        if places is not None:
            elder = 2 << torch.arange(len(places.ancestors), device=self.device)
            places = places._replace(ancestors=elder - 1)
        return super().forward(tokens, positions, places, keep)


class WrongSlotTarget(FlawedTarget):
    """A target whose keys of the accepted path are moved to wrong slots: each to the one after its own."""

    def move(self, source: Tensor, slots: Tensor) -> None:
        """As `CachedModel.move`, but each node goes to the slot of the next one."""
        super().move(source.roll(1, 1), slots)


# Drafters: f(drafter, sampling, threshold). sampling: whose distribution is wanted. threshold: --draftThreshold.


class FlawedDrafter(WrappedDrafter):
    """The guesses of `drafter` with `sampling`, whatever the target is told, after `change` was made to them."""

    def __init__(self, drafter: Drafter, sampling: Sampling, change: Callable[[Guesses], Guesses]) -> None:
        super().__init__(drafter, sampling)
        self.change = change

    def changed(self, guesses: Guesses, rows: Rows, gamma: int) -> Guesses:
        return self.change(guesses)


def one_sided(drafter: Drafter, sampling: Sampling, threshold: float) -> Drafter:
    """Guesses with the wanted sampling, while the target scores with the one it is told."""
    return FlawedDrafter(drafter, sampling, lambda guesses: replace(guesses, p=None))


def unsure_guess_dropped(drafter: Drafter, sampling: Sampling, threshold: float) -> Drafter:
    """Takes back a guess whose q is below the threshold, and all guesses after it."""

    def change(guesses: Guesses) -> Guesses:
        sure = guesses.of_drafts()[..., None] >= threshold
        return replace(guesses, q=guesses.q * sure.cumprod(1))

    return FlawedDrafter(drafter, sampling, change)


def tree_drafter(drafter: Drafter, sampling: Sampling, threshold: float, heat: float | None = None) -> TreeDrafter:
    """Guesses trees. heat: the draft's temperature over the wanted one; None: that of the flags."""
    assert isinstance(drafter, ModelDrafter)
    temperature = drafter.temperature if heat is None else heat * sampling.temperature
    return TreeDrafter(drafter.model, temperature, drafter.top_p)


def unchanged(part: T, *_: object) -> T:
    """The part as it is."""
    return part


@dataclass(frozen=True)
class Mistake:
    """One mistake. Every part that is not named here is the right one.

    what: the mistake in words. verify: the verification rule. target: f(model). drafter: f(drafter, sampling,
        threshold).
    told: f(sampling), the sampling that the loop is given instead. tested: f(sampling of the flags), the sampling whose
        distribution is wanted.
    tree: the shape of the guesses of a round; None: a chain.
    """

    what: str
    verify: Callable[..., tuple[Tensor, ...]] = token_rule
    target: Callable[[CachedModel], CachedModel] = unchanged
    drafter: Callable[[Drafter, Sampling, float], Any] = unchanged
    told: Callable[[Sampling], Sampling] = unchanged
    tested: Callable[[Sampling], Sampling] = unchanged
    tree: Tree | None = None

    def sampler(
        self, target: CachedModel, drafter: Drafter, gamma: int, sampling: Sampling, threshold: float
    ) -> Sampler:
        """The sampler with this mistake in it. drafter: of a tree, a `ModelDrafter`. gamma: of a chain."""
        flawed_target, flawed_drafter = self.target(target), self.drafter(drafter, sampling, threshold)
        loop: Any = treeSampling if self.tree else specSampling
        guesses = self.tree or gamma

        def sample(
            prefixes: Sequence[Sequence[int]], max_len: int, sampling: Sampling, *args: Any, **named: Any
        ) -> Any:
            parts = prefixes, flawed_target, flawed_drafter, max_len, guesses, self.told(sampling)
            return loop(*parts, *args, verify=self.verify, **named)

        return sample


MISTAKES = {
    "always accept": Mistake("every guess is accepted", always_accept),
    "replace from p": Mistake("a rejected guess is replaced from p, not from the residual", replace_from_p),
    "shifted by one": Mistake("p of the place before is compared with q", p_shifted),
    "bonus from q": Mistake("the token after the last guess is the draft's", bonus_from_q),
    "one-sided top-p": Mistake(
        "top-p for the draft, none for the target",
        drafter=one_sided,
        told=lambda sampling: replace(sampling, top_p=1.0),
        tested=lambda sampling: sampling if sampling.top_p < 1 else replace(sampling, top_p=0.9),
    ),
    "wrong temperature": Mistake(f"guesses are accepted at {HEAT} times the temperature", wrong_temperature),
    "stale slot": Mistake("the cache keeps a rejected guess for its replacement", target=StaleSlotTarget),
    "dropped guess": Mistake("a guess below --draftThreshold is dropped, not verified", drafter=unsure_guess_dropped),
}
tree_mistake = partial(Mistake, verify=traversal_rule, drafter=tree_drafter, tree=SHAPE)
TREE_MISTAKES = {
    "siblings not renormalised": tree_mistake(
        f"a later sibling is judged by a q whose sum is below 1; the draft at {COLD} times the temperature",
        verify=siblings_not_renormalised,
        drafter=partial(tree_drafter, heat=COLD),
    ),
    "dropped node": tree_mistake(
        f"a node is dropped after it was drawn, if its q is below {UNSURE}", verify=unsure_node_dropped
    ),
    "mass not updated": tree_mistake("a rejected subtree leaves the mass as it was", verify=mass_not_updated),
    "sibling in the mask": tree_mistake(
        "a node attends to all nodes before it, siblings too", target=SiblingMaskTarget
    ),
    "wrong slot": tree_mistake("the keys of the accepted path are moved to wrong slots", target=WrongSlotTarget),
}
