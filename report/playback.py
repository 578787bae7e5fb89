"""What happens in each round of the speculative decoding of one prompt: streamed on a terminal, and as a web page that
plays it."""

import copy
import html
import json
import os
import tempfile
from base64 import b64encode
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.text import Text

from inputs.escape import visible
from utils import UserError

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
KINDS = ("guesses accepted", "guesses rejected", "the target's own tokens")  # in the order of Round's fields
COLOURS, MARKS, TAGS = ("green", "red strike", "bold bright_blue"), ("[]", "~~", None), ("u", "del", "b")


@dataclass
class Round:
    """Token ids of one round: guesses that stood, guesses that did not, and the target's own."""

    accepted: list
    rejected: list
    own: list


class Watched:
    """A drafter that remembers what it guessed last for row 0."""

    def __init__(self, drafter):
        self.drafter, self.models, self.begin, self.rewind = drafter, drafter.models, drafter.begin, drafter.rewind
        self.guesses = []

    def draft(self, *args):
        drafts, q = self.drafter.draft(*args)
        real = q[0].gather(-1, drafts[0][:, None])[:, 0] > 0  # the others only fill the row up
        self.guesses = drafts[0][real].tolist()
        return drafts, q


class Trace:
    """The rounds of row 0, collected by a sampler's `callback`; `on_round(round)` hears of each as it ends.

    watched: the sampler's drafter; None where nothing guesses."""

    def __init__(self, watched=None, on_round=None):
        self.watched, self.on_round, self.rounds = watched, on_round, []

    def callback(self, row, tokens, guessed):
        if row == 0:
            # The prompt is read before anything is guessed: what a used drafter remembers then is another prompt's.
            guesses = self.watched.guesses if self.watched and self.rounds else []
            self.rounds.append(Round(tokens[:guessed], guesses[guessed:], tokens[guessed:]))
            if self.on_round:
                self.on_round(self.rounds[-1])


class Pieces:
    """The text each token adds: all pieces joined, and `rest()` after them, are the decoded text.

    A token that ends within a character is held back until the character is whole. Only tokens since the last place but
    one between characters are decoded, so a token costs the same however long the text is."""

    def __init__(self, tokenizer):
        self.tokenizer, self.before, self.fresh, self.given = tokenizer, [], [], 0

    def decode(self):
        return self.tokenizer.decode(self.before + self.fresh)

    def add(self, token):
        self.fresh = [*self.fresh, token]
        text = self.decode()
        whole = text.rstrip(UNFINISHED)
        piece, self.given = whole[self.given :], max(self.given, len(whole))
        if whole == text:
            self.before, self.fresh = self.fresh, []
            self.given = len(self.decode())
        return piece

    def rest(self):
        """What is held back: a character that was never finished."""
        return self.decode()[self.given :]

    def of(self, round):
        """The pieces of the next round's tokens, as lists in the order of KINDS."""
        accepted = [self.add(token) for token in round.accepted]
        fork = copy.copy(self)  # rejected guesses follow the accepted ones, and leave no trace
        rejected = [fork.add(token) for token in round.rejected]
        if rejected:
            rejected[-1] += fork.rest()
        return [accepted, rejected, [self.add(token) for token in round.own]]


def pieces_of(rounds, tokenizer):
    """The pieces of all rounds, nothing held back."""
    pieces = Pieces(tokenizer)
    texts = [pieces.of(round) for round in rounds]
    if pieces.rest():
        (texts[-1][2] or texts[-1][0])[-1] += pieces.rest()
    return texts


def summary(rounds):
    """One line of figures. As in `Record`, the reading of the prompt does not count among the rounds."""
    accepted, rejected, own = (sum(len(astuple(round)[kind]) for round in rounds) for kind in range(len(KINDS)))
    line, more, later = f"{accepted + own} tokens", accepted + own - 1, len(rounds) - 1
    if later > 0:
        line += f": 1 from reading the prompt, {more} in {later} rounds ({more / later:.2f} tokens per round)"
    return line + (f"; {accepted} of {accepted + rejected} guesses accepted" if accepted + rejected else "")


class Screen:
    """Rounds streamed on a terminal: `begin(prompt)`, `round(round)` for each, `end()`.

    colour: of the kinds of tokens; without it they have marks. None: what the terminal and its environment want."""

    def __init__(self, tokenizer, colour=None, file=None):
        if colour is None:
            console = Console(file=file)
            colour = console.color_system is not None and not console.no_color
        self.colour, self.pieces, self.rounds = colour, Pieces(tokenizer), []
        self.console = Console(
            file=file,
            color_system="standard" if colour else None,
            force_terminal=colour,
            no_color=not colour,
            soft_wrap=True,
        )

    def look(self, kind, text):
        """`text` as its kind looks. Where guesses were rejected no line ends, so their newlines are escaped too."""
        text = visible(text, "" if kind == 1 else "\n")
        marks = "" if self.colour or not text else MARKS[kind]
        return (f"{marks[0]}{text}{marks[1]}" if marks else text), COLOURS[kind]

    def write(self, *parts, end=""):
        """Print (string, style) pairs: never markup, and "?" for what the file's encoding lacks."""
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        parts = [(text.encode(encoding, "replace").decode(encoding), style) for text, style in parts]
        self.console.print(Text.assemble(*parts), end=end)

    def begin(self, prompt):
        stop = "" if self.colour else "|"
        names = [self.look(kind, name) for kind, name in enumerate(KINDS)]
        self.write((f"the prompt{stop}", "dim"), *(part for name in names for part in ((", ", ""), name)), end="\n\n")
        self.write((visible(prompt) + stop, "dim"))

    def round(self, round):
        """One more round, on the screen when this returns."""
        self.rounds.append(round)
        self.write(*(self.look(kind, "".join(texts)) for kind, texts in enumerate(self.pieces.of(round))))

    def end(self):
        self.write(self.look(2, self.pieces.rest()), end="\n\n")
        self.write((summary(self.rounds), ""), end="\n")


def write_page(path, prompt, rounds, tokenizer, title, facts):
    """Write a page that plays `rounds`, whole or not at all; it needs no other file and may load none.

    facts: {name: value} shown under the title. Text of models and users is escaped in the page, and the script sets it
    as text: it is never markup."""

    def safe(text, mark=html.escape):
        return mark(visible(str(text), "\n\t\u200c\u200d"))  # the last two belong to some scripts, and to emoji

    named, path, file = path, Path(os.path.realpath(path)), None
    texts = pieces_of(rounds, tokenizer)
    data = json.dumps([[[safe(piece, str) for piece in pieces] for pieces in kinds] for kinds in texts])  # ASCII only
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    style, script = ("'sha256-" + b64encode(sha256(text.encode()).digest()).decode() + "'" for text in (STYLE, SCRIPT))
    page = PAGE.format(
        style=STYLE,
        script=SCRIPT,
        policy=f"default-src 'none'; style-src {style}; script-src {script}",
        data=data,
        title=safe(title),
        facts=" \u00b7 ".join(f"{safe(name)} {safe(value)}" for name, value in facts.items()),
        legend=" ".join(f"<{tag}>{name}</{tag}>" for tag, name in zip(TAGS, map(html.escape, KINDS))),
        prompt=safe(prompt),
        text="".join(
            "<span>"
            + "".join(f"<{tag}>{safe(''.join(pieces))}</{tag}>" for tag, pieces in zip(TAGS, kinds))
            + "</span>"
            for kinds in texts
        ),
    )
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(page)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"--html {named} cannot be written: {error.strerror or error}") from None
    finally:
        if file:
            Path(file.name).unlink(missing_ok=True)


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1><p class="dim">{facts}</p>
<p id="legend">{legend} <label><input type="checkbox" id="clean"> hide rejected guesses in the text</label></p>
<div id="player" hidden><p><button id="first">First</button><button id="back">Back</button>
<button id="play">Play</button><button id="forward">Forward</button><button id="last">Last</button>
<input type="range" id="slider" min="0" aria-label="round"><select id="speed" aria-label="speed">
<option value="1">1 round/s<option value="2" selected>2 rounds/s<option value="5">5 rounds/s
<option value="20">20 rounds/s</select></p><p><strong id="where"></strong></p><p id="row"></p>
<dl><div><dt>tokens<dd id="tokens"></div><div><dt>forwards of the target<dd id="forwards"></div>
<div><dt>tokens per forward after the prompt's<dd id="mean"></div>
<div><dt>guesses accepted<dd id="guesses"></div></dl></div>
<div id="box"><span class="dim" id="prompt">{prompt}</span><span id="text">{text}</span></div>
<script type="application/json" id="rounds">{data}</script><script>{script}</script></body></html>
"""
STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1f2328; --dim: #656d76; --line: #d0d7de; --now: #fff3b8;
  --u: #1a7f37; --del: #b42318; --b: #1d4ed8 }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --ink: #e6edf3; --dim: #8d96a0; --line: #3d444d;
  --now: #453a08; --u: #7ee787; --del: #ff9d94; --b: #8cc2ff } }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 56rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: 0 } p, dl { margin: .7rem 0 } .dim, small, dt { color: var(--dim) }
u { color: var(--u); text-underline-offset: .2em } del { color: var(--del) } b { color: var(--b) }
#legend > * { margin-right: 1.2em } [hidden], body:has(#clean:checked) #text del { display: none }
#box { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; border: 1px solid var(--line);
  border-radius: 6px; padding: 1rem } #text del { white-space: normal } .now { background: var(--now) }
@media screen { .live #box { max-height: 50vh; overflow: auto } } button, select { font: inherit }
#player > * { display: flex; flex-wrap: wrap; gap: .5rem } #slider { flex: 1 } #play { min-width: 5rem }
#row { min-height: 3.9rem } #row > * { display: flex; flex-direction: column; align-items: center }
#row :is(u, del, b) { padding: .1rem .45rem; font-family: ui-monospace, monospace; border: 2px solid var(--u);
  border-radius: 5px; white-space: pre-wrap } #row del { border: 2px dashed var(--del) }
#row b { border-color: var(--b); background: var(--b); color: var(--back) }
dl div { margin-right: 1.6rem } dt { font-size: .85rem } dd { margin: 0; font-size: 1.2rem; font-weight: 600 }
"""
SCRIPT = r"""
"use strict";
const $ = id => document.getElementById(id), rounds = JSON.parse($("rounds").textContent), last = rounds.length - 1;
const spans = [...$("text").children];
let at = 0, timer = 0;
const token = (tag, verdict) => piece => {  // a piece is empty where its token ends within a character
  const box = document.createElement("span"), signs = {" ": "\u2423", "\t": "\u21e5", "\n": "\u21b5"};
  const text = piece.replace(/[ \t\n]/g, blank => signs[blank]) || "\u2026";
  for (const [name, content] of [[tag, text], ["small", verdict]])
    box.appendChild(document.createElement(name)).textContent = content;
  return box;
};
function show(round) {
  spans[at].className = "";
  at = Math.max(0, Math.min(last, round));
  spans[at].className = "now";
  $("text").replaceChildren(...spans.slice(0, at + 1));
  spans[at].scrollIntoView({block: "nearest"});
  const [accepted, rejected, own] = rounds[at];
  $("row").replaceChildren(...accepted.map(token("u", "accepted")),
    ...rejected.slice(0, own.length).map(token("del", "rejected")),  // none where the text ended before
    ...rejected.slice(own.length).map(token("del", "dropped")), ...own.map(token("b", "target")));
  const [kept, fell, added] = [0, 1, 2].map(kind => rounds.slice(0, at + 1).reduce((n, r) => n + r[kind].length, 0));
  const values = {where: at ? `Round ${at} of ${last}` : "The prompt is read", tokens: kept + added, forwards: at + 1,
    guesses: `${kept} of ${kept + fell}`, mean: at ? ((kept + added - 1) / at).toFixed(2) : "\u2013"};
  for (const id in values) $(id).textContent = values[id];
  $("slider").value = at;
  if (!timer) try { history.replaceState(null, "", "#" + at); } catch { }  // browsers limit how often
}
const go = round => { clearInterval(timer); timer = 0; $("play").textContent = "Play"; show(round); };
function play() {
  if (timer) return go(at);
  if (at === last) show(0);
  $("play").textContent = "Pause";
  timer = setInterval(() => at + 1 < last ? show(at + 1) : go(last), 1000 / $("speed").value);
}
const acts = {first: () => go(0), back: () => go(at - 1), play, forward: () => go(at + 1), last: () => go(last)};
const keys = {Home: "first", ArrowLeft: "back", " ": "play", ArrowRight: "forward", End: "last"};
onkeydown = event => {
  const native = event.key === " " ? "button, select, #clean" : "select";  // what the key means something else to
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || event.target.matches(native)) return;
  event.preventDefault();
  $(keys[event.key]).click();
};
onhashchange = () => location.hash === "#play" ? (go(0), play()) : go(parseInt(location.hash.slice(1), 10) || 0);
if (last >= 0) {
  for (const id in acts) $(id).onclick = acts[id];
  $("slider").max = last;
  $("slider").oninput = event => go(Number(event.target.value));
  $("speed").onchange = () => { if (timer) go(at), play(); };
  document.body.className = "live";
  $("player").hidden = false;
  onhashchange();
}
"""
