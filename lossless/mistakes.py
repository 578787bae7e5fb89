"""Samplers with a planted mistake: a test of losslessness is worth as much as the mistakes it sees.

Real samplers have been written with each of them; some name the public code in which it was seen. Each is a method of
the project with one part replaced: the target, the drafter, the verification rule, or the shape of the tree.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import Drafter, Guesses
from decoding.rows import Rows
from decoding.tree import Places, Tree
from decoding.treeRules import in_postorder, judge, take_path, traversal_rule
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from methods.lookup import LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling
from utils import Sampling, pick, residual

Part = TypeVar("Part", bound=Callable[..., Any])
Verified = tuple[Tensor, Tensor]  # by a rule for chains (decoding/verification.py)
VerifiedTree = tuple[Tensor, Tensor, Tensor]  # by a rule for trees (decoding/treeRules.py)


@dataclass(frozen=True)
class Mistake:
    """One mistake. Every part that is not named here is the right one.

    what: the mistake in words. seen_in: the public code that makes or made it.
    verify: the verification rule. target: f(model). drafter: f(drafter, sampling). None: the right one.
    tree: the shape of the guesses of a round; None: it is a mistake of chains.
    drafters: with others it is no mistake, or it cannot be made. own_copy: the target's own copy must guess. queue: the
        texts must outnumber the rows of the batch. needs_top_p: it is tested at top-p 0.9 if the flags say 1.
    everywhere: it is planted in every method that is tested, not only in the first that it fits, and `verify` takes the
        method's rule first.
    """

    what: str
    verify: Callable[..., Any] | None = None
    seen_in: str = ""
    target: Callable[[Any], Any] | None = None
    drafter: Callable[[Any, Sampling], Any] | None = None
    tree: Tree | None = None
    drafters: type[Drafter] | tuple[type[Drafter], ...] = Drafter
    own_copy: bool = False
    queue: bool = False
    needs_top_p: bool = False
    everywhere: bool = False

    def tested(self, sampling: Sampling) -> Sampling:
        """The sampling that is tested, for that of the flags."""
        return replace(sampling, top_p=0.9) if self.needs_top_p and sampling.top_p == 1 else sampling

    def fits(self, sampler: Any) -> bool:
        """Whether it can be planted in a sampler, a partial function."""
        drafter, loop = sampler.keywords.get("drafter"), treeSampling if self.tree else specSampling
        if not isinstance(drafter, self.drafters) or (sampler.func is not loop and not self.everywhere):
            return False
        models = sampler.keywords["target"], *drafter.models
        cached = all(isinstance(model, CachedModel) for model in models)  # A flawed model is one with a KV cache.
        shared = any(model.cache_of is not None for model in drafter.models)
        return (cached or not (self.target or self.drafter)) and (shared or not self.own_copy)

    def planted(self, sampler: Any, sampling: Sampling) -> Any:
        """`sampler`, a partial function of `specSampling` or `treeSampling`, with this mistake in it. sampling: that is
        tested."""
        parts = dict(sampler.keywords)
        if self.verify:
            parts["verify"] = partial(self.verify, parts["verify"]) if self.everywhere else self.verify
        if self.tree:
            parts["tree"] = self.tree
        if self.target:
            parts["target"] = self.target(parts["target"])
        if self.drafter:
            parts["drafter"] = self.drafter(parts["drafter"], sampling)
        return partial(sampler.func, **parts)


MISTAKES: dict[str, Mistake] = {}


def mistake(name: str, part: str = "verify", **fields: Any) -> Callable[[Part], Part]:
    """Add the decorated rule, model or drafter to MISTAKES, as that part of a sampler. The first paragraph of its
    docstring says what is wrong, in the words of the report. fields: others of `Mistake`."""

    def add(code: Part) -> Part:
        what = (code.__doc__ or "").partition("\n\n")[0]
        MISTAKES[name] = Mistake(what, **fields | {part: code})
        return code

    return add


def after(p: Tensor, accepted: Tensor) -> Tensor:
    """The distribution of the token after the accepted guesses: `p[B, n + 1, V]`, `accepted[B]` -> `[B, V]`. Of q
    `[B, n, V]` that of the rejected guess, or 0."""
    p = F.pad(p, (0, 0, 0, 1))
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def judged_by(wrong_p: Tensor, wrong_q: Tensor, p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """Accepts guesses by the wrong distributions. The token after a rejection is drawn from the right residual."""
    accepted, _ = token_rule(wrong_p, wrong_q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(q, accepted)), u[:, -1])


def one_hot(q: Tensor, drafts: Tensor) -> Tensor:
    """Distributions `[B, n, V]` that give all to the drafts; 0 where a row has none."""
    return torch.zeros_like(q).scatter(-1, drafts[..., None], 1) * (q.sum(-1, keepdim=True) > 0)


@mistake("always accept")
def always_accept(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """every guess is accepted"""
    accepted = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))  # Where a row has no guess, q is 0.
    return accepted, pick(after(p, accepted), u[:, -1])


@mistake("inverted", seen_in="R. Gadgil, Towards Data Science 2024 (where q > p)")
def inverted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """a guess is rejected with probability min(1, p / q), not accepted with it"""
    flipped = F.pad((q - p[:, : q.shape[1]]).clamp(min=0), (0, 0, 0, 1))
    return judged_by(flipped, q, p, q, drafts, u)


@mistake("replace from p", seen_in="code of Clay's post on SmolLM2")
def replace_from_p(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """a rejected guess is replaced from p, not from the residual"""
    accepted, _ = token_rule(p, q, drafts, u)
    return accepted, pick(after(p, accepted), u[:, -1])


@mistake("shared noise", seen_in="vllm 54282", drafters=ModelDrafter)
def shared_noise(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """the noise that drew a rejected guess draws its replacement too

    A guess x is the argmin of E / q, where E are exponential numbers (the Gumbel-max trick); its replacement is that of
    E / residual. Let T be the least of E / q, which is exponential too. Given T and x, E(x) is q(x) T, and E - q T of
    the other tokens are new exponential numbers, as the exponential distribution has no memory. So E is drawn after x.
    """
    accepted, _ = token_rule(p, q, drafts, u)
    q = after(q, accepted)  # 0 where no guess was rejected: then E is new
    generator = torch.Generator(p.device).manual_seed(int(u[0, -1] * 2**24))
    least = torch.empty(len(p), 1, device=p.device).exponential_(generator=generator)
    rest = torch.empty_like(q).exponential_(generator=generator)
    return accepted, ((q * least + rest) / residual(after(p, accepted), q)).argmin(-1)


@mistake("half handed over", drafters=ModelDrafter)
def half_handed_over(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """acceptance takes q(x) for 1, the residual takes q as it is"""
    return judged_by(p, one_hot(q, drafts), p, q, drafts, u)


class FlawedModel(CachedModel):
    """A model with a mistake in how it runs: the weights and the KV cache of `model`."""

    def __init__(self, model: CachedModel) -> None:
        super().__init__(model.model, model.vocabulary, model.name, model.cache_of, model.features_of or model.tap)
        self.store = model.store


class UnfilteredDraft(FlawedModel):
    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        self.unfiltered.append(logits.softmax(-1))
        return super().probabilities(logits, sampling, seen)

    def draw(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.unfiltered: list[Tensor] = []
        drafts, _ = super().draw(*args)
        return drafts, torch.stack(self.unfiltered, 1)


@mistake("q before the filters", "drafter", seen_in="transformers 47932", drafters=ModelDrafter)
def unfiltered(drafter: Any, sampling: Sampling) -> Drafter:
    """guesses are drawn after temperature and top-p, and q is from before them"""
    return ModelDrafter(UnfilteredDraft(drafter.model), drafter.temperature, drafter.top_p)


@mistake("late rejection", seen_in="openvino.genai 4190")
def late_rejection(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """a rejected guess is dropped, and the token drawn after it takes its place"""
    accepted, token = token_rule(p, q, drafts, u)
    rejected = after(q, accepted).sum(-1) > 0
    late = pick(after(p, (accepted + 1).clamp(max=drafts.shape[1])), u[:, -1])
    return accepted, torch.where(rejected, late, token)


@mistake("shifted by one")
def p_shifted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """p of the place before is compared with q"""
    return token_rule(p.roll(1, 1), q, drafts, u)


@mistake("bonus from q")
def unverified_last(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """the token after the last guess is the draft's"""
    if not drafts.shape[1]:
        return token_rule(p, q, drafts, u)
    last = q[:, -1:].sum((1, 2)) > 0  # the rows that have a last guess
    q = torch.cat([q[:, :-1], torch.zeros_like(q[:, -1:])], 1)
    accepted, token = token_rule(p, q, drafts, u)
    # If all others are accepted, the last guess is taken unverified, as the token after them.
    return accepted, torch.where(last & (accepted == q.shape[1] - 1), drafts[:, -1], token)


@mistake("one-sided top-p", "target", needs_top_p=True)
class OneSidedTarget(FlawedModel):
    """top-p for the draft, none for the target"""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return super().probabilities(logits, replace(sampling, top_p=1.0), seen)


@mistake("wrong temperature")
def wrong_temperature(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> Verified:
    """guesses are accepted at 1.2 times the temperature"""
    hotter = p ** (1 / 1.2)
    return judged_by(hotter / hotter.sum(-1, keepdim=True), q, p, q, drafts, u)


class StaleTarget(FlawedModel):
    """A target that leaves in some slots of its cache what they held before it scored the guesses."""

    @abstractmethod
    def stale(self, rows: Rows, slots: Tensor) -> Tensor:
        """Which of `slots[B, n + 1]`, of the last committed token and the guesses: bool `[B, n + 1]`."""

    def score_and_verify(self, rows: Rows, guesses: Guesses, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert self.cache is not None
        _, slots = rows.last(1, guesses.drafts.shape[1])
        stale = self.stale(rows, slots)
        row, slot = stale.nonzero()[:, 0], slots[stale]
        states = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        before = [x[row, :, slot] for x in states]
        result = super().score_and_verify(rows, guesses, *rest)
        for x, old in zip(states, before):
            x[row, :, slot] = old
        return result


@mistake("stale slot", "target")
class StaleSlotTarget(StaleTarget):
    """the cache keeps a rejected guess for its replacement"""

    def stale(self, rows: Rows, slots: Tensor) -> Tensor:
        records = [rows.records[number] for number in rows.numbers]
        rejected = torch.tensor([[record.drafted[-1] > record.accepted[-1]] for record in records])
        return rejected.to(slots.device) & (slots == slots[:, :1])


@mistake("dropped guess", "drafter", drafters=(ModelDrafter, OtherTokenizerDrafter, LookupFirst))
def unsure_dropped(drafter: Any, sampling: Sampling) -> Drafter:
    """a guess whose q is below 0.4 is dropped, not verified"""
    flawed, right = copy.copy(drafter), type(drafter).draft

    def draft(*args: Any) -> Guesses:
        guesses = right(flawed, *args)
        sure = guesses.of_drafts()[..., None] >= 0.4
        return replace(guesses, q=guesses.q * sure.cumprod(1))  # The guesses after it are dropped too.

    flawed.draft = draft
    return flawed


@mistake("predecessor's slots", "target", queue=True)
class PredecessorTarget(FlawedModel):
    """a text that takes over a row of the batch attends to what the text before it left there

    It reads only the last token of such a prompt.
    """

    def prefill(self, rows: Rows) -> Tensor:
        self.takes_over = rows.waiting > rows.batch
        return super().prefill(rows)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int], first: int = 0) -> Tensor:
        if not self.takes_over:
            return super().read_prompts(prompts, lengths, first)
        last = torch.tensor(lengths, device=self.device)[:, None] - 1
        return self.forward(prompts.gather(1, last), last)[:, 0]


@mistake("draft's keys", "target", own_copy=True)
class DraftKeysTarget(StaleTarget):
    """the target leaves the keys and values that its own copy wrote for the guesses"""

    def stale(self, rows: Rows, slots: Tensor) -> Tensor:
        return slots < slots[:, -1:]  # A draft that shares the cache has not read its last guess.


@mistake("constant q", everywhere=True)
def constant_q(rule: Callable[..., Any], p: Tensor, q: Tensor, drafts: Tensor, *rest: Any) -> Any:
    """the drafter says q = 0.3 of every guess"""
    return rule(p, 0.3 * one_hot(q, drafts), drafts, *rest)


of_trees = partial(mistake, verify=traversal_rule, tree=Tree.of("4,2"))


# The draft has half the temperature, where this shows: the mistake is a factor of 1 - q(x_1) - q(x_2) - ... in a later
# sibling's q, which is near 1 where the draft is unsure. On the bundled pair it moves 0.020 of the probability of the
# token after four siblings, and 0.079 with a draft at half the temperature.
@of_trees(
    "siblings not renormalised",
    drafter=lambda drafter, sampling: TreeDrafter(drafter.model, 0.5 * sampling.temperature, drafter.top_p),
)
def siblings_not_renormalised(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> VerifiedTree:
    """a later sibling is judged by a q whose sum is below 1; the draft at 0.5 times the temperature"""
    unnormalised = []
    for node, rank in enumerate(tree.ranks):
        first = node - rank  # the first sibling
        has_guess = q[:, node].sum(1, keepdim=True) > 0
        unnormalised.append(q[:, first].scatter(1, drafts[:, first:node], 0) * has_guess)
    return traversal_rule(p, torch.stack(unnormalised, 1), drafts, u, tree)


@of_trees("dropped node")
def unsure_node_dropped(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> VerifiedTree:
    """a node is dropped after it was drawn, if its q is below 0.4"""
    return traversal_rule(p, q * (q.gather(-1, drafts[..., None]) >= 0.4), drafts, u, tree)


@of_trees("mass not updated")
def mass_not_updated(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> VerifiedTree:
    """a rejected subtree leaves the mass as it was

    So it judges the children after it, and then their parent. The token comes from the right residual.
    """
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
    return take_path(p, judge(p, q, drafts, tree, carried=True)[0], route, u[:, -1], tree)


@of_trees("sibling in the mask", "target")
class SiblingMaskTarget(FlawedModel):
    """a node attends to all nodes before it, siblings too"""

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        if places is not None:
            elder = 2 << torch.arange(len(places.ancestors), device=self.device)
            places = places._replace(ancestors=elder - 1)
        return super().forward(tokens, positions, places, keep)


@of_trees("wrong slot", "target")
class WrongSlotTarget(FlawedModel):
    """the keys of the accepted path are moved to wrong slots"""

    def move(self, source: Tensor, slots: Tensor) -> None:
        super().move(source.roll(1, 1), slots)  # Each node goes to the slot of the next one.
