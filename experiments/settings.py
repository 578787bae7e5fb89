"""`parse`: the flags of `test.py` as settings. Rejects invalid flags as far as possible before anything is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.flags import FLAGS, TIMED, Measuring, ModelChoice, Output, SamplingChoice, TextChoice, read_flags
from inputs.commandLine import filled, flags_of
from inputs.models import default_for, default_pair
from inputs.starting import Something
from methods.catalogue import METHODS, Role, build, check_roles, choose, repeatable
from methods.samplers import Decoding, tree_choice
from utils import UserError

MODES = (*TIMED, "diversity", "lossless")  # modes that measure methods
ALL_MODES = (*MODES, "ppl", "audit", "show", "html", "chat")
BATCHES = (1, 2, 4, 8, 16, 32)  # texts at a time in --sweep batch
TOKENS, TEXTS = 100_000, 64  # of --lossless: tokens tested, and texts that a method is given at a time
PLAYED = {"contrastive": "speculativeContrastive", "speedMulti": "cascade", "speedNew": "additive"}  # by --show, --html
OF_MODELS = {"mid": "mid", "draftVocab": "draft", "draftDevice": "draft"}  # {flag: the model that it is for}
NO_MODEL = {  # {value of --draft that names no model: {flag: why it cannot be given}}
    "lookup": {
        "draftDevice": "is not a model and needs no device",
        "tree": "is not a model, and a tree needs one",
        "ppl": "has no perplexity: it is not a model",
        "draftVocab": "is not a model whose tokens can be restricted",
    },
    "self": {
        "draftDevice": "shares the target's KV cache, and so its device",
        "mid": "is the target's copy; for three levels give --mid self and another draft",
        "draftVocab": "has the target's output layer",
    },
    "head": {
        "draftDevice": "reads the target's features, on the target's device",
        "ppl": "has no perplexity: it does not read text by itself",
    },
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run, from its flags."""

    measuring: Measuring
    models: ModelChoice
    decoding: Decoding
    sampling: SamplingChoice
    texts: TextChoice
    output: Output

    @property
    def flags(self) -> dict[str, Any]:
        """{flag: value}, for the run's record."""
        parts = ((part, name, declared) for part in vars(self).values() for name, declared in flags_of(part).items())
        values = {name: getattr(part, declared.name) for part, name, declared in parts}
        values |= {name: list(value) or None for name, value in values.items() if isinstance(value, tuple)}
        return values | {name: str(value) for name, value in values.items() if isinstance(value, Path)}

    @property
    def rows(self) -> int:
        """Texts that are decoded, or guessed along, at a time."""
        if self.measuring.sweep == "batch":
            return max(BATCHES)
        if self.measuring.audit:  # Along greedy texts nothing is guessed, nor in tokens that the target lacks.
            return (self.measuring.batch or TEXTS) if self.draws and self.decoding.translation is None else 1
        if "lossless" not in self.measuring.groups:
            return self.measuring.batch or 1
        return min(self.measuring.batch or TEXTS, self.texts_at_once)

    @property
    def draws(self) -> bool:
        """Whether the texts of --audit, or of --diversity, are drawn."""
        sampling = self.sampling.of("audit" if self.measuring.audit else "diversity")
        return bool(sampling.temperature or self.decoding.contrastive_temperature)

    @property
    def guesses_along(self) -> str:
        """The method that guesses along the texts of --audit. The seed must fix its guesses: it chooses by no times."""
        return "speculative" if repeatable("speculative", self.decoding) else "fixed"

    @property
    def continues(self) -> bool:
        """Whether prompts are continued by methods that are timed, tested or played. --diversity has its own."""
        return bool(set(self.measuring.modes) - {"diversity"})

    @property
    def prompts_from_corpora(self) -> bool:
        """Whether the prompts are texts of the data set."""
        return self.texts.from_corpora and self.continues and not self.output.chat

    @property
    def texts_at_once(self) -> int:
        """Texts of a call of a method in `--lossless`."""
        return min(TEXTS, -(-self.tokens // self.sampling.max_len_of("lossless")))

    @property
    def queues(self) -> bool:
        """Whether texts are a queue for several rows."""
        return self.rows > 1 and bool(self.measuring.groups and self.measuring.batch or self.measuring.sweep == "batch")

    @property
    def tokens(self) -> int:
        """The least tokens of each method that `--lossless` tests."""
        return self.measuring.tokens or TOKENS

    def gamma_of(self, mode: str) -> int | None:
        """The number of guesses in a round of `mode`; None if each method has its own."""
        shared = mode == "speed" and self.decoding.draft_length == "fixed"
        return self.decoding.gamma_of("fixed", self.decoding.lookup) if shared else self.decoding.gamma


def parse(argv: Sequence[str], again: bool = False) -> Settings:
    """The settings of the flags `argv`. Raises UserError. again: the flags are those of a record, which has all."""
    args = read_flags(argv)
    complete = bool(args.rerun or args.check)  # Nothing else is to be chosen.
    args.promptLen = sorted(set(args.promptLen))
    args.temperature = args.temperature and list(dict.fromkeys(args.temperature))
    if not complete:
        choose_defaults(args)
    parts = Measuring, ModelChoice, Decoding, SamplingChoice, TextChoice, Output
    settings = Settings(*(filled(part, vars(args)) for part in parts))
    if complete:
        return settings
    groups, played = methods_of(args, settings.models.roles)
    decoding = replace(settings.decoding, lookup=args.draft == "lookup", own_copy=args.draft == "self")
    measuring = replace(settings.measuring, groups=groups, played=played)
    settings = replace(settings, measuring=measuring, decoding=decoding)
    for clash, message in clashes(settings):
        if clash:
            raise UserError(message)
    for message in () if again else without_effect(settings, argv).values():
        raise UserError(message)
    return settings


def choose_defaults(args: argparse.Namespace) -> None:
    """Set the modes and models that were not named. Raises UserError for modes that exclude each other."""
    if not any(getattr(args, mode) for mode in ALL_MODES):  # The default is both, but for one that is switched off.
        off = "--ppl 0" * (args.ppl == 0) or "--prompts is for speed alone" * bool(args.prompts)
        if args.draft in ("lookup", "head") or (args.head and not args.draft) or args.draftVocab:
            off = off or "this draft has no perplexity"
        if args.acceptance is not None:
            off = off or "--acceptance is for speed alone"
        args.speed, args.ppl = int(args.speed is None), int(not off)
        if not (args.speed or args.ppl):
            raise UserError(f"nothing is left to measure: --speed 0, and {off}")
    modes = [mode for mode in ALL_MODES if getattr(args, mode)]
    for single in "lossless", "audit":
        if single in modes and len(modes) > 1:
            raise UserError(f"--{single} cannot be combined with other modes")
    args.sentences = args.sentences or (10 if args.lossless is None else TEXTS)
    if args.mid and not args.draft:
        raise UserError("--mid needs a draft as well: name one with --draft")
    pair = default_pair()
    args.draft = args.draft or (args.head and "head")
    if args.audit and not args.draft:
        args.draft = "lookup"  # No draft model is needed.
    if not args.target and not args.draft:
        args.mid = default_for(pair[0], "mid")
    args.target, args.draft = args.target or pair[0], args.draft or pair[1]
    args.head = args.head or default_for(args.target, "head")


def models_used(settings: Settings, argv: Sequence[str]) -> str:
    """The line that says which models a run with the flags `argv` uses if they name none; "" if they name any."""
    named, models = read_flags(argv), settings.models
    if named.target or named.draft or named.head:
        return ""
    if settings.measuring.audit:
        return f"No target named: using {models.target}.\n"
    more = "" if models.target.startswith("pythia") else " docs/pythia-on-gpu.md says how to get Pythia."
    return f"No models named: using {models.target} (target) and {models.draft} (draft).{more}\n"


def methods_of(args: argparse.Namespace, roles: set[Role]) -> tuple[dict[str, list[str]], str | None]:
    """{mode: the methods it measures}, of the requested modes; and the method whose text is played, instead of any
    measurement. Raises UserError if a method lacks a model."""
    if args.show or args.html or args.chat:
        played = next((method for mode, method in PLAYED.items() if getattr(args, mode)), "speculative")
        check_roles([played], roles)
        return {}, played
    groups: dict[str, list[str]] = {}
    for mode in MODES:
        if mode in ("compare", "lossless") and getattr(args, mode) is not None:
            groups[mode] = choose(getattr(args, mode), roles, mode)
        elif getattr(args, mode):
            measured = [name for name, method in METHODS.items() if mode in method.modes]
            groups[mode] = [name for name in measured if name != "draft" or Role.READER in roles]
            check_roles(groups[mode], roles)
    return groups, None


def clashes(settings: Settings) -> Iterator[tuple[Any, str]]:
    """(condition, message) of flags that are valid alone but not together."""
    flags, measuring, models, decoding = settings.flags, settings.measuring, settings.models, settings.decoding
    played, sweep = measuring.played, measuring.sweep
    several = len(settings.texts.questions) > 1 and not played
    yield several, "a conversation is played, not measured: add --show or --html, or give one --question"
    batches = sweep == "batch" and list(measuring.groups) != ["sweep"]
    yield batches, "--sweep batch cannot be combined with other modes"
    several = sweep == "batch" and max(map(len, (settings.sampling.temperatures, settings.texts.prompt_lengths))) > 1
    yield several, "--sweep batch takes one --temperature and one --promptLen"
    short = sweep and (settings.sampling.max_len or 3) < 3
    yield short, "--sweep needs a round of guesses between the first token and the last: --maxLen 3 or more"
    several = len(settings.sampling.temperatures) > 1 and list(measuring.groups) != ["sweep"]
    yield several, "several temperatures are for --sweep alone; give one, or leave out the other modes"
    one = settings.prompts_from_corpora and not measuring.groups.keys() - {"steps"}  # prompt
    several = one and len(settings.texts.prompt_lengths) > 1
    yield several, "--steps, --show and --html read one prompt; give one --promptLen"
    penalty = measuring.steps and settings.sampling.repetition_penalty != 1
    yield penalty, "--steps times steps without a repetition penalty; leave out --repetition_penalty"
    for mode in "speed", "ppl", "compare", "sweep", "steps", "diversity":
        yield played and flags[mode], f"--show, --html and --chat measure nothing; leave out --{mode}"
    chats = settings.output.chat and [mode for mode in ("show", "html", *PLAYED) if flags[mode]]
    yield chats, f"--chat cannot be combined with --{(chats or [''])[0]}"
    many = played and sum(bool(flags[mode]) for mode in PLAYED) > 1
    yield many, "--show and --html play one method: of --speedNew, --speedMulti and --contrastive give one"
    texts = settings.output.texts
    closed = texts and not os.access(texts, os.W_OK)
    yield closed, f"--texts {texts} is a folder that you may not write to; name another"
    greedy = texts and [*settings.sampling.temperatures] == [0]
    yield greedy, "--texts keeps drawn texts, and --temperature 0 draws none; leave out one of them"
    several = bool(texts) and len(settings.texts.prompt_lengths) > 1
    yield several, "--texts keeps the texts of one prompt length, each method's in a file; give one --promptLen"
    untimed = measuring.diversity or measuring.lossless or measuring.ppl or measuring.audit or played
    coin = "--acceptance is for measuring speed: its text is not the target's; leave out the other things to do"
    yield decoding.acceptance is not None and untimed, coin
    if decoding.tree is not None:
        tree_choice(decoding)
        yield decoding.lookup_first, "a tree is drawn by a draft model alone; leave out --lookupFirst or --tree"
        yield sweep, "--sweep varies gamma, the length of a chain; leave out --tree, or --compare trees"
        yield played and not settings.output.chat, "--show and --html play chains of guesses; leave out --tree"
    yield models.target in ("self", "lookup", "head"), f"--target {models.target}: the target is a model; name it"
    yield models.draft_device == "auto", "--draftDevice auto: a draft is on one device; name it"
    restricted = "a draft restricted by --draftVocab has no perplexity: it gives most tokens none"
    yield models.draft_vocab and measuring.ppl, f"{restricted}; leave out --ppl or --draftVocab"
    unused = models.head != default_for(models.target, "head") and "head" not in (models.draft, *measuring.names)
    yield unused, "--head is for the method head and for --draft head; add one of them or leave it out"
    scores = f"--mid {models.mid}: the model between scores guesses, which {models.mid} does not; name another"
    yield models.mid in ("head", "lookup"), scores
    yield models.draft == "head" and not models.head, "--draft head needs a trained head; name its folder with --head"
    for flag, why in NO_MODEL.get(models.draft, {}).items():
        yield flags[flag], f"--draft {models.draft} {why}; leave out --{flag}"


def without_effect(settings: Settings, words: Iterable[str]) -> dict[str, str]:
    """{flag: message} of the flags among `words` that have no effect in a run with these settings. Fields of `Decoding`
    have one if a method reads them when it is built with stand-ins for models, and so have flags of the models."""
    of_guessing, read, messages = flags_of(Decoding), set(), dict[str, str]()
    measuring = settings.measuring
    drawn = measuring.audit and settings.draws
    roles = {"target", *(["draft"] if measuring.ppl or measuring.lossless or drawn else [])}  # that are read

    class Watched(Decoding):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    class StandIn(Something):
        vocabulary = context = 1
        device = "cpu"

    class Roles(dict[str, Any]):
        def __getitem__(self, role: str) -> Any:
            roles.add(role)
            return super().__getitem__(role)

        def items(self) -> Any:
            roles.update(self)
            return super().items()

    models: Any = Roles.fromkeys(("target", *(role.model for role in settings.models.roles)), StandIn)
    decoding = Watched(**vars(settings.decoding))
    build(["fixed"] if "sweep" in measuring.groups else [], models, decoding)
    read.discard("gamma")  # A sweep has its own numbers of guesses.
    audited = [settings.guesses_along] if drawn else []
    build([*measuring.names, *audited], models, decoding)
    if audited:
        read -= {"verification", "tree_rule"}  # The text itself is the path.
    if measuring.groups.keys() == {"steps"}:
        read -= {"verification", "acceptance"}  # A round that is timed has rules of its own.
    others = [METHODS[name] for name in measuring.names if METHODS[name].engine]
    roles |= {role.model for method in others for role in method.needs}
    read |= {"gamma", "acceptance"} if any(method.guesses for method in others) else set()
    for name in (word.split("=")[0][2:] for word in words if word.startswith("--")):
        if name not in FLAGS:
            continue  # It is the value of a flag.
        purpose, is_asked_for = FLAGS[name].metadata.get("only", (None, None))
        if purpose and not is_asked_for(settings):
            messages[f"--{name}"] = f"--{name} is for {purpose}, which this run lacks; leave it out"
        elif (name in of_guessing and of_guessing[name].name not in read) or OF_MODELS.get(name, "target") not in roles:
            messages[f"--{name}"] = f"--{name} has no effect here: no measured method uses it; leave it out"
    return messages
