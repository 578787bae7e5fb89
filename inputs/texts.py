"""Texts to measure on, prompts, and texts to audit: the samples, WikiText-2 and PG-19 from `datasets/`, or any file or
folder."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from inputs import files
from inputs.commandLine import did_you_mean, one_line
from inputs.files import file_errors, library_errors, replace_file
from inputs.hub import MANIFEST
from utils import UserError

T = TypeVar("T")

FOLDERS = {"sample": "sample", "wikitext": "wikitext", "pg19": "pg19_sample"}  # {data set: folder of datasets/}
ENDINGS = (".txt", ".raw", ".tokens")
HEADING = re.compile(r"^ *= .* = *$")
CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs
SETS = {"sample": "sample/categories.jsonl", "specbench": "specbench/question.jsonl"}  # {name: file of datasets/}
# MT-bench's categories. Spec-Bench's evaluation/speed.py reports them as one task, and each other category as a task.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass
class Corpus:
    """A named collection of documents (whole texts)."""

    name: str
    documents: list[str]

    def passages(self, least: int, reach: int | None = None) -> list[str]:
        """The passages of at least `least` characters, in order.

        A passage is a line of a document in WikiText's format, headings left out, or a paragraph of any other document.
        reach: each passage is extended by the text that follows, up to this many characters or the document's end.
        """
        passages = []
        for document in self.documents:
            wiki = re.search(r"^ = [^=\n]* = $", document, re.M)
            gaps = [gap.span() for gap in re.finditer(r"\n" if wiki else r"\n\s*\n", document)]
            start = 0
            for end, following in (*gaps, (len(document), len(document))):
                passage = document[start:end]
                if len(passage.strip()) >= least and not HEADING.match(passage):
                    passages.append(document[start : start + reach] if reach else passage)
                start = following
        return passages


def load_corpora(name: str, books: int | None = None) -> list[Corpus]:
    """The corpora of a data set, at least one, each with at least one document that is not blank.

    name: 'sample', 'wikitext', 'pg19', another data set installed in `datasets/`, or the path of a text file, of a
        folder of text files, or of a folder written by the `datasets` library's `save_to_disk` with a column `text`
        (its split `test`, if it has splits).
    books: the most documents of each corpus.
    """
    path = find_texts(name)
    label = name if name in FOLDERS else path.name
    if is_saved(path):
        from datasets import load_from_disk  # Importing it takes a second, and most runs do not need it.

        what = f"{path} is not a data set with a column 'text' and, if it has splits, a split 'test'"
        with library_errors(what, "save one, or name a text file"):
            saved = load_from_disk(str(path))
            rows = (saved["test"] if hasattr(saved, "keys") else saved)["text"]
            rows = [row for row in rows if row is not None]
            if any(HEADING.match(row.rstrip("\n")) for row in rows[:50]):  # WikiText has one line in each row.
                rows = [("" if any(row.endswith("\n") for row in rows) else "\n").join(rows)]
        corpora = [Corpus(label, rows)]
    else:
        folder = (file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
        texts = [path] if path.is_file() else sorted(folder)
        corpora = [Corpus(file.name, [read(file)]) for file in texts]
        if name != "sample":  # Its two styles are reported separately. Any other folder is one corpus.
            corpora = [Corpus(label, [document for corpus in corpora for document in corpus.documents])]
    for corpus in corpora:
        corpus.documents = [document for document in corpus.documents if document.strip()][:books]
    corpora = [corpus for corpus in corpora if corpus.documents]
    if not corpora:
        raise UserError(f"{path} contains no text; give non-empty {', '.join(ENDINGS)} files or a saved data set")
    return corpora


def find_texts(name: str) -> Path:
    """The file or folder of a data set. Raises UserError if it does not exist."""
    if name not in FOLDERS and os.path.isfile(files.DATASETS / name / MANIFEST):
        return files.DATASETS / name
    return find_named(name, FOLDERS, "data set", "--dataset")


def find_named(name: str, known: Mapping[str, str], what: str, flag: str) -> Path:
    """The file or folder in datasets/ of a name that is `known`, or of a path. what: it is, for the error. Raises
    UserError if it does not exist."""
    if name in known:
        path = files.DATASETS / known[name]
        missing = f"there is no datasets/{known[name]}; get it with downloadData.py ({name}), or use {flag} sample"
    else:
        path = Path(os.path.abspath(os.path.expanduser(name)))
        missing = f"it is not one of {', '.join(known)}, and no such path exists{did_you_mean(name, known)}"
    if not os.path.exists(path):
        raise UserError(f"{what} {name!r}: {missing}")
    return path


def read(path: Path) -> str:
    """The content of a text file. Raises UserError if it is not UTF-8 text."""
    with library_errors(f"{path} cannot be read as UTF-8 text", "convert it, or name another"), file_errors():
        text = path.read_text(encoding="utf-8-sig")  # Project Gutenberg's files begin with a byte order mark.
    if "\0" in text:
        raise UserError(f"{path} is a binary file; name a text file")
    return text


def parse_lines(flag: str, file: Path, fields: str, parse: Callable[[int, Any], T]) -> list[T]:
    """`parse(number of the line, its JSON value)` of each line of a file that is not blank. fields: what a line has, in
    words. Raises UserError, which names flag and line, for one that is no JSON or where `parse` raises ValueError."""
    lines = [(number, line) for number, line in enumerate(read(file).split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{flag} {file} is empty; write one JSON object a line, with {fields}")
    parsed = []
    for number, line in lines:
        try:
            parsed.append(parse(number, json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{flag} {file}, line {number}: this is not JSON ({one_line(error)})") from None
        except ValueError as error:
            raise UserError(f"{flag} {file}, line {number}: {one_line(error)}") from None
    return parsed


def is_saved(path: Path) -> bool:
    """Whether the `datasets` library's `save_to_disk` wrote this folder."""
    return any(os.path.exists(path / name) for name in ("dataset_dict.json", "dataset_info.json"))


@dataclass(frozen=True)
class Question:
    """A line of a file of prompts. line: its number, from 1. turns: of a conversation, one after the other."""

    line: int
    category: str
    turns: tuple[str, ...]


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
    file = find_named(name, SETS, "--prompts", "--prompts")
    questions = parse_lines("--prompts", file, "prompt and category", question_of)
    if {question.category for question in questions} >= MT_BENCH:
        questions = [replace(q, category="mt_bench") if q.category in MT_BENCH else q for q in questions]
    counts = Counter(question.category for question in questions)
    for question in questions:
        if counts[question.category] == 1:
            alone = f"category {question.category!r} has only this prompt, and a comparison needs two"
            remedy = "add one, or use another category"
            raise UserError(f"--prompts {file}, line {question.line}: {alone}; {remedy}")
    return questions


def question_of(number: int, fields: Any) -> Question:
    """The question of a line. Raises ValueError for a line that cannot be used."""
    if not isinstance(fields, dict) or not {"prompt", "turns"} & fields.keys():
        raise ValueError('this is not an object with "prompt" or "turns"')
    if {"prompt", "turns"} <= fields.keys():
        raise ValueError('it has both "prompt" and "turns"; leave out one')
    turns: Any = fields["turns"] if "turns" in fields else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not all(is_text(turn) and turn.strip() for turn in turns):
        raise ValueError('"turns" is not a list of texts' if "turns" in fields else '"prompt" is not text')
    if not is_text(fields.get("category")) or not fields["category"].strip():
        raise ValueError('there is no "category", a word')
    return Question(number, " ".join(fields["category"].split()), tuple(turns))


def is_text(value: object) -> bool:
    """Whether a value of JSON is text that can be encoded."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


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
    earlier = "".join(f"{turn}{answer}\n\n" for turn, answer in zip(turns, answers))
    return encode([earlier + turns[-1]], tokenizer)[0]


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of texts that are continued from their end."""
    return [tokenizer(text, verbose=False)["input_ids"] for text in texts]


def encode_chat(
    questions: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: str
) -> list[int]:
    """Token ids of a conversation in the chat template of `model`, up to where its next answer begins. answers: to all
    questions but the last. Raises UserError if there is no template, or if it fails."""
    if not tokenizer.chat_template:
        remedy = "give the question with --prompt, or name an instruct model"
        raise UserError(f"the tokenizer of {model} has no chat template; {remedy}")
    chat = []
    for question, answer in itertools.zip_longest(questions, answers):
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    # A template is a program. It may do anything but what its sandbox forbids.
    with library_errors(f"the chat template of {model} fails", "give the question with --prompt"):
        return tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]


def choose_prompts(
    tokenizer: PreTrainedTokenizerBase, corpora: Sequence[Corpus], lengths: Sequence[int], least: int, count: int
) -> dict[int, list[list[int]]]:
    """Token ids of `count` prompts for each length, {length: prompts}.

    A prompt is the text from the start of a passage on, cut to the length. Passages of at least `least` characters are
    taken from the corpora alternately. If too few texts are that long, the longest others are added.
    """
    prompts = {}
    for length in sorted(set(lengths)):
        passages = (corpus.passages(least, CHARACTERS * length) for corpus in corpora)
        rows: list[list[int]] = []
        missing = count
        for text in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*passages))):
            rows += [row[:length] for row in encode([text], tokenizer)]
            missing -= len(rows[-1]) == length
            if not missing:
                break
        prompts[length] = sorted(rows, key=len, reverse=True)[:count]
    return prompts


@dataclass(frozen=True)
class ModelLimits:
    """What limits the texts a model can read, known before its weights are loaded."""

    name: str
    vocabulary: int
    context: int


@dataclass(frozen=True)
class AuditText:
    """A text after its prompt, both as token ids. line: of the file, from 1. was_text: the line has no ids of the text,
    so they are those of the tokenizer, which the engine need not have written."""

    line: int
    prompt: list[int]
    tokens: list[int]
    was_text: bool = False


def read_texts(file: Path, tokenizer: PreTrainedTokenizerBase, model: ModelLimits) -> list[AuditText]:
    """The texts of a file, at least one. Raises UserError, which names the line, for one that `model` cannot write."""

    def parse(number: int, fields: Any) -> AuditText:
        """The text of a line. Raises ValueError for a line that cannot be used."""
        if not isinstance(fields, dict) or "prompt" not in fields or not {"tokens", "text"} & fields.keys():
            raise ValueError('this is not an object with "prompt" and with "tokens" or "text"')
        lists = {name for name, value in fields.items() if isinstance(value, list)} - {"prompt", "tokens"}
        for name in sorted(name for name in lists if name.endswith(("tokens", "ids"))):
            raise ValueError(f'"{name}" is not read: token ids are "prompt" and "tokens"')
        prompt, was_text = ids_of(fields["prompt"], "prompt", model, tokenizer), fields.get("tokens") is None
        if was_text:
            tokens = ids_of(ids_after(prompt, fields["prompt"], fields.get("text"), tokenizer), "text", model)
        else:
            tokens = ids_of(fields["tokens"], "tokens", model)
        if not prompt:
            raise ValueError("the prompt has no token; the model needs one to read before it can say what comes next")
        if not tokens:
            raise ValueError("there is no token to test after the prompt")
        if len(prompt) >= model.context or len(prompt) + len(tokens) > model.context + 1:  # The last is not read.
            lengths = f"a prompt of {len(prompt)} tokens and a text of {len(tokens)}"
            raise ValueError(f"{lengths}, and {model.name} reads {model.context}")
        return AuditText(number, prompt, tokens, was_text)

    return parse_lines("--audit", file, "prompt and tokens", parse)


def ids_of(value: Any, name: str, model: ModelLimits, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Token ids of a field. tokenizer: if the field may be text instead. Raises ValueError for other values."""
    if tokenizer is not None and isinstance(value, str):
        value = encode([checked(value, name)], tokenizer)[0]
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f'"{name}" is not a list of token ids' + (", nor text" if tokenizer is not None else ""))
    for token in value:
        if not 0 <= token < model.vocabulary:
            raise ValueError(f'"{name}" has token {token}, and {model.name} has tokens 0 to {model.vocabulary - 1}')
    return value


def checked(value: Any, name: str) -> str:
    """`value`, if it is text. Raises ValueError otherwise."""
    if not is_text(value):
        raise ValueError(f'"{name}" is not text')
    return value


def ids_after(ids: list[int], prompt: Any, text: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of the text after a prompt (text, or ids), which is `ids` in tokens; both are encoded as one text.
    Raises ValueError if that does not give the prompt's ids, or if decoding does not give the text back."""
    is_text = isinstance(prompt, str)
    whole = (prompt if is_text else decoded(ids, tokenizer)) + checked(text, "text")
    plain = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
    if decoded(plain, tokenizer) != whole:
        raise ValueError("the text is another after the tokenizer has encoded and decoded it; give token ids")
    encoded = list(tokenizer(whole, add_special_tokens=is_text, verbose=False)["input_ids"])
    if encoded[: len(ids)] != ids:
        raise ValueError("the text's beginning merges with the prompt's last token; give token ids")
    return encoded[len(ids) :]


def decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of token ids, without any clean-up."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def write_texts(file: Path, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Write a file for `--audit`. texts: (prompt, text after it), both as token ids."""
    replace_file(file, "".join(json.dumps({"prompt": list(p), "tokens": list(t)}) + "\n" for p, t in texts))
