"""`chat`: a conversation on the terminal (`test.py --chat`). An answer is shown as it is decoded, then its speed."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress

import torch
from rich.console import Console
from rich.text import Text

from experiments.loading import Inputs
from inputs.commandLine import visible
from inputs.texts import encode_chat
from methods.catalogue import build
from playback.trace import Pieces
from utils import UserError

METHODS = {"/plain": "target", "/self": "speculative"}
HELP = "/plain answers without guesses, /self with guesses again, /new forgets the conversation, /quit ends it."
ROOM = 4096  # slots of the KV cache, if the context has as many: while it stays the same, only new tokens are read
UNREAD = 16  # tokens at the end of an answer that a model may not have read
SAMPLE, SAMPLE_TOKENS = "Write a sentence about the sea.", 32  # an answer from which plain decoding's speed is known


class Chat:
    """Loaded models and a conversation: `questions`, and the `answers` to them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.settings, self.tokenizer = inputs, inputs.settings, inputs.tokenizer
        with redirect_stdout(sys.stderr):  # Only answers are written where no terminal is.
            models = inputs.load_first()
        self.samplers = build(["target", "speculative"], dict(models), self.settings.decoding)
        # {method: the models that read its text}. A draft with another tokenizer reads other tokens.
        readers = [models["target"]] if inputs.translation else list(models.values())
        self.readers = {"target": [models["target"]], "speculative": readers}
        self.generator = torch.Generator(inputs.device).manual_seed(self.settings.measuring.seed)
        self.max_len = self.settings.sampling.max_len_of("show")
        self.context = min(model.context for model in models.values())
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.console = Console(highlight=False, soft_wrap=True)
        self.questions, self.answers = list[str](), list[str]()

    def prompt(self) -> list[int]:
        """The conversation in tokens. The oldest questions and answers are left out where the context is too short."""
        while True:
            tokens = encode_chat(self.questions, self.answers, self.tokenizer, self.settings.models.target)
            if len(tokens) + self.max_len <= self.context or not self.answers:
                return tokens
            del self.questions[0], self.answers[0]

    def decode(self, method: str, max_len: int, shown: bool = True) -> tuple[list[int], float]:
        """Decode an answer, until Ctrl-C at most. Returns its tokens, and tokens per second after the first one."""
        count = itertools.count(1)  # of tokens
        tokens, times, pieces = list[int](), list[float](), Pieces(self.tokenizer)

        def show(row: int, new: list[int], guessed: int) -> None:
            times.append(time.perf_counter())
            tokens.extend(new)
            for number, token in enumerate(new if shown else []):
                if token not in self.inputs.end_tokens:
                    self.write(pieces.add(token), "dim" if number < guessed else "")

        prompt = self.prompt()
        with suppress(KeyboardInterrupt):
            self.samplers[method](
                [prompt],
                max_len=max(min(ROOM, self.context) - len(prompt), max_len),
                sampling=self.settings.sampling.of("show"),
                end_of_text=lambda row, token: self.inputs.ends(row, token) or next(count) == max_len,
                generator=self.generator,
                callback=show,
            )
        for model in self.readers[method] if times else ():
            model.remembered = [*prompt, *tokens[:-UNREAD]]
        if shown:
            self.write(pieces.rest())
            self.console.print()
        return tokens, (len(tokens) - 1) / (times[-1] - times[0]) if len(times) > 1 else math.nan

    def write(self, text: str, style: str = "") -> None:
        """Show a piece of an answer. Where no terminal shows it, an answer is one line."""
        text = text if self.terminal else text.replace("\n", " ")
        self.console.print(Text(visible(text), style), end="")

    def lines(self, first: Sequence[str]) -> Iterator[str]:
        """What the user writes, after the lines of --question."""
        yield from first
        if not self.terminal:
            yield from (line.strip() for line in sys.stdin)
            return
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` then has a history and can be edited
        while True:
            try:
                yield input("> ").strip()
            except KeyboardInterrupt:
                print()
            except EOFError:
                return


def chat(inputs: Inputs) -> int:
    """Answer each line that the user writes. Returns the exit code."""
    conversation, method, plain = Chat(inputs), "speculative", math.nan
    if conversation.terminal:
        print(HELP)
        conversation.questions = [SAMPLE]
        for _ in range(2):  # The first time warms up.
            _, plain = conversation.decode("target", SAMPLE_TOKENS, shown=False)
        conversation.questions = []
    for line in conversation.lines(inputs.settings.texts.questions):
        if line == "/quit":
            break
        if line in METHODS:
            method = METHODS[line]
        elif line == "/new":
            conversation.questions, conversation.answers = [], []
        elif line.startswith("/"):
            print(HELP)
        elif line:
            conversation.questions.append(line)
            try:
                tokens, rate = conversation.decode(method, conversation.max_len)
            except UserError as error:  # The question is too long for the context.
                conversation.questions.pop()
                print(error, file=sys.stderr)
                continue
            conversation.answers.append(inputs.tokenizer.decode(tokens, skip_special_tokens=True))
            if conversation.terminal and rate == rate:
                ratio = f", {rate / plain:.2f} times plain decoding" if method != "target" and plain == plain else ""
                speed = f"[{len(tokens)} tokens, {rate:.0f} a second{ratio}]"
                conversation.console.print(speed, style="dim", markup=False)
    return 0
