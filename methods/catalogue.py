"""The decoding methods, one entry each: what `test.py` measures, compares, proves and shows.

To add a method, add one `Method` to `CATALOGUE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from methods.makers import (
    Decoding,
    Models,
    Plans,
    Sampler,
    Wrap,
    alone,
    cascade,
    cascade_graphs,
    contrastive,
    contrastive_graphs,
    follows_no_clock,
    lookup,
    lookup_first,
    one_token,
    rounds_of,
    rounds_of_both,
    rounds_of_lookup,
    speculative,
    speculative_contrastive_graphs,
    whole_rounds,
)
from methods.treeMakers import (
    as_flags_say,
    graphs_as_flags_say,
    is_fixed,
    rounds_as_flags_say,
    tree,
    tree_graphs,
    tree_rounds,
)


@dataclass(frozen=True)
class Method:
    """One decoding method.

    name: what flags and records call it. title: one line of help.
    make: f(models, decoding, wrap) -> sampler; wrap: wraps the drafter, to watch it.
    needs: roles it needs beside the target.
    graphs: f(decoding) -> the graphs worth making for each role.
    rounds: f(decoding) -> numbers of guesses whose rounds are worth one graph each (`compiling.compile_round`).
    lossless: its text is distributed as the target's. seeded: f(decoding) -> whether the seed fixes its tokens.
    contrasts: it needs two different models that both know every token.
    guesser: the role of the model whose distributions are the q of its guesses.
    guesses_tree: f(decoding) -> whether its guesses form a tree.
    modes: the modes of `test.py` that measure it. in_all: whether "all" methods include it.
    """

    name: str
    title: str
    make: Callable[[Models, Decoding, Wrap], Sampler]
    needs: tuple[str, ...] = ()
    graphs: Callable[[Decoding], Plans] = field(default=lambda decoding: {})
    rounds: Callable[[Decoding], frozenset[int]] = field(default=lambda decoding: frozenset())
    lossless: bool = False
    seeded: Callable[[Decoding], bool] = field(default=lambda decoding: True)
    contrasts: bool = False
    guesser: str = "draft"
    guesses_tree: Callable[[Decoding], bool] = field(default=lambda decoding: False)
    modes: tuple[str, ...] = ()
    in_all: bool = True


CATALOGUE = (
    Method(
        "draft",
        "the draft alone",
        alone("draft"),
        needs=("draft",),
        graphs=one_token("draft"),
        modes=("speed", "speedNew", "speedMulti", "sweep"),
        in_all=False,
    ),
    Method(
        "mid",
        "the mid model alone",
        alone("mid"),
        needs=("mid",),
        graphs=one_token("mid"),
        modes=("speedMulti",),
        in_all=False,
    ),
    Method(
        "target",
        "plain decoding: the target alone",
        alone("target"),
        graphs=one_token("target"),
        lossless=True,
        modes=("speed", "speedNew", "speedMulti", "contrastive", "sweep", "diversity"),
    ),
    Method(
        "speculative",
        "speculative sampling as the flags say",
        as_flags_say,
        graphs=graphs_as_flags_say,
        rounds=rounds_as_flags_say,
        lossless=True,
        seeded=follows_no_clock,
        guesses_tree=lambda decoding: decoding.tree is not None,
        modes=("speed", "speedMulti", "diversity"),
        in_all=False,
    ),
    Method(
        "fixed",
        "gamma guesses each round",
        speculative("fixed"),
        graphs=rounds_of("fixed"),
        rounds=whole_rounds("fixed"),
        lossless=True,
    ),
    Method(
        "additive",
        "one guess more after a round accepted in full, else half",
        speculative("additive"),
        graphs=rounds_of("additive"),
        lossless=True,
        modes=("speedNew",),
    ),
    Method(
        "draftConfidence",
        "guesses until the draft is unsure",
        speculative("draftConfidence"),
        graphs=rounds_of("draftConfidence"),
        lossless=True,
    ),
    Method(
        "targetConfidence",
        "guesses only while the target is sure",
        speculative("targetConfidence"),
        graphs=rounds_of("targetConfidence"),
        rounds=whole_rounds("targetConfidence"),
        lossless=True,
    ),
    Method(
        "costAware",
        "as many guesses as pay",
        speculative("costAware"),
        graphs=rounds_of("costAware"),
        rounds=whole_rounds("costAware"),
        lossless=True,
        seeded=lambda decoding: False,
    ),
    Method(
        "block",
        "block verification",
        speculative("fixed", "block"),
        graphs=rounds_of("fixed"),
        rounds=whole_rounds("fixed"),
        lossless=True,
    ),
    Method(
        "tree",
        "a tree of guesses (--tree), traversal verification",
        tree("traversal"),
        needs=("draft",),
        graphs=tree_graphs,
        rounds=tree_rounds,
        lossless=True,
        seeded=is_fixed,
        guesses_tree=lambda decoding: True,
    ),
    Method(
        "topDown",
        "the same tree, verified from the root down",
        tree("topDown"),
        needs=("draft",),
        graphs=tree_graphs,
        rounds=tree_rounds,
        lossless=True,
        seeded=is_fixed,
        guesses_tree=lambda decoding: True,
        in_all=False,
    ),
    Method(
        "lookup",
        "guesses from the text so far",
        speculative("fixed", None, lookup),
        graphs=rounds_of_lookup,
        lossless=True,
    ),
    Method(
        "lookupFirst",
        "guesses from the text so far, and the draft's where it has none",
        speculative("fixed", None, lookup_first),
        needs=("draft",),
        graphs=rounds_of_both,
        rounds=whole_rounds("fixed"),
        lossless=True,
    ),
    Method(
        "cascade",
        "the draft guesses for the mid model, both for the target",
        cascade,
        needs=("mid",),
        graphs=cascade_graphs,
        lossless=True,
        guesser="mid",
        modes=("speedMulti",),
    ),
    Method(
        "contrastive",
        "contrastive decoding",
        contrastive(False),
        needs=("draft",),
        graphs=contrastive_graphs,
        contrasts=True,
        modes=("contrastive", "diversity"),
    ),
    Method(
        "speculativeContrastive",
        "contrastive decoding with guesses",
        contrastive(True),
        needs=("draft",),
        graphs=speculative_contrastive_graphs,
        contrasts=True,
        seeded=follows_no_clock,
        modes=("contrastive", "diversity"),
    ),
)
METHODS = {method.name: method for method in CATALOGUE}
