"""Samplers with a planted mistake: a test of losslessness is worth as much as the mistakes it sees.

Real samplers have been written with each of them; some name the public code in which it was seen. Each is a method of
the project with one part replaced: the target, the drafter, the verification rule, or the shape of the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import ChangedDrafter, Drafter, Guesses
from decoding.rows import Rows
from decoding.trees.rules import in_postorder, judge, traversal_rule
from decoding.trees.tree import Places, Tree
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from methods.lookup import LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter
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
SAID = 0.3  # What a drafter says of each guess.


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


def judged_by(
    wrong_p: Tensor, wrong_q: Tensor, p: Tensor, q: Tensor, drafts: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts guesses by the wrong distributions. The token after a rejection is drawn from the right residual."""
    accepted, _ = token_rule(wrong_p, wrong_q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(F.pad(q, (0, 0, 0, 1)), accepted)), u[:, -1])


def inverted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Rejects a guess with the probability min(1, p / q) with which it should be accepted."""
    flipped = F.pad((q - p[:, : q.shape[1]]).clamp(min=0), (0, 0, 0, 1))
    return judged_by(flipped, q, p, q, drafts, u)


def one_hot_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Judges a drawn guess x as if q(x) were 1: accepts it with probability p(x), else draws from p without x.

    This is no mistake. Whatever x is, the result is distributed as p. But fewer guesses are accepted: sum p q of them
    instead of sum min(p, q). vLLM has judged so (its issue 40149).
    """
    return token_rule(p, one_hot(q, drafts), drafts, u)


def half_handed_over(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts a guess x with probability p(x), as if q(x) were 1, and replaces it from the residual of the true q."""
    return judged_by(p, one_hot(q, drafts), p, q, drafts, u)


def one_hot(q: Tensor, drafts: Tensor) -> Tensor:
    """Distributions `[B, n, V]` that give all to the drafts; 0 where a row has none."""
    return torch.zeros_like(q).scatter(-1, drafts[..., None], 1) * (q.sum(-1, keepdim=True) > 0)


def late_rejection(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Notices a rejection one place late: the guess is dropped, and the token drawn after it takes its place."""
    accepted, token = token_rule(p, q, drafts, u)
    rejected = after(F.pad(q, (0, 0, 0, 1)), accepted).sum(-1) > 0
    late = pick(after(p, (accepted + 1).clamp(max=drafts.shape[1])), u[:, -1])
    return accepted, torch.where(rejected, late, token)


def shared_noise(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a rejected guess with the noise that drew it, by the Gumbel-max trick.

    A guess x is the argmin of E / q, where E are exponential numbers; its replacement, that of E / residual. Let T be
    the least of E / q, which is exponential too. Given T and x, E(x) is q(x) T, and E - q T of the other tokens are new
    exponential numbers, as the exponential distribution has no memory. So E is drawn after x is known.
    """
    accepted, _ = token_rule(p, q, drafts, u)
    q = after(F.pad(q, (0, 0, 0, 1)), accepted)  # 0 where no guess was rejected: then E is new
    generator = torch.Generator(p.device).manual_seed(int(u[0, -1] * 2**24))
    least, rest = (
        torch.empty(size, device=p.device).exponential_(generator=generator) for size in ((len(p), 1), q.shape)
    )
    return accepted, ((q * least + rest) / residual(after(p, accepted), q)).argmin(-1)


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
    return judged_by(hotter / hotter.sum(-1, keepdim=True), q, p, q, drafts, u)


def constant_q(rule: Callable[..., T], p: Tensor, q: Tensor, drafts: Tensor, *rest: Any) -> T:
    """Any rule, for chains or trees, whose drafter says that q is SAID for each guess, and 0 for other tokens."""
    return rule(p, SAID * one_hot(q, drafts), drafts, *rest)


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


# Models.


class FlawedModel(CachedModel):
    """A model with a mistake in how it runs: the weights and the KV cache of `model`."""

    def __init__(self, model: CachedModel) -> None:
        features = model.features_of or model.tap
        super().__init__(model.model, model.vocabulary, model.name, model.cache_of, features)
        self.store = model.store


class KeepingTarget(FlawedModel):
    """A target whose cache keeps what it held in some slots, whatever the target reads into them.

    highest: int64 `[B, 1]`, the last slot that was written in each row.
    """

    highest = torch.zeros(0, 1, dtype=torch.long)

    @abstractmethod
    def kept(self, positions: Tensor) -> Tensor:
        """Which of the slots `positions[B, n]` keep their content: bool `[B, n]`."""

    def prefill(self, rows: Rows) -> Tensor:
        fresh, self.highest = rows.fresh, self.highest[: rows.batch]
        if len(self.highest) < rows.batch or rows.waiting <= rows.batch:
            self.highest = torch.zeros(rows.batch, 1, dtype=torch.long, device=self.device)
        self.prefilling = True
        logits = super().prefill(rows)
        self.prefilling = False
        self.highest[fresh, 0] = rows.lengths[fresh] - 1
        return logits

    def copy_row(self, source: int, row: int) -> None:
        super().copy_row(source, row)
        self.highest[row] = self.highest[source]

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """As `CachedModel.forward`, but for the slots that keep their content."""
        if self.prefilling:
            return super().forward(tokens, positions, places, keep)
        assert self.cache is not None
        states = [states[: len(tokens)] for layer in self.cache.layers for states in (layer.keys, layer.values)]
        slots = [positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]) for x in states]
        before, kept = [x.gather(2, at) for x, at in zip(states, slots)], self.kept(positions)[:, None, :, None]
        logits = super().forward(tokens, positions, places, keep)
        for x, at, old in zip(states, slots, before):
            x.scatter_(2, at, torch.where(kept, old, x.gather(2, at)))
        self.highest[: len(tokens)] = torch.maximum(self.highest[: len(tokens)], positions[:, -1:])
        return logits


class StaleSlotTarget(KeepingTarget):
    """A target whose cache keeps a rejected guess: the token that replaces it does not overwrite its slot."""

    def kept(self, positions: Tensor) -> Tensor:
        """The first token's slot, if it was written before."""
        return (positions <= self.highest[: len(positions)]) & (
            torch.arange(positions.shape[1], device=self.device) == 0
        )


class DraftKeysTarget(KeepingTarget):
    """A target whose cache keeps what a draft that shares it has written for the guesses."""

    def kept(self, positions: Tensor) -> Tensor:
        """All slots but the last: the draft has not read its last guess."""
        return positions < positions[:, -1:]


class PredecessorTarget(FlawedModel):
    """A target whose rows keep the text before: of a prompt that takes the row over, only the last token is read."""

    def prefill(self, rows: Rows) -> Tensor:
        self.takes_over = rows.waiting > rows.batch
        return super().prefill(rows)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int]) -> Tensor:
        if not self.takes_over:
            return super().read_prompts(prompts, lengths)
        last = torch.tensor(lengths, device=self.device)[:, None] - 1
        return self.forward(prompts.gather(1, last), last)[:, 0]


class SiblingMaskTarget(FlawedModel):
    """A target whose ancestor masks have siblings in them: a node attends to all nodes before it."""

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """As `CachedModel.forward`, but a node of a tree attends to all nodes before it."""
        if places is not None:
            elder = 2 << torch.arange(len(places.ancestors), device=self.device)
            places = places._replace(ancestors=elder - 1)
        return super().forward(tokens, positions, places, keep)


class WrongSlotTarget(FlawedModel):
    """A target whose keys of the accepted path are moved to wrong slots: each to the one after its own."""

    def move(self, source: Tensor, slots: Tensor) -> None:
        """As `CachedModel.move`, but each node goes to the slot of the next one."""
        super().move(source.roll(1, 1), slots)


class OneSidedTarget(FlawedModel):
    """A target without top-p, whatever the draft guesses with."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return super().probabilities(logits, replace(sampling, top_p=1.0), seen)


class UnfilteredDraft(FlawedModel):
    """A draft that draws with temperature, top-k and top-p, and hands over the distributions from before them."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        self.unfiltered.append(logits.softmax(-1))
        return super().probabilities(logits, sampling, seen)

    def draw(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.unfiltered: list[Tensor] = []
        drafts, _ = super().draw(*args)
        return drafts, torch.stack(self.unfiltered, 1)


# Drafters: f(drafter, sampling, threshold). sampling: whose distribution is wanted. threshold: --draftThreshold.


def unsure_dropped(drafter: Drafter, sampling: Sampling, threshold: float) -> Drafter:
    """Takes back a guess whose q is below the threshold, and all guesses after it."""

    def change(guesses: Guesses, gamma: int) -> Guesses:
        sure = guesses.of_drafts()[..., None] >= threshold
        return replace(guesses, q=guesses.q * sure.cumprod(1))

    return ChangedDrafter(drafter, change)


def unfiltered(drafter: Drafter, sampling: Sampling, threshold: float) -> Drafter:
    """Guesses of a draft model, with the q from before the filters."""
    assert isinstance(drafter, ModelDrafter) and isinstance(drafter.model, CachedModel)
    return ModelDrafter(UnfilteredDraft(drafter.model), drafter.temperature, drafter.top_p)


def cold_drafter(drafter: Drafter, sampling: Sampling, threshold: float) -> TreeDrafter:
    """Guesses trees at a lower temperature."""
    assert isinstance(drafter, TreeDrafter)
    return TreeDrafter(drafter.model, COLD * sampling.temperature, drafter.top_p)


def unchanged(part: T, *_: object) -> T:
    """The part as it is."""
    return part


@dataclass(frozen=True)
class Mistake:
    """One mistake. Every part that is not named here is the right one.

    what: the mistake in words. verify: the verification rule. target: f(model). drafter: f(drafter, sampling,
        threshold). tree: the shape of the guesses of a round.
    tested: f(sampling of the flags), the sampling that is tested.
    seen_in: the public code that makes or made it.
    loops, drafters: of other methods it is no mistake, or it cannot be made. own_copy: the target's own copy must
        guess. queue: the texts must outnumber the rows of the batch.
    everywhere: it is `constant_q`, and planted in every method that is tested, not only in the first that it fits.
    """

    what: str
    verify: Callable[..., tuple[Tensor, ...]] | None = None
    target: Callable[[CachedModel], CachedModel] = unchanged
    drafter: Callable[[Drafter, Sampling, float], Any] = unchanged
    tested: Callable[[Sampling], Sampling] = unchanged
    tree: Tree | None = None
    seen_in: str = ""
    loops: tuple[Callable[..., Any], ...] = (specSampling,)
    drafters: type[Drafter] | tuple[type[Drafter], ...] = Drafter
    own_copy: bool = False
    queue: bool = False
    everywhere: bool = False

    def fits(self, sampler: Any) -> bool:
        """Whether it can be planted in a sampler."""
        drafter = sampler.keywords.get("drafter")
        if sampler.func not in self.loops or not isinstance(drafter, self.drafters):
            return False
        return not self.own_copy or any(model.cache_of is not None for model in drafter.models)

    def planted(self, sampler: Any, sampling: Sampling, threshold: float) -> Any:
        """`sampler`, a partial function of one of `loops`, with this mistake in it. sampling: that is tested.
        threshold: --draftThreshold."""
        parts = sampler.keywords
        drafter = self.drafter(parts["drafter"], sampling, threshold)
        verify = partial(constant_q, parts["verify"]) if self.everywhere else self.verify or parts["verify"]
        tree = {"tree": self.tree} if self.tree else {}
        return partial(sampler, target=self.target(parts["target"]), drafter=drafter, verify=verify, **tree)


MISTAKES = {
    "always accept": Mistake("every guess is accepted", always_accept),
    "inverted": Mistake(
        "a guess is rejected with probability min(1, p / q), not accepted with it",
        inverted,
        seen_in="R. Gadgil, Towards Data Science 2024",
    ),
    "replace from p": Mistake(
        "a rejected guess is replaced from p, not from the residual", replace_from_p, seen_in="Clay's blog on SmolLM2"
    ),
    "shared noise": Mistake(
        "the noise that drew a rejected guess draws its replacement too",
        shared_noise,
        seen_in="vllm 54282",
        drafters=ModelDrafter,
    ),
    "half handed over": Mistake(
        "acceptance takes q(x) for 1, the residual takes q as it is", half_handed_over, drafters=ModelDrafter
    ),
    "q before the filters": Mistake(
        "guesses are drawn after temperature and top-p, and q is from before them",
        drafter=unfiltered,
        seen_in="transformers 47932",
        drafters=ModelDrafter,
    ),
    "late rejection": Mistake(
        "a rejected guess is dropped, and the token drawn after it takes its place",
        late_rejection,
        seen_in="openvino.genai 4190",
    ),
    "shifted by one": Mistake("p of the place before is compared with q", p_shifted),
    "bonus from q": Mistake("the token after the last guess is the draft's", bonus_from_q),
    "one-sided top-p": Mistake(
        "top-p for the draft, none for the target",
        target=OneSidedTarget,
        tested=lambda sampling: sampling if sampling.top_p < 1 else replace(sampling, top_p=0.9),
    ),
    "wrong temperature": Mistake(f"guesses are accepted at {HEAT} times the temperature", wrong_temperature),
    "stale slot": Mistake("the cache keeps a rejected guess for its replacement", target=StaleSlotTarget),
    "dropped guess": Mistake(
        "a guess below --draftThreshold is dropped, not verified",
        drafter=unsure_dropped,
        drafters=(ModelDrafter, OtherTokenizerDrafter, LookupFirst),
    ),
    "predecessor's slots": Mistake(
        "a text that takes over a row of the batch attends to what the text before it left there",
        target=PredecessorTarget,
        queue=True,
    ),
    "draft's keys": Mistake(
        "the target leaves the keys and values that its own copy wrote for the guesses",
        target=DraftKeysTarget,
        own_copy=True,
    ),
    "constant q": Mistake(
        f"the drafter says q = {SAID:g} of every guess", loops=(specSampling, treeSampling), everywhere=True
    ),
}
tree_mistake = partial(Mistake, verify=traversal_rule, tree=SHAPE, loops=(treeSampling,))
TREE_MISTAKES = {
    "siblings not renormalised": tree_mistake(
        f"a later sibling is judged by a q whose sum is below 1; the draft at {COLD} times the temperature",
        verify=siblings_not_renormalised,
        drafter=cold_drafter,
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
