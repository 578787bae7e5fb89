"""`parse`: the flags of `test.py` as typed settings. What cannot be right is refused here, as far as it shows before
anything is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from experiments.choices import (
    ALL_MODES,
    MODES,
    ROWS,
    Measuring,
    ModelChoice,
    Output,
    SamplingChoice,
    Settings,
    TextChoice,
)
from experiments.flagChecks import check_numbers, check_prompts, check_rerun
from experiments.flags import parser
from inputs.models import default_mid, default_pair
from methods.catalogue import METHODS
from methods.makers import Decoding
from methods.selection import check_roles, choose, choose_lossless, in_mode
from methods.treeMakers import choice_of
from utils import UserError


def parse(argv: Sequence[str]) -> Settings:
    """The settings that the flags `argv` say. Raises UserError for what cannot be right."""
    args = parser().parse_args(argv)
    if args.rerun:
        check_rerun(args)
    check_numbers(args)
    check_prompts(args)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    args.promptLen = sorted(set(args.promptLen))
    args.temperature = args.temperature and list(dict.fromkeys(args.temperature))
    if not args.rerun:
        check_modes(args)
        args.sentences = args.sentences or (10 if args.lossless is None else ROWS)
        name_models(args)
    settings = typed(args)
    if not args.rerun:
        check_together(settings)
    return settings


def typed(args: argparse.Namespace) -> Settings:
    """The flags, sorted into settings."""
    models = ModelChoice(
        args.target,
        args.draft,
        args.mid,
        args.draftVocab,
        args.dtype,
        args.device,
        args.draftDevice,
        args.compile,
        args.offline,
    )
    decoding = Decoding(
        gamma=args.gamma,
        draft_length=args.draftLength,
        draft_threshold=args.draftThreshold,
        target_threshold=args.targetThreshold,
        verification=args.verification,
        tree=args.tree,
        tree_rule=args.treeRule,
        gamma1=args.gamma1,
        gamma2=args.gamma2,
        ngram=args.ngram,
        lookup=args.draft == "lookup",
        draft_temperature=args.draftTemperature,
        draft_top_p=args.draftTop_p,
        lookup_first=args.lookupFirst,
        plausibility=args.plausibility,
        amateur_temperature=args.amateurTemperature,
        contrastive_temperature=args.contrastiveTemperature,
    )
    texts = TextChoice(
        dataset=args.dataset,
        books=args.books,
        sentences=args.sentences,
        sentence_limit=args.sentenceLimit,
        prompt=args.prompt,
        question=args.question,
        prompt_file=args.promptFile,
        prompt_lengths=tuple(args.promptLen),
        window=args.window,
        stride=args.stride,
    )
    groups, played = ({}, None) if args.rerun else (groups_of(args, models), played_of(args, models))
    return Settings(
        Measuring(groups, played, bool(args.ppl), args.repeats, args.tokens, args.seed),
        models,
        decoding,
        sampling_of(args),
        texts,
        Output(args.out, args.show, args.html),
        args.rerun,
        {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
    )


def sampling_of(args: argparse.Namespace) -> SamplingChoice:
    """The flags that say how tokens are drawn."""
    return SamplingChoice(tuple(args.temperature or ()), args.top_p, args.top_k, args.repetition_penalty, args.maxLen)


def groups_of(args: argparse.Namespace, models: ModelChoice) -> dict[str, list[str]]:
    """{mode: the methods it measures}, of the modes asked for. Raises UserError if a method lacks a model."""
    groups: dict[str, list[str]] = {}
    for mode in MODES if not (args.show or args.html) else ():
        if mode == "compare" and args.compare is not None:
            groups[mode] = choose(args.compare, models.roles)
        elif mode == "lossless" and args.lossless is not None:
            groups[mode] = choose_lossless(args.lossless, models.roles)
        elif getattr(args, mode):
            groups[mode] = [name for name in in_mode(mode) if name != "draft" or "draft" in models.roles]
            check_roles(groups[mode], models.roles)
    return groups


def played_of(args: argparse.Namespace, models: ModelChoice) -> str | None:
    """The method whose text --show and --html play; None if neither is asked for."""
    if not (args.show or args.html):
        return None
    named = {"contrastive": "speculativeContrastive", "speedMulti": "cascade", "speedNew": "additive"}
    name = next((method for mode, method in named.items() if getattr(args, mode)), "speculative")
    check_roles([name], models.roles)
    return name


def name_models(args: argparse.Namespace) -> None:
    """Fill in the models that were not named."""
    if args.mid and not args.draft:
        raise UserError("--mid stands between the target and a draft: name that too, with --draft")
    pair = default_pair()
    if args.target is None and args.draft is None and args.mid is None:
        print(
            f"No models named: using {pair[0]} (target) and {pair[1]} (draft)."
            + ("" if pair[0].startswith("pythia") else " docs/pythia-on-gpu.md says how to get Pythia.")
        )
        args.mid = default_mid(pair)
    args.target, args.draft = args.target or pair[0], args.draft or pair[1]


# What cannot be right together.


def check_modes(args: argparse.Namespace) -> None:
    """Settle what is measured if no flag says so. Raises UserError for modes that exclude each other."""
    if not any(getattr(args, mode) for mode in ALL_MODES):  # The default is both, but for one that is switched off.
        args.speed, args.ppl = int(args.speed is None), int(args.ppl is None)
        if args.draft == "lookup" or args.draftVocab:
            args.ppl = 0
    if not any(getattr(args, mode) for mode in ALL_MODES):
        raise UserError("nothing to measure: leave out --speed 0 or --ppl 0")
    if args.lossless is None and args.tokens:
        raise UserError("--tokens is a flag of --lossless; give both or neither")
    if args.lossless is not None and any(getattr(args, mode) for mode in ALL_MODES if mode != "lossless"):
        raise UserError("--lossless is a run of its own: leave out the other things to do")


def check_together(settings: Settings) -> None:
    """Raise UserError for flags that are right by themselves but not together."""
    flags, played = settings.flags, settings.measuring.played
    if not played and not os.access(settings.output.folder, os.W_OK):
        raise UserError(f"{settings.output.folder} is a folder that you may not write to; name another with --out")
    if flags["sweep"] and (settings.sampling.max_len or 3) < 3:
        raise UserError("--sweep needs a round of guesses between the first token and the last: --maxLen 3 or more")
    if played:
        for mode in "speed", "ppl", "compare", "sweep", "diversity":
            if flags[mode]:
                raise UserError(f"--show and --html play one text and measure nothing; leave out --{mode}")
        if sum(bool(flags[mode]) for mode in ("speedNew", "speedMulti", "contrastive")) > 1:
            raise UserError("--show and --html play one method: of --speedNew, --speedMulti and --contrastive give one")
    if settings.decoding.lookup and settings.models.draft_device:
        raise UserError("--draft lookup is no model and needs no device; leave out --draftDevice")
    if settings.models.draft_device == "auto":
        raise UserError("--draftDevice auto: a draft is on one device; name it")
    if settings.decoding.tree is not None:
        check_tree(settings)
    own = settings.decoding.draft_temperature, settings.decoding.draft_top_p
    if settings.decoding.lookup and own != (None, None):
        raise UserError("--draft lookup draws nothing; leave out --draftTemperature and --draftTop_p")
    if settings.decoding.lookup and settings.decoding.lookup_first:
        raise UserError("--lookupFirst is for a draft model that guesses too; leave it out, or name one with --draft")
    if settings.decoding.lookup and settings.measuring.ppl:
        raise UserError("--draft lookup has no perplexity: it is no model; leave out --ppl")
    if settings.models.draft_vocab:
        check_draft_vocabulary(settings)


def check_tree(settings: Settings) -> None:
    """Raise UserError for what cannot be done with a tree of guesses."""
    flags = settings.flags
    choice_of(settings.decoding)
    if settings.decoding.lookup:
        raise UserError("a tree grows from a draft model, and --draft lookup is none; leave out --tree")
    if settings.decoding.lookup_first:
        raise UserError("a tree grows from a draft model alone; leave out --lookupFirst or --tree")
    if flags["sweep"]:
        raise UserError("--sweep is over gamma, the length of a chain; leave out --tree, or --compare trees")
    if settings.measuring.played:
        raise UserError("--show and --html play chains of guesses; leave out --tree")
    guessing = [method for name, method in METHODS.items() if name in settings.measuring.names and method.lossless]
    chains = [m for m in guessing if m.name != "target" and not m.guesses_tree(settings.decoding)]
    if (flags["draftLength"] != "fixed" or flags["gamma"]) and not chains:
        raise UserError("--tree says how many tokens to guess; leave out --gamma and --draftLength")


def check_draft_vocabulary(settings: Settings) -> None:
    """Raise UserError for what needs a draft that knows every token, or has no use for one that does not."""
    if settings.decoding.lookup:
        raise UserError("--draftVocab restricts a draft model, and --draft lookup is none; leave out one of them")
    if settings.measuring.ppl:
        raise UserError(
            "a draft restricted by --draftVocab has no perplexity: it gives most tokens none; leave out "
            "--ppl or --draftVocab"
        )
    if any(METHODS[name].contrasts for name in settings.measuring.names):
        raise UserError(
            "contrastive decoding (in --contrastive, --diversity, --compare all) needs a draft that knows "
            "every token; leave it or --draftVocab out"
        )
