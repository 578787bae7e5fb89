"""The texts of `test.py --audit`: a file with one JSON object a line, read and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from inputs.files import replace_file
from inputs.models import ModelLimits
from inputs.texts import parse_lines


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
            raise ValueError('this is no object with "prompt" and with "tokens" or "text"')
        prompt, was_text = ids_of(fields["prompt"], "prompt", model, tokenizer), fields.get("tokens") is None
        if was_text:
            tokens = ids_after(prompt, fields["prompt"], fields["text"], tokenizer)
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
        return list(tokenizer(checked(value, name), verbose=False)["input_ids"])
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f'"{name}" is no list of token ids' + (" and no text" if tokenizer is not None else ""))
    for token in value:
        if not 0 <= token < model.vocabulary:
            raise ValueError(f'"{name}" has token {token}, and {model.name} has tokens 0 to {model.vocabulary - 1}')
    return value


def checked(value: Any, name: str) -> str:
    """`value`, if it is a text. Raises ValueError otherwise."""
    if not isinstance(value, str) or value != value.encode(errors="replace").decode():
        raise ValueError(f'"{name}" is no text')
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
