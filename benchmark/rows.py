"""`samplers`: the rows of the speed table, each a sampler that is timed."""

from __future__ import annotations

import functools
import sys

from torch import Generator, Tensor
from transformers import PreTrainedModel

from benchmark.options import Options
from benchmark.peers import SAMPLING, Generated, by_library, cache_free
from decoding.interfaces import Model, VerificationRule
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel
from experiments.speed import Timed
from methods import customGenerate
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling

Variants = dict[str, dict[str, CachedModel]]  # {"eager" or "compiled": {role: model}}
Library = dict[str, PreTrainedModel]  # {role: model with `transformers`' own attention}
ALPHAS = (0.4, 0.6, 0.8)  # of synthetic acceptance


def samplers(options: Options, variants: Variants, library: Library) -> dict[str, Timed]:
    """{name: sampler} of all rows, in the order of the table."""
    found: dict[str, Timed] = {}
    for variant, models in variants.items():
        found[f"plain, {variant}"] = plain(models["target"], options.max_len)
        for name, rule in rules(options, models["target"]).items():
            found[f"{name}, {variant}"] = speculative(models, options, rule)
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
