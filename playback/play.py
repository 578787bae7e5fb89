"""`play`: continue one prompt or answer the questions of a conversation on the terminal, round by round, and as a page
that plays it back."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TextIO

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from experiments.loading import Prepared
from experiments.runRecord import run_record
from inputs.commandLine import visible
from inputs.texts import encode_chat
from methods.catalogue import build, repeatable
from methods.samplers import Sampler
from playback.page import render, write_file
from playback.trace import KINDS, Pieces, Round, Trace, Turn, pieces_of, summary

TITLE = "Speculative decoding, round by round"
PACE = 12.0  # tokens a second on a terminal: slow enough to follow, and about twice as fast as people read
COLOURS, MARKS = ("green", "red strike", "bold bright_blue"), (("[", "]"), ("~", "~"), ("", ""))  # of each of KINDS
Styled = tuple[str, str]  # text, and the style that rich gives it


def play(prepared: Prepared, argv: Sequence[str] = ()) -> int:
    """Continue the first prompt, or answer the questions, by the method of the settings: on the screen, in a
    file, or both. Loads the models. argv: the command line. Returns the exit code, 130 after Ctrl-C.

    The file is a page, or the record of the turns as JSON. It holds the turns that were begun, also after Ctrl-C or an
    error.
    """
    settings, models, name = prepared.settings, prepared.load_first(), prepared.settings.measuring.played
    assert name is not None, "the settings ask for it"
    sampler = build([name], dict(models), settings.decoding)[name]
    pace = (
        PACE if repeatable(name, settings.decoding) else None
    )  # A rule that depends on measured times would include the pauses.
    screen = Screen(prepared.tokenizer, ends=prepared.end_tokens, pace=pace) if settings.output.show else None
    turns: list[Turn] = []
    try:
        play_turns(prepared, sampler, screen, turns)
    except KeyboardInterrupt:
        return 130
    finally:
        file = settings.output.html
        if turns and file and file.suffix == ".json":
            texts = [{"prompt": turn.prompt, "rounds": pieces_of(turn.rounds, prepared.tokenizer)} for turn in turns]
            record = {**run_record(prepared, models, argv), "dtype": prepared.place.dtype, "turns": texts}
            write_file(file, json.dumps(record, ensure_ascii=False) + "\n")
        elif turns and file:
            facts = {role: model.name for role, model in models.items()}
            write_file(file, render(turns, prepared.tokenizer, TITLE, facts))
    return 0


def play_turns(prepared: Prepared, sampler: Sampler, screen: Screen | None, turns: list[Turn]) -> None:
    """Continue the first prompt, or answer each question after the answers to those before it. Each turn is added to
    `turns` when it begins."""
    settings, tokenizer, questions = prepared.settings, prepared.tokenizer, prepared.settings.texts.questions
    generator = torch.Generator(prepared.place.device).manual_seed(settings.measuring.seed)
    max_len = settings.sampling.max_len_of("show")
    answers: list[str] = []
    for number in range(len(questions) or 1):
        if questions:
            prompt = encode_chat(questions[: number + 1], answers, tokenizer, settings.models.target)
            shown = f"> {questions[number]}\n\n"
        else:
            prompt = prepared.inputs.rows[0]
            shown = tokenizer.decode(prompt)
        trace, note = Trace(screen.round if screen else None), "not finished"
        turns.append(Turn(shown, trace.rounds))
        if screen:
            screen.begin(shown)
        try:
            (text,), _ = sampler(
                [prompt],
                max_len=max_len,
                sampling=settings.sampling.of("show"),
                end_of_text=prepared.ends,
                generator=generator,
                callback=trace.callback,
                observer=trace.observer,
            )
            note = "the model ended the text" if prepared.ends(0, text[-1]) else f"cut at --maxLen {max_len}"
        finally:
            if screen:
                screen.end(note)
        answers.append(tokenizer.decode(text, skip_special_tokens=True))


class Screen:
    """A terminal that shows texts round by round: of each `begin(prompt)`, `round(round)` for each, `end(note)`.

    The kinds of tokens have colours; where the terminal or its environment variables allow none, they have marks.
    ends: tokens that end a text, which are not shown. pace: tokens a second at most, on a terminal; None: as fast as
    they come.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        file: TextIO | None = None,
        ends: Collection[int] = (),
        pace: float | None = None,
    ) -> None:
        self.tokenizer, self.ends, self.console = tokenizer, ends, Console(file=file, soft_wrap=True)
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
        """Print `parts`, never as markup. Characters that the file's encoding lacks become "?"."""
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        encodable = [text.encode(encoding, "replace").decode(encoding) for text, _ in parts]
        styles = [style if self.colour else "" for _, style in parts]
        self.console.print(Text.assemble(*zip(encodable, styles)), end=end)

    def begin(self, prompt: str) -> None:
        """Show a prompt, before the first one the legend."""
        stop = "" if self.colour or prompt.endswith("\n") else "|"
        if not self.begun:
            self.write((f"the prompt{stop}", "dim"))
            for kind, name in enumerate(KINDS):
                self.write((", ", ""), self.styled(kind, name))
        self.write(("\n" if self.begun else "\n\n", ""), (visible(prompt) + stop, "dim"))
        self.begun, self.pieces = True, Pieces(self.tokenizer)
        self.rounds: list[Round] = []

    def round(self, round: Round) -> None:
        """Show one more round; it is on the screen when this returns. A reader has had time for the one before it."""
        self.rounds.append(round)
        accepted, target = ([token for token in tokens if token not in self.ends] for tokens in (round[0], round[2]))
        pieces = self.pieces.of(Round(accepted, round.rejected, target))
        if self.pause:
            time.sleep(max(0.0, self.due - time.monotonic()))
            self.due = time.monotonic() + self.pause * (len(accepted) + len(target))
        self.write(*(self.styled(kind, "".join(texts)) for kind, texts in enumerate(pieces)))

    def end(self, note: str = "") -> None:
        """Show what is left of the text, and one line of figures. note: how the text ended."""
        self.write(self.styled(2, self.pieces.rest()), end="\n\n")
        self.write(("; ".join(filter(None, (summary(self.rounds), note))), ""), end="\n")
