"""`parse`: the flags of `test.py` as typed settings. What cannot be right is refused here, as far as it shows before
anything is loaded."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from experiments.flags import read_flags
from inputs.models import default_head, default_mid, default_pair
from inputs.starting import Something
from methods.catalogue import build, check_roles, choose, choose_lossless, in_mode
from methods.samplers import Decoding, tree_choice
from utils import Sampling, UserError

TIMED = ("speed", "speedNew", "speedMulti", "contrastive", "compare", "sweep")  # modes that measure speed
MODES = (*TIMED, "diversity", "lossless")  # modes that measure methods
ALL_MODES = (*MODES, "ppl", "audit", "show", "html")
# Defaults that differ from mode to mode; the value for the other modes stands where they are used.
MAX_LEN = {"speedNew": 1000, "diversity": 45}
REPEATS = {"compare": 2, "sweep": 2, "diversity": 20}
FILTERS = {"diversity": (1.0, 1.0)}  # temperature and top_p; the article's naive sampling has neither
BATCHES = (1, 2, 4, 8, 16, 32)  # texts at a time in --sweep batch
TOKENS, TEXTS = 100_000, 64  # of --lossless: tokens tested, and texts that a method is given at a time
PLAYED = {"contrastive": "speculativeContrastive", "speedMulti": "cascade", "speedNew": "additive"}  # by --show, --html


@dataclass(frozen=True)
class Measuring:
    """What to measure. groups: {mode: its methods}; played: the one method whose text is played, and nothing is
    measured; repeats, tokens, batch None: the mode's default. audit: the file of texts to test, written in the dtype
    `written_in`."""

    groups: dict[str, list[str]]
    played: str | None
    ppl: bool
    audit: Path | None
    written_in: str
    repeats: int | None
    batch: int | None
    tokens: int | None
    seed: int

    @property
    def timed(self) -> list[str]:
        """The modes that measure speed."""
        return [mode for mode in self.groups if mode in TIMED]

    @property
    def names(self) -> set[str]:
        """All methods that are measured or played."""
        return {name for names in self.groups.values() for name in names} | ({self.played} if self.played else set())

    @property
    def modes(self) -> list[str]:
        """All modes that generate text."""
        return [*self.groups, *(["show"] if self.played else [])]

    def repeats_of(self, mode: str) -> int:
        """How often each prompt is continued in that mode."""
        return self.repeats or REPEATS.get(mode, 3)


@dataclass(frozen=True)
class ModelChoice:
    """Which models, and how they are loaded. draft "lookup": the text so far guesses; draft or mid "self": the target's
    copy, with `draft_bits` bits; draft "head": the trained head. None: the default; for draft_device the target's
    device, for draft_bits the fastest; no mid, no head.
    """

    target: str
    draft: str
    mid: str | None
    head: str | None
    draft_bits: int | None
    draft_vocab: int | None
    dtype: str | None
    device: str | None
    draft_device: str | None
    compile: bool
    offline: bool

    @property
    def roles(self) -> set[str]:
        """The models there are beside the target. Its copy can always be made."""
        there = {
            "self": True,
            "draft": self.draft != "lookup",
            "draft model": self.draft not in ("lookup", "head"),
            "whole draft model": self.draft not in ("lookup", "head", "self") and not self.draft_vocab,
            "mid": self.mid,
            "head": self.head,
        }
        return {role for role, is_there in there.items() if is_there}


@dataclass(frozen=True)
class SamplingChoice:
    """How tokens are drawn, and how many. None: the mode's default."""

    temperatures: tuple[float, ...]
    top_p: float | None
    top_k: int
    repetition_penalty: float
    max_len: int | None

    def of(self, mode: str, temperature: float | None = None) -> Sampling:
        """`Sampling` of that mode, at one of several temperatures."""
        default, top_p = FILTERS.get(mode, (0.85, 0.9))
        if temperature is None:
            temperature = self.temperatures[0] if self.temperatures else default
        return Sampling(temperature, self.top_k, top_p if self.top_p is None else self.top_p, self.repetition_penalty)

    def max_len_of(self, mode: str) -> int:
        """New tokens at most in that mode."""
        return self.max_len or MAX_LEN.get(mode, 200)


@dataclass(frozen=True)
class TextChoice:
    """Which texts are continued and scored. questions: of a conversation, in turn. prompts: the file, or the name, of
    prompts with categories."""

    dataset: str
    books: int | None
    sentences: int
    sentence_limit: int
    prompt: str | None
    questions: tuple[str, ...]
    prompt_file: Path | None
    prompts: str | None
    prompt_lengths: tuple[int, ...]
    window: int
    stride: int

    @property
    def from_corpora(self) -> bool:
        """Whether the prompts come from the data set, not from a flag."""
        return self.prompt is None and not self.questions and self.prompt_file is None and self.prompts is None


@dataclass(frozen=True)
class Output:
    """Where results go. show: on the screen, as text is decoded; html: the page that plays it."""

    folder: Path
    show: bool
    html: Path | None


@dataclass(frozen=True)
class Settings:
    """Everything the flags say. rerun: the run to repeat; flags: the flags themselves, for the run's record."""

    measuring: Measuring
    models: ModelChoice
    decoding: Decoding
    sampling: SamplingChoice
    texts: TextChoice
    output: Output
    rerun: str | None
    flags: dict[str, Any]

    @property
    def rows(self) -> int:
        """Texts that are decoded at a time."""
        if self.flags["sweep"] == "batch":
            return max(BATCHES)
        if "lossless" not in self.measuring.groups:
            return self.measuring.batch or 1
        return min(self.measuring.batch or TEXTS, self.texts_at_once)

    @property
    def prompts_from_corpora(self) -> bool:
        """Whether texts of the data set are continued. --diversity has prompts of its own."""
        return self.texts.from_corpora and bool(set(self.measuring.modes) - {"diversity"})

    @property
    def texts_at_once(self) -> int:
        """Texts that a method of `--lossless` is given at a time."""
        return min(TEXTS, -(-self.tokens // self.sampling.max_len_of("lossless")))

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that batches have. A queue ends in smaller batches: of half as many rows, and so on."""
        queues = self.measuring.batch or self.flags["sweep"] == "batch"
        return [self.rows >> i for i in range(self.rows.bit_length() if queues else 1)]

    @property
    def tokens(self) -> int:
        """Tokens of each method that `--lossless` tests at least."""
        return self.measuring.tokens or TOKENS

    def gamma_of(self, mode: str) -> int | None:
        """The number of guesses in a round of that mode; None if each method has its own."""
        shared = mode == "speed" and self.decoding.draft_length == "fixed"
        return self.decoding.gamma_of("fixed", self.decoding.lookup) if shared else self.decoding.gamma


def parse(argv: Sequence[str], again: bool = False) -> Settings:
    """The settings that the flags `argv` say. Raises UserError for what cannot be right. again: the flags are those of
    a record, which names all."""
    args = read_flags(argv)
    args.promptLen = sorted(set(args.promptLen))
    args.temperature = args.temperature and list(dict.fromkeys(args.temperature))
    if not args.rerun:
        check_modes(args)
        args.sentences = args.sentences or (10 if args.lossless is None else TEXTS)
        name_models(args)
    settings = typed(args)
    if not args.rerun:
        check_together(settings)
    if not args.rerun and not again and (idle := without_effect(settings, argv)):
        raise UserError(next(iter(idle.values())))
    return settings


def field_of(flag: str) -> str:
    """The field that a flag sets, such as `draft_length` for draftLength."""
    return re.sub("[A-Z]", r"_\g<0>", flag).lower()


def typed(args: argparse.Namespace) -> Settings:
    """The flags, sorted into settings."""
    values = {field_of(name): value for name, value in vars(args).items()}
    values |= {
        "ppl": bool(args.ppl),
        "written_in": args.writtenIn or "bfloat16",
        "lookup": args.draft == "lookup",
        "own_copy": args.draft == "self",
        "draft_bits": None if args.draftBits == "auto" else int(args.draftBits),
        "temperatures": tuple(args.temperature or ()),
        "prompt_lengths": tuple(args.promptLen),
        "questions": tuple(args.question or ()),
        "folder": args.out,
        "flags": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    roles = from_values(ModelChoice, values).roles
    values["groups"], values["played"] = ({}, None) if args.rerun else methods_of(args, roles)
    return from_values(Settings, values)


def from_values(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass with the values of its fields' names; fields that are dataclasses are made likewise. A field without
    a value has its default."""
    parts = {field.name: from_values(field.type, values) for field in fields(kind) if is_dataclass(field.type)}
    return kind(**parts, **{field.name: values[field.name] for field in fields(kind) if field.name in values})


def methods_of(args: argparse.Namespace, roles: set[str]) -> tuple[dict[str, list[str]], str | None]:
    """{mode: the methods it measures}, of the modes asked for; and the method whose text is played, instead of any
    measurement. Raises UserError if a method lacks a model."""
    groups: dict[str, list[str]] = {}
    if args.show or args.html:
        played = next((method for mode, method in PLAYED.items() if getattr(args, mode)), "speculative")
        check_roles([played], roles)
        return groups, played
    for mode in MODES:
        if mode == "compare" and args.compare is not None:
            groups[mode] = choose(args.compare, roles)
        elif mode == "lossless" and args.lossless is not None:
            groups[mode] = choose_lossless(args.lossless, roles)
        elif getattr(args, mode):
            groups[mode] = [name for name in in_mode(mode) if name != "draft" or "draft model" in roles]
            check_roles(groups[mode], roles)
    return groups, None


def name_models(args: argparse.Namespace) -> None:
    """Fill in the models that were not named."""
    if args.mid and not args.draft:
        raise UserError("--mid stands between the target and a draft: name that too, with --draft")
    if args.head and not args.draft:
        args.draft = "head"
    pair = default_pair()
    if args.audit and args.draft is None:
        args.draft = "lookup"  # No draft model is needed.
        print(end="" if args.target else f"No target named: using {pair[0]}.\n")
    if args.target is None and args.draft is None and args.mid is None:
        print(
            f"No models named: using {pair[0]} (target) and {pair[1]} (draft)."
            + ("" if pair[0].startswith("pythia") else " docs/pythia-on-gpu.md says how to get Pythia.")
        )
        args.mid = default_mid(pair)
    args.target, args.draft = args.target or pair[0], args.draft or pair[1]
    args.head = args.head or default_head(args.target)


def check_modes(args: argparse.Namespace) -> None:
    """Settle what is measured if no flag says so. Raises UserError for modes that exclude each other."""
    if not any(getattr(args, mode) for mode in ALL_MODES):  # The default is both, but for one that is switched off.
        args.speed, args.ppl = int(args.speed is None), int(args.ppl is None)
        if args.draft in ("lookup", "head") or (args.head and not args.draft) or args.draftVocab or args.prompts:
            args.ppl = 0
    if not any(getattr(args, mode) for mode in ALL_MODES):
        raise UserError("nothing to measure: leave out --speed 0 or --ppl 0")
    for own in "lossless", "audit":
        if getattr(args, own) is not None and any(getattr(args, mode) for mode in ALL_MODES if mode != own):
            raise UserError(f"--{own} is a run of its own: leave out the other things to do")


def check_together(settings: Settings) -> None:
    """Raise UserError for flags that are right by themselves but not together."""
    flags, played = settings.flags, settings.measuring.played
    folder = settings.output.folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not played and not (there.is_dir() and os.access(there, os.W_OK)):
        raise UserError(f"{settings.output.folder} is a folder that you may not write to; name another with --out")
    if len(settings.texts.questions) > 1 and not played:
        raise UserError("a conversation is played, not measured: add --show or --html, or give one --question")
    if flags["sweep"] == "batch" and list(settings.measuring.groups) != ["sweep"]:
        raise UserError("--sweep batch is a run of its own: leave out the other modes")
    if flags["sweep"] and (settings.sampling.max_len or 3) < 3:
        raise UserError("--sweep needs a round of guesses between the first token and the last: --maxLen 3 or more")
    if played:
        for mode in "speed", "ppl", "compare", "sweep", "diversity":
            if flags[mode]:
                raise UserError(f"--show and --html play one text and measure nothing; leave out --{mode}")
        if sum(bool(flags[mode]) for mode in ("speedNew", "speedMulti", "contrastive")) > 1:
            raise UserError("--show and --html play one method: of --speedNew, --speedMulti and --contrastive give one")
    decoding = settings.decoding
    if decoding.lookup and settings.models.draft_device:
        raise UserError("--draft lookup is no model and needs no device; leave out --draftDevice")
    if settings.models.draft_device == "auto":
        raise UserError("--draftDevice auto: a draft is on one device; name it")
    if decoding.tree is not None:
        check_tree(settings)
    if decoding.lookup and settings.measuring.ppl:
        raise UserError("--draft lookup has no perplexity: it is no model; leave out --ppl")
    if settings.models.draft_vocab:
        check_draft_vocabulary(settings)
    check_copy(settings)
    check_head(settings)


# {flag: (what it is for, whether the settings ask for that)}. Of how to guess, the methods say it: `fields_read`.
EFFECTS: dict[str, tuple[str, Callable[[Settings], Any]]] = {
    "tokens": ("--lossless", lambda settings: "lossless" in settings.measuring.groups),
    "writtenIn": ("--audit", lambda settings: settings.measuring.audit),
    "prompts": (
        "modes that measure speed, and not --diversity",
        lambda settings: settings.measuring.timed and not settings.flags["diversity"],
    ),
    "batch": (
        "modes that measure speed, except --sweep, and for --lossless",
        lambda settings: settings.measuring.groups.keys() & {*TIMED, "lossless"} and not settings.flags["sweep"],
    ),
    "draftBits": (
        "the target's own copy (--draft self)",
        lambda settings: "self" in (settings.models.draft, settings.models.mid, *settings.measuring.names),
    ),
    "promptLen": ("prompts from the data set", lambda settings: settings.prompts_from_corpora),
    **dict.fromkeys(
        ("dataset", "books", "sentences", "sentenceLimit"),
        ("texts from the data set", lambda settings: settings.prompts_from_corpora or settings.measuring.ppl),
    ),
}


def without_effect(settings: Settings, words: Iterable[str]) -> dict[str, str]:
    """{flag: what to say of it} of the flags among `words` that change nothing in a run with these settings."""
    parts, read, found = {field.name for field in fields(Decoding)}, fields_read(settings), {}
    for flag in (word.split("=")[0][2:] for word in words if word.startswith("--")):
        purpose, is_asked_for = EFFECTS.get(flag, ("", lambda settings: True))
        if not is_asked_for(settings):
            found[f"--{flag}"] = f"--{flag} is for {purpose}, and this run has none; leave it out, or add that"
        elif (field := field_of(flag)) in parts and field not in read:
            found[f"--{flag}"] = f"--{flag} changes nothing here: no method that is measured reads it; leave it out"
    return found


def fields_read(settings: Settings) -> set[str]:
    """The fields of `Decoding` that the methods read as they are made, of models that are stand-ins."""
    read = set()

    class Watched(Decoding):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    class StandIn(Something):
        vocabulary = context = 1
        device = "cpu"

    models: Any = dict.fromkeys(("target", *settings.models.roles), StandIn)
    decoding = Watched(**vars(settings.decoding))
    build(["fixed"] if "sweep" in settings.measuring.groups else [], models, decoding)
    read.discard("gamma")  # A sweep has its own numbers of guesses.
    build(settings.measuring.names, models, decoding)
    return read


def check_copy(settings: Settings) -> None:
    """Raise UserError for what the target's own copy cannot do, or has no use for."""
    choice = settings.models
    if choice.target in ("self", "lookup", "head"):
        raise UserError(f"--target {choice.target}: the target is a model; name it")
    if choice.draft != "self":
        return
    if choice.draft_device:
        raise UserError("--draft self shares the target's KV cache, and so its device; leave out --draftDevice")
    if choice.mid:
        raise UserError("--draft self guesses for the target; for three levels give --mid self and another draft")
    if choice.draft_vocab:
        raise UserError("--draft self has the target's output layer; leave out --draftVocab")


def check_head(settings: Settings) -> None:
    """Raise UserError for what a trained head cannot do, or has no use for."""
    choice = settings.models
    if choice.head != default_head(choice.target) and "head" not in (choice.draft, *settings.measuring.names):
        raise UserError("--head is for the method head and for --draft head; add one of them or leave it out")
    if choice.mid == "head":
        raise UserError("--mid head: a head reads what the target has read, and scores no guesses; name another model")
    if choice.draft != "head":
        return
    if not choice.head:
        raise UserError("--draft head needs a trained head; name its folder with --head")
    if choice.draft_device:
        raise UserError("--draft head reads the target's features, on the target's device; leave out --draftDevice")
    if settings.measuring.ppl:
        raise UserError("--draft head has no perplexity: it reads no text by itself; leave out --ppl")


def check_tree(settings: Settings) -> None:
    """Raise UserError for what cannot be done with a tree of guesses."""
    flags = settings.flags
    tree_choice(settings.decoding)
    if settings.decoding.lookup:
        raise UserError("a tree grows from a draft model, and --draft lookup is none; leave out --tree")
    if settings.decoding.lookup_first:
        raise UserError("a tree grows from a draft model alone; leave out --lookupFirst or --tree")
    if flags["sweep"]:
        raise UserError("--sweep is over gamma, the length of a chain; leave out --tree, or --compare trees")
    if settings.measuring.played:
        raise UserError("--show and --html play chains of guesses; leave out --tree")


def check_draft_vocabulary(settings: Settings) -> None:
    """Raise UserError for what needs a draft that knows every token, or has no use for one that does not."""
    if settings.decoding.lookup:
        raise UserError("--draftVocab restricts a draft model, and --draft lookup is none; leave out one of them")
    if settings.measuring.ppl:
        raise UserError(
            "a draft restricted by --draftVocab has no perplexity: it gives most tokens none; leave out "
            "--ppl or --draftVocab"
        )
