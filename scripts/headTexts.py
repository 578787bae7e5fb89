"""The texts a head is trained on: its target writes them.

They are written as users let the target write. It continues passages of books or articles. A chat model also writes
conversations: both the user's turns and the answers (Magpie, Xu et al., arXiv 2406.08464). Most of these begin with a
task about a passage instead, or with the first words of a question, because the questions that a small model asks by
itself are much alike.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from engine.compiling import compiled
from inputs.commandLine import one_line
from inputs.devices import pick_dtype
from inputs.models import load_model
from inputs.prompts import CHARACTERS, encode, read_questions
from inputs.texts import Corpus, load_corpora
from inputs.tokenizers import end_tokens, load_tokenizer
from regrSampling import regrSampling
from scripts.trainBundled import read_texts
from scripts.training import SAMPLING
from utils import Sampling, UserError

LENGTH = 1024  # tokens of a text at most, with its prompt
PROMPT = 16, 256  # tokens of a passage that the target continues, from and to
TOGETHER = 64  # texts that are written at a time: the others of a part wait until one ends
PLAIN = Sampling(1.0, 0, 1.0)  # the model's own distribution
PLAIN_SHARE = 0.2  # of the texts are drawn from it: the head must also guess for flags that are not the default ones
USER = Sampling(0.9, 0, 0.95)  # how users' turns are drawn: of many kinds, but not nonsense
CHATS = 0.7  # share of a chat model's texts that are conversations; the others continue passages
TURN = 160  # tokens of a user's turn at most
TURNS = 2  # of the user and of the model in a conversation, if there is room
ANSWER = 256  # tokens that a chat model writes at a time at most: a small one's longer texts repeat themselves
TASKS = 0.4  # share of conversations that begin with a task about a passage
INSTRUCTIONS = (
    "Summarize the following text.",
    "Summarize the text below in one sentence.",
    "What happens in the following passage, and why?",
    "Who is mentioned in this text, and what do they do?",
    "Explain the text below to a child.",
    "Rewrite the following text in plain words.",
    "List five facts from this text.",
    "Write a question that the text below answers, and then answer it.",
    "Continue this story.",
    "Is the following passage fiction? Explain how you know.",
    "Translate the first sentence of the text into German.",
    "Translate the first sentence of the text into French.",
    "Use the following context to say where and when it takes place.",
    "Write a short poem about the scene below.",
    "What would you ask the author of this text?",
    "Correct the mistakes in the following text, if there are any.",
)
STARTED = 0.6  # share of the users' turns which the target writes whose first words are given: its own are much alike
STARTS = (
    "How do I", "How does", "How many", "How much does", "How would you", "Why do", "Why is", "Why did", "When did",
    "Where can I", "Who was", "Which is better,", "What is the", "What are the", "What happens when", "What would",
    "What should I", "Can you explain", "Can you help me", "Could you write", "Is it true that", "Tell me about",
    "Explain how", "Describe", "Compare", "List", "Give me", "Write a letter", "Write a story", "Write a poem about",
    "Write a Python function", "Write an email", "Suggest", "Imagine that you", "You are a", "I have", "I want to",
    "I am planning", "My friend", "My", "We", "Two", "Three", "A", "A shop sells", "A car", "If", "Suppose", "Find",
    "Calculate", "Solve", "Translate", "Translate this sentence into", "Summarize", "Classify", "Correct this:",
    "In the year", "According to", "Please", "Here is",
)  # fmt: skip
PASSAGE = 200  # characters of a passage at least
FEWEST = 20  # passages without which no head is trained


class Text(NamedTuple):
    """A text's token ids, and for each whether the target drew it with SAMPLING."""

    tokens: list[int]
    drawn: list[bool]

    def then(self, tokens: Sequence[int], drawn: bool = False) -> Text:
        """The text with more tokens after it."""
        return Text([*self.tokens, *tokens], [*self.drawn, *[drawn] * len(tokens)])


class Writer:
    """Writes texts with the target.

    passages: what it continues. questions: users' turns that are given by flag, [] if there are none.
    """

    def __init__(self, folder: Path, device: str, passages: Sequence[str], questions: Sequence[str], seed: int) -> None:
        self.tokenizer = load_tokenizer(folder)
        target = load_model(folder, self.tokenizer, pick_dtype(device), device)
        self.length = min(LENGTH, target.context)
        self.target = compiled(target) if device == "cpu" else target
        self.ends = end_tokens(folder, self.tokenizer)
        self.questions, self.seed = questions, seed
        self.pieces = chat_pieces(self.tokenizer) if self.tokenizer.chat_template else None
        different = list(dict.fromkeys(passages))  # A text of --texts that counts several times has each so often.
        kept = set(random.Random(seed).sample(different, max(1, len(different) // 10)))
        self.passages = {held_out: [p for p in passages if (p in kept) == held_out] for held_out in (True, False)}

    def write(self, part: int, count: int) -> list[Text]:
        """The texts of a part. Part 0 is held out: its passages are in no other part, and all is drawn with
        SAMPLING."""
        self.rng = random.Random(f"{self.seed} {part}")
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 40))
        plain = 0 if part == 0 else round(PLAIN_SHARE * count)
        texts = []
        for sampling, number_of_texts in (SAMPLING, count - plain), (PLAIN, plain):
            chats = round(CHATS * number_of_texts) if self.pieces else 0
            texts += self.conversations(chats, sampling, part == 0)
            starts = [Text([], []).then(self.beginning(part == 0)) for _ in range(number_of_texts - chats)]
            texts += self.continued(starts, sampling, ANSWER if self.pieces else self.length)
        return texts

    def beginning(self, held_out: bool, task: str = "") -> list[int]:
        """Token ids of the beginning of a passage, after a task."""
        length = min(self.rng.randint(*PROMPT), self.length // 2)
        passage = self.rng.choice(self.passages[held_out])[: CHARACTERS * length]
        return (self.encoded(task + passage) if task else encode([passage], self.tokenizer)[0])[:length]

    def continued(self, texts: Sequence[Text], sampling: Sampling, most: int) -> list[Text]:
        """The texts, each with what the target draws after it: until it ends, or `most` tokens."""
        if not texts:
            return []
        most = min(most, self.length - max(len(text.tokens) for text in texts))
        new, _ = regrSampling(
            [text.tokens for text in texts],
            self.target,
            most,
            sampling,
            lambda _, token: token in self.ends,
            self.generator,
            batch=TOGETHER,
        )
        return [text.then(tokens, sampling == SAMPLING) for text, tokens in zip(texts, new)]

    def conversations(self, count: int, sampling: Sampling, held_out: bool) -> list[Text]:
        """Conversations of TURNS turns. The target writes the users' turns too, after the template's beginning. But
        the first ones are questions that were given by flag, or some of them tasks about a passage."""
        if not count:
            return []
        assert self.pieces is not None, "a model without a chat template has no conversations"
        first, after_user, after_model = self.pieces
        texts, ended = [Text([], []).then(first) for _ in range(count)], []
        for turn in range(TURNS):
            if turn:
                room = self.length - TURN - ANSWER
                ended += [text for text in texts if len(text.tokens) >= room]
                texts = [self.without_end(text).then(after_model) for text in texts if len(text.tokens) < room]
            given = self.first_turns(count, held_out) if not turn else []
            asked = [text.then(question[: self.length // 2]) for text, question in zip(texts, given)]
            begun = [text.then(self.start()) for text in texts[len(given) :]]
            texts = asked + [self.without_end(text) for text in self.continued(begun, USER, TURN)]
            texts = [text.then(after_user) for text in texts]
            texts = self.continued(texts, sampling, ANSWER)
        return ended + texts

    def first_turns(self, count: int, held_out: bool) -> list[list[int]]:
        """Token ids of the users' first turns that the target does not write, at most `count`."""
        if self.questions:
            return [self.encoded(question) for question in self.rng.choices(self.questions, k=count)]
        tasks = self.rng.choices(INSTRUCTIONS, k=round(TASKS * count))
        return [self.beginning(held_out, f"{task}\n\n") for task in tasks]

    def start(self) -> list[int]:
        """Token ids of the first words of a user's turn, or none."""
        return self.encoded(self.rng.choice(STARTS)) if self.rng.random() < STARTED else []

    def encoded(self, words: str) -> list[int]:
        """Token ids of words in the middle of a text."""
        return self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]

    def without_end(self, text: Text) -> Text:
        """The text without the token that ended it, if one did: the template's next piece has it."""
        return Text(text.tokens[:-1], text.drawn[:-1]) if text.tokens[-1] in self.ends else text


def chat_pieces(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """Token ids of a chat template before the user's first turn, between a turn of the user and the answer, and between
    an answer and the user's next turn. Raises UserError for a template that cannot be cut so."""
    marks = ["11111", "22222", "33333"]
    roles = ["user", "assistant", "user"]
    chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
    try:
        words = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        first, rest = words.split(marks[0])
        after_user, rest = rest.split(marks[1])
        after_model, _ = rest.split(marks[2])
    except Exception as error:  # A template is a program. It may do anything but what its sandbox forbids.
        raise UserError(f"the chat template cannot be cut into its turns ({one_line(error)})") from None
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (first, after_user, after_model)]
    return ids[0], ids[1], ids[2]


def prompts_of(args: Namespace) -> tuple[list[str], list[str]]:
    """The passages of --texts, and the first turns of --prompts."""
    corpora = [Corpus(str(name), read_texts(name)) for name in args.texts] if args.texts else load_corpora("sample")
    passages = [p for corpus in corpora for p in corpus.passages(PASSAGE, CHARACTERS * PROMPT[1])]
    different = len(set(passages))
    if different < FEWEST:
        raise UserError(
            f"the --texts hold {different} passages of {PASSAGE} characters, and a head needs {FEWEST}; give more"
        )
    return passages, [q.turns[0] for q in read_questions(args.prompts)] if args.prompts else []
