"""`prepare`: find and check everything that a run needs. All input errors are raised here, before a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decoding.rows import check_room
from downloadModel import is_hub_id, on_first_use
from experiments import diversity
from experiments.loading import ANSWERS, Inputs, Place, Prepared, models_of
from experiments.processes import ALONE, Processes
from experiments.settings import Settings
from inputs import prompts
from inputs.auditTexts import read_texts
from inputs.devices import pick_dtype
from inputs.models import Outline, find_model, holds_head, outline
from inputs.randomModels import made_model
from inputs.texts import Corpus, load_corpora
from inputs.tokenizers import check_tokenizers, end_tokens, load_tokenizer, most_frequent
from methods.catalogue import METHODS
from methods.otherTokenizer import Translation
from utils import UserError

COVERED = 0.5  # With a smaller share of tokens that can be guessed, guessing hardly ever gains speed.


def prepare(settings: Settings, processes: Processes = ALONE) -> Prepared:
    """Find and check everything that the settings name. Raises UserError for invalid input."""
    chosen, measuring, inputs = settings.texts, settings.measuring, Inputs()
    place, corpora = where_to_run(settings, processes), []
    if measuring.ppl or settings.prompts_from_corpora:
        corpora = load_corpora(chosen.dataset, chosen.books)
        prompts.check_passages(corpora, chosen.dataset, chosen.sentence_limit)
    named = prompts.read_prompts(chosen.prompt, chosen.prompt_file)
    if chosen.prompts is not None:
        inputs.questions = prompts.read_questions(chosen.prompts)
    folders = processes.in_turn(lambda: find_models(settings))
    tokenizer = load_tokenizer(folders["target"])
    ends = end_tokens(folders["target"], tokenizer)
    translation = translation_of(settings, folders, tokenizer)
    settings = replace(settings, decoding=replace(settings.decoding, translation=translation))
    outlines = [outline(folder, tokenizer) for folder in folders.values()]
    shortest = min(outlines, key=lambda model: model.context)
    choose_texts(settings, inputs, named, corpora, tokenizer)
    slots = check_rooms(settings, inputs, outlines)
    if translation is not None:  # The draft reads the same prompts in its own tokens.
        draft = outline(folders["draft"], translation.tokenizer)
        slots = max(slots, check_rooms(settings, inputs, [draft], translation.row))
    if measuring.ppl and translation is None:
        inputs.window = min(chosen.window, shortest.context)
        inputs.stride = chosen.stride if chosen.stride < inputs.window else inputs.window // 2
        inputs.texts = scored_texts(settings, corpora, tokenizer, shortest.context)
    if measuring.audit:
        inputs.audited = read_texts(measuring.audit, tokenizer, shortest)
    audited = (len(text.prompt) + len(text.tokens) for text in inputs.audited)
    inputs.tokens = max([slots, *audited, chosen.window if inputs.texts else 0])
    inputs.slots = slots if settings.rows > 1 else 0
    count = settings.models.draft_vocab
    frequent = most_frequent(count, tokenizer, ends) if count else None
    if translation is not None and not inputs.audited:
        covered = translation.coverage([*inputs.rows, *inputs.article])
        print(
            f"{translation.names[1]} has another tokenizer than {translation.names[0]}: it guesses the "
            f"{len(translation.draft)} tokens that both have, {translation.share:.1%} of the target's and "
            f"{covered:.1%} of those in the prompts."
            + (" That is too few to gain anything." if covered < COVERED else "")
            + (" Perplexities cannot be compared and are left out." if measuring.ppl else "")
        )
    return Prepared(settings, processes, place, folders, tokenizer, ends, frequent, inputs)


def where_to_run(settings: Settings, processes: Processes) -> Place:
    """The devices and dtypes. Raises UserError for those that cannot be used."""
    choice = settings.models
    if settings.queues and processes.count > 1:
        raise UserError("--batch and --sweep batch run in a single process: start test.py without accelerate launch")
    if settings.measuring.steps and processes.count > 1:
        raise UserError("--steps runs in a single process: start test.py without accelerate launch")
    if settings.measuring.played and processes.count > 1:
        raise UserError("--show and --html run in a single process: start test.py without accelerate launch")
    others = {METHODS[name].engine for name in settings.measuring.names} - {""}
    if others and processes.count > 1:
        raise UserError(f"{min(others)} runs in a single process: start test.py without accelerate launch")
    device = processes.own_device(choice.device)
    if others - {"generate"} and device != "cpu":
        raise UserError(f"{min(others - {'generate'})} runs only on the CPU: use --device cpu")
    draft_device = processes.own_draft_device(choice.draft_device) or device
    dtype = choice.dtype or pick_dtype(device)
    if dtype == "bfloat16" and "mps" in (device, draft_device):
        raise UserError("mps does not support bfloat16: use --dtype float16 or float32")
    first = "float32" if settings.measuring.lossless else choice.dtype or "float32"
    return Place(device, draft_device, dtype, first)


def find_models(settings: Settings) -> dict[str, Path]:
    """{role: folder} of the models that are needed; those named by a hub id are downloaded."""
    choice, names = settings.models, models_of(settings)
    if "head" in names and not holds_head(find_model(choice.head or "")):
        raise UserError(f"--head {choice.head} is a model, not a trained head; train one with scripts/trainHead.py")
    names = {role: name for role, name in names.items() if name not in ("self", "head")}
    names = {role: made_model(name) for role, name in names.items()}
    in_order = sorted(dict.fromkeys(names.values()), key=is_hub_id)  # A wrong name is found before a large download.
    by_name = {name: find_model(on_first_use(name, choice.offline)) for name in in_order}
    for name, folder in by_name.items():
        if holds_head(folder):
            raise UserError(f"{name} is a trained head, not a model; give it as --head {name} --draft head")
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
    names, methods = (folders["target"].name, folders["draft"].name), [METHODS[n] for n in settings.measuring.names]
    contrasts = "so they cannot be contrasted (in --contrastive, --diversity, --compare all); leave that out or name a "
    scored_alone = settings.measuring.ppl and not settings.measuring.modes
    assisted = "so other programs cannot use it; name other methods, or one by one"
    trees = "so it grows no trees of guesses (tree, topDown, --tree); name other methods"
    for clash, message in (
        (settings.models.draft_vocab, "so it guesses only the tokens that both have; leave out --draftVocab"),
        (any(method.contrasts for method in methods), f"{contrasts}draft that shares the target's"),
        (settings.decoding.tree or any(method.grows_trees for method in methods), trees),
        (any(method.engine and method.needs for method in methods), assisted),
        (scored_alone, "so their perplexities cannot be compared; leave out --ppl"),
    ):
        if clash:
            raise UserError(f"{names[1]} has another tokenizer than {names[0]}, {message}")
    return Translation(tokenizer, of_draft, names)


def choose_texts(
    settings: Settings, inputs: Inputs, named: list[str], corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Choose the prompts, and those of --diversity, which may be the same. named: prompts that a flag names. Each turn
    of --prompts is a prompt, after the shortest answers. Raises UserError for fewer prompts than rows of the batch."""
    texts, diverse, model = settings.texts, settings.measuring.diversity, settings.models.target
    rows: list[list[int]] = []
    if not settings.continues and not diverse:
        return
    if inputs.questions:
        turns = [(inputs.questions[number], ["."] * turn) for number, turn in inputs.turns]
        rows = [prompts.encode_turn(question, answers, tokenizer, model) for question, answers in turns]
    elif texts.questions:
        rows = [prompts.encode_chat(texts.questions, ["."] * (len(texts.questions) - 1), tokenizer, model)]
    elif named:
        rows = prompts.encode(named, tokenizer)
    if diverse:
        inputs.article = rows or prompts.encode(diversity.PROMPTS, tokenizer)
    if settings.continues and rows:
        inputs.prompts = {max(map(len, rows)): rows}
    elif settings.continues:
        lengths, least = texts.prompt_lengths, texts.sentence_limit
        inputs.prompts = prompts.choose_prompts(tokenizer, corpora, lengths, least, texts.sentences)
    batch, count = settings.measuring.batch or 1, min(map(len, inputs.prompts.values()), default=0)
    if settings.measuring.timed and count < batch:
        more = "raise --sentences" if texts.from_corpora else "give more"
        raise UserError(f"--batch {batch} needs at least {batch} prompts, and there are {count}; {more}")


def scored_texts(
    settings: Settings, corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase, context: int
) -> list[tuple[Corpus, list[list[int]]]]:
    """The passages of each corpus whose perplexity is measured. Raises UserError if there are none."""
    least, count = settings.texts.sentence_limit, settings.texts.sentences
    texts = [(c, prompts.tokenize(c.passages(least)[:count], tokenizer, context)) for c in corpora]
    if not any(passages for _, passages in texts):
        raise UserError(f"no text of {settings.texts.dataset} has two tokens; raise --sentenceLimit")
    return texts


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
