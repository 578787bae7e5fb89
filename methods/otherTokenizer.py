"""A draft model with a tokenizer of its own: `Translation` encodes the target's texts in the draft's tokens, and
`OtherTokenizerDrafter` guesses tokens that both have (token-level intersection; Timor et al., arXiv 2502.05202,
algorithm 4).

Tokens are compared as bytes, not as strings. A byte-level tokenizer writes each byte as one letter.
SentencePiece writes a space as U+2581, and most other characters as they are.
"""

from __future__ import annotations

import codecs
import copy
import itertools
import json
import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding.drafter import Drafter, Guesses, LengthRule, no_guesses
from decoding.model import Model
from decoding.rows import Rows
from methods.drafters import guess
from utils import Sampling, UserError, upload

FALLBACK = r"<0x([0-9A-F]{2})>"  # as SentencePiece writes a byte that is in no other token
SPACE = "\u2581"  # as SentencePiece writes a space
TAIL = 32  # At least this many tokens at the end of a growing text are encoded again.
READ = 4  # Tokens that the draft reads at least before it guesses: few shapes serve most rounds.
GROWTH = 4  # Capacity in the draft's tokens for each token of the target.


class Tokens:
    """The contents of a tokenizer's tokens.

    contents: the bytes of each token; None for a special token, which stands for no text. ids: {bytes: id}. special:
    {name: id} of the special tokens; the end of text has the same name for all tokenizers. front: the ids before every
    text, such as a beginning of text. adds_space: a space is put before every text, as SentencePiece does.
    name, vocabulary: of the model; it has no logits for other ids. Raises UserError if its tokenizer writes tokens in
    an unknown way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str())["decoder"]) if backend is not None else ""
        kinds = set(re.findall(r'"type": "(\w+)"', decoder))  # of the decoder and its parts
        if not kinds & {"ByteLevel", "Metaspace"} and f'"pattern": {{"String": {json.dumps(SPACE)}}}' not in decoder:
            raise UserError(
                f"the tokenizer of {name} is neither byte-level nor in the manner of SentencePiece, so the bytes of "
                "its tokens are not known; name two models that share one tokenizer"
            )
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}  # as byte-level tokenizers write bytes
        self.contents: list[bytes | None] = [None] * vocabulary
        for token, index in tokenizer.get_vocab().items():
            if index >= vocabulary:
                continue
            if "ByteFallback" in kinds and (fallback := re.fullmatch(FALLBACK, token)):
                self.contents[index] = bytes([int(fallback[1], 16)])
            elif "ByteLevel" in kinds:
                is_spelled = byte_of.keys() >= set(token)
                self.contents[index] = bytes(byte_of[letter] for letter in token) if is_spelled else token.encode()
            else:
                self.contents[index] = token.replace(SPACE, " ").encode()
        self.special: dict[str, int] = {}
        for index, token in tokenizer.added_tokens_decoder.items():  # They are written as plain text.
            if index < vocabulary:
                self.contents[index] = None if token.special else token.content.encode()
                self.special |= {token.content: index} if token.special else {}
        # Of tokens with the same bytes the last is taken: SentencePiece has its single bytes first, and writes a letter
        # by the ordinary token.
        self.ids = {content: index for index, content in enumerate(self.contents) if content}
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocabulary:
            self.special["end of text"] = tokenizer.eos_token_id
        whole, text = (tokenizer.backend_tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
        self.front = next(whole[:i] for i in range(len(whole) + 1) if whole[i : i + len(text)] == text)
        self.adds_space = b"".join(self.contents[i] or b"" for i in text).startswith(b" ")


class Translation:
    """From the tokenizer of a target to that of a draft.

    target, draft: int64 `[N]`, the ids of the tokens that both have, in the same order. vocabulary: the target's, the
    first of `vocabularies`. tokenizer: the draft's. names: of the two models, for messages. contents: the bytes of each
    of the target's tokens, for a special token those of its name. special: {the target's id: the draft's} of special
    tokens. vocabularies: of the two models; None: up to the largest ids of their tokenizers.
    Raises UserError if they have no token in common, or if the bytes of their tokens are not known.
    """

    def __init__(
        self,
        target: PreTrainedTokenizerBase,
        draft: PreTrainedTokenizerBase,
        names: tuple[str, str] = ("target", "draft"),
        vocabularies: tuple[int, int] | None = None,
    ) -> None:
        sizes = vocabularies or [1 + max(tokenizer.get_vocab().values()) for tokenizer in (target, draft)]
        self.names, self.vocabulary, self.tokenizer = names, sizes[0], draft
        self.tokens, self.draft_tokens = Tokens(target, names[0], sizes[0]), Tokens(draft, names[1], sizes[1])
        ours, theirs = self.tokens, self.draft_tokens
        common = [(ours.ids[content], theirs.ids[content]) for content in ours.ids if content in theirs.ids]
        if not common:
            raise UserError(f"the tokenizers of {names[0]} and {names[1]} have no token in common; name another draft")
        self.special = {ours.special[name]: theirs.special[name] for name in ours.special if name in theirs.special}
        # A token that ends texts may be plain text too, or have two names. It has one partner: q counts it once.
        pairs: dict[int, int] = {}
        partners: set[int] = set()
        for target_id, draft_id in (*self.special.items(), *common):
            if target_id not in pairs and draft_id not in partners:
                pairs[target_id] = draft_id
                partners.add(draft_id)
        self.target, self.draft = (torch.tensor(ids) for ids in zip(*sorted(pairs.items())))
        added = {index: token.content.encode() for index, token in target.added_tokens_decoder.items()}
        self.contents = [content or added.get(index, b"") for index, content in enumerate(ours.contents)]
        self.single_bytes = {content[0]: index for content, index in theirs.ids.items() if len(content) == 1}

    @property
    def share(self) -> float:
        """The share of the target's vocabulary that the draft has too."""
        return len(self.target) / self.vocabulary

    def coverage(self, texts: Sequence[Sequence[int]]) -> float:
        """The share of the tokens of some texts that the draft has too: about the most that can be accepted."""
        common, tokens = set(self.target.tolist()), [token for text in texts for token in text]
        return sum(token in common for token in tokens) / max(1, len(tokens))

    def row(self, tokens: Sequence[int]) -> list[int]:
        """A text of the target in the draft's tokens, as the draft's tokenizer writes it. Never empty."""
        return self.encode(tokens) or [int(self.draft[0])]

    def encode(self, tokens: Sequence[int], is_start: bool = True) -> list[int]:
        """The draft's tokens of a text, or of what follows a word (is_start False)."""
        ids: list[int] = []
        if is_start:
            ids += self.draft_tokens.front
            if list(tokens[: len(self.tokens.front)]) == self.tokens.front:
                tokens = tokens[len(self.tokens.front) :]
        # A space that the target's tokenizer puts before every text is taken off. The draft's adds its own.
        drops_space = (self.tokens if is_start else self.draft_tokens).adds_space
        for is_special, run in itertools.groupby(tokens, self.special.__contains__):
            if is_special:
                ids += [self.special[token] for token in run]
                continue
            content = b"".join(self.contents[token] for token in run)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = decoder.decode(content.removeprefix(b" ") if drops_space else content)
            if text:
                found = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
                ids += [index for index in found if index < len(self.draft_tokens.contents)]  # The draft knows these.
            # The beginning of a character whose other bytes are not written yet.
            ids += [self.single_bytes[byte] for byte in decoder.getstate()[0] if byte in self.single_bytes]
            drops_space = False
        return ids


class GrowingText:
    """A text of the target that grows, in the draft's tokens. The results are those of `Translation.row`, but only
    the last words are encoded again.

    fixed: the target's tokens at the beginning of the text that are not encoded again. encoded: the draft's for them.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.fixed: list[int] = []
        self.encoded: list[int] = []

    def row(self, tokens: Sequence[int]) -> list[int]:
        """The text `tokens` in the draft's tokens. It need not continue the previous text."""
        encode, contents = self.translation.encode, self.translation.contents
        if list(tokens[: len(self.fixed)]) != self.fixed:
            self.fixed, self.encoded = [], []
        rest = tokens[len(self.fixed) :]
        for cut in range(len(rest) - TAIL, 0, -1) if len(rest) > 2 * TAIL else ():
            # Every tokenizer begins a token at one space and a letter. It may merge two spaces.
            content, previous = contents[rest[cut]], contents[rest[cut - 1]]
            if content[:1] == b" " and content[1:2].isalpha() and not previous.endswith(b" "):
                self.encoded = self.encoded + encode(rest[:cut], not self.fixed)
                self.fixed, rest = self.fixed + list(rest[:cut]), rest[cut:]
                break
        return self.encoded + encode(rest, not self.fixed) or self.translation.row(tokens)


class OtherTokenizerDrafter(Drafter):
    """A model with its own tokenizer guesses. It reads the committed text in its own tokens, and draws only tokens that
    both tokenizers have: `model` gives all others no probability (`engine.sharedWeights.RestrictedModel`).

    Its q, renormalised over these tokens, is carried over to the target's ids; elsewhere q is 0. In each round the end
    of the text is encoded anew, because its last tokens may have merged with what came after. The KV cache keeps what
    is still the same. A row that outgrows the draft's room gets no more guesses.

    temperature, top_p: as in `ModelDrafter`. Raises UserError for a model that may guess other tokens.
    """

    def __init__(
        self, model: Model, translation: Translation, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        inner: Any = model
        while isinstance(inner, Model):  # One without a KV cache holds another one.
            inner = getattr(inner, "model", None)
        tokens = getattr(inner and inner.get_output_embeddings(), "tokens", None)
        if tokens is None or set(tokens.tolist()) != set(translation.draft.tolist()):
            remedy = "give RestrictedModel(draft, translation.draft)"
            raise UserError(f"{model.name} may guess tokens that the target lacks: {remedy}")
        self.model, self.translation, self.temperature, self.top_p = model, translation, temperature, top_p
        self.targets, self.drafts = translation.target.to(model.device), translation.draft.to(model.device)
        self.to_target = torch.zeros(model.vocabulary, dtype=torch.long, device=model.device)
        self.to_target[self.drafts] = self.targets
        reader = copy.copy(model)  # Rows of the target hold its tokens; the draft reads a translation.
        reader.vocabulary = translation.vocabulary
        self.models = [reader]

    def begin(self, rows: Rows) -> None:
        """Raises UserError if a prompt does not fit into the draft's context."""
        self.texts = [GrowingText(self.translation) for _ in rows.prompts]
        self.held = [text.row(prompt) for text, prompt in zip(self.texts, rows.prompts)]
        ends = [(len(text) + rows.max_len, len(text) + GROWTH * rows.max_len) for text in self.held]
        self.rooms = [max(least, min(most, self.model.context)) for least, most in ends]  # in the draft's tokens
        self.rows = Rows(self.held, max(self.rooms) - max(map(len, self.held)), [self.model], batch=rows.batch)
        self.guessed: dict[int, list[int]] = {}  # {text: guesses that the cache holds after `held`}

    def read_prompts(self, rows: Rows) -> None:
        self.rows.numbers, self.rows.fresh = rows.numbers, rows.fresh
        self.model.prefill(self.rows)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """At most `gammas[i]` guesses for row i, in the target's tokens."""
        if max(gammas) == 0:
            return no_guesses(rows, self.translation.vocabulary)
        tokens, positions, going = self.unread(rows, gammas)
        seen = rows.seen(self.translation.vocabulary, sampling)
        if seen is not None:  # The tokens that the target has seen, of those that the draft can guess.
            shared = seen.to(self.model.device)[:, self.targets]
            seen = shared.new_zeros(len(shared), self.model.vocabulary).index_copy_(1, self.drafts, shared)
        draft_sampling, stop = sampling.but(self.temperature, self.top_p), length.stop if length else None
        u = rows.uniform(gammas).T.to(self.model.device)
        drafts, draft_q = guess(self.model, tokens, positions, going, u, draft_sampling, stop, seen)
        self.guessed |= zip(rows.numbers, drafts[:, :-1].tolist())
        # 0, or nan where the draft's q is: a distribution is nan everywhere or nowhere.
        q = (draft_q[..., :1] * 0).repeat(1, 1, self.translation.vocabulary)
        q.index_copy_(-1, self.targets, draft_q.index_select(-1, self.drafts)).masked_fill_(~going[:, None, None], 0)
        return Guesses(self.to_target[drafts].to(rows.device), q.to(rows.device))

    def unread(self, rows: Rows, gammas: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The last tokens of each row, `[B, w]`: READ, or as many as some row has not read. The positions of these and
        of all guesses but the last, `[B, w + max(gammas) - 1]`. And which rows guess at all, bool `[B]`.

        Whether a row guesses does not depend on its neighbours. Where these have more guesses, what it draws beyond its
        own is read at the last slot, which no text fills.
        """
        last = self.rows.capacity - 1
        fits: list[bool] = []
        unread: list[int] = []
        for number, tokens, ended, gamma in zip(rows.numbers, rows.texts, rows.ended, gammas):
            known = (self.held[number] + self.guessed.get(number, []))[:last]
            text = [] if ended else self.texts[number].row(tokens)
            fits.append(len(text) + max(1, gamma) <= self.rooms[number] and not ended)
            self.held[number] = text = text if fits[-1] else known[:1]
            unread.append(len(text) - min(len(commonprefix([text, known])), len(text) - 1))
        width = max(READ, *unread)
        texts = [self.held[number] for number in rows.numbers]
        spans = [range(len(text) - width, len(text) + max(gammas) - 1) for text in texts]
        positions = [[min(max(0, place), last) for place in span] for span in spans]
        block = [[text[place] for place in places[:width]] for text, places in zip(texts, positions)]
        device = self.model.device
        return upload(block, device), upload(positions, device), upload(fits, device)
