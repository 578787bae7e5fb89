"""`play`: continue one prompt or answer the questions of a conversation on the terminal, round by round, and as a page
that plays it back: one self-contained HTML file, made of the files in `page/`. `converse`: a conversation on the
terminal (`test.py --chat`), in which an answer is shown as it is decoded, then its speed."""

import html
import itertools
import json
import math
import os
import sys
import time
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from experiments.loading import Inputs
from experiments.runRecord import run_record
from inputs.commandLine import visible
from inputs.files import replace_file
from inputs.progress import Printer
from inputs.texts import encode_chat
from methods.catalogue import build
from playback.trace import KINDS, Pieces, Round, Trace, Turn, decoded_rounds, summary
from utils import UserError

PACE = 12.0  # tokens a second on a terminal: slow enough to follow, and about twice as fast as people read
PARTS = Path(__file__).with_name("page")
# Of each of KINDS: the colour, the marks where there are no colours, and the HTML element.
COLOURS = "green", "red strike", "bold bright_blue"
MARKS, TAGS = (("[", "]"), ("~", "~"), ("", "")), ("u", "del", "b")
KEPT = "\n\t\u200c\u200d"  # control characters of a page; some scripts and emoji need U+200C and U+200D
Styled = tuple[str, str]  # text, and the style that rich gives it

METHODS = {"/plain": "target", "/self": "speculative"}  # of a conversation
HELP = "/plain answers without guesses, /self with guesses again, /new forgets the conversation, /quit ends it."
ROOM = 4096  # slots of the KV cache, if the context has as many: while it stays the same, only new tokens are read
SAMPLE, SAMPLE_TOKENS = "Write a sentence about the sea.", 32  # an answer from which plain decoding's speed is known


def play(inputs: Inputs, argv: Sequence[str] = ()) -> int:
    """Continue the first prompt, or answer each question after the answers to those before it, by the method of the
    settings: on the screen, in a file, or both. argv: the command line. Returns the exit code, 130 after Ctrl-C.

    The file is a page, or the record of the turns as JSON. It holds the turns that were begun, also after Ctrl-C or an
    error.
    """
    if inputs.settings.output.chat:
        return converse(inputs)
    settings, models, tokenizer = inputs.settings, inputs.load_first(), inputs.tokenizer
    name, file, show = settings.measuring.played or "", settings.output.html, settings.output.show
    sampler = build([name], models, settings.decoding)[name]
    screen = Screen(tokenizer, ends=inputs.end_tokens, pace=PACE if show else 0)
    screen.console.quiet = not show
    questions, max_len = settings.texts.questions, settings.sampling.max_len_of("show")
    options: dict[str, Any] = {"max_len": max_len, "sampling": settings.sampling.of("show"), "end_of_text": inputs.ends}
    options["generator"] = torch.Generator(inputs.device).manual_seed(settings.measuring.seed)
    turns, answers = list[Turn](), list[str]()
    try:
        for number in range(len(questions) or 1):
            if questions:
                prompt = encode_chat(questions[: number + 1], answers, tokenizer, settings.models.target)
                shown = f"> {questions[number]}\n\n"
            else:
                prompt = inputs.rows[0]
                shown = tokenizer.decode(prompt)
            trace, note = Trace(screen.round), "not finished"
            turns.append(Turn(shown, trace.rounds))
            screen.begin(shown)
            try:
                (text,), _ = sampler([prompt], callback=trace.callback, observer=trace.observer, **options)
                note = "the model ended the text" if inputs.ends(0, text[-1]) else f"cut at --maxLen {max_len}"
            finally:
                screen.end(trace, note)
            answers.append(tokenizer.decode(text, skip_special_tokens=True))
    except KeyboardInterrupt:
        return 130
    finally:
        if turns and file and file.suffix == ".json":
            texts = [{"prompt": turn.prompt, "rounds": decoded_rounds(turn.rounds, tokenizer)} for turn in turns]
            record = {**run_record(inputs, models, argv), "dtype": inputs.dtype, "turns": texts}
            write_file(file, json.dumps(record, ensure_ascii=False) + "\n")
        elif turns and file:
            facts = {role: model.name for role, model in models.items()}
            write_file(file, html_page(turns, tokenizer, "Speculative decoding, round by round", facts))
    return 0


class Screen:
    """A terminal that shows texts round by round: of each `begin(prompt)`, `round(round)` for each, `end(trace)`.

    The kinds of tokens have colours; where the terminal or its environment variables allow none, they have marks.
    ends: tokens that end a text, which are not shown. pace: tokens a second at most, on a terminal; 0: as they come.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        file: TextIO | None = None,
        ends: Collection[int] = (),
        pace: float = 0,
    ) -> None:
        self.tokenizer, self.ends, self.console = tokenizer, ends, Printer(file=file, soft_wrap=True)
        self.colour = self.console.color_system is not None and not self.console.no_color
        self.pause = 1 / pace if pace and self.console.file.isatty() else 0.0  # seconds a token
        self.due = 0.0  # when the next round may be shown
        self.begun = False

    def styled(self, kind: int, text: str) -> Styled:
        """`text` as its kind is shown. Rejected guesses end no line, so their newlines are escaped too."""
        text = visible(text, "" if kind == 1 else "\n")
        begin, end = MARKS[kind] if text and not self.colour else ("", "")
        return f"{begin}{text}{end}", COLOURS[kind]

    def write(self, *parts: Styled, end: str = "") -> None:
        """Print `parts`, never as markup."""
        self.console.print(Text.assemble(*((text, style if self.colour else "") for text, style in parts)), end=end)

    def begin(self, prompt: str) -> None:
        """Show a prompt, before the first one the legend."""
        stop = "" if self.colour or prompt.endswith("\n") else "|"
        if not self.begun:
            self.write((f"the prompt{stop}", "dim"))
            for kind, name in enumerate(KINDS):
                self.write((", ", ""), self.styled(kind, name))
        self.write(("\n" if self.begun else "\n\n", ""), (visible(prompt) + stop, "dim"))
        self.begun, self.pieces = True, Pieces(self.tokenizer)

    def round(self, round: Round) -> None:
        """Show one more round; it is on the screen when this returns. A reader has had time for the one before it."""
        accepted, target = ([token for token in tokens if token not in self.ends] for tokens in (round[0], round[2]))
        pieces = self.pieces.of(Round(accepted, round.rejected, target))
        if self.pause:
            time.sleep(max(0.0, self.due - time.monotonic()))
            self.due = time.monotonic() + self.pause * (len(accepted) + len(target))
        self.write(*(self.styled(kind, "".join(texts)) for kind, texts in enumerate(pieces)))

    def end(self, trace: Trace, note: str = "") -> None:
        """Show what is left of the text, its figures, and its speed. note: how the text ended."""
        self.write(self.styled(2, self.pieces.rest()), end="\n\n")
        self.write(("; ".join(filter(None, (summary(trace.rounds), note))), ""), end="\n")
        if trace.speed():
            self.write((trace.speed(), "dim"), end="\n")


def html_page(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, title: str, facts: Mapping[str, object]
) -> str:
    """A page that plays the rounds of `turns`, one turn after the other. It needs no other file, and may not load any.

    facts: {name: value}, shown under the title. Text of models and users is escaped here, and the script sets it as
    text: it is never markup.
    """

    def escaped(text: object) -> str:
        return html.escape(visible(str(text), KEPT))

    template, style, script = ((PARTS / name).read_text("utf-8") for name in ("page.html", "style.css", "script.js"))
    # The Content-Security-Policy allows this style and this script by their hashes, and nothing else.
    hashes = [b64encode(sha256(part.encode()).digest()).decode() for part in (style, script)]
    data: list[list[list[str]]] = []  # [round][kind][token]
    text = ""
    for number, turn in enumerate(turns):
        for index, kinds in enumerate(decoded_rounds(turn.rounds, tokenizer)):
            data.append([[visible(piece, KEPT) for piece in pieces] for pieces in kinds])
            # The prompt of a later turn stands in the text, before the turn's first round.
            prompt = f'<span class="dim">\n\n{escaped(turn.prompt)}</span>' if number and not index else ""
            spans = (f"<{tag}>{escaped(''.join(pieces))}</{tag}>" for tag, pieces in zip(TAGS, kinds))
            text += f"<span>{prompt}{''.join(spans)}</span>"
    return template.format(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'",
        # In ASCII and without characters that mean something in HTML.
        data=json.dumps(data).replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"),
        title=escaped(title),
        facts=" \u00b7 ".join(f"{escaped(name)} {escaped(value)}" for name, value in facts.items()),
        legend=" ".join(f"<{tag}>{escaped(name)}</{tag}>" for tag, name in zip(TAGS, KINDS)),
        prompt=escaped(turns[0].prompt),
        text=text,
    )


def write_file(path: Path, content: str) -> None:
    """Write the file of --html, as a whole or not at all, and print its path. Raises UserError if this fails."""
    real = Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():
            raise OSError("it is not a file")
        replace_file(real, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror or error}") from None
    print(visible(f"Written to {path}", ""))


class Chat:
    """Loaded models and a conversation: `questions`, and the `answers` to them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, settings, self.tokenizer = inputs, inputs.settings, inputs.tokenizer
        with redirect_stdout(sys.stderr):  # Only answers are written where no terminal is.
            models = inputs.load_first()
        self.samplers = build(["target", "speculative"], models, settings.decoding)
        self.target = models["target"]
        # A draft with another tokenizer reads other tokens.
        self.drafts = [model for model in models.values() if model is not self.target and not inputs.translation]
        generator = torch.Generator(inputs.device).manual_seed(settings.measuring.seed)
        self.options: dict[str, Any] = {"sampling": settings.sampling.of("show"), "generator": generator}
        self.max_len = settings.sampling.max_len_of("show")
        self.context = min(model.context for model in models.values())
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.console = Printer(highlight=False, soft_wrap=True)
        self.questions, self.answers = list[str](), list[str]()

    def decode(self, method: str, max_len: int, shown: bool = True) -> Trace:
        """Decode an answer, until Ctrl-C at most. Where the context is too short for the conversation, its oldest
        questions and answers are left out. It stays as it is if the last question alone is too long."""
        translation = self.inputs.translation
        for left_out in range(len(self.answers) + 1):
            questions, answers = self.questions[left_out:], self.answers[left_out:]
            prompt = encode_chat(questions, answers, self.tokenizer, self.inputs.settings.models.target)
            # The tokens of the draft may be others, and more.
            read = max(len(prompt), len(translation.row(prompt)) if translation else 0)
            if read + self.max_len <= self.context:
                if left_out:
                    print(f"The context is full. Oldest questions left out: {left_out}", file=sys.stderr)
                self.questions, self.answers = questions, answers
                break
        count, pieces = itertools.count(1), Pieces(self.tokenizer)

        def show(round: Round) -> None:
            for style, tokens in ("dim", round.accepted), ("", round.target):
                self.write("".join(pieces.add(token) for token in tokens if token not in self.inputs.end_tokens), style)

        def ends(row: int, token: int) -> bool:
            return self.inputs.ends(row, token) or next(count) == max_len

        trace, room = Trace(show) if shown else Trace(), max(min(ROOM, self.context) - read, max_len)
        with suppress(KeyboardInterrupt):
            sampler = self.samplers[method]
            sampler([prompt], max_len=room, end_of_text=ends, callback=trace.callback, **self.options)
        if trace.rounds:  # It has read all tokens but the last.
            self.target.remembered = [*prompt, *trace.tokens[:-1]]
        if method == "speculative" and len(trace.rounds) > 1:  # After Ctrl-C in the first they may not have read it.
            for draft in self.drafts:  # How much of the answer a draft has read depends on how it was asked.
                draft.remembered = prompt
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
