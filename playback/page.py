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
KEPT = "\n\t\u200c\u200d"  # control characters of a page; some scripts and emoji need U+200C and U+200D


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


def render(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, title: str, facts: Mapping[str, object]) -> str:
    """A page that plays the rounds of `turns`, one turn after the other. It needs no other file, and may not load any.

    facts: {name: value}, shown under the title. Text of models and users is escaped here, and the script sets it as
    text: it is never markup.
    """

    def allowed(text: str) -> str:
        """The hash by which the Content-Security-Policy allows a style or a script."""
        return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()

    def escaped(text: object) -> str:
        return html.escape(visible(str(text), KEPT))

    template, style, script = ((PARTS / name).read_text("utf-8") for name in ("page.html", "style.css", "script.js"))
    data: list[list[list[str]]] = []  # [round][kind][token]
    text = ""
    for number, turn in enumerate(turns):
        for index, kinds in enumerate(pieces_of(turn.rounds, tokenizer)):
            data.append([[visible(piece, KEPT) for piece in pieces] for pieces in kinds])
            # The prompt of a later turn stands in the text, before the turn's first round.
            prompt = f'<span class="dim">\n\n{escaped(turn.prompt)}</span>' if number and not index else ""
            spans = (f"<{tag}>{escaped(''.join(pieces))}</{tag}>" for tag, pieces in zip(TAGS, kinds))
            text += f"<span>{prompt}{''.join(spans)}</span>"
    return template.format(
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src '{allowed(style)}'; script-src '{allowed(script)}'",
        # In ASCII and without characters that mean something in HTML.
        data=json.dumps(data).replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"),
        title=escaped(title),
        facts=" \u00b7 ".join(f"{escaped(name)} {escaped(value)}" for name, value in facts.items()),
        legend=" ".join(f"<{tag}>{escaped(name)}</{tag}>" for tag, name in zip(TAGS, KINDS)),
        prompt=escaped(turns[0].prompt),
        text=text,
    )
