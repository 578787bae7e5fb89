"""`prepare`: everything a run needs, found and checked before anything is measured. Whatever may be refused is refused
here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
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
from methods.selfDraft import Trial, copies_of, trials
from methods.translation import Translation
from utils import UserError

COVERED = 0.5  # Where fewer of the text's tokens can be guessed, guessing hardly ever pays.
SCALE = 2 / GROUP  # bytes of a weight's share of its scale, in a copy in few bits
ROUNDING, MULTIPLYING = 40, 12  # bytes for each weight of the largest layer while that is done to it, in float32
ANSWERS = "answers"  # to earlier turns: a mode with the default sampling and length
LoadedModels = dict[str, CachedModel]  # {role: model}; those of `methods.samplers.Models`


@dataclass
class Prepared:
    """What a run needs, its models not loaded yet. processes: those that share the work.

    draft_device: of the draft. device: of the other models.
    dtype, text_dtype: of the models that are timed, and of those that perplexity and diversity are measured with, and
        losslessness is tested with first. folders: {role: model folder}.
    end_tokens: they end a text (`ends`).
    prompts: {length: prompts}, token ids; of a conversation its last question, after the shortest answers. Of
        `questions` (--prompts) every turn; `load_first` puts the target's answers in the place of the shortest.
    article: the prompts of --diversity.
    texts: [(corpus, token ids of its passages)] of --ppl, read in windows of `window` tokens, `stride` apart.
    tokens: the most tokens that are read at once. slots: of the KV cache of the largest batch; 0 if that is one text,
        whose slots count with its tokens. frequent: the tokens that a restricted draft guesses.
    roles_of_copy: the roles that the target's copy has. bits: of its weights; None: not measured yet.
    translation: to the draft's tokenizer, if that is another one. Then it guesses only the tokens that both have.
    audited: the texts of --audit.
    """

    settings: Settings
    processes: Processes
    device: str
    draft_device: str
    dtype: str
    text_dtype: str
    folders: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    prompts: dict[int, list[list[int]]]
    article: list[list[int]]
    texts: list[tuple[Corpus, list[list[int]]]]
    window: int
    stride: int
    tokens: int
    frequent: Tensor | None
    roles_of_copy: frozenset[str] = frozenset()
    bits: int | None = None
    translation: Translation | None = None
    audited: list[AuditText] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    slots: int = 0
    made: Copies | None = field(default=None, init=False)  # of the target that was loaded last

    @property
    def roles_of_head(self) -> set[str]:
        """The roles that the trained head has."""
        return roles_of_head(self.settings)

    @property
    def head(self) -> Path:
        """The folder of the trained head."""
        return find_model(self.settings.models.head or "")

    def ends(self, row: int, token: int) -> bool:
        """Whether a text ends at this token: the `end_of_text` of `Rows`."""
        return token in self.end_tokens

    def load(self, dtype: str, batches: bool = True) -> LoadedModels:
        """The models in that dtype. batches: whether texts will be decoded in batches."""
        models, caches = {}, self.caches(dtype) if batches else {}
        for role, folder in self.folders.items():
            device = self.draft_device if role == "draft" else self.device
            spread = self.settings.models.device == "auto" and device == self.device
            tokenizer = self.translation.tokenizer if role == "draft" and self.translation else self.tokenizer
            models[role] = load_model(folder, tokenizer, dtype, device, self.tokens, spread, caches.get(device, 0))
        if self.roles_of_copy:
            bits = [self.bits] if self.bits else list(BITS)
            self.made = self.processes.in_turn(lambda: make_copies(models["target"], bits))
            models |= dict.fromkeys(self.roles_of_copy, self.made.of(bits[0], models["target"]))
        if self.roles_of_head:
            head = load_head(self.head, models["target"], model_version(self.folders["target"]))
            models |= dict.fromkeys(self.roles_of_head, head)
        if self.frequent is not None:
            models["restricted"] = RestrictedModel(models["draft"], self.frequent)
        if self.translation is not None:
            models["draft"] = RestrictedModel(models["draft"], self.translation.draft)
        return models

    def caches(self, dtype: str) -> dict[str, int]:
        """{device: bytes} of the KV caches of a batch. Empty if each text is decoded alone."""
        sizes: dict[str, int] = {}
        for role, folder in self.folders.items() if self.slots else ():
            device = self.draft_device if role == "draft" else self.device
            kept_as = "float32" if device == "cpu" and not self.settings.models.compile else dtype
            size = cache_bytes(read_config(folder).get_text_config(), self.slots, DTYPES[kept_as])
            sizes[device] = sizes.get(device, 0) + size
        return sizes

    @property
    def idle(self) -> str:
        """A line that says that there are more processes than work, if there are."""
        shares = [max(len(passages), sum(map(len, passages)) // self.stride) for _, passages in self.texts]  # windows
        for mode in self.settings.measuring.modes:
            if mode == "lossless":
                return ""  # Planted mistakes are shared out too.
            shares += (
                [self.settings.measuring.repeats_of(mode)] if mode == "diversity" else map(len, self.prompts.values())
            )
        count = self.processes.count
        most = max(shares, default=count)  # --audit shares out its own texts.
        return f"More processes ({count}) than texts ({most}): {count - most} idle.\n" if count > most else ""

    def load_first(self) -> LoadedModels:
        """The models of what comes first."""
        timed = bool(self.settings.measuring.timed or self.settings.measuring.played)
        dtype, rows = self.dtype if timed else self.text_dtype, self.settings.rows
        if len(self.settings.sizes) > 1 and self.slots:
            print(f"The KV caches of {rows} texts take {gigabytes(sum(self.caches(dtype).values()))}.")
        models = self.load_as_timed(dtype)
        if self.made is not None:
            print(about_copy(models["target"], models["self"], self.made.weights, self.bits or 0))
        if any(len(question.turns) > 1 for question in self.questions):
            self.answer_turns(models)
        return models

    def answer_turns(self, models: LoadedModels) -> None:
        """Let the target answer all turns but the last of each question, and put the answers into the prompts of the
        turns after them. So every method continues the same prompts."""
        chosen, tokenizer, seed = self.settings.sampling, self.tokenizer, self.settings.measuring.seed
        sampler = build(["target"], dict(models), self.settings.decoding)["target"]

        def converse(number: int) -> list[list[int]]:
            """The prompts of a question's turns."""
            question, generator = self.questions[number], Generator(self.device).manual_seed(seed + number)
            prompts: list[list[int]] = []
            answers: list[str] = []
            for _ in question.turns[1:]:
                prompts.append(encode_turn(question, answers, tokenizer, self.settings.models.target))
                (tokens,), _ = sampler(
                    prompts[-1:],
                    max_len=chosen.max_len_of(ANSWERS),
                    sampling=chosen.of(ANSWERS),
                    end_of_text=self.ends,
                    generator=generator,
                )
                answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
            return [*prompts, encode_turn(question, answers, tokenizer, self.settings.models.target)]

        numbers = range(len(self.questions))
        conversations = followed(self.processes.mapped(converse, numbers), "answers to earlier turns", len(numbers))
        rows = list(itertools.chain.from_iterable(conversations))
        self.prompts = {max(map(len, rows)): rows}

    def label_of(self, prompt: int) -> Label:
        """The category of a prompt, by its number, and its question. Empty if prompts have none."""
        if not self.questions:
            return {}
        number, _ = turns_of(self.questions)[prompt]
        return {"category": self.questions[number].category, "question": number}

    def load_as_timed(self, dtype: str) -> LoadedModels:
        """The models in that dtype: compiled if the flags say so and text is generated."""
        models, compiles = self.load(dtype), self.settings.models.compile and continues(self.settings)
        if compiles:
            models["target"] = compiled(models["target"])
        if self.roles_of_copy and self.bits is None:
            self.choose_bits(models, compiles)
        if compiles:
            models = compile_models(models, self.settings, next(iter(self.prompts.values()))[0])
        return models

    def choose_bits(self, models: LoadedModels, compiles: bool) -> None:
        """Put the fastest copy of the target in the place of any other, and keep its number of bits."""
        target, made = models["target"], self.made
        assert made is not None
        for role in self.roles_of_copy:
            del models[role]
        sampling, gamma = self.settings.sampling.of("compare"), self.settings.decoding.gamma_of("fixed")
        make = partial(compiled, target=target) if compiles else lambda copy: copy
        measured = list(followed(trials(target, made, sampling, gamma, make), "measuring copies", len(BITS)))
        best = max(measured, key=lambda trial: trial.gain)
        self.bits = self.processes.gathered(best.bits)[0]  # All processes use the same copy.
        models |= dict.fromkeys(self.roles_of_copy, made.of(self.bits, target))
        print(about_copies(measured, self.bits))

    @property
    def flags(self) -> dict[str, Any]:
        """The flags, with what they left to a measurement: a repetition does not measure it again."""
        return self.settings.flags | ({"draftBits": str(self.bits)} if self.bits else {})


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


def about_copy(target: CachedModel, copy: CachedModel, weights: int, bits: int) -> str:
    """One line: the memory that the target's copy takes. weights: how many of them have few bits."""
    packed = is_compiled(copy) and copy.device.type == "cpu"
    size = weights * ((bits / 8 if packed else 1) + SCALE)
    share = size / (target.parameters * target.dtype.itemsize)
    return f"The target drafts for itself: its copy in {bits} bits takes {gigabytes(size)}, {share:.0%} of its weights."


def about_copies(measured: Sequence[Trial], bits: int) -> str:
    """One line: what was measured of the target's copies, and which is used."""
    copies = "; ".join(
        f"{trial.bits} bits: acceptance {trial.alpha:.2f}, {trial.cost:.2f} of a step" for trial in measured
    )
    return f"Copies of the target ({copies}). Used: {bits} bits."


def continues(settings: Settings) -> bool:
    """Whether prompts are continued by methods that are timed, tested or played."""
    return bool(set(settings.measuring.modes) - {"diversity"})


def prepare(settings: Settings, processes: Processes = ALONE) -> Prepared:
    """Find and check what the settings name. Raises UserError for what cannot be used."""
    texts = settings.texts
    device, draft_device, dtype = where_to_run(settings, processes)
    corpora = []
    if settings.measuring.ppl or settings.prompts_from_corpora:
        corpora = load_corpora(texts.dataset, texts.books)
        check_passages(corpora, texts.dataset, texts.sentence_limit)
    named = read_prompts(texts.prompt, texts.prompt_file)
    questions = [] if texts.prompts is None else read_questions(texts.prompts)
    folders = processes.in_turn(lambda: find_models(settings))
    tokenizer = load_tokenizer(folders["target"])
    ends = end_tokens(folders["target"], tokenizer)
    settings, translation = with_translation(settings, folders, tokenizer)
    measuring, draft_vocab = settings.measuring, settings.models.draft_vocab
    outlines = [outline(folder, tokenizer) for folder in folders.values()]
    shortest = min(outlines, key=lambda model: model.context)
    context = shortest.context
    prompts, article = choose_texts(settings, named, questions, corpora, tokenizer)
    check_queues(settings, prompts)
    longest = with_longest_answers(settings, prompts, questions)
    check_questions(settings, questions, longest, outlines)
    slots = check_rooms(settings, longest, article, outlines)
    if translation is not None:  # The draft reads the same prompts in its own tokens.
        translated = {length: list(map(translation.row, rows)) for length, rows in longest.items()}
        draft = outline(folders["draft"], translation.tokenizer)
        slots = max(slots, check_rooms(settings, translated, list(map(translation.row, article)), [draft]))
    passages = scored_texts(settings, corpora, tokenizer, context) if measuring.ppl else []
    audited = read_texts(measuring.audit, tokenizer, shortest) if measuring.audit else []
    most = max([slots, *(len(text.prompt) + len(text.tokens) for text in audited)])
    window = min(texts.window, context)
    prepared = Prepared(
        settings,
        processes,
        device,
        draft_device,
        dtype,
        "float32" if "lossless" in measuring.groups else settings.models.dtype or "float32",
        folders,
        tokenizer,
        ends,
        prompts,
        article,
        passages,
        window,
        texts.stride if texts.stride < window else window // 2,
        max(most, texts.window if measuring.ppl else 0),
        most_frequent(draft_vocab, tokenizer, ends) if draft_vocab else None,
        roles_of_copy(settings),
        settings.models.draft_bits,
        translation,
        audited,
        questions,
        slots if settings.rows > 1 else 0,
    )
    print(end=prepared.idle)
    if translation is not None and not audited:
        print(about_translation(translation, settings, [*sum(prompts.values(), []), *article]))
    return prepared


def turns_of(questions: Sequence[Question]) -> list[tuple[int, int]]:
    """(number of the question, number of its turn), from 0, of each prompt."""
    return [(number, turn) for number, question in enumerate(questions) for turn in range(len(question.turns))]


def with_longest_answers(
    settings: Settings, prompts: dict[int, list[list[int]]], questions: Sequence[Question]
) -> dict[int, list[list[int]]]:
    """The prompts as long as they get at most, by length: in that of a later turn, each answer before it is as long as
    it may be."""
    if not questions:
        return prompts
    longest = settings.sampling.max_len_of(ANSWERS)
    ((length, rows),) = prompts.items()
    return {length: [row + turn * longest * row[-1:] for row, (_, turn) in zip(rows, turns_of(questions))]}


def check_questions(
    settings: Settings, questions: Sequence[Question], prompts: dict[int, list[list[int]]], outlines: list[Outline]
) -> None:
    """Raise UserError, which names the line, unless the models can read each prompt of --prompts and what follows."""
    if not questions:
        return
    max_len = max(map(settings.sampling.max_len_of, settings.measuring.modes))
    for row, (number, turn) in zip(*prompts.values(), turns_of(questions)):
        try:
            check_room([row], max_len, outlines)
        except UserError as error:
            after = f", turn {turn + 1} after answers of {settings.sampling.max_len_of(ANSWERS)} tokens" if turn else ""
            place = f"--prompts {settings.texts.prompts}, line {questions[number].line}{after}"
            raise UserError(f"{place}: {error}") from None


def choose_texts(
    settings: Settings,
    named: list[str],
    questions: list[Question],
    corpora: list[Corpus],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[int, list[list[int]]], list[list[int]]]:
    """The prompts by length, and those of --diversity, as token ids. named: prompts that a flag names. questions: those
    of --prompts, each turn of which is a prompt, after the shortest answers."""
    texts, diverse = settings.texts, "diversity" in settings.measuring.groups
    prompts: dict[int, list[list[int]]] = {}
    if questions:
        turns, model = turns_of(questions), settings.models.target
        rows = [encode_turn(questions[number], ["."] * turn, tokenizer, model) for number, turn in turns]
        return {max(map(len, rows)): rows}, []
    if (named or texts.questions) and (continues(settings) or diverse):
        if texts.questions:
            shortest = ["."] * (len(texts.questions) - 1)
            rows = [encode_chat(texts.questions, shortest, tokenizer, settings.models.target)]
        else:
            rows = encode(named, tokenizer)
        return {max(map(len, rows)): rows} if continues(settings) else {}, rows if diverse else []
    if continues(settings):
        lengths, limit = texts.prompt_lengths, texts.sentence_limit
        prompts = choose_prompts(tokenizer, corpora, lengths, limit, texts.sentences)
    return prompts, encode(diversity.PROMPTS, tokenizer) if diverse else []


def check_queues(settings: Settings, prompts: dict[int, list[list[int]]]) -> None:
    """Raise UserError if there are fewer prompts to time than rows of the batch."""
    batch, count = settings.measuring.batch or 1, min(map(len, prompts.values()), default=0)
    if settings.measuring.timed and count < batch:
        more = "raise --sentences" if settings.texts.from_corpora else "give more"
        raise UserError(f"--batch {batch} needs at least {batch} prompts, and there are {count}; {more}")


def check_rooms(
    settings: Settings, prompts: dict[int, list[list[int]]], article: list[list[int]], outlines: list[Outline]
) -> int:
    """Raise UserError unless the models can read the prompts of each mode and the tokens that follow. Returns the most
    tokens that a batch can have."""
    most = 0
    for mode in settings.measuring.modes:
        rows = article if mode == "diversity" else sum(prompts.values(), [])
        max_len = settings.sampling.max_len_of(mode)
        check_room(rows, max_len, outlines)
        most = max(most, settings.rows * (max_len + max(map(len, rows))))
    return most


def where_to_run(settings: Settings, processes: Processes) -> tuple[str, str, str]:
    """The device, the draft's device, and the dtype of what is timed. Raises UserError for what cannot be used."""
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
    return device, draft_device, dtype


def with_translation(
    settings: Settings, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[Settings, Translation | None]:
    """The settings and None if all models share the target's `tokenizer`. If the draft has another one: the settings
    with its `Translation` and without perplexity, and the translation.

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
        return settings, None
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
    translation = Translation(tokenizer, of_draft, names)
    decoding = replace(settings.decoding, translation=translation)
    return replace(settings, decoding=decoding, measuring=replace(measuring, ppl=False)), translation


def about_translation(translation: Translation, settings: Settings, prompts: Sequence[Sequence[int]]) -> str:
    """One line: what is done, how much both tokenizers share, and whether that is too little to gain."""
    covered = translation.coverage(prompts)
    return (
        f"{translation.names[1]} has another tokenizer than {translation.names[0]}: it guesses the "
        f"{len(translation.draft)} tokens that both have, {translation.share:.1%} of the target's and {covered:.1%} of "
        "those in the prompts."
        + (" That is too few to gain anything." if covered < COVERED else "")
        + (" Perplexities cannot be compared and are left out." if settings.flags["ppl"] else "")
    )


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


def roles_of(settings: Settings) -> set[str]:
    """The models that are needed."""
    needed = {role for name in settings.measuring.names for role in METHODS[name].needs}
    needed = {role.removeprefix("whole ").removesuffix(" model") for role in needed}
    return needed | ({"target"} if settings.decoding.lookup else {"target", "draft"})


def roles_of_copy(settings: Settings) -> frozenset[str]:
    """Which of them are the target's own copy; "self" is one if there is any."""
    choice = settings.models
    named = {"self": "self", "draft": choice.draft, "mid": choice.mid}
    copies = {role for role in roles_of(settings) if named.get(role) == "self"}
    return frozenset(copies | {"self"} if copies else ())


def roles_of_head(settings: Settings) -> set[str]:
    """Which of them are the trained head; "head" is one if there is any."""
    roles = roles_of(settings) & ({"head", "draft"} if settings.models.draft == "head" else {"head"})
    return roles | {"head"} if roles else roles


def find_models(settings: Settings) -> dict[str, Path]:
    """{role: folder} of the models that are needed; those named by a hub id are downloaded."""
    choice, methods = settings.models, settings.measuring.names
    needed = roles_of(settings) - roles_of_copy(settings) - roles_of_head(settings)
    names: dict[str, str] = {role: getattr(choice, role) for role in ("target", "draft", "mid") if role in needed}
    in_order = sorted(dict.fromkeys(names.values()), key=is_hub_id)  # A wrong name is found before a large download.
    if roles_of_head(settings) and not holds_head(find_model(choice.head or "")):
        raise UserError(f"--head {choice.head} is a model, and no trained head; scripts/trainHead.py trains one")
    by_name = {name: find_model(on_first_use(name, choice.offline)) for name in in_order}
    for name, folder in by_name.items():
        if holds_head(folder):
            raise UserError(f"{name} is a trained head, and no model; give it as --head {name} --draft head")
    folders = {role: by_name[name] for role, name in names.items()}
    if any(METHODS[name].contrasts for name in methods) and folders["target"] == folders.get("draft"):
        raise UserError("contrastive decoding needs two models: --target and --draft are the same")
    return folders


def compile_models(models: LoadedModels, settings: Settings, prompt: Sequence[int]) -> LoadedModels:
    """The models, compiled, with the graphs that the methods need, and a line that says how long it took. No
    measurement includes it. prompt: token ids for a rehearsal."""
    start = time.perf_counter()
    once = {id(model): model for model in models.values()}  # A copy of the target may have several roles.
    target = compiled(models["target"])
    made_once = {
        key: compiled(model, target if model.cache_of or model.features_of else None) for key, model in once.items()
    }
    made: LoadedModels = {role: made_once[id(model)] for role, model in models.items()}
    if make_all_graphs(made, settings, prompt) is not None:
        print(f"Compiled in {time.perf_counter() - start:.1f} s.")
    return made


def make_all_graphs(models: LoadedModels, settings: Settings, prompt: Sequence[int]) -> float | None:
    """Make the graphs of compiled `models` that the methods need. Returns the seconds, or None if some failed."""
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
