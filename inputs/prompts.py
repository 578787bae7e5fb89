"""Token ids of the texts that are continued or scored: those given by flag, or the first of each corpus."""

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from inputs import files
from inputs.commandLine import one_line
from inputs.texts import Corpus, parse_lines, read
from utils import UserError

CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs
SETS = {"sample": "sample/categories.jsonl", "specbench": "specbench/question.jsonl"}  # {name: file of datasets/}
# MT-bench's categories. Spec-Bench's evaluation/speed.py reports them as one task, and each other category as a task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True)
class Question:
    """A line of a file of prompts. line: its number, from 1. turns: of a conversation, one after the other."""

    line: int
    category: str
    turns: tuple[str, ...]


def check_passages(corpora: Sequence[Corpus], dataset: str, least: int) -> None:
    """Raise UserError if no text of the data set has `least` characters."""
    if not any(corpus.passages(least) for corpus in corpora):
        raise UserError(f"no text of {dataset} has {least} characters; lower --sentenceLimit")


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The texts given by flag: one prompt, or the lines of a file. Empty if there are none."""
    if file is None:
        return [] if prompt is None else [prompt]
    lines = [line for line in read(file).split("\n") if line.strip()]
    if not lines:
        raise UserError(f"--promptFile {file} contains no prompt; write one on each line")
    return lines


def read_questions(name: str) -> list[Question]:
    """The prompts of `--prompts`: of a file, or of one of SETS.

    Each line is a JSON object with a category, and with turns (a list, as in Spec-Bench's question.jsonl) or a prompt.
    If all categories of MT-bench occur, they are one: "mt_bench". Raises UserError, which names the line, for a line
    that holds no such object or no text, and for a category of one line, which would be compared by one text.
    """
    file = find_prompts(name)
    questions = parse_lines("--prompts", file, "prompt and category", question_of)
    if {question.category for question in questions} >= MT_BENCH:
        questions = [replace(q, category="mt_bench") if q.category in MT_BENCH else q for q in questions]
    counts = Counter(question.category for question in questions)
    for question in questions:
        if counts[question.category] == 1:
            raise UserError(
                f"--prompts {file}, line {question.line}: category {question.category!r} has only this prompt, and a "
                "comparison needs two; add one, or use another category"
            )
    return questions


def find_prompts(name: str) -> Path:
    """The file of `--prompts`. Raises UserError if it does not exist."""
    if name not in SETS:
        return Path(os.path.expanduser(name))
    file = files.DATASETS / SETS[name]
    if not file.is_file():
        raise UserError(
            f"--prompts {name}: there is no datasets/{SETS[name]}; get it with downloadData.py ({name}), or use "
            "--prompts sample"
        )
    return file


def question_of(number: int, fields: Any) -> Question:
    """The question of a line. Raises ValueError for a line that cannot be used."""
    if not isinstance(fields, dict) or not {"prompt", "turns"} & fields.keys():
        raise ValueError('this is no object with "prompt" or "turns"')
    turns: Any = fields["turns"] if "turns" in fields else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not all(map(is_text, turns)):
        raise ValueError('"turns" is no list of texts' if "turns" in fields else '"prompt" is no text')
    if not is_text(fields.get("category")):
        raise ValueError('there is no "category", a word')
    return Question(number, " ".join(fields["category"].split()), tuple(turns))


def is_text(value: object) -> bool:
    """Whether a value of JSON is text that can be encoded, and not blank."""
    return isinstance(value, str) and bool(value.strip()) and value == value.encode(errors="replace").decode()


def encode_turn(
    question: Question, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: str
) -> list[int]:
    """Token ids of a question up to where the next answer begins. answers: to the turns before.

    With a chat template, each turn is a message. Without one, the text is continued as it is, and a later turn is a
    paragraph after the earlier answer.
    """
    turns = question.turns[: len(answers) + 1]
    if tokenizer.chat_template:
        return encode_chat(turns, answers, tokenizer, model)
    earlier = (f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers))
    return encode(["".join([*earlier, turns[-1]])], tokenizer)[0]


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of texts that are continued from their end."""
    return [tokenizer(text, verbose=False)["input_ids"] for text in texts]


def encode_chat(
    questions: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: str
) -> list[int]:
    """Token ids of a conversation in the chat template of the model `model`, up to where its next answer begins.

    answers: to all questions but the last. Raises UserError if there is no template, or if it fails.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {model} has no chat template; give the question with --prompt, or name an instruct model"
        )
    turns = [("user", question) for question in questions], [("assistant", answer) for answer in answers]
    pairs = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*turns)))
    chat = [{"role": role, "content": content} for role, content in pairs]
    try:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # A template is a program. It may do anything but what its sandbox forbids.
        raise UserError(
            f"the chat template of {model} fails ({one_line(error)}); give the question with --prompt"
        ) from None


def choose_prompts(
    tokenizer: PreTrainedTokenizerBase, corpora: Sequence[Corpus], lengths: Sequence[int], least: int, count: int
) -> dict[int, list[list[int]]]:
    """Token ids of `count` prompts for each length, {length: prompts}.

    A prompt is the text from the start of a passage on, cut to the length. Passages of at least
    `least` characters are taken from the corpora alternately. If too few texts are that long, the longest others are
    added.
    """
    prompts = {}
    for length in sorted(set(lengths)):
        passages = (corpus.passages(least, CHARACTERS * length) for corpus in corpora)
        texts = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*passages)))
        long: list[list[int]] = []
        short: list[list[int]] = []
        for text in texts:
            ids = tokenizer(text, verbose=False)["input_ids"][:length]
            (long if len(ids) == length else short).append(ids)
            if len(long) == count:
                break
        prompts[length] = (long + sorted(short, key=len, reverse=True))[:count]
    return prompts


def tokenize(passages: Sequence[str], tokenizer: PreTrainedTokenizerBase, context: int) -> list[list[int]]:
    """Token ids of each passage of two tokens or more, cut to `context` tokens."""
    return [ids[:context] for ids in (tokenizer(text, verbose=False)["input_ids"] for text in passages) if len(ids) > 1]
