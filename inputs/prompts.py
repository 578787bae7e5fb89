"""Token ids of the texts that are continued or scored: those given by flag, or the first of each corpus."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from inputs.commandLine import one_line
from inputs.texts import Corpus, read
from utils import UserError

CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs


def check_passages(corpora: Sequence[Corpus], dataset: str, least: int) -> None:
    """Raise UserError if no text of the data set has `least` characters."""
    if not any(corpus.passages(least) for corpus in corpora):
        raise UserError(f"no text of {dataset} has {least} characters; lower --sentenceLimit")


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The texts given by flag: one prompt, or the lines of a file. Empty if neither is given."""
    if file is None:
        return [] if prompt is None else [prompt]
    lines = [line for line in read(file).split("\n") if line.strip()]
    if not lines:
        raise UserError(f"--promptFile {file} holds no prompt; write one on each line")
    return lines


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
    tokenizer: PreTrainedTokenizerBase,
    corpora: Sequence[Corpus],
    lengths: Sequence[int],
    context: int,
    least: int,
    count: int,
) -> dict[int, list[list[int]]]:
    """Token ids of `count` prompts for each length, {length: prompts}.

    A prompt is the text from the start of a passage on, cut to the length (or to `context`). Passages of at least
    `least` characters are taken from each corpus in turn. If too few texts go on for that long, the longest others are
    added.
    """
    prompts = {}
    for length in sorted({min(length, context) for length in lengths}):
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
