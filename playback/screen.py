"""Rounds on a terminal, as they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from inputs.escape import visible
from playback.trace import KINDS, Pieces, Round

COLOURS, MARKS = ("green", "red strike", "bold bright_blue"), ("[]", "~~", None)  # of each of KINDS
Styled = tuple[str, str]  # text, and the style that rich gives it


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

    def look(self, kind: int, text: str) -> Styled:
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
        names = [self.look(kind, name) for kind, name in enumerate(KINDS)]
        self.write((f"the prompt{stop}", "dim"), *(part for name in names for part in ((", ", ""), name)), end="\n\n")
        self.write((visible(prompt) + stop, "dim"))

    def round(self, round: Round) -> None:
        """Show one more round; it is on the screen when this returns."""
        self.rounds.append(round)
        self.write(*(self.look(kind, "".join(texts)) for kind, texts in enumerate(self.pieces.of(round))))

    def end(self) -> None:
        """Show what is left of the text, and one line of figures."""
        self.write(self.look(2, self.pieces.rest()), end="\n\n")
        self.write((summary(self.rounds), ""), end="\n")


def summary(rounds: Sequence[Round]) -> str:
    """One line of figures. As in `Record`, the prefill does not count among the rounds."""
    accepted, rejected, own = (sum(len(round.kinds()[kind]) for round in rounds) for kind in range(len(KINDS)))
    line, more, later = f"{accepted + own} tokens", accepted + own - 1, len(rounds) - 1
    if later > 0:
        line += f": 1 from reading the prompt, {more} in {later} rounds ({more / later:.2f} tokens per round)"
    return line + (f"; {accepted} of {accepted + rejected} guesses accepted" if accepted + rejected else "")
