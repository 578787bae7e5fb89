"""`prepare`: everything a run needs, found and checked before anything is measured. Whatever may be refused is refused
here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from decoding.rows import check_room
from downloadModel import is_hub_id, on_first_use
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from engine.copies import Copies, weights_of
from engine.head import load_head
from engine.kvCache import cache_bytes
from engine.quantised import BITS, GROUP
from engine.sharedWeights import RestrictedModel
from experiments import diversity
from experiments.lines import Label
from experiments.processes import ALONE, Processes
from experiments.settings import Settings
from inputs.auditTexts import AuditText, read_texts
from inputs.devices import available_memory, pick_dtype
from inputs.files import gigabytes
from inputs.models import DTYPES, Outline, find_model, holds_head, load_model, model_version, outline, read_config
from inputs.progress import followed
from inputs.prompts import (
    Question,
    check_passages,
    choose_prompts,
    encode,
    encode_chat,
    encode_turn,
    read_prompts,
    read_questions,
    tokenize,
)
from inputs.texts import Corpus, load_corpora
from inputs.tokenizers import check_tokenizers, end_tokens, load_tokenizer, most_frequent
from methods.catalogue import METHODS, build
from methods.rehearsal import compile_samplers
from methods.selfDraft import copies_of, trials
from methods.translation import Translation
from utils import UserError

COVERED = 0.5  # Where fewer of the text's tokens can be guessed, guessing hardly ever pays.
SCALE = 2 / GROUP  # bytes of a weight's share of its scale, in a copy in few bits
ROUNDING, MULTIPLYING = 40, 12  # bytes for each weight of the largest layer while that is done to it, in float32
ANSWERS = "answers"  # to earlier turns: a mode with the default sampling and length
LoadedModels = dict[str, CachedModel]  # {role: model}; those of `methods.samplers.Models`


@dataclass(frozen=True)
class Place:
    """Where models run. device: of all but the draft. dtype: of what is timed; text_dtype: of what perplexity and
    diversity are measured with, and losslessness is tested with first."""

    device: str
    draft_device: str
    dtype: str
    text_dtype: str

    def of(self, role: str) -> str:
        """The device of a role's model."""
        return self.draft_device if role == "draft" else self.device


@dataclass
class Inputs:
    """What the models read, as token ids.

    prompts: {length: prompts}; of a conversation its last question, after the shortest answers. Of `questions`
        (--prompts) every turn; `answer_turns` puts the target's answers in the place of the shortest.
    article: the prompts of --diversity. audited: the texts of --audit.
    texts: [(corpus, its passages)] of --ppl, read in windows of `window` tokens, `stride` apart.
    tokens: the most tokens that are read at once. slots: of the KV cache of the largest batch; 0 if that is one text,
        whose slots count with its tokens.
    """

    prompts: dict[int, list[list[int]]]
    article: list[list[int]]
    questions: list[Question]
    audited: list[AuditText]
    texts: list[tuple[Corpus, list[list[int]]]]
    window: int
    stride: int
    tokens: int = 0
    slots: int = 0

    @property
    def rows(self) -> list[list[int]]:
        """The prompts of all lengths."""
        return list(itertools.chain.from_iterable(self.prompts.values()))

    @property
    def turns(self) -> list[tuple[int, int]]:
        """(number of the question, number of its turn), from 0, of each prompt of --prompts."""
        return turns_of(self.questions)

    def label_of(self, prompt: int) -> Label:
        """The category of a prompt, by its number, and its question. Empty if prompts have none."""
        if not self.questions:
            return {}
        number, _ = self.turns[prompt]
        return {"category": self.questions[number].category, "question": number}


@dataclass
class Prepared:
    """What a run needs, its models not loaded yet. processes: those that share the work. folders: {role: model folder}.
    end_tokens: they end a text. frequent: the tokens that a restricted draft guesses. made: the copies of the target
    that was loaded last."""

    settings: Settings
    processes: Processes
    place: Place
    folders: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    frequent: Tensor | None
    inputs: Inputs
    made: Copies | None = field(default=None, init=False)

    @property
    def translation(self) -> Translation | None:
        """To the draft's tokenizer, if that is another one. Then the draft guesses only the tokens that both have."""
        translation: Any = self.settings.decoding.translation
        return translation

    @property
    def head(self) -> Path:
        """The folder of the trained head."""
        return find_model(self.settings.models.head or "")

    def roles_of(self, name: str) -> set[str]:
        """The roles that the target's copy ("self") or the trained head ("head") has."""
        return {role for role, model in models_of(self.settings).items() if model == name}

    def ends(self, row: int, token: int) -> bool:
        """Whether a text ends at this token: the `end_of_text` of `Rows`."""
        return token in self.end_tokens

    def load(self, dtype: str, batches: bool = True) -> LoadedModels:
        """The models in that dtype. batches: whether texts will be decoded in batches."""
        models, caches = {}, self.caches(dtype) if batches else {}
        for role, folder in self.folders.items():
            device = self.place.of(role)
            spread = self.settings.models.device == "auto" and device == self.place.device
            tokenizer = self.translation.tokenizer if role == "draft" and self.translation else self.tokenizer
            models[role] = load_model(
                folder, tokenizer, dtype, device, self.inputs.tokens, spread, caches.get(device, 0)
            )
        if roles := self.roles_of("self"):
            bits = [self.settings.models.bits] if self.settings.models.bits else list(BITS)
            self.made = self.processes.in_turn(lambda: make_copies(models["target"], bits))
            models |= dict.fromkeys(roles, self.made.of(bits[0], models["target"]))
        if roles := self.roles_of("head"):
            head = load_head(self.head, models["target"], model_version(self.folders["target"]))
            models |= dict.fromkeys(roles, head)
        if self.frequent is not None:
            models["restricted"] = RestrictedModel(models["draft"], self.frequent)
        if self.translation is not None:
            models["draft"] = RestrictedModel(models["draft"], self.translation.draft)
        return models

    def caches(self, dtype: str) -> dict[str, int]:
        """{device: bytes} of the KV caches of a batch. Empty if each text is decoded alone."""
        sizes: dict[str, int] = {}
        for role, folder in self.folders.items() if self.inputs.slots else ():
            device = self.place.of(role)
            kept_as = "float32" if device == "cpu" and not self.settings.models.compile else dtype
            size = cache_bytes(read_config(folder).get_text_config(), self.inputs.slots, DTYPES[kept_as])
            sizes[device] = sizes.get(device, 0) + size
        return sizes

    def load_as_timed(self, dtype: str) -> LoadedModels:
        """The models in that dtype: compiled if the flags say so and text is generated, with the graphs that the
        methods need, and a line that says how long that took. No measurement includes it."""
        models, compiles = self.load(dtype), self.settings.models.compile and self.settings.continues
        if compiles:
            models["target"] = compiled(models["target"])
        if "self" in models and self.settings.models.bits is None:
            self.choose_bits(models, compiles)
        if not compiles:
            return models
        start, target = time.perf_counter(), models["target"]
        once = {id(model): model for model in models.values()}  # A copy of the target may have several roles.
        by_id = {
            key: compiled(model, target if model.cache_of or model.features_of else None) for key, model in once.items()
        }
        models = {role: by_id[id(model)] for role, model in models.items()}
        if make_all_graphs(models, self.settings, self.inputs.rows[0]) is not None:
            print(f"Compiled in {time.perf_counter() - start:.1f} s.")
        return models

    def choose_bits(self, models: LoadedModels, compiles: bool) -> None:
        """Put the fastest copy of the target in the place of any other, and its number of bits into the settings: a
        repetition of the run does not measure it again."""
        target, made, roles = models["target"], self.made, self.roles_of("self")
        assert made is not None
        for role in roles:
            del models[role]
        sampling, gamma = self.settings.sampling.of("compare"), self.settings.decoding.gamma_of("fixed")
        make = partial(compiled, target=target) if compiles else lambda copy: copy
        measured = list(followed(trials(target, made, sampling, gamma, make), "measuring copies", len(BITS)))
        best = max(measured, key=lambda trial: trial.gain)
        bits = self.processes.gathered(best.bits)[0]  # All processes use the same copy.
        self.settings = replace(self.settings, models=replace(self.settings.models, draft_bits=str(bits)))
        models |= dict.fromkeys(roles, made.of(bits, target))
        copies = "; ".join(f"{t.bits} bits: acceptance {t.alpha:.2f}, {t.cost:.2f} of a step" for t in measured)
        print(f"Copies of the target ({copies}). Used: {bits} bits.")

    def load_first(self) -> LoadedModels:
        """The models of what comes first, and lines that say what memory they take."""
        measuring, bits = self.settings.measuring, 0
        dtype = self.place.dtype if measuring.timed or measuring.played else self.place.text_dtype
        if len(self.settings.sizes) > 1 and self.inputs.slots:
            size = gigabytes(sum(self.caches(dtype).values()))
            print(f"The KV caches of {self.settings.rows} texts take {size}.")
        models = self.load_as_timed(dtype)
        if self.made is not None:
            bits, target = self.settings.models.bits or 0, models["target"]
            taken = copy_bytes(models["self"], self.made.weights, bits)
            share = taken / (target.parameters * target.dtype.itemsize)
            says = f"its copy in {bits} bits takes {gigabytes(taken)}, {share:.0%} of its weights."
            print(f"The target drafts for itself: {says}")
        if any(len(question.turns) > 1 for question in self.inputs.questions):
            self.answer_turns(models)
        return models

    def answer_turns(self, models: LoadedModels) -> None:
        """Let the target answer all turns but the last of each question, and put the answers into the prompts of the
        turns after them. So every method continues the same prompts."""
        settings, tokenizer, questions = self.settings, self.tokenizer, self.inputs.questions
        sampler = build(["target"], dict(models), settings.decoding)["target"]

        def converse(number: int) -> list[list[int]]:
            """The prompts of a question's turns."""
            generator = Generator(self.place.device).manual_seed(settings.measuring.seed + number)
            prompts: list[list[int]] = []
            answers: list[str] = []
            for _ in questions[number].turns:
                prompts.append(encode_turn(questions[number], answers, tokenizer, settings.models.target))
                if len(prompts) == len(questions[number].turns):
                    break
                (tokens,), _ = sampler(
                    prompts[-1:],
                    max_len=settings.sampling.max_len_of(ANSWERS),
                    sampling=settings.sampling.of(ANSWERS),
                    end_of_text=self.ends,
                    generator=generator,
                )
                answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
            return prompts

        numbers = range(len(questions))
        conversations = followed(self.processes.mapped(converse, numbers), "answers to earlier turns", len(numbers))
        rows = list(itertools.chain.from_iterable(conversations))
        self.inputs.prompts = {max(map(len, rows)): rows}


def make_copies(target: CachedModel, bits: Sequence[int]) -> Copies:
    """The target's copies. Raises UserError if the memory is short for one, or for rounding the layers."""

    def check_memory(needed: float) -> None:
        if needed > (free := available_memory(str(target.device))):
            raise UserError(
                f"{target.name} cannot draft for itself: its copy needs about {gigabytes(needed)} more and "
                f"{target.device} has {gigabytes(free)} free; use a smaller --dtype or target, or another --draft"
            )

    def follow(work: Iterable[Any], title: str, steps: int) -> Iterable[Any]:
        check_memory(ROUNDING * max(sizes))  # Only now, as codes that are on the disk need not be made.
        return followed(work, title, steps)

    with suppress(RuntimeError):  # What cannot be rounded is refused by `copies_of`.
        sizes = [weight.numel() for weight in weights_of(target.model).values()]
        check_memory(sum(sizes) * (1 + SCALE) + MULTIPLYING * max(sizes))  # A weight takes a byte until it is packed.
    return copies_of(target, bits, follow)


def copy_bytes(copy: CachedModel, weights: int, bits: int) -> float:
    """The memory that the target's copy takes. weights: how many of them have few bits."""
    packed = is_compiled(copy) and copy.device.type == "cpu"
    return weights * ((bits / 8 if packed else 1) + SCALE)


def make_all_graphs(models: LoadedModels, settings: Settings, prompt: Sequence[int]) -> float | None:
    """Make the graphs of compiled `models` that the methods need. prompt: token ids for a rehearsal. Returns the
    seconds, or None if some failed."""
    sweep = "sweep" in settings.measuring.groups
    names = [*sorted(settings.measuring.names), *(["additive"] if sweep else [])]
    return compile_samplers(
        build(names, dict(models), settings.decoding).values(),
        models.values(),
        prompt,
        settings.sampling.of("compare"),
        settings.sizes,
        follow=lambda graphs: followed(graphs, "compiling", len(graphs)),
    )


def prepare(settings: Settings, processes: Processes = ALONE) -> Prepared:
    """Find and check what the settings name. Raises UserError for what cannot be used."""
    chosen, measuring = settings.texts, settings.measuring
    place, corpora = where_to_run(settings, processes), []
    if measuring.ppl or settings.prompts_from_corpora:
        corpora = load_corpora(chosen.dataset, chosen.books)
        check_passages(corpora, chosen.dataset, chosen.sentence_limit)
    named = read_prompts(chosen.prompt, chosen.prompt_file)
    questions = [] if chosen.prompts is None else read_questions(chosen.prompts)
    folders = processes.in_turn(lambda: find_models(settings))
    tokenizer = load_tokenizer(folders["target"])
    ends = end_tokens(folders["target"], tokenizer)
    translation = translation_of(settings, folders, tokenizer)
    settings = replace(settings, decoding=replace(settings.decoding, translation=translation))
    outlines = [outline(folder, tokenizer) for folder in folders.values()]
    shortest = min(outlines, key=lambda model: model.context)
    prompts, article = choose_texts(settings, named, questions, corpora, tokenizer)
    check_queues(settings, prompts)
    window = min(chosen.window, shortest.context)
    inputs = Inputs(
        prompts,
        article,
        questions,
        read_texts(measuring.audit, tokenizer, shortest) if measuring.audit else [],
        scored_texts(settings, corpora, tokenizer, shortest.context) if measuring.ppl and not translation else [],
        window,
        chosen.stride if chosen.stride < window else window // 2,
    )
    slots = check_rooms(settings, inputs, outlines)
    if translation is not None:  # The draft reads the same prompts in its own tokens.
        draft = outline(folders["draft"], translation.tokenizer)
        slots = max(slots, check_rooms(settings, inputs, [draft], translation.row))
    audited = (len(text.prompt) + len(text.tokens) for text in inputs.audited)
    inputs.tokens = max([slots, *audited, chosen.window if inputs.texts else 0])
    inputs.slots = slots if settings.rows > 1 else 0
    count = settings.models.draft_vocab
    frequent = most_frequent(count, tokenizer, ends) if count else None
    if translation is not None and not inputs.audited:
        covered = translation.coverage([*inputs.rows, *article])
        print(
            f"{translation.names[1]} has another tokenizer than {translation.names[0]}: it guesses the "
            f"{len(translation.draft)} tokens that both have, {translation.share:.1%} of the target's and "
            f"{covered:.1%} of those in the prompts."
            + (" That is too few to gain anything." if covered < COVERED else "")
            + (" Perplexities cannot be compared and are left out." if measuring.ppl else "")
        )
    return Prepared(settings, processes, place, folders, tokenizer, ends, frequent, inputs)


def where_to_run(settings: Settings, processes: Processes) -> Place:
    """The devices and dtypes. Raises UserError for what cannot be used."""
    choice = settings.models
    if len(settings.sizes) > 1 and processes.count > 1:
        raise UserError("--batch and --sweep batch are for one process: start test.py without accelerate launch")
    if settings.measuring.played and processes.count > 1:
        raise UserError("--show and --html play one text, in one process: start test.py without accelerate launch")
    device = processes.own_device(choice.device)
    draft_device = processes.own_draft_device(choice.draft_device) or device
    dtype = choice.dtype or pick_dtype(device)
    if dtype == "bfloat16" and "mps" in (device, draft_device):
        raise UserError("bfloat16 is not for mps: use --dtype float16 or float32")
    first = "float32" if settings.measuring.lossless else choice.dtype or "float32"
    return Place(device, draft_device, dtype, first)


def models_of(settings: Settings) -> dict[str, str]:
    """{role: the name of its model} of the models that are needed. The target's copy is named "self" and the trained
    head "head", and where there is one, that is a role as well."""
    choice = settings.models
    named = {"target": choice.target, "draft": choice.draft, "mid": choice.mid or "", "self": "self", "head": "head"}
    needed = {role.model for name in settings.measuring.names for role in METHODS[name].needs}
    needed |= {"target"} if settings.decoding.lookup else {"target", "draft"}
    needed |= {named[role] for role in needed} & {"self", "head"}
    return {role: name for role, name in named.items() if role in needed}


def find_models(settings: Settings) -> dict[str, Path]:
    """{role: folder} of the models that are needed; those named by a hub id are downloaded."""
    choice, names = settings.models, models_of(settings)
    if "head" in names and not holds_head(find_model(choice.head or "")):
        raise UserError(f"--head {choice.head} is a model, and no trained head; scripts/trainHead.py trains one")
    names = {role: name for role, name in names.items() if name not in ("self", "head")}
    in_order = sorted(dict.fromkeys(names.values()), key=is_hub_id)  # A wrong name is found before a large download.
    by_name = {name: find_model(on_first_use(name, choice.offline)) for name in in_order}
    for name, folder in by_name.items():
        if holds_head(folder):
            raise UserError(f"{name} is a trained head, and no model; give it as --head {name} --draft head")
    folders = {role: by_name[name] for role, name in names.items()}
    contrasts = any(METHODS[name].contrasts for name in settings.measuring.names)
    if contrasts and folders["target"] == folders.get("draft"):
        raise UserError("contrastive decoding needs two models: --target and --draft are the same")
    return folders


def translation_of(
    settings: Settings, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase
) -> Translation | None:
    """The translation to the draft's tokenizer; None if all models share the target's `tokenizer`.

    Raises UserError for a model that must share it, and for what needs a draft that does.
    """
    of_draft = None
    for role, folder in folders.items():
        other = load_tokenizer(folder)
        if role == "draft" and other.get_vocab() != tokenizer.get_vocab():
            of_draft = other
        else:
            check_tokenizers(tokenizer, other, (folders["target"].name, folder.name))
    if of_draft is None:
        return None
    names, measuring = (folders["target"].name, folders["draft"].name), settings.measuring
    differ = f"{names[1]} has another tokenizer than {names[0]}"
    if settings.models.draft_vocab:
        raise UserError(f"{differ}, so it guesses only the tokens that both have; leave out --draftVocab")
    if any(METHODS[name].contrasts for name in measuring.names):
        raise UserError(
            f"{differ}, so they cannot be contrasted (in --contrastive, --diversity, --compare all); leave that out or "
            "name a draft that shares the target's"
        )
    if any(METHODS[name].guesses_tree(settings.decoding) for name in measuring.names):
        raise UserError(f"{differ}, so it grows no trees of guesses (tree, topDown, --tree); name other methods")
    if measuring.ppl and not measuring.modes:
        raise UserError(f"{differ}, so their perplexities cannot be compared; leave out --ppl")
    return Translation(tokenizer, of_draft, names)


def turns_of(questions: Sequence[Question]) -> list[tuple[int, int]]:
    """(number of the question, number of its turn), from 0, of each turn."""
    return [(number, turn) for number, question in enumerate(questions) for turn in range(len(question.turns))]


def choose_texts(
    settings: Settings,
    named: list[str],
    questions: list[Question],
    corpora: list[Corpus],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[int, list[list[int]]], list[list[int]]]:
    """The prompts by length, and those of --diversity, as token ids. named: prompts that a flag names. questions: those
    of --prompts, each turn of which is a prompt, after the shortest answers."""
    texts, diverse, model = settings.texts, settings.measuring.diversity, settings.models.target
    rows: list[list[int]] = []
    if not settings.continues and not diverse:
        return {}, []
    if questions:
        rows = [encode_turn(questions[number], ["."] * turn, tokenizer, model) for number, turn in turns_of(questions)]
    elif texts.questions:
        rows = [encode_chat(texts.questions, ["."] * (len(texts.questions) - 1), tokenizer, model)]
    elif named:
        rows = encode(named, tokenizer)
    article = rows or encode(diversity.PROMPTS, tokenizer) if diverse else []
    if not settings.continues:
        return {}, article
    if rows:
        return {max(map(len, rows)): rows}, article
    lengths = texts.prompt_lengths
    return choose_prompts(tokenizer, corpora, lengths, texts.sentence_limit, texts.sentences), article


def scored_texts(
    settings: Settings, corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase, context: int
) -> list[tuple[Corpus, list[list[int]]]]:
    """The passages of each corpus whose perplexity is measured. Raises UserError if there are none."""
    chosen = settings.texts
    texts = [
        (corpus, tokenize(corpus.passages(chosen.sentence_limit)[: chosen.sentences], tokenizer, context))
        for corpus in corpora
    ]
    if not any(passages for _, passages in texts):
        raise UserError(f"no text of {chosen.dataset} has two tokens; raise --sentenceLimit")
    return texts


def check_queues(settings: Settings, prompts: dict[int, list[list[int]]]) -> None:
    """Raise UserError if there are fewer prompts to time than rows of the batch."""
    batch, count = settings.measuring.batch or 1, min(map(len, prompts.values()), default=0)
    if settings.measuring.timed and count < batch:
        more = "raise --sentences" if settings.texts.from_corpora else "give more"
        raise UserError(f"--batch {batch} needs at least {batch} prompts, and there are {count}; {more}")


def check_rooms(
    settings: Settings,
    inputs: Inputs,
    outlines: Sequence[Outline],
    translate: Callable[[list[int]], list[int]] = lambda row: row,
) -> int:
    """Raise UserError unless the models can read the prompts of each mode and the tokens that follow. It names the line
    of --prompts. Returns the most tokens that a batch can have. translate: to the tokens of these models."""
    modes, max_len_of, most = settings.measuring.modes, settings.sampling.max_len_of, 0
    answer = max_len_of(ANSWERS)  # In the prompt of a later turn, each answer before it is as long as it may be.
    turns = inputs.turns or [(0, 0)] * len(inputs.rows)
    rows = [translate(row + turn * answer * row[-1:]) for row, (_, turn) in zip(inputs.rows, turns)]
    for row, (number, turn) in zip(rows, inputs.turns):
        try:
            check_room([row], max(map(max_len_of, modes)), outlines)
        except UserError as error:
            after = f", turn {turn + 1} after answers of {answer} tokens" if turn else ""
            place = f"--prompts {settings.texts.prompts}, line {inputs.questions[number].line}{after}"
            raise UserError(f"{place}: {error}") from None
    for mode in modes:
        texts = list(map(translate, inputs.article)) if mode == "diversity" else rows
        check_room(texts, max_len_of(mode), outlines)
        most = max(most, settings.rows * (max_len_of(mode) + max(map(len, texts))))
    return most
