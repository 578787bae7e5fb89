"""`load_inputs`: find and check everything that a run needs. All input errors are raised here, before a measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decoding.rows import check_room
from downloadModel import download_model, downloaded_folder, is_hub_id
from experiments.flags import STRIDE
from experiments.intervals import OVERALL
from experiments.loading import ANSWERS, Inputs, models_of
from experiments.processes import SINGLE, Processes
from experiments.settings import Settings
from inputs import models, texts
from inputs.commandLine import visible
from inputs.devices import check_device, pick_dtype
from inputs.models import find_model, holds_head, load_tokenizer
from inputs.randomModels import write_random
from inputs.texts import read_texts
from methods.catalogue import METHODS, Role
from methods.otherTokenizer import Translation
from utils import UserError

# Of R. Gadgil, "Combining Large and Small LLMs to Boost Inference Time and Quality" (2024): GPT-2 large with GPT-2, one
# text of 50 tokens, including the prompt, for each prompt (report/sources.py).
PROMPTS = (
    "Large Language models are",
    "Barack Obama was",
    "Decoding strategy is important because",
    "A good recipe for Halloween is",
    "Stanford is known for",
)
COVERED = 0.5  # With a smaller share of tokens that can be guessed, guessing hardly ever gains speed.


def load_inputs(settings: Settings, processes: Processes = SINGLE) -> Inputs:
    """Find and check everything that the settings name. Raises UserError for invalid input."""
    chosen, measuring, corpora = settings.texts, settings.measuring, []
    # Folder, devices and texts first: they are checked sooner than models.
    device, draft_device, dtype, text_dtype = where_to_run(settings, processes)
    if measuring.ppl or settings.prompts_from_corpora:
        corpora = texts.load_corpora(chosen.dataset, chosen.books)
        if not any(corpus.passages(chosen.sentence_limit) for corpus in corpora):
            length = f"{chosen.sentence_limit} characters"
            raise UserError(f"no text of {chosen.dataset} has {length}; lower --sentenceLimit")
    named = texts.read_prompts(chosen.prompt, chosen.prompt_file)
    questions = [] if chosen.prompts is None else texts.read_questions(chosen.prompts)
    if any(question.category == OVERALL for question in questions):
        raise UserError(f"--prompts {chosen.prompts}: the category {OVERALL!r} is a row of the tables; rename it")
    # The models' folders, and their tokenizers.
    folders = processes.in_turn(lambda: find_models(settings))
    settings = without_impossible(settings, folders)
    tokenizer = load_tokenizer(folders["target"])
    ends = models.end_tokens(folders["target"], tokenizer)
    translation = translation_of(settings, folders, tokenizer)
    inputs = Inputs(
        settings=replace(settings, decoding=replace(settings.decoding, translation=translation)),
        processes=processes,
        device=device,
        draft_device=draft_device,
        dtype=dtype,
        text_dtype=text_dtype,
        folders=folders,
        tokenizer=tokenizer,
        end_tokens=ends,
        questions=questions,
    )
    # The texts in tokens, which must fit into the models' contexts.
    reads = [folder for role, folder in folders.items() if role != "draft" or translation is None]
    limits = [models.model_limits(folder, tokenizer) for folder in reads]
    encode_prompts(inputs, named, corpora)
    slots = tokens_of_batch(inputs, limits)
    if translation is not None:  # The draft reads the same prompts in its own tokens.
        limits_of_draft = models.model_limits(folders["draft"], translation.tokenizer)
        slots = max(slots, tokens_of_batch(inputs, [limits_of_draft], translation))
        if not measuring.audit:
            report_translation(inputs, translation)
    shortest = min(limits, key=lambda model: model.context)
    if measuring.ppl and translation is None:
        encode_scored(inputs, corpora, shortest)
    if measuring.audit:
        inputs.audited = read_texts(measuring.audit, tokenizer, shortest)
        # Along so many tokens a method guesses at a time: each row has room for the longest prompt and text.
        longest = max(len(text.prompt) for text in inputs.audited) + max(len(text.tokens) for text in inputs.audited)
        slots = min(inputs.settings.rows, len(inputs.audited)) * min(longest, shortest.context)
    passages = [len(ids) for _, passages in inputs.texts for ids in passages]
    inputs.tokens = max([slots, *passages, *[inputs.window] * bool(passages)])
    inputs.slots = slots if inputs.settings.rows > 1 else 0
    if settings.models.draft_vocab:
        inputs.frequent = models.most_frequent(
            settings.models.draft_vocab, tokenizer, min(model.vocabulary for model in limits), ends
        )
    return inputs


def encode_scored(inputs: Inputs, corpora: Sequence[texts.Corpus], shortest: models.ModelLimits) -> None:
    """Set the texts whose perplexity is measured, and window and stride. shortest: the model of the shortest context.
    Raises UserError."""
    chosen = inputs.settings.texts
    inputs.window = min(chosen.window, shortest.context)
    if (chosen.stride or 0) >= inputs.window:
        of = f"--window, which is at most the context of {shortest.name} ({shortest.context} tokens)"
        raise UserError(f"--stride ({chosen.stride}) must be less than {of}")
    inputs.stride = chosen.stride or (STRIDE if inputs.window > STRIDE else inputs.window // 2)
    for corpus in corpora:
        passages = texts.encode(corpus.passages(chosen.sentence_limit)[: chosen.sentences], inputs.tokenizer)
        inputs.texts.append((corpus, [ids[: shortest.context] for ids in passages if len(ids) > 1]))
        if longer := sum(len(ids) > shortest.context for ids in passages):
            are = "1 text is" if longer == 1 else f"{longer} texts are"
            kept = f"the context of {shortest.name}, of which only the first {shortest.context} tokens count"
            print(visible(f"{corpus.name}: {are} longer than {kept} in the perplexity per text.", ""))
    if not any(ids for _, ids in inputs.texts):
        raise UserError(f"no text of {chosen.dataset} has two tokens; raise --sentenceLimit")


def where_to_run(settings: Settings, processes: Processes) -> tuple[str, str, str, str]:
    """The device, the draft's, and the dtypes where speed is measured and elsewhere. Raises UserError."""
    choice, measuring, folder = settings.models, settings.measuring, settings.output.folder
    if not (measuring.played or processes.index):  # Process 0 writes the results.
        parent = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise UserError(f"{folder} is a folder that you may not write to; name another with --out")
        lines = folder / "results.jsonl"
        if lines.exists() and not (lines.is_file() and os.access(lines, os.W_OK)):
            raise UserError(f"{lines} is not a file that you may write to; name another folder with --out")
    programs = {METHODS[name].engine for name in measuring.names} - {""}
    for what, asked in (
        ("--batch and --sweep batch run", settings.queues),
        ("--steps runs", measuring.steps),
        ("--show, --html and --chat run", measuring.played),
        (f"{min(programs, default='')} runs", programs),
    ):
        if asked and processes.count > 1:
            raise UserError(f"{what} in a single process: start test.py without accelerate launch")
    device = processes.own_device(choice.device)
    if programs - {"generate"} and device != "cpu":
        raise UserError(f"{min(programs - {'generate'})} runs only on the CPU: use --device cpu")
    if choice.draft_device is not None:
        if processes.count > 1 and choice.draft_device != "cpu":
            kind = f"--draftDevice {choice.draft_device} is for a single process"
            raise UserError(f"{kind}; with several use cpu or leave it out")
        check_device(choice.draft_device)
    draft_device = choice.draft_device or device
    dtype = choice.dtype or pick_dtype(device, choice.compile and draft_device != "mps")
    if dtype == "bfloat16" and "mps" in (device, draft_device):
        raise UserError("mps does not support bfloat16: use --dtype float16 or float32")
    return device, draft_device, dtype, "float32" if measuring.lossless else choice.dtype or "float32"


def find_models(settings: Settings) -> dict[str, Path]:
    """{role: folder} of the models that are needed; those named by a hub id are downloaded."""
    choice, names = settings.models, models_of(settings)
    if "head" in names and not holds_head(find_model(choice.head or "")):
        raise UserError(f"--head {choice.head} is a model, not a trained head; train one with scripts/trainHead.py")
    names = {role: write_random(name) for role, name in names.items() if name not in ("self", "head")}
    in_order = sorted(dict.fromkeys(names.values()), key=is_hub_id)  # A wrong name is found before a large download.
    by_name = {}
    for name in in_order:
        by_name[name] = folder = find_model(
            downloaded_folder(name) or download_model(name, offline=choice.offline) if is_hub_id(name) else name
        )
        if holds_head(folder):
            raise UserError(f"{name} is a trained head, not a model; give it as --head {name} --draft head")
    folders = {role: by_name[name] for role, name in names.items()}
    contrasts = any(METHODS[name].contrasts for name in settings.measuring.names)
    if contrasts and folders["target"] == folders.get("draft"):
        raise UserError("contrastive decoding needs two models: --target and --draft are the same")
    return folders


def without_impossible(settings: Settings, folders: dict[str, Path]) -> Settings:
    """The settings without the methods of "all" that these models cannot decode by. A line says so."""
    measuring, impossible = settings.measuring, set[str]()
    named = {name.strip() for names in (measuring.compare, measuring.lossless) for name in (names or "").split(",")}
    of_all = [METHODS[name] for name in sorted(measuring.names - named)]
    trees, copies = [m for m in of_all if m.grows_trees], [m for m in of_all if Role.SELF in m.needs]
    for methods, roles, lacks, what in (
        (trees, ("target", "draft"), models.reads_no_trees, "reads no trees of guesses"),
        (copies, ("target",), models.has_no_copy, "is of a type that has no copy in few bits"),
    ):
        lacking = [folders[role] for role in roles if methods and role in folders and lacks(folders[role])]
        if lacking:
            left_out = [method.name for method in methods]
            print(f"{visible(lacking[0].name, '')} {what}: all leaves out {' and '.join(left_out)}.")
            impossible.update(left_out)
    groups = {mode: [name for name in names if name not in impossible] for mode, names in measuring.groups.items()}
    return replace(settings, measuring=replace(measuring, groups=groups))


def translation_of(
    settings: Settings, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase
) -> Translation | None:
    """The translation to the draft's tokenizer; None if all models share the target's `tokenizer`. Raises UserError for
    a model that must share it, and for what needs a draft that does."""
    of_draft, measuring = None, settings.measuring
    for role, folder in folders.items():
        other = load_tokenizer(folder)
        if role == "draft" and other.get_vocab() != tokenizer.get_vocab():
            of_draft = other
        else:
            models.check_tokenizers(tokenizer, other, (folders["target"].name, folder.name))
    if of_draft is None:
        return None
    names, methods = (folders["target"].name, folders["draft"].name), [METHODS[name] for name in measuring.names]
    trees = settings.decoding.tree or any(method.grows_trees for method in methods)
    programs = any(method.engine and method.needs for method in methods)
    contrasts = "so they cannot be contrasted (in --contrastive, --diversity, --compare all); leave that out or name a "
    for clash, why in (
        (settings.models.draft_vocab, "so it guesses only the tokens that both have; leave out --draftVocab"),
        (any(method.contrasts for method in methods), f"{contrasts}draft that shares the target's"),
        (trees, "so it grows no trees of guesses (tree, topDown, --tree); name other methods"),
        (programs, "so other programs cannot use it; name other methods, or one by one"),
        (measuring.ppl and not measuring.modes, "so their perplexities cannot be compared; leave out --ppl"),
    ):
        if clash:
            raise UserError(f"{names[1]} has another tokenizer than {names[0]}, {why}")
    others = (models.model_limits(folder, tokenizer) for role, folder in folders.items() if role != "draft")
    sizes = min(model.vocabulary for model in others), models.model_limits(folders["draft"], of_draft).vocabulary
    return Translation(tokenizer, of_draft, names, sizes)


def report_translation(inputs: Inputs, translation: Translation) -> None:
    """Print how many tokens a draft with another tokenizer can guess."""
    share = translation.coverage([*inputs.rows, *inputs.article])
    print(
        f"{translation.names[1]} has another tokenizer than {translation.names[0]}: it guesses the "
        f"{len(translation.draft)} tokens that both have, {translation.share:.1%} of the target's and "
        f"{share:.1%} of those in the prompts."
        + (" That is too few to gain anything." if share < COVERED else "")
        + (" Perplexities cannot be compared and are left out." if inputs.settings.measuring.ppl else "")
    )


def encode_prompts(inputs: Inputs, named: list[str], corpora: list[texts.Corpus]) -> None:
    """Choose the prompts, and those of --diversity, which may be the same. named: prompts that a flag names. Each turn
    of --prompts is a prompt, after the shortest answers. Raises UserError for fewer prompts than rows of the batch."""
    settings, choice, tokenizer = inputs.settings, inputs.settings.texts, inputs.tokenizer
    rows, model = list[list[int]](), settings.models.target
    if not settings.continues and not settings.measuring.diversity:
        return
    if inputs.questions:
        rows = [texts.encode_turn(question, ["."] * turn, tokenizer, model) for question, turn in inputs.turns]
    elif choice.questions or settings.output.chat:
        questions = choice.questions or ["."]
        rows = [texts.encode_chat(questions, ["."] * (len(questions) - 1), tokenizer, model)]
    elif named:
        rows = texts.encode(named, tokenizer)
    if settings.measuring.diversity:
        inputs.article = rows or texts.encode(PROMPTS, tokenizer)
    if settings.continues and rows:
        inputs.prompts = {max(map(len, rows)): rows}
    elif settings.continues:
        chosen = choice.prompt_lengths, choice.sentence_limit, choice.sentences
        inputs.prompts = texts.choose_prompts(tokenizer, corpora, *chosen)
    batch, count = settings.measuring.batch or 1, min(map(len, inputs.prompts.values()), default=0)
    if settings.measuring.timed and count < batch:
        chosen_few = choice.from_corpora and count == choice.sentences  # The data set may have more.
        more = "raise --sentences" if chosen_few else "give more, or a smaller --batch"
        raise UserError(f"--batch {batch} needs at least {batch} prompts, and there are {count}; {more}")


def tokens_of_batch(
    inputs: Inputs, limits: Sequence[models.ModelLimits], translation: Translation | None = None
) -> int:
    """The most tokens that a batch can have. translation: to the tokens of the models. Raises UserError, which names
    the line of --prompts, unless the models can read the prompts of each mode and the tokens that follow."""
    settings, max_len_of = inputs.settings, inputs.settings.sampling.max_len_of
    translate: Callable[[list[int]], list[int]] = translation.row if translation else list
    answer = max_len_of(ANSWERS)  # In the prompt of a later turn, each answer before it is as long as it may be.
    turns: list[tuple[texts.Question | None, int]] = [*inputs.turns] or [(None, 0)] * len(inputs.rows)
    most, rows = 0, [translate(row + turn * answer * row[-1:]) for row, (_, turn) in zip(inputs.rows, turns)]
    for mode in settings.measuring.modes:
        read = list(map(translate, inputs.article)) if mode == "diversity" else rows
        try:
            check_room(read, max_len_of(mode), limits)
        except UserError as error:
            question, turn = max(zip(rows, turns), key=lambda pair: len(pair[0]))[1] if rows else (None, 0)
            if question is None:
                raise
            after = f", turn {turn + 1} after answers of {answer} tokens" if turn else ""
            raise UserError(f"--prompts {settings.texts.prompts}, line {question.line}{after}: {error}") from None
        most = max(most, settings.rows * (max_len_of(mode) + max(map(len, read))))
    return most
