"""`contenders`: the rows of the speed table: this project's decoding with a KV cache and without, and `transformers`'
own."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmark.engines.engineProcess import short_reason
from benchmark.options import Options
from decoding.drafter import Drafter
from decoding.lengthRules import Fixed
from decoding.model import Model
from decoding.record import Record
from decoding.trees.rules import TreeRule, first_passed, path_of, traversal_rule
from decoding.trees.shapes import Acceptance, best_tree
from decoding.trees.tree import Tree
from decoding.verification import VerificationRule, block_rule, token_rule
from engine.cachedModel import CachedModel
from engine.sharedWeights import sharing_copy
from engine.uncachedModel import UncachedModel
from experiments.speed import Timed, ends_after
from methods import customGenerate
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling

Variants = dict[str, dict[str, CachedModel]]  # {"eager" or "compiled": {role: model}}
Library = dict[str, PreTrainedModel]  # {role: model with `transformers`' own attention}
DrafterOf = Callable[[CachedModel], Drafter]  # what makes a drafter of a draft model
Generated = tuple[list[list[int]], list[Record]]  # the new tokens of one prompt and its record, each in a list of one


class Contender(Protocol):
    """A row: it continues one prompt by `max_len` tokens. first: end after that many, with a KV cache as large as for
    `max_len`."""

    def __call__(
        self, prompt: list[int], generator: Generator, max_len: int, sampling: Sampling = ..., first: int | None = None
    ) -> Generated: ...


STATIC = "transformers, static cache"
STATIC_COMPILED = f"{STATIC}, compiled"
COMPILING: dict[str, Any] = {}  # how the library compiles its forward: arguments of its `CompileConfig`
SAMPLING = Sampling()  # of all rows
ALPHAS = (0.4, 0.6, 0.8)  # of synthetic acceptance
COPY_ALPHAS = (0.9, 0.93, 0.95)  # likewise, of guesses of the target's own copy
INNER = 2  # tokens that the draft guesses for the copy in a round of theirs
TREE = best_tree(8, Acceptance().table(4, 4))  # of the rows with a tree: 8 guesses, 4 levels
# Synthetic acceptance of the 1st, 2nd ... child, if those before it were rejected. On the bundled pair the later ones
# are accepted as often.
SIBLINGS = (0.6, 0.3, 0.2, 0.1)


@dataclass
class Contenders:
    """The rows of a run.

    rows: {name: sampler}, in the order of the table. left_out: {name: why} of those that cannot be timed here.
    compile_seconds: {name: seconds} of the library's rows that `torch.compile` compiled at their first call.
    """

    rows: dict[str, Contender] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)

    def attempt(self, name: str, sampler: Contender, prompt: list[int], max_len: int) -> float | None:
        """Add a row if its first call succeeds. Returns the seconds that it took; None if the row is left out: some
        models, devices and versions of the library do not support what it does."""
        start = time.perf_counter()
        try:
            sampler(prompt, Generator().manual_seed(0), max_len)
        except Exception as error:
            self.left_out[name] = short_reason(str(error))
            print(f"{name} is left out: {self.left_out[name]}", file=sys.stderr)
            return None
        self.rows[name] = sampler
        return time.perf_counter() - start


def contenders(
    options: Options, variants: Variants, library: Library, prompt: list[int], drafter_of: DrafterOf = ModelDrafter
) -> Contenders:
    """All rows. prompt: for the first call of those that may fail. drafter_of: `ModelDrafter`, or what translates for a
    draft with another tokenizer. Trees, and the library's rows with an assistant, need one tokenizer."""
    found, gamma = Contenders(), options.gamma
    for variant, models in variants.items():
        target, draft = models["target"], models["draft"]
        found.rows[f"plain, {variant}"] = as_contender(regrSampling, target=target)
        for name, rule in rules(options.shapes, target).items():
            found.rows[f"{name}, {variant}"] = as_contender(
                specSampling, target=target, drafter=drafter_of(draft), gamma=gamma, verify=rule
            )
        if not options.shapes:
            found.rows[f"prompt lookup, {variant}"] = as_contender(
                specSampling, target=target, drafter=LookupDrafter(target.vocabulary), gamma=gamma
            )
        for name, tree_rule in tree_rules(options.shapes, target).items() if drafter_of is ModelDrafter else ():
            found.rows[f"{name}, {variant}"] = as_contender(
                treeSampling, target=target, drafter=TreeDrafter(draft), tree=TREE, verify=tree_rule
            )
        if "head" in models:
            found.rows |= {f"{name}, {variant}": row for name, row in rows_of_head(models, gamma).items()}
        if "copy" in models:
            rows = rows_of_copy(options, models, drafter_of is ModelDrafter)
            found.rows |= {f"{name}, {variant}": row for name, row in rows.items()}
    if drafter_of is ModelDrafter:
        found.rows |= rows_without_cache(options.shapes, variants["eager"], gamma)
    vocabulary = variants["eager"]["target"].vocabulary
    outside = list(range(vocabulary, library["target"].config.vocab_size))
    # Models may have more logits than the tokenizer has tokens, and no other row draws those.
    drawn: dict[str, Any] = {"suppress_tokens": outside} if outside else {}
    found.rows["transformers"] = library_sampler(library["target"], **drawn)
    if not options.shapes:
        add_trained_rows(found, library, options, prompt, drawn)
        if drafter_of is ModelDrafter:
            add_assisted_rows(found, library, options, vocabulary, prompt, drawn)
    return found


def as_contender(sample: Callable[..., Generated], **parts: object) -> Contender:
    """A row of this project. sample: `regrSampling` or the like; parts: its models and settings."""

    def write(
        prompt: list[int], generator: Generator, max_len: int, sampling: Sampling = SAMPLING, first: int | None = None
    ) -> Generated:
        ends = None if first is None else ends_after(first)
        return sample([prompt], max_len=max_len, sampling=sampling, end_of_text=ends, generator=generator, **parts)

    return write


def as_timed(row: Contender, max_len: int) -> Timed:
    """A row as `experiments.speed.measure` takes it."""
    return lambda prompt, generator, first=None: row(prompt, generator, max_len, SAMPLING, first)


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


def rows_of_head(models: dict[str, CachedModel], gamma: int) -> dict[str, Contender]:
    """{name: sampler} of the rows in which a trained head guesses."""
    target, head = models["target"], models["head"]
    chains = {"": token_rule, ", block verification": block_rule}
    rows = {
        f"trained head{name}": as_contender(
            specSampling, target=target, drafter=ModelDrafter(head), gamma=gamma, verify=rule
        )
        for name, rule in chains.items()
    }
    tree = as_contender(treeSampling, target=target, drafter=TreeDrafter(head), tree=TREE, verify=traversal_rule)
    return rows | {f"trained head, tree of {TREE.size}": tree}


def rows_of_copy(options: Options, models: dict[str, CachedModel], one_tokenizer: bool) -> dict[str, Contender]:
    """{name: sampler} of the rows in which the target's own copy guesses, alone and with the draft, if that has the
    target's tokenizer: the draft guesses for the copy, and both for the target."""
    target, copy, name = models["target"], models["copy"], copy_name(options.draft_bits)
    alone = partial(as_contender, specSampling, target=target, gamma=options.gamma_copy)
    chances = {alpha: synthetic(alpha, target.rule(token_rule)) for alpha in (*ALPHAS, *COPY_ALPHAS)}
    rows: dict[str, tuple[Drafter, VerificationRule]]
    if options.shapes:
        rows = {f"{name}, synthetic {alpha}": (ModelDrafter(copy), chances[alpha]) for alpha in COPY_ALPHAS}
        inner, outer = ALPHAS[1], COPY_ALPHAS[1]
        cascade = CascadeDrafter(copy, ModelDrafter(models["draft"]), Fixed(INNER), chances[inner])
        rows[f"draft, {name}, synthetic {inner} and {outer}"] = cascade, chances[outer]
    else:
        rows = {name: (ModelDrafter(copy), token_rule), f"{name}, block verification": (ModelDrafter(copy), block_rule)}
        if one_tokenizer:
            rows[f"draft, {name}"] = CascadeDrafter(copy, ModelDrafter(models["draft"]), Fixed(INNER)), token_rule
    return {name: alone(drafter=drafter, verify=rule) for name, (drafter, rule) in rows.items()}


def copy_name(bits: int | str | None) -> str:
    """What the rows call the target's own copy."""
    return f"own copy in {bits} bits"


def rows_without_cache(synthetic_acceptance: bool, models: dict[str, CachedModel], gamma: int) -> dict[str, Contender]:
    """{name: sampler} of decoding as in the course report's code: without a KV cache, eagerly."""
    target, draft = UncachedModel(models["target"]), UncachedModel(models["draft"])
    rule = synthetic(ALPHAS[1]) if synthetic_acceptance else token_rule
    speculative = as_contender(specSampling, target=target, drafter=ModelDrafter(draft), gamma=gamma, verify=rule)
    return {
        "plain, no cache": as_contender(regrSampling, target=target),
        guessed_without_cache(synthetic_acceptance): speculative,
    }


def guessed_without_cache(synthetic_acceptance: bool) -> str:
    """The row of speculative sampling without a KV cache."""
    return f"synthetic {ALPHAS[1]}, no cache" if synthetic_acceptance else "speculative, no cache"


def add_trained_rows(
    found: Contenders, library: Library, options: Options, prompt: list[int], drawn: dict[str, Any]
) -> None:
    """Add the rows of `transformers` that need trained weights. drawn: options of `generate` for all of them.

    `generate` compiles its forward, for a static cache alone, by itself only on accelerators. On a CPU it must be asked
    to, so here compiling is a row of its own on every device.
    """
    target, max_len = library["target"], options.max_len
    found.attempt(STATIC, library_sampler(target, **static(drawn)), prompt, max_len)
    seconds = found.attempt(STATIC_COMPILED, compiled_by_library(target, **drawn), prompt, max_len)
    if seconds is not None:
        found.compile_seconds[STATIC_COMPILED] = seconds
    lookup = library_sampler(target, prompt_lookup_num_tokens=options.gamma, **drawn)
    found.attempt("transformers, prompt lookup", lookup, prompt, max_len)


def static(drawn: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate` with a static cache, not compiled."""
    return drawn | {"cache_implementation": "static", "disable_compile": True}


def add_assisted_rows(
    found: Contenders, library: Library, options: Options, vocabulary: int, prompt: list[int], drawn: dict[str, Any]
) -> None:
    """Add the rows of `transformers` in which a draft guesses."""
    target, draft, gamma, max_len = library["target"], library["draft"], options.gamma, options.max_len
    found.rows["transformers, assistant"] = library_sampler(target, draft, gamma, **drawn)
    found.rows["transformers, assistant as it comes"] = library_sampler(target, draft, **drawn)
    found.attempt(f"{STATIC}, assistant", library_sampler(target, draft, gamma, **static(drawn)), prompt, max_len)
    plug_in = customGenerate.speculative(draft, gamma, vocabulary=vocabulary)
    found.rows["speculative, inside generate"] = library_sampler(target, custom_generate=plug_in)


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
    model: PreTrainedModel, assistant: PreTrainedModel | None = None, gamma: int | None = None, **options: Any
) -> Contender:
    """`generate` of `transformers`. assistant: the draft. It guesses `gamma` tokens a round; None: as it does by
    default."""

    def write(
        prompt: list[int], generator: Generator, max_len: int, sampling: Sampling = SAMPLING, first: int | None = None
    ) -> Generated:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if assistant is not None:  # The assistant's own configuration decides how it guesses.
            config = assistant.generation_config
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(generator.initial_seed())
        streamer, tokens = RecordStreamer(), torch.tensor([prompt], device=model.device)
        filters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_len if first is None else min(first, max_len),  # A static cache is never made smaller.
            do_sample=sampling.temperature > 0,
            assistant_model=assistant,
            streamer=streamer,
            **(filters if sampling.temperature else {}),
            **options,
        )
        return [output[0, len(prompt) :].tolist()], [streamer.record]

    return write


def compiled_by_library(model: PreTrainedModel, **options: Any) -> Contender:
    """`generate` with a static cache that compiles its forward on any device. Its first call compiles."""
    config = CompileConfig(**COMPILING)
    config._compile_all_devices = True  # Without it, accelerators alone.
    sampler = library_sampler(model, cache_implementation="static", compile_config=config, **options)

    def write(
        prompt: list[int], generator: Generator, max_len: int, sampling: Sampling = SAMPLING, first: int | None = None
    ) -> Generated:
        generated = sampler(prompt, generator, max_len, sampling, first)
        if not hasattr(model, "_compiled_call"):
            raise RuntimeError("this version of the library does not compile its forward on this device")
        return generated

    return write


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
