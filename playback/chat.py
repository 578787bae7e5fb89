"""A conversation on the terminal (`test.py --chat`): an answer is shown as it is decoded, then its speed."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress

import torch
from rich.console import Console
from rich.text import Text

from experiments.loading import Inputs
from inputs.commandLine import visible
from inputs.texts import encode_chat
from methods.catalogue import build
from playback.trace import Pieces, Round, Trace
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

    def decode(self, method: str, max_len: int, shown: bool = True) -> Trace:
        """Decode an answer, until Ctrl-C at most."""
        count, pieces, prompt = itertools.count(1), Pieces(self.tokenizer), self.prompt()

        def show(round: Round) -> None:
            for style, tokens in ("dim", round.accepted), ("", round.target):
                self.write("".join(pieces.add(token) for token in tokens if token not in self.inputs.end_tokens), style)

        trace = Trace(show) if shown else Trace()
        with suppress(KeyboardInterrupt):
            self.samplers[method](
                [prompt],
                max_len=max(min(ROOM, self.context) - len(prompt), max_len),
                sampling=self.settings.sampling.of("show"),
                end_of_text=lambda row, token: self.inputs.ends(row, token) or next(count) == max_len,
                generator=self.generator,
                callback=trace.callback,
            )
        for model in self.readers[method] if trace.rounds else ():
            model.remembered = [*prompt, *trace.tokens[:-UNREAD]]
        if shown:
            self.write(pieces.rest())
            self.console.print()
        return trace

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


def converse(inputs: Inputs) -> int:
    """Answer each line that the user writes. Returns the exit code."""
    conversation, method, plain = Chat(inputs), "speculative", 0.0
    if conversation.terminal:
        print(HELP)
        conversation.questions = [SAMPLE]
        for _ in range(2):  # The first time warms up.
            plain = max(plain, conversation.decode("target", SAMPLE_TOKENS, shown=False).rate)
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
                trace = conversation.decode(method, conversation.max_len)
            except UserError as error:  # The question is too long for the context.
                conversation.questions.pop()
                print(error, file=sys.stderr)
                continue
            conversation.answers.append(inputs.tokenizer.decode(trace.tokens, skip_special_tokens=True))
            if method == "target":
                plain = max(plain, trace.rate)  # The machine may have been busy before.
            speed = trace.speed(plain if plain and method != "target" else math.nan)
            if conversation.terminal and speed:
                conversation.console.print(speed, style="dim", markup=False)
    return 0
