"""`samplers`: the rows of the speed table, each a sampler that is timed."""

from __future__ import annotations

import functools
import sys

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from benchmark.options import Options
from benchmark.peers import SAMPLING, Generated, by_library, cache_free
from decoding.interfaces import Model, TreeRule, VerificationRule
from decoding.trees import Tree
from decoding.treeShapes import Acceptance, best_tree
from decoding.treeVerification import first_passed, path_of, traversal_rule
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel
from experiments.speed import Timed
from methods import customGenerate
from methods.drafters import ModelDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling

Variants = dict[str, dict[str, CachedModel]]  # {"eager" or "compiled": {role: model}}
Library = dict[str, PreTrainedModel]  # {role: model with `transformers`' own attention}
ALPHAS = (0.4, 0.6, 0.8)  # of synthetic acceptance
TREE = best_tree(8, Acceptance().table(4, 4))  # of the rows with a tree: 8 guesses, 4 levels
# Synthetic acceptance of the 1st, 2nd ... child, if those before it were rejected. On the bundled pair the later ones
# are accepted as often (`python -m scripts.treeTokens`).
SIBLINGS = (0.6, 0.3, 0.2, 0.1)


def samplers(options: Options, variants: Variants, library: Library) -> dict[str, Timed]:
    """{name: sampler} of all rows, in the order of the table."""
    found: dict[str, Timed] = {}
    for variant, models in variants.items():
        found[f"plain, {variant}"] = plain(models["target"], options.max_len)
        for name, rule in rules(options, models["target"]).items():
            found[f"{name}, {variant}"] = speculative(models, options, rule)
        for name, tree_rule in tree_rules(options, models["target"]).items():
            found[f"{name}, {variant}"] = speculative_tree(models, options, tree_rule)
    found["transformers"] = by_library(library["target"], options.max_len)
    if options.shapes:
        return found
    return found | peers(options, library, variants["eager"]["target"].vocabulary)


def rules(options: Options, target: Model) -> dict[str, VerificationRule]:
    """{name: verification rule} of the rows with speculative sampling. Models with random weights accept by a coin."""
    if options.shapes:
        rule = target.operators.rule(token_rule)
        return {f"synthetic {alpha}": synthetic(alpha, rule) for alpha in ALPHAS}
    return {"speculative": token_rule, "block verification": block_rule}


def tree_rules(options: Options, target: Model) -> dict[str, TreeRule]:
    """{name: verification rule} of the rows with a tree of guesses."""
    rule = target.operators.rule(traversal_rule)
    if options.shapes:
        return {f"tree, synthetic {SIBLINGS[0]}": synthetic_tree(SIBLINGS, rule)}
    return {f"tree of {TREE.size}": traversal_rule}


def plain(target: CachedModel, max_len: int) -> Timed:
    """Plain decoding by this project."""

    def sampler(prompt: list[int], generator: Generator) -> Generated:
        return regrSampling([prompt], target, max_len, SAMPLING, None, generator)

    return sampler


def speculative(models: dict[str, CachedModel], options: Options, rule: VerificationRule) -> Timed:
    """Speculative sampling by this project."""
    target, drafter = models["target"], ModelDrafter(models["draft"])

    def sampler(prompt: list[int], generator: Generator) -> Generated:
        return specSampling(
            [prompt], target, drafter, options.max_len, options.gamma, SAMPLING, None, generator, verify=rule
        )

    return sampler


def speculative_tree(models: dict[str, CachedModel], options: Options, rule: TreeRule) -> Timed:
    """Speculative sampling with a tree of guesses by this project."""
    target, drafter = models["target"], TreeDrafter(models["draft"])

    def sampler(prompt: list[int], generator: Generator) -> Generated:
        return treeSampling([prompt], target, drafter, options.max_len, TREE, SAMPLING, None, generator, verify=rule)

    return sampler


def peers(options: Options, library: Library, vocabulary: int) -> dict[str, Timed]:
    """{name: sampler} of the rows beside `transformers` that need real weights."""
    found: dict[str, Timed] = {}
    target, draft, max_len, device = library["target"], library["draft"], options.max_len, library["target"].device
    static = {"cache_implementation": "static", "disable_compile": device.type == "cpu"}
    try:
        by_library(target, 2, **static)([1, 2, 3], Generator(device).manual_seed(0))
        found["transformers, static cache"] = by_library(target, max_len, **static)
    except Exception as error:  # Some models, devices and versions do not support the library's static cache.
        print("transformers, static cache is left out:", *str(error).split()[:30], file=sys.stderr)
    found["transformers, assistant"] = by_library(target, max_len, draft, options.gamma)
    found["transformers, assistant as it comes"] = by_library(target, max_len, draft)
    inside = customGenerate.speculative(draft, options.gamma, vocabulary=vocabulary)
    found["speculative, inside generate"] = by_library(target, max_len, custom_generate=inside)
    found["speculative, no cache"] = lambda prompt, generator: cache_free(
        prompt, target, draft, max_len, options.gamma, generator, vocabulary=vocabulary
    )
    return found


@functools.cache  # CUDA graphs are captured for each rule: the same arguments must give the same rule.
def synthetic(alpha: float, rule: VerificationRule = token_rule) -> VerificationRule:
    """A verification rule that accepts each guess with probability `alpha`, for models whose agreement is an accident.
    Everything else is computed as by the token rule. rule: the token rule, or its kernel."""

    def verify(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        at = drafts[..., None]
        p[:, : drafts.shape[1]].scatter_(-1, at, alpha * q.gather(-1, at))
        return rule(p, q, drafts, u)

    return verify


@functools.cache
def synthetic_tree(chances: tuple[float, ...], rule: TreeRule = traversal_rule) -> TreeRule:
    """As `synthetic` for trees: the k-th child of a node is accepted with probability `chances[k]`, if its parent was
    and those before it were not. rule: the traversal rule, or its kernel: its work is done, and its token is kept."""

    def verify(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        token = rule(p, q, drafts, u, tree)[2]
        passed = torch.stack([u[:, node] < chances[rank] for node, rank in enumerate(tree.ranks)], 1)
        return *path_of(first_passed(passed, tree), tree), token

    return verify
