"""`Inputs`: all that a run reads, and loading its models."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from engine.copies import Copies, weights_of
from engine.head import load_head
from engine.kvCache import cache_bytes
from engine.quantised import BITS, GROUP, in_few_bits
from engine.sharedWeights import RestrictedModel, library_twin
from experiments.processes import Processes
from experiments.schema import Conditions
from experiments.settings import Settings
from inputs.devices import available_memory
from inputs.files import gigabytes
from inputs.models import DTYPES, choose_devices, find_model, load_model, model_version, read_config, weight_bytes
from inputs.progress import followed
from inputs.texts import AuditText, Corpus, Question, encode_turn
from methods.catalogue import METHODS, Role, build
from methods.otherTokenizer import GROWTH, Translation
from methods.selfDraft import best_copy, copies_of, trials
from utils import Sampling, UserError

SCALE = 2 / GROUP  # bytes of a weight's share of its scale, in a copy in few bits
MULTIPLYING = 12  # bytes for each weight of the largest layer while it is multiplied, in float32
SCORED = "target", "draft"  # the roles whose perplexity and diversity are measured
ANSWERS = "answers"  # to earlier turns: a mode with the default sampling and length
LoadedModels = dict[str, CachedModel]  # {role: model}; those of `methods.samplers.Models`


@dataclass(kw_only=True)
class Inputs:
    """All that a run reads. Texts are token ids."""

    settings: Settings
    processes: Processes  # They share the work.
    device: str  # of all models but the draft
    draft_device: str
    dtype: str  # of the weights where speed is measured
    text_dtype: str  # where perplexity and diversity are, and the first of those in which losslessness is tested
    folders: dict[str, Path]  # {role: the folder of its model}
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    frequent: Tensor | None = None  # the tokens that a restricted draft guesses
    # {length: prompts}. Of a conversation the last question, after the shortest answers. Of `questions` (--prompts)
    # every turn; `answer_turns` puts the target's answers in the place of the shortest.
    prompts: dict[int, list[list[int]]] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    article: list[list[int]] = field(default_factory=list)  # the prompts of --diversity
    audited: list[AuditText] = field(default_factory=list)  # by --audit
    texts: list[tuple[Corpus, list[list[int]]]] = field(default_factory=list)  # [(corpus, its passages)] of --ppl
    window: int = 0  # in which a corpus is read
    stride: int = 0
    tokens: int = 0  # the most that are read at once
    slots: int = 0  # of the KV cache of the largest batch; 0 for a single text, whose slots count with its tokens
    copies: Copies | None = None  # in few bits, of the target that was loaded last
    library: dict[str, PreTrainedModel] = field(default_factory=dict)  # models as transformers' own methods run them

    @property
    def rows(self) -> list[list[int]]:
        """The prompts of all lengths."""
        return list(itertools.chain.from_iterable(self.prompts.values()))

    @property
    def turns(self) -> list[tuple[Question, int]]:
        """The question of each prompt of --prompts, and the number of its turn, from 0."""
        return [(question, turn) for question in self.questions for turn in range(len(question.turns))]

    @property
    def translation(self) -> Translation | None:
        """To the draft's tokenizer, if that is another one. Then the draft guesses only the tokens that both have."""
        return self.settings.decoding.translation

    @property
    def compiles(self) -> bool:
        """Whether models are compiled. An audit judges with eager ones: it is not timed."""
        return self.settings.models.compile and not self.settings.measuring.audit

    @property
    def generates(self) -> bool:
        """Whether transformers' own methods run."""
        return any(METHODS[name].engine == "generate" for name in self.settings.measuring.names)

    @property
    def scores_others(self) -> bool:
        """Whether perplexity and diversity need other models than those that are timed."""
        measuring = self.settings.measuring
        return bool(measuring.timed and self.dtype != self.text_dtype and (measuring.diversity or self.texts))

    def conditions_of(self, mode: str, length: int, sampling: Sampling) -> Conditions:
        """Of a timed text. length: of the prompts."""
        return {
            "dtype": self.dtype,
            "promptLen": length,
            "mode": mode,
            "maxLen": self.settings.sampling.max_len_of(mode),
            "gamma": self.settings.gamma_of(mode),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }

    @property
    def head(self) -> Path:
        """The folder of the trained head."""
        return find_model(self.settings.models.head or "")

    def roles_of(self, name: str) -> set[str]:
        """The roles that the target's copy ("self") or the trained head ("head") has."""
        return {role for role, model in models_of(self.settings).items() if model == name}

    def device_of(self, role: str) -> str:
        return self.draft_device if role == "draft" else self.device

    def ends(self, row: int, token: int) -> bool:
        """Whether a text ends at this token: the `end_of_text` of `Rows`."""
        return token in self.end_tokens

    def load(self, dtype: str, roles: Container[str] | None = None) -> LoadedModels:
        """Load the models in `dtype`. roles: of those that will score texts, and decode no batch; None: all."""
        models, caches = {}, {} if roles else self.caches(dtype)
        self.copies, self.library = None, {}  # Those of models that were loaded before take memory.
        for role, folder in self.in_order(roles):
            device, spread = self.device_of(role), self.spread(role, dtype)
            tokenizer = self.translation.tokenizer if role == "draft" and self.translation else self.tokenizer
            models[role] = load_model(folder, tokenizer, dtype, device, self.tokens, spread, caches.get(device, 0))
        models = {role: models[role] for role in self.folders if role in models}
        sharing = [model for role, model in models.items() if role != "draft" or not self.translation]
        for model in sharing:  # One may lack the logits of a special token.
            model.vocabulary = min(other.vocabulary for other in sharing)
        if roles := self.roles_of("self"):
            bits = [self.settings.models.bits] if self.settings.models.bits else list(BITS)
            self.copies = self.processes.in_turn(lambda: make_copies(models["target"], bits))
            models |= dict.fromkeys(roles, self.copies.of(bits[0], models["target"]))
        if roles := self.roles_of("head"):
            head = load_head(self.head, models["target"], model_version(self.folders["target"]))
            models |= dict.fromkeys(roles, head)
        if self.frequent is not None:
            models["restricted"] = RestrictedModel(models["draft"], self.frequent)
        if self.translation is not None:
            models["restricted"] = RestrictedModel(models["draft"], self.translation.draft)
        return models

    def in_order(self, roles: Container[str] | None) -> list[tuple[str, Path]]:
        """(role, folder) in the order of loading: the target, which may be spread, takes what the others leave."""
        chosen = [(role, folder) for role, folder in self.folders.items() if roles is None or role in roles]
        return sorted(chosen, key=lambda pair: pair[0] == "target")

    def spread(self, role: str, dtype: str) -> list[str]:
        """The devices that a role's model may be spread over if it is too large for its own. Perplexity and diversity
        are not timed: for them, layers of a target without a copy or a head may stay in the CPU's memory."""
        device = self.device_of(role)
        if self.settings.models.device == "auto" and device == self.device:
            return [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu"]
        untimed = dtype == self.text_dtype != self.dtype and not self.roles_of("self") | self.roles_of("head")
        return [device, "cpu"] if untimed and role == "target" and device.startswith("cuda") else []

    def check_memory(self, dtype: str, roles: Container[str] | None = None) -> None:
        """Raise UserError unless the models would fit in `dtype`, now that none is loaded. roles: as for `load`."""
        caches, taken = Counter({} if roles else self.caches(dtype)), Counter[str]()
        for role, folder in self.in_order(roles):
            device, spread = self.device_of(role), self.spread(role, dtype)
            if role == "target" and self.roles_of("self"):  # Its copy has a byte for each weight.
                taken[device] += int(weight_bytes(folder, DTYPES[dtype]) / DTYPES[dtype].itemsize * (1 + SCALE))
            if self.generates and self.compiles and device == "cpu":  # Compiling packs weights anew.
                taken[device] += weight_bytes(folder, DTYPES[dtype])
            used = caches[device], taken[device]
            choose_devices(folder, read_config(folder), dtype, device, self.tokens, spread, *used)
            taken[device] += weight_bytes(folder, DTYPES[dtype])

    def caches(self, dtype: str) -> dict[str, int]:
        """{device: bytes} of the KV caches of a batch. Empty if each text is decoded alone."""
        sizes = Counter[str]()
        for role, folder in self.folders.items() if self.slots else ():
            device = self.device_of(role)
            kept_as = "float32" if device == "cpu" and not self.compiles else dtype
            slots = self.slots * (GROWTH if role == "draft" and self.translation else 1)
            sizes[device] += cache_bytes(read_config(folder).get_text_config(), slots, DTYPES[kept_as])
        return sizes

    def load_as_timed(self, dtype: str, roles: Container[str] | None = None) -> LoadedModels:
        """`load`, and compile the models if the flags say so."""
        return self.as_timed(self.load(dtype, roles), dtype, roles is None)

    def as_timed(self, models: LoadedModels, dtype: str, are_all: bool = True) -> LoadedModels:
        """The models that `load` returned, compiled if the flags say so. are_all: those of all roles."""
        if are_all and self.generates:
            # Now, because compiling packs the layers.
            self.library = {role: library_twin(models[role].model) for role in self.folders}
        start = time.perf_counter()
        if self.compiles:
            models["target"] = compiled(models["target"])
        packing = time.perf_counter() - start
        if "self" in models and self.settings.models.bits is None:
            self.choose_bits(models)
        if not self.compiles:
            return models
        start, target = time.perf_counter() - packing, models["target"]
        once = {id(model): model for model in models.values()}  # A copy of the target may have several roles.
        by_id = {key: compiled(m, target if m.cache_of or m.features_of else None) for key, m in once.items()}
        models = {role: by_id[id(model)] for role, model in models.items()}
        if all(map(is_compiled, models.values())):
            spent = f"Compiled in {time.perf_counter() - start:.1f} s, {dtype}."
            print("Each step is compiled at its first use." if target.device.type == "cuda" else spent)
        return models

    def choose_bits(self, models: LoadedModels) -> None:
        """Put the fastest copy of the target in the place of any other, and its number of bits into the settings: a
        repetition of the run does not measure it again."""
        target, copies, roles = models["target"], self.copies, self.roles_of("self")
        assert copies is not None
        for role in roles:
            del models[role]
        sampling, gamma = self.settings.sampling.of("compare"), self.settings.decoding.gamma_of("fixed")
        make = partial(compiled, target=target) if self.compiles else lambda copy: copy
        read = *self.rows, *self.article, *itertools.chain.from_iterable(passages for _, passages in self.texts)
        prompts = [*read, *(text.prompt + text.tokens for text in self.audited)]
        tried = trials(target, copies, prompts, sampling, gamma, make)
        measured = list(followed(tried, "measuring copies", len(BITS)))
        bits = self.processes.gathered(best_copy(measured, gamma).bits)[0]  # All processes use the same copy.
        self.settings = replace(self.settings, models=replace(self.settings.models, draft_bits=str(bits)))
        models |= dict.fromkeys(roles, copies.of(bits, target))
        figures = "; ".join(f"{t.bits} bits: acceptance {t.alpha:.2f}, {t.cost:.2f} of a step" for t in measured)
        print(f"Copies of the target were measured ({figures}); the copy in {bits} bits is used.")

    def load_first(self) -> LoadedModels:
        """Load the models of the first measurements, and print the memory they take."""
        measuring = self.settings.measuring
        dtype = self.dtype if measuring.timed or measuring.played else self.text_dtype
        if self.settings.queues and self.slots:
            size = gigabytes(sum(self.caches(dtype).values()))
            print(f"The KV caches of {self.settings.rows} texts take {size}.")
        for used in {dtype, self.dtype} if measuring.lossless else {dtype}:
            self.check_memory(used)
        if self.scores_others:
            self.check_memory(self.text_dtype, SCORED)
        models = self.load_as_timed(dtype)
        if self.copies is not None:
            bits, target = self.settings.models.bits or 0, models["target"]
            taken = copy_bytes(models["self"], self.copies.weights, bits)
            share = taken / (target.parameters * target.dtype.itemsize)
            says = f"its copy in {bits} bits takes {gigabytes(taken)}, {share:.0%} of its weights."
            print(f"The target drafts for itself: {says}")
        if any(len(question.turns) > 1 for question in self.questions):
            self.answer_turns(models)
        return models

    def answer_turns(self, models: LoadedModels) -> None:
        """Let the target answer all turns but the last of each question, and put the answers into the prompts of the
        turns after them. So every method continues the same prompts."""
        settings, tokenizer = self.settings, self.tokenizer
        sampling, max_len = settings.sampling.of(ANSWERS), settings.sampling.max_len_of(ANSWERS)
        sampler = build(["target"], models, settings.decoding)["target"]
        answer = partial(sampler, max_len=max_len, sampling=sampling, end_of_text=self.ends)

        def converse(number: int) -> list[list[int]]:
            """The prompts of a question's turns."""
            question, answers = self.questions[number], list[str]()
            generator = Generator(self.device).manual_seed(settings.measuring.seed + number)
            prompts = [encode_turn(question, answers, tokenizer, settings.models.target)]
            while len(prompts) < len(question.turns):
                (tokens,), _ = answer(prompts[-1:], generator=generator)
                answers.append(tokenizer.decode(tokens, skip_special_tokens=True))
                prompts.append(encode_turn(question, answers, tokenizer, settings.models.target))
            return prompts

        numbers = range(len(self.questions))
        conversations = followed(self.processes.mapped(converse, numbers), "answers to earlier turns", len(numbers))
        rows = list(itertools.chain.from_iterable(conversations))
        self.prompts = {max(map(len, rows)): rows}


def make_copies(target: CachedModel, bits: Sequence[int]) -> Copies:
    """The target's copies. Raises UserError if the memory is short for one."""
    with suppress(RuntimeError):  # What cannot be rounded is refused by `copies_of`.
        sizes = [weight.numel() for weight in weights_of(target.model).values()]
        needed = sum(sizes) * (1 + SCALE) + MULTIPLYING * max(sizes)  # A weight takes a byte until it is packed.
        if needed > (free := available_memory(str(target.device))):
            short = f"its copy needs about {gigabytes(needed)} more and {target.device} has {gigabytes(free)} free"
            remedy = "use a smaller --dtype or target, or another --draft"
            raise UserError(f"{target.name} cannot draft for itself: {short}; {remedy}")
    return copies_of(target, bits, followed)


def copy_bytes(copy: CachedModel, weights: int, bits: int) -> float:
    """The memory that the target's copy takes. weights: how many of them have few bits."""
    if is_compiled(copy) and copy.device.type == "cpu":
        return weights * (bits / 8 + SCALE)
    return sum(x.nbytes for name, x in in_few_bits(copy.model) if name != "bias")


def models_of(settings: Settings) -> dict[str, str]:
    """{role: the name of its model} of the models that are needed. The target's copy is named "self" and the trained
    head "head", and where there is one, that is a role as well."""
    choice = settings.models
    named = {role.model: getattr(choice, role.model, "self") for role in Role}
    named = {"target": choice.target} | named | {"head": "head"}
    needed = {role.model for name in settings.measuring.names for role in METHODS[name].needs}
    needed |= {"target"} if settings.decoding.lookup else {"target", "draft"}
    needed |= {named[role] for role in needed} & {"self", "head"}
    return {role: name for role, name in named.items() if role in needed}
