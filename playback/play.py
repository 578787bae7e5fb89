"""`play`: continue one prompt on the terminal, round by round, or as a page that plays it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decoding.drafter import Drafter
from experiments.prepare import Prepared
from inputs.commandLine import visible
from methods.catalogue import build
from playback.page import write_page
from playback.trace import KINDS, Pieces, RecordingDrafter, Round, Trace

TITLE = "Speculative decoding, round by round"
COLOURS, MARKS = ("green", "red strike", "bold bright_blue"), ("[]", "~~", None)  # of each of KINDS
Styled = tuple[str, str]  # text, and the style that rich gives it


def play(prepared: Prepared) -> None:
    """Continue the first prompt by the method that the settings name, as they say: on the screen, or as a page, or
    both. Loads the models."""
    settings, tokenizer = prepared.settings, prepared.tokenizer
    models, name = prepared.load_first(), settings.measuring.played
    assert name is not None, "the settings ask for it"
    drafters: list[RecordingDrafter] = []

    def record(drafter: Drafter) -> RecordingDrafter:
        drafters.append(RecordingDrafter(drafter))
        return drafters[0]

    sampler = build([name], dict(models), settings.decoding, record)[name]
    screen = Screen(tokenizer) if settings.output.show else None
    trace = Trace(drafters[0], screen.round if screen else None)
    prompt = next(iter(prepared.prompts.values()))[0]
    text = tokenizer.decode(prompt)
    generator = torch.Generator(prepared.device).manual_seed(settings.measuring.seed)
    if screen:
        screen.begin(text)
    try:
        sampler(
            [prompt],
            max_len=settings.sampling.max_len_of("show"),
            sampling=settings.sampling.of("show"),
            end_of_text=tokenizer.eos_token_id,
            generator=generator,
            callback=trace.callback,
        )
    finally:
        if screen:
            screen.end()
    if settings.output.html:
        names = {role: model.name for role, model in models.items()}
        write_page(settings.output.html, text, trace.rounds, tokenizer, TITLE, names)
        print(visible(f"Written to {settings.output.html}", ""))


class Screen:
    """A terminal that shows rounds one by one: `begin(prompt)`, `round(round)` for each, `end()`.

    colour: whether the kinds of tokens have colours; without them they have marks. None: what the terminal and its
    environment variables ask for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, colour: bool | None = None, file: TextIO | None = None
    ) -> None:
        if colour is None:
            console = Console(file=file)
            colour = console.color_system is not None and not console.no_color
        self.colour, self.pieces = colour, Pieces(tokenizer)
        self.rounds: list[Round] = []
        self.console = Console(
            file=file,
            color_system="standard" if colour else None,
            force_terminal=colour,
            no_color=not colour,
            soft_wrap=True,
        )

    def styled(self, kind: int, text: str) -> Styled:
        """`text` as its kind is shown. Rejected guesses end no line, so their newlines are escaped too."""
        text = visible(text, "" if kind == 1 else "\n")
        marks = "" if self.colour or not text else MARKS[kind]
        return (f"{marks[0]}{text}{marks[1]}" if marks else text), COLOURS[kind]

    def write(self, *parts: Styled, end: str = "") -> None:
        """Print `parts`, never as markup. What the encoding of the file lacks becomes "?"."""
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        encodable = [(text.encode(encoding, "replace").decode(encoding), style) for text, style in parts]
        self.console.print(Text.assemble(*encodable), end=end)

    def begin(self, prompt: str) -> None:
        """Show the legend and the prompt."""
        stop = "" if self.colour else "|"
        self.write((f"the prompt{stop}", "dim"))
        for kind, name in enumerate(KINDS):
            self.write((", ", ""), self.styled(kind, name))
        self.write(("\n\n", ""), (visible(prompt) + stop, "dim"))

    def round(self, round: Round) -> None:
        """Show one more round; it is on the screen when this returns."""
        self.rounds.append(round)
        self.write(*(self.styled(kind, "".join(texts)) for kind, texts in enumerate(self.pieces.of(round))))

    def end(self) -> None:
        """Show what is left of the text, and one line of figures."""
        self.write(self.styled(2, self.pieces.rest()), end="\n\n")
        self.write((summary(self.rounds), ""), end="\n")


def summary(rounds: Sequence[Round]) -> str:
    """One line of figures. As in `Record`, the prefill does not count among the rounds."""
    accepted, rejected, target = (sum(map(len, tokens)) for tokens in zip(*rounds)) if rounds else (0, 0, 0)
    line, more, later = f"{accepted + target} tokens", accepted + target - 1, len(rounds) - 1
    if later > 0:
        line += f": 1 from reading the prompt, {more} in {later} rounds ({more / later:.2f} tokens per round)"
    return line + (f"; {accepted} of {accepted + rejected} guesses accepted" if accepted + rejected else "")
