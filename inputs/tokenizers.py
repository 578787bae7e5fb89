"""Tokenizers: loaded, compared, and the most frequent of their tokens."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inputs.commandLine import one_line
from inputs.models import find_model, read_json
from inputs.texts import load_corpora
from utils import UserError, out_of_memory


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises UserError if it cannot be used."""
    folder = find_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # A broken folder can raise nearly anything, also exceptions of transformers.
        if out_of_memory(error):
            raise
        raise UserError(
            f"{folder} has no usable tokenizer ({one_line(error)}); download its tokenizer.json "
            "and config.json again (code that comes with a model is never run)"
        ) from None
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # What transformers makes of no files.
        raise UserError(f"{folder} has no tokenizer files; download its tokenizer.json")
    end_with_the_text(tokenizer)
    return tokenizer


def end_with_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """Keep a tokenizer from adding a token after a text: that would end it before it is continued."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if tokenizer.is_fast and whole[-len(plain) :] != plain:
        first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        added = list(zip(tokenizer.convert_ids_to_tokens(whole[:first]), whole[:first]))
        single = [*(token for token, _ in added), "$A"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=added)


def check_tokenizers(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, names: tuple[str, str] = ("target", "draft")
) -> None:
    """Raise UserError unless both give every token the same id, for models that must read the same ids."""
    vocab, draft_vocab = target.get_vocab().items(), draft.get_vocab().items()
    if vocab == draft_vocab:
        return
    token, index = min(vocab - draft_vocab or draft_vocab - vocab, key=lambda item: item[1])
    raise UserError(
        f"the tokenizers of {names[0]} ({len(vocab)} tokens) and {names[1]} ({len(draft_vocab)}) differ, first "
        f"at id {index} ({token!r}); name two models that share one tokenizer"
    )


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a text of the model in a folder.

    Those that transformers' `generate` stops at: one or several of generation_config.json, or else of config.json. And
    the tokenizer's own. Raises UserError if no file names any.
    """
    named: object = None
    for file in folder / "generation_config.json", folder / "config.json":
        if named is None and file.is_file():
            content = read_json(file)
            named = content.get("eos_token_id") if isinstance(content, dict) else content
            ids = named if isinstance(named, list) else [named]
            if not all(token is None or type(token) is int for token in ids):
                raise UserError(f"{file} does not say which tokens end a text (eos_token_id); download it again")
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def most_frequent(count: int, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> Tensor:
    """The `count` most frequent tokens of the sample texts, int64 `[count]` in ascending order.

    ends: tokens that are always among them. Equally frequent and unseen tokens are taken by id: a byte-pair encoding
    numbers its tokens roughly by frequency. Raises UserError if the tokenizer has fewer tokens.
    """
    if count > len(tokenizer):
        raise UserError(f"--draftVocab {count} exceeds the vocabulary of {len(tokenizer)} tokens")
    counts = torch.zeros(len(tokenizer), dtype=torch.long)
    for corpus in load_corpora("sample"):
        for document in corpus.documents:
            ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long)
            counts += torch.bincount(ids, minlength=len(tokenizer))
    counts[[token for token in ends if token < len(tokenizer)]] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values
