"""`Translation`: between the tokenizers of a target and of a draft. Which tokens both have, and a text of the target in
the draft's tokens.

Tokens are compared as bytes, not as they are written. A byte-level tokenizer writes each byte as a letter of its own.
One in the manner of SentencePiece writes a space as U+2581, and most other characters as they are.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from utils import UserError

BYTE = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level tokenizers write bytes
FALLBACK = r"<0x([0-9A-F]{2})>"  # as SentencePiece writes a byte that is in no other token
SPACE = "\u2581"  # as SentencePiece writes a space
ANEW = 32  # The last tokens of a text that grows, at least so many, are encoded anew.


def token_bytes(tokenizer: PreTrainedTokenizerBase, name: str) -> list[bytes | None]:
    """The bytes of each token; None for a special token, which stands for no text.

    Raises UserError if the tokenizer of the model `name` writes its tokens in a way that is not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = decoder_kinds(json.loads(backend.to_str())["decoder"]) if backend is not None else set()
    if not kinds & {"ByteLevel", "Metaspace", SPACE}:
        raise UserError(
            f"the tokenizer of {name} is neither byte-level nor in the manner of SentencePiece, so the bytes of its "
            "tokens are not known; name two models that share one tokenizer"
        )
    found: list[bytes | None] = [None] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        if index < len(found):
            fallback = re.fullmatch(FALLBACK, token) if "ByteFallback" in kinds else None
            if fallback:
                found[index] = bytes([int(fallback[1], 16)])
            elif "ByteLevel" in kinds:
                found[index] = bytes(BYTE[c] for c in token) if BYTE.keys() >= set(token) else token.encode()
            else:
                found[index] = token.replace(SPACE, " ").encode()
    for index, added in tokenizer.added_tokens_decoder.items():  # They are written as they are.
        if index < len(found):
            found[index] = None if added.special else added.content.encode()
    return found


def decoder_kinds(decoder: object) -> set[str]:
    """The types of the parts of a decoder, as tokenizer.json names them; SPACE for a part that replaces that."""
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder["type"])}.union(*map(decoder_kinds, decoder.get("decoders", ())))
    return kinds | {SPACE} if decoder.get("pattern") == {"String": SPACE} else kinds


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """{name: id} of the special tokens. The end of text has a name that is the same for all tokenizers."""
    found = {
        added.content: index
        for index, added in tokenizer.added_tokens_decoder.items()
        if added.special and index < len(tokenizer)
    }
    return found if tokenizer.eos_token_id is None else found | {"end of text": tokenizer.eos_token_id}


def by_bytes(tokens: Sequence[bytes | None]) -> dict[bytes, int]:
    """{bytes: id}. Of tokens with the same bytes the last is taken: SentencePiece has its single bytes first, and
    writes a letter by the ordinary token."""
    return {token: index for index, token in enumerate(tokens) if token}


def added_in_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before every text, such as a beginning of text."""
    whole, text = (tokenizer.backend_tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
    return next(whole[:i] for i in range(len(whole) + 1) if whole[i : i + len(text)] == text)


def puts_space(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[bytes | None]) -> bool:
    """Whether the tokenizer puts a space before every text, as SentencePiece does."""
    first = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
    return b"".join(tokens[i] or b"" for i in first).startswith(b" ")


class Translation:
    """From the tokenizer of a target to that of a draft.

    target, draft: int64 `[N]`, the ids of the tokens that both have, in the same order. vocabulary: the target's
    number of tokens. tokenizer: the draft's. names: of the two models, for messages.
    Raises UserError if they have no token in common, or if the bytes of their tokens are not known.
    """

    def __init__(
        self,
        target: PreTrainedTokenizerBase,
        draft: PreTrainedTokenizerBase,
        names: tuple[str, str] = ("target", "draft"),
    ) -> None:
        self.names, self.vocabulary, self.tokenizer = names, len(target), draft
        self.bytes, drafts = token_bytes(target, names[0]), token_bytes(draft, names[1])
        ours, theirs = by_bytes(self.bytes), by_bytes(drafts)
        specials = special_tokens(target), special_tokens(draft)
        pairs = {ours[token]: theirs[token] for token in ours if token in theirs}
        self.special = {specials[0][name]: specials[1][name] for name in specials[0] if name in specials[1]}
        if not pairs:
            raise UserError(f"the tokenizers of {names[0]} and {names[1]} have no token in common; name another draft")
        taken: set[int] = set()
        for ours_id, theirs_id in self.special.items():  # Two names of one special token may have one partner.
            if theirs_id not in taken:
                pairs[ours_id] = theirs_id
                taken.add(theirs_id)
        self.target, self.draft = (torch.tensor(ids) for ids in zip(*sorted(pairs.items())))
        self.single = {token[0]: index for token, index in theirs.items() if len(token) == 1}
        self.front, self.start = added_in_front(target), added_in_front(draft)
        self.unspelled = {i: added.content.encode() for i, added in target.added_tokens_decoder.items()}
        # Whether each tokenizer puts a space before every text: the target's is taken off, the draft's comes again.
        self.spaced = puts_space(target, self.bytes), puts_space(draft, drafts)

    @property
    def share(self) -> float:
        """The share of the target's vocabulary that the draft has too."""
        return len(self.target) / self.vocabulary

    def coverage(self, texts: Sequence[Sequence[int]]) -> float:
        """The share of the tokens of some texts that the draft has too: about the most that can be accepted."""
        known, tokens = set(self.target.tolist()), [token for text in texts for token in text]
        return sum(token in known for token in tokens) / max(1, len(tokens))

    def row(self, tokens: Sequence[int]) -> list[int]:
        """A text of the target in the draft's tokens, as the draft's tokenizer writes it. Never empty."""
        return self.encode(tokens) or [int(self.draft[0])]

    def encode(self, tokens: Sequence[int], is_start: bool = True) -> list[int]:
        """The draft's tokens of a text, or of what follows a word (is_start False)."""
        if is_start and list(tokens[: len(self.front)]) == self.front:
            tokens = tokens[len(self.front) :]
        found, extra = list(self.start) if is_start else [], self.spaced[0 if is_start else 1]
        for part in self.parts(tokens):
            if isinstance(part, int):
                found.append(part)
                continue
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = decoder.decode(part.removeprefix(b" ") if extra else part)
            if text:
                found += self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            # The beginning of a character whose other bytes are not written yet.
            found += [self.single[byte] for byte in decoder.getstate()[0] if byte in self.single]
            extra = False
        return found

    def parts(self, tokens: Sequence[int]) -> Iterator[bytes | int]:
        """The text of `tokens` as bytes, interrupted by the draft's ids of special tokens that both have."""
        pending: list[bytes] = []
        for token in tokens:
            if token in self.special:
                if pending:
                    yield b"".join(pending)
                pending = []
                yield self.special[token]
            else:
                pending.append(self.bytes[token] or self.unspelled.get(token, b""))
        if pending:
            yield b"".join(pending)

    def growing(self) -> Growing:
        """For one text that grows."""
        return Growing(self)


class Growing:
    """A text of the target that grows, in the draft's tokens: `Translation.row`, but only the last words are encoded
    anew. What stands before them stays as it is."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.fixed: list[int] = []  # the beginning of the text
        self.encoded: list[int] = []  # the same in the draft's tokens

    def row(self, tokens: Sequence[int]) -> list[int]:
        """The text `tokens` in the draft's tokens. It need not go on from the text given before."""
        encode = self.translation.encode
        if list(tokens[: len(self.fixed)]) != self.fixed:
            self.fixed, self.encoded = [], []
        rest = tokens[len(self.fixed) :]
        if len(rest) > 2 * ANEW:
            starts = (i for i in range(len(rest) - ANEW, 0, -1) if self.begins_word(rest[i], rest[i - 1]))
            cut = next(starts, 0)
            if cut:
                self.encoded = self.encoded + encode(rest[:cut], not self.fixed)
                self.fixed, rest = self.fixed + list(rest[:cut]), rest[cut:]
        return self.encoded + encode(rest, not self.fixed) or self.translation.row(tokens)

    def begins_word(self, token: int, before: int) -> bool:
        """Whether a token is one space and a letter or more: a place where every tokenizer begins a token. Not so after
        another space: a tokenizer may join spaces, and leave none to the word."""
        text, last = self.translation.bytes[token] or b"", self.translation.bytes[before] or b""
        return len(text) > 1 and text[:1] == b" " and text[1:2].isalpha() and not last.endswith(b" ")
