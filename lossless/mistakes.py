"""Samplers with a planted mistake: a test of losslessness is worth as much as the mistakes it sees.

Real samplers have been written with each of them; some name the public code in which it was seen. Each is a method of
the project with one part replaced: the target, the drafter, the verification rule, or the shape of the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.drafter import ChangedDrafter, Drafter, Guesses
from decoding.rows import Rows
from decoding.tree import Places, Tree
from decoding.treeRules import in_postorder, judge, traversal_rule
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from methods.lookup import LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling
from utils import Sampling, pick, residual

HEAT = 1.2  # The wrong temperature over the right one: 0.85 becomes 1.02.
SHAPE = Tree.of("4,2")
UNSURE = 0.4  # Guesses whose q is below this are dropped.
# The draft's temperature over the target's, where siblings are not renormalised. The mistake is a factor of
# 1 - q(x_1) - q(x_2) - ... in a later sibling's q, which is near 1 where the draft is unsure. On the bundled pair it
# moves 0.020 of the probability of the token after four siblings, and 0.079 with a draft at half the temperature.
COLD = 0.5
SAID = 0.3  # The probability that a drafter reports for each guess.


# Verification rules for chains. Arguments and results are those of decoding/verification.py.


def after(p: Tensor, accepted: Tensor) -> Tensor:
    """The distribution of the token after the accepted guesses: `p[B, n + 1, V]`, `accepted[B]` -> `[B, V]`. Of q
    `[B, n, V]` that of the rejected guess, or 0."""
    p = F.pad(p, (0, 0, 0, 1))
    return p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]


def always_accept(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    accepted = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))  # Where a row has no guess, q is 0.
    return accepted, pick(after(p, accepted), u[:, -1])


def replace_from_p(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    accepted, _ = token_rule(p, q, drafts, u)
    return accepted, pick(after(p, accepted), u[:, -1])


def p_shifted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return token_rule(p.roll(1, 1), q, drafts, u)


def judged_by(
    wrong_p: Tensor, wrong_q: Tensor, p: Tensor, q: Tensor, drafts: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts guesses by the wrong distributions. The token after a rejection is drawn from the right residual."""
    accepted, _ = token_rule(wrong_p, wrong_q, drafts, u)
    return accepted, pick(residual(after(p, accepted), after(q, accepted)), u[:, -1])


def inverted(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """min(1, p / q) is the probability of a rejection."""
    flipped = F.pad((q - p[:, : q.shape[1]]).clamp(min=0), (0, 0, 0, 1))
    return judged_by(flipped, q, p, q, drafts, u)


def one_hot(q: Tensor, drafts: Tensor) -> Tensor:
    """Distributions `[B, n, V]` that give all to the drafts; 0 where a row has none."""
    return torch.zeros_like(q).scatter(-1, drafts[..., None], 1) * (q.sum(-1, keepdim=True) > 0)


def half_handed_over(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return judged_by(p, one_hot(q, drafts), p, q, drafts, u)


def late_rejection(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    accepted, token = token_rule(p, q, drafts, u)
    rejected = after(q, accepted).sum(-1) > 0
    late = pick(after(p, (accepted + 1).clamp(max=drafts.shape[1])), u[:, -1])
    return accepted, torch.where(rejected, late, token)


def shared_noise(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a rejected guess with the noise that drew it, by the Gumbel-max trick.

    A guess x is the argmin of E / q, where E are exponential numbers; its replacement, that of E / residual. Let T be
    the least of E / q, which is exponential too. Given T and x, E(x) is q(x) T, and E - q T of the other tokens are new
    exponential numbers, as the exponential distribution has no memory. So E is drawn after x is known.
    """
    accepted, _ = token_rule(p, q, drafts, u)
    q = after(q, accepted)  # 0 where no guess was rejected: then E is new
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
    hotter = p ** (1 / HEAT)
    return judged_by(hotter / hotter.sum(-1, keepdim=True), q, p, q, drafts, u)


def constant_q(rule: Callable[..., Any], p: Tensor, q: Tensor, drafts: Tensor, *rest: Any) -> Any:
    """Any rule, for chains or trees, whose drafter says that q is SAID for each guess, and 0 for other tokens."""
    return rule(p, SAID * one_hot(q, drafts), drafts, *rest)


# Verification rules for trees. Arguments and results are those of decoding/treeRules.py.


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
        super().__init__(model.model, model.vocabulary, model.name, model.cache_of, model.features_of or model.tap)
        self.store = model.store


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


class KeepingTarget(FlawedModel):
    """A target that leaves in some slots of its cache what they held before it scored the guesses."""

    @abstractmethod
    def kept(self, rows: Rows, slots: Tensor) -> Tensor:
        """Which of `slots[B, n + 1]`, of the last committed token and the guesses: bool `[B, n + 1]`."""

    def score_and_verify(self, rows: Rows, guesses: Guesses, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert self.cache is not None
        _, slots = rows.last(1, guesses.drafts.shape[1])
        mask = self.kept(rows, slots)
        row, slot = mask.nonzero()[:, 0], slots[mask]
        states = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        before = [x[row, :, slot] for x in states]
        result = super().score_and_verify(rows, guesses, *rest)
        for x, old in zip(states, before):
            x[row, :, slot] = old
        return result


class StaleSlotTarget(KeepingTarget):
    def kept(self, rows: Rows, slots: Tensor) -> Tensor:
        """The last committed token's, if it replaces a guess."""
        records = [rows.records[number] for number in rows.numbers]
        rejected = torch.tensor([[record.drafted[-1] > record.accepted[-1]] for record in records])
        return rejected.to(slots.device) & (slots == slots[:, :1])


class DraftKeysTarget(KeepingTarget):
    def kept(self, rows: Rows, slots: Tensor) -> Tensor:
        """All but the last: a draft that shares the cache has not read its last guess."""
        return slots < slots[:, -1:]


class PredecessorTarget(FlawedModel):
    """A target that reads only the last token of a prompt that takes over a row."""

    def prefill(self, rows: Rows) -> Tensor:
        self.takes_over = rows.waiting > rows.batch
        return super().prefill(rows)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int]) -> Tensor:
        if not self.takes_over:
            return super().read_prompts(prompts, lengths)
        last = torch.tensor(lengths, device=self.device)[:, None] - 1
        return self.forward(prompts.gather(1, last), last)[:, 0]


class SiblingMaskTarget(FlawedModel):
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        if places is not None:
            elder = 2 << torch.arange(len(places.ancestors), device=self.device)
            places = places._replace(ancestors=elder - 1)
        return super().forward(tokens, positions, places, keep)


class WrongSlotTarget(FlawedModel):
    def move(self, source: Tensor, slots: Tensor) -> None:
        """Each node goes to the slot of the next one."""
        super().move(source.roll(1, 1), slots)


# Drafters: f(drafter, sampling).


def unsure_dropped(drafter: Drafter, sampling: Sampling) -> Drafter:
    """Takes back a guess whose q is below UNSURE, and all guesses after it."""

    def change(guesses: Guesses, gamma: int) -> Guesses:
        sure = guesses.of_drafts()[..., None] >= UNSURE
        return replace(guesses, q=guesses.q * sure.cumprod(1))

    return ChangedDrafter(drafter, change)


def unfiltered(drafter: Any, sampling: Sampling) -> Drafter:
    """Guesses of a draft model, with the q from before the filters."""
    return ModelDrafter(UnfilteredDraft(drafter.model), drafter.temperature, drafter.top_p)


def cold_drafter(drafter: Any, sampling: Sampling) -> Drafter:
    """Guesses trees at a lower temperature."""
    return TreeDrafter(drafter.model, COLD * sampling.temperature, drafter.top_p)


@dataclass(frozen=True)
class Mistake:
    """One mistake. Every part that is not named here is the right one.

    what: the mistake in words. seen_in: the public code that makes or made it.
    verify: the verification rule. target: f(model). drafter: f(drafter, sampling). tree: the shape of the guesses of a
        round; None: it is a mistake of chains.
    tested: f(sampling of the flags), the sampling that is tested.
    drafters: with others it is no mistake, or it cannot be made. own_copy: the target's own copy must guess. queue: the
        texts must outnumber the rows of the batch.
    everywhere: it is `constant_q`, and planted in every method that is tested, not only in the first that it fits.
    """

    what: str
    verify: Callable[..., tuple[Tensor, ...]] | None = None
    seen_in: str = ""
    target: Callable[[Any], Any] = lambda model: model
    drafter: Callable[[Any, Sampling], Any] = lambda drafter, sampling: drafter
    tested: Callable[[Sampling], Sampling] = lambda sampling: sampling
    tree: Tree | None = None
    drafters: type[Drafter] | tuple[type[Drafter], ...] = Drafter
    own_copy: bool = False
    queue: bool = False
    everywhere: bool = False

    def fits(self, sampler: Any) -> bool:
        """Whether it can be planted in a sampler, a partial function."""
        drafter, loop = sampler.keywords.get("drafter"), treeSampling if self.tree else specSampling
        return (
            isinstance(drafter, self.drafters)
            and (self.everywhere or sampler.func is loop)
            and (not self.own_copy or any(model.cache_of is not None for model in drafter.models))
        )

    def planted(self, sampler: Any, sampling: Sampling) -> Any:
        """`sampler`, a partial function of `specSampling` or `treeSampling`, with this mistake in it. sampling: that is
        tested."""
        parts = sampler.keywords
        return partial(
            sampler,
            target=self.target(parts["target"]),
            drafter=self.drafter(parts["drafter"], sampling),
            verify=partial(constant_q, parts["verify"]) if self.everywhere else self.verify or parts["verify"],
            **({"tree": self.tree} if self.tree else {}),
        )


of_trees = partial(Mistake, verify=traversal_rule, tree=SHAPE)
MISTAKES = {
    "always accept": Mistake("every guess is accepted", always_accept),
    "inverted": Mistake(
        "a guess is rejected with probability min(1, p / q), not accepted with it",
        inverted,
        "R. Gadgil, Towards Data Science 2024",
    ),
    "replace from p": Mistake(
        "a rejected guess is replaced from p, not from the residual", replace_from_p, "Clay's blog on SmolLM2"
    ),
    "shared noise": Mistake(
        "the noise that drew a rejected guess draws its replacement too",
        shared_noise,
        "vllm 54282",
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
        "openvino.genai 4190",
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
        f"a guess whose q is below {UNSURE} is dropped, not verified",
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
    "constant q": Mistake(f"the drafter says q = {SAID:g} of every guess", everywhere=True),
    "siblings not renormalised": of_trees(
        f"a later sibling is judged by a q whose sum is below 1; the draft at {COLD} times the temperature",
        verify=siblings_not_renormalised,
        drafter=cold_drafter,
    ),
    "dropped node": of_trees(
        f"a node is dropped after it was drawn, if its q is below {UNSURE}", verify=unsure_node_dropped
    ),
    "mass not updated": of_trees("a rejected subtree leaves the mass as it was", verify=mass_not_updated),
    "sibling in the mask": of_trees("a node attends to all nodes before it, siblings too", target=SiblingMaskTarget),
    "wrong slot": of_trees("the keys of the accepted path are moved to wrong slots", target=WrongSlotTarget),
}
