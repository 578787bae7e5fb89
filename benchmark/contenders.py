"""`samplers`: the rows of the speed table: this project's decoding, `transformers`' own, and speculative sampling
without a KV cache.

Each row is a sampler f(prompt, generator) -> (tokens, records), as `speed.measure` takes it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmark.options import Options
from decoding.model import Model
from decoding.rows import Record
from decoding.trees.rules import TreeRule, first_passed, path_of, traversal_rule
from decoding.trees.shapes import Acceptance, best_tree
from decoding.trees.tree import Tree
from decoding.verification import VerificationRule, block_rule, token_rule
from engine.cachedModel import CachedModel
from engine.sharedWeights import sharing_copy
from experiments.speed import Timed
from methods import customGenerate
from methods.drafters import ModelDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, draw, probabilities

Variants = dict[str, dict[str, CachedModel]]  # {"eager" or "compiled": {role: model}}
Library = dict[str, PreTrainedModel]  # {role: model with `transformers`' own attention}
Generated = tuple[list[list[int]], list[Record]]  # the new tokens of one prompt and its record, each in a list of one

SAMPLING = Sampling()  # of all rows
ALPHAS = (0.4, 0.6, 0.8)  # of synthetic acceptance
TREE = best_tree(8, Acceptance().table(4, 4))  # of the rows with a tree: 8 guesses, 4 levels
# Synthetic acceptance of the 1st, 2nd ... child, if those before it were rejected. On the bundled pair the later ones
# are accepted as often (`python -m scripts.treeTokens`).
SIBLINGS = (0.6, 0.3, 0.2, 0.1)


def samplers(options: Options, variants: Variants, library: Library) -> dict[str, Timed]:
    """{name: sampler} of all rows, in the order of the table."""
    rows: dict[str, Timed] = {}
    max_len, gamma = options.max_len, options.gamma
    for variant, models in variants.items():
        target, draft = models["target"], models["draft"]
        rows[f"plain, {variant}"] = as_sampler(regrSampling, target, max_len)
        for name, rule in rules(options.shapes, target).items():
            rows[f"{name}, {variant}"] = as_sampler(
                specSampling, target, ModelDrafter(draft), max_len, gamma, verify=rule
            )
        for name, tree_rule in tree_rules(options.shapes, target).items():
            rows[f"{name}, {variant}"] = as_sampler(
                treeSampling, target, TreeDrafter(draft), max_len, TREE, verify=tree_rule
            )
    rows["transformers"] = library_sampler(library["target"], max_len)
    if options.shapes:
        return rows
    return rows | trained_rows(library, max_len, gamma, variants["eager"]["target"].vocabulary)


def as_sampler(sample: Callable[..., Generated], *arguments: object, **options: object) -> Timed:
    """A row of this project. sample: `regrSampling` or the like, called with `arguments` after the prompt."""
    return lambda prompt, generator: sample([prompt], *arguments, sampling=SAMPLING, generator=generator, **options)


def rules(synthetic_acceptance: bool, target: Model) -> dict[str, VerificationRule]:
    """{name: verification rule} of the rows with speculative sampling. Models with random weights accept by a coin."""
    if synthetic_acceptance:
        rule = target.rule(token_rule)
        return {f"synthetic {alpha}": synthetic(alpha, rule) for alpha in ALPHAS}
    return {"speculative": token_rule, "block verification": block_rule}


def tree_rules(synthetic_acceptance: bool, target: Model) -> dict[str, TreeRule]:
    """{name: verification rule} of the rows with a tree of guesses."""
    if synthetic_acceptance:
        rule = target.rule(traversal_rule)
        return {f"tree, synthetic {SIBLINGS[0]}": synthetic_tree(SIBLINGS, rule)}
    return {f"tree of {TREE.size}": traversal_rule}


def trained_rows(library: Library, max_len: int, gamma: int, vocabulary: int) -> dict[str, Timed]:
    """{name: sampler} of the rows beside `transformers` that need trained weights."""
    rows: dict[str, Timed] = {}
    target, draft = library["target"], library["draft"]
    static = {"cache_implementation": "static", "disable_compile": target.device.type == "cpu"}
    try:
        library_sampler(target, 2, **static)([1, 2, 3], Generator(target.device).manual_seed(0))
        rows["transformers, static cache"] = library_sampler(target, max_len, **static)
    except Exception as error:  # Some models, devices and versions do not support the library's static cache.
        print("transformers, static cache is left out:", *str(error).split()[:30], file=sys.stderr)
    rows["transformers, assistant"] = library_sampler(target, max_len, draft, gamma)
    rows["transformers, assistant as it comes"] = library_sampler(target, max_len, draft)
    plug_in = customGenerate.speculative(draft, gamma, vocabulary=vocabulary)
    rows["speculative, inside generate"] = library_sampler(target, max_len, custom_generate=plug_in)
    rows["speculative, no cache"] = lambda prompt, generator: cache_free(
        prompt, target, draft, max_len, gamma, generator, vocabulary=vocabulary
    )
    return rows


def library_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the weights, with `transformers`' own attention."""
    other = sharing_copy(model)
    other.set_attn_implementation("sdpa")
    return other


class RecordStreamer(BaseStreamer):
    """Notes when `generate` has new tokens on the host: after each forward of the target."""

    def __init__(self) -> None:
        self.start, self.record = time.perf_counter(), Record()
        self.prompt = True  # The library passes the prompt first.

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.record.add(time.perf_counter() - self.start, value.numel(), 0, 0)
        self.prompt = False

    def end(self) -> None:
        pass


def library_sampler(
    model: PreTrainedModel,
    max_len: int,
    assistant: PreTrainedModel | None = None,
    gamma: int | None = None,
    **options: Any,
) -> Timed:
    """`generate` of `transformers`. assistant: the draft. It guesses `gamma` tokens a round; None: as it does by
    default."""

    def timed(prompt: list[int], generator: Generator) -> Generated:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if assistant is not None:  # The assistant's own configuration decides how it guesses.
            config = assistant.generation_config
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(generator.initial_seed())
        streamer, tokens = RecordStreamer(), torch.tensor([prompt], device=model.device)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_len,
            do_sample=True,
            temperature=SAMPLING.temperature,
            top_p=SAMPLING.top_p,
            top_k=SAMPLING.top_k,
            assistant_model=assistant,
            streamer=streamer,
            **options,
        )
        return [output[0, len(prompt) :].tolist()], [streamer.record]

    return timed


@torch.inference_mode()
def cache_free(
    prompt: Sequence[int],
    target: PreTrainedModel,
    draft: PreTrainedModel,
    max_len: int,
    gamma: int,
    generator: Generator | None = None,
    sampling: Sampling = SAMPLING,
    vocabulary: int | None = None,
) -> Generated:
    """Speculative sampling as in course reports: without a KV cache, so each forward reads the whole text."""

    def distributions(model: PreTrainedModel, count: int) -> Tensor:
        return probabilities(model(input_ids=text, use_cache=False).logits[:, -count:, :vocabulary], sampling)

    start, text, record = time.perf_counter(), torch.tensor([prompt], device=target.device), Record()
    while record.tokens < max_len:
        length = text.shape[1]
        q: list[Tensor] = []
        for _ in range(min(gamma, max_len - record.tokens - 1)):
            q.append(distributions(draft, 1))
            text = torch.cat([text, draw(q[-1], generator)], 1)
        p, drafts = distributions(target, len(q) + 1), text[:, length:]
        u = torch.rand(1, len(q) + 1, device=target.device, generator=generator)
        accepted, token = token_rule(p, torch.cat(q, 1) if q else p[:, :0], drafts, u)
        text = torch.cat([text[:, : length + accepted.item()], token[:, None]], 1)
        record.add(time.perf_counter() - start, text.shape[1] - length, len(q), accepted.item())
    return [text[0, len(prompt) :].tolist()], [record]


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
