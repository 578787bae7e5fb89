"""The playback page: one self-contained HTML file that plays the rounds of a text.

Its HTML, CSS and JavaScript are the files in `page/`.
"""

from __future__ import annotations

import html
import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from inputs.commandLine import visible
from inputs.files import replace_file
from playback.trace import KINDS, Turn, pieces_of
from utils import UserError

PARTS = Path(__file__).with_name("page")
TAGS = ("u", "del", "b")  # the HTML element of each of KINDS


def write_file(path: str | os.PathLike[str], content: str) -> None:
    """Write what --html asks for, as a whole or not at all. Raises UserError if it cannot be written."""
    real = Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():
            raise OSError("it is not a file")
        replace_file(real, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror or error}") from None


def render(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, title: str, facts: Mapping[str, object]) -> str:
    """A page that plays the rounds of `turns`, one turn after the other. It needs no other file, and may not load any.

    facts: {name: value}, shown under the title. Text of models and users is escaped here, and the script sets it as
    text: it is never markup.
    """
    template, style, script = ((PARTS / name).read_text("utf-8") for name in ("page.html", "style.css", "script.js"))
    pieces = [(turn.prompt, pieces_of(turn.rounds, tokenizer)) for turn in turns]
    # The prompt of a later turn stands in the text, before the turn's first round.
    texts = [
        (f"\n\n{prompt}" if number and not index else "", kinds)
        for number, (prompt, rounds) in enumerate(pieces)
        for index, kinds in enumerate(rounds)
    ]
    return template.format(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'",
        data=as_json([kinds for _, kinds in texts]),
        title=escaped(title),
        facts=" \u00b7 ".join(f"{escaped(name)} {escaped(value)}" for name, value in facts.items()),
        legend=" ".join(f"<{tag}>{html.escape(name)}</{tag}>" for tag, name in zip(TAGS, KINDS)),
        prompt=escaped(turns[0].prompt),
        text="".join(
            "<span>"
            + (f'<span class="dim">{escaped(prompt)}</span>' if prompt else "")
            + "".join(f"<{tag}>{escaped(''.join(pieces))}</{tag}>" for tag, pieces in zip(TAGS, kinds))
            + "</span>"
            for prompt, kinds in texts
        ),
    )


def digest(text: str) -> str:
    """The hash by which the Content-Security-Policy allows a style or a script."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def printable(text: object) -> str:
    """`text` without control characters. U+200C and U+200D stay: some scripts and emoji need them."""
    return visible(str(text), "\n\t\u200c\u200d")


def escaped(text: object) -> str:
    """`text` for HTML."""
    return html.escape(printable(text))


def as_json(rounds: Sequence[Sequence[Sequence[str]]]) -> str:
    """The pieces as JSON, in ASCII and without characters that mean something in HTML."""
    data = json.dumps([[[printable(piece) for piece in pieces] for pieces in kinds] for kinds in rounds])
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data
