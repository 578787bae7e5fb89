"""What is shown of each round: the pieces of text, the terminal, and the page, in a browser if one is installed."""

import base64
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser

import pytest
from helpers import tiny

from inputs.commandLine import visible
from inputs.models import load_tokenizer
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from playback import play as play_module
from playback import trace as trace_module
from playback.play import Screen, html_page, write_file
from playback.trace import Pieces, Round, Trace, Turn, decoded_rounds
from regrSampling import regrSampling
from specSampling import specSampling

CURSED = "</script><img src=x onerror=alert(1)> & <b> \u2028 <!-- "
MANY_BYTES = "na\u00efve \U0001f600\U0001f44d\U0001f3fd \u6f22\u5b57\u4eee\u540d, \u00a0\u3000\u0939\u093f\u0928\u094d!"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled-target")


def split(tokens, seed=0):
    """`tokens` as rounds of random lengths, with rejected guesses at random."""
    chance, tokens = random.Random(seed), list(tokens)
    rounds = [Round([], [], [tokens.pop(0)])]
    while tokens:
        count = min(chance.randrange(4), len(tokens) - 1)
        rejected = [chance.randrange(4096) for _ in range(chance.randrange(4))]
        rounds.append(Round(tokens[:count], rejected, tokens[count : count + 1]))
        del tokens[: count + 1]
    return rounds


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def rounds_of(tokenizer, text):
    return split(ids(tokenizer, text))


# Pieces of text.


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_of_all_committed_tokens_are_the_decoded_text(tokenizer, seed):
    """Also of tokens drawn at random, whose bytes are often no text at all."""
    chance = random.Random(seed)
    tokens = chance.choices(range(1, 300), k=60) if seed % 2 else tokenizer(MANY_BYTES * 3)["input_ids"]
    tokens = tokens[: len(tokens) - seed // 2]  # the last character may be cut
    rounds, text, committed = split(tokens, seed), "", []
    for round, (accepted, rejected, target) in zip(rounds, decoded_rounds(rounds, tokenizer)):
        assert list(map(len, (accepted, rejected, target))) == list(map(len, round))
        committed, text = committed + round.accepted, text + "".join(accepted)
        if rejected:
            assert text + "".join(rejected) == tokenizer.decode(committed + round.rejected)
        committed, text = committed + round.target, text + "".join(target)
    assert committed == tokens and text == tokenizer.decode(tokens)


def test_a_character_comes_whole_with_its_last_token(tokenizer):
    tokens, pieces = ids(tokenizer, "a\U0001f600\u6f22"), Pieces(tokenizer)
    assert len(tokens) > 3
    assert [piece for token in tokens if (piece := pieces.add(token))] == ["a", "\U0001f600", "\u6f22"]
    assert pieces.rest() == ""


# Rounds.


def traced(decode, *args, on_round=lambda round: None, **how):
    """The trace of the first row of a decoder's text, and the row's record. They must agree."""
    trace = Trace(on_round)
    tokens, records = decode(*args, **how, callback=trace.callback, observer=trace.observer)
    assert trace.tokens == tokens[0]
    assert [len(round.accepted + round.rejected) for round in trace.rounds] == records[0].drafted
    return trace, records[0]


def test_a_trace_holds_what_the_record_counts():
    """In a batch of row 0 alone, with its own guesses: it has fewer than the others, or none."""
    target, drafter, heard = tiny(), ModelDrafter(tiny(seed=1)), []
    for _ in range(2):  # A drafter used before does not lend its last guesses to the next prompt.
        trace, record = traced(specSampling, [[1, 2, 3]], target, drafter, 10, on_round=heard.append)
        assert [len(round.accepted) for round in trace.rounds] == record.accepted
        assert heard[-len(trace.rounds) :] == trace.rounds and any(round.rejected for round in trace.rounds)
    traced(specSampling, [[1, 2, 3], [5, 6] * 9], tiny(), LookupDrafter(61), 12)
    at_guess = partial(specSampling, end_of_text=lambda text, token: next(count) == 3)  # It ends at a guess.
    count, target = itertools.count(1), tiny()
    trace, _ = traced(at_guess, [[1, 2, 3]], target, ModelDrafter(target), 10)
    assert trace.rounds[-1].rejected == trace.rounds[-1].target == []
    trace = Trace()
    (tokens,), _ = regrSampling([[1, 2]], tiny(), 9, callback=trace.callback)
    assert trace.rounds == [Round([], [], [token]) for token in tokens]  # all the target's own


def test_a_speed_is_that_after_the_prefill_without_the_time_of_showing(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(trace_module.time, "perf_counter", lambda: clock[0])
    trace = Trace(lambda round: clock.insert(0, clock[0] + 100))
    assert trace.speed() == ""
    for tokens, guesses, guessed in ([3], [], 0), ([4, 5], [4], 1), ([4, 0], [4, 0, 5], 2):
        clock[0] += 2
        trace.guesses = guesses
        trace.callback(0, tokens, guessed)
    assert trace.speed() == "[5 tokens, 1 a second]"
    assert trace.speed(plain=0.8) == "[5 tokens, 1 a second, 1.25 times plain decoding]"
    assert trace.speed(plain=0.4) == trace.speed()  # More than 2 tokens a round: the plain rate is not to be trusted.
    # A guess after the end of the text was neither accepted nor rejected.
    assert trace.rounds[-1] == Round([4, 0], [], [])


# The terminal.


class Terminal(io.StringIO):
    """A terminal that remembers what it had been given at each flush."""

    def __init__(self, terminal=True):
        super().__init__()
        self.terminal, self.flushed = terminal, []

    def isatty(self):
        return self.terminal

    def flush(self):
        self.flushed.append(self.getvalue())


def streamed(tokenizer, rounds, prompt="Once", **options):
    screen, file, trace = Screen(tokenizer, **options), options["file"], Trace()
    screen.begin(prompt)
    for round in rounds:
        screen.round(round)
        assert file.flushed[-1] == file.getvalue(), "a round is on the screen when it is over"
    trace.rounds, trace.seconds = rounds, 0.1 * len(rounds)
    screen.end(trace)
    return file.getvalue()


@pytest.fixture
def story(tokenizer):
    rounds = ("", "", " there"), (" was [b]\n ", " not\n", "a"), ("", "", " king ")
    return [Round(*(ids(tokenizer, text) for text in round)) for round in rounds]


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    """The environment of a terminal with colours."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("terminal, given", [(False, ()), (True, ("NO_COLOR", "1")), (True, ("TERM", "dumb"))])
def test_marks_where_there_is_no_colour(tokenizer, story, monkeypatch, terminal, given):
    if given:
        monkeypatch.setenv(*given)
    out = streamed(tokenizer, story, file=Terminal(terminal))
    assert re.fullmatch(
        r"the prompt\|, \[guesses accepted\], ~guesses rejected~, the target's own tokens\n\n"
        r"Once\| there\[ was \[b\]\n \]~ not\\n~a king \n\n"
        r"\d+ tokens: 1 from reading the prompt, \d+ in 2 rounds \([\d.]+ tokens per round\); \d of \d+ guesses "
        r"accepted\n\[\d+ tokens, \d\d+ a second\]\n",
        out,
    )


def test_colour_on_a_terminal(tokenizer, story):
    out = streamed(tokenizer, story, file=Terminal())
    assert "\x1b[9;31m not\\n\x1b[0m" in out and "\x1b[32m was [b]\x1b[0m\n" in out and "\x1b[1;94ma\x1b[0m" in out


@pytest.mark.parametrize("colour", [False, True])
def test_no_control_character_reaches_the_screen(tokenizer, colour):
    evil = "\x1b]0;title\x07\r\x08\x9b2J\u202e\t[bold red]:smile:[/]"
    rounds = rounds_of(tokenizer, evil)
    rounds.append(Round([], ids(tokenizer, evil), ids(tokenizer, ".")))
    out = streamed(tokenizer, rounds, evil, file=Terminal(colour))
    assert ("\x1b[" in out) == colour
    out = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "\\x1b]0;title\\x07\\r\\x08\\x9b2J\\u202e\\t[bold red]:smile:[/]" in out


@pytest.mark.parametrize("terminal, slept", [(True, [1.0, 6.0]), (False, [])])
def test_a_terminal_waits_for_its_reader_and_a_file_does_not(tokenizer, monkeypatch, terminal, slept):
    """Each committed token takes a reader half a second. A round that took as long itself is shown at once."""
    clock, pauses = [10.0], []
    monkeypatch.setattr(play_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(play_module.time, "sleep", lambda seconds: (pauses.append(seconds), clock.append(0.0)))
    screen = Screen(tokenizer, file=Terminal(terminal), pace=2.0)
    screen.begin("Once")
    for tokens, seconds in (2, 0.0), (14, 1.0), (1, 90.0), (1, 0.0):
        screen.round(Round([5] * (tokens - 1), [6] * 9, [7]))
        clock[0] += seconds
    assert [seconds for seconds in pauses if seconds] == slept


def test_the_token_that_ends_a_text_counts_and_is_not_shown(tokenizer):
    end = tokenizer.eos_token_id
    rounds = [Round([], [end], ids(tokenizer, "A")), Round([end], [], [])]
    out = streamed(tokenizer, rounds, ends={end}, file=Terminal(False))
    assert "Once|~<|endoftext|>~A\n\n2 tokens" in out
    # As after Ctrl-C during the prefill.
    assert streamed(tokenizer, [], file=Terminal(False)).endswith("Once|\n\n0 tokens\n")


# The page.


class Page(HTMLParser):
    """Text by the id of the element it is in, rejected guesses left out; and all tags."""

    def __init__(self, source):
        super().__init__()
        self.texts, self.tags, self.open, self.verdicts = {}, [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "input", "img", "br"):
            self.open.append((tag, dict(attributes).get("id", tag)))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:  # options need no end
            pass

    def handle_data(self, data):
        tags, names = zip(*self.open) if self.open else ((), ())
        for name in filter(None, names):
            if name != "text" or "del" not in tags:
                self.texts[name] = self.texts.get(name, "") + data
        if "row" in names and tags[-1] == "small":
            self.verdicts.append(data)


def text_until(tokenizer, turns, last):
    """What a page of these turns shows when the round numbered `last` is over."""
    texts, begun = [], 0
    for turn in turns:
        if rounds := turn.rounds[: max(0, last + 1 - begun)]:
            text = tokenizer.decode([token for round in rounds for token in round.accepted + round.target])
            texts.append(visible(turn.prompt * bool(begun) + text))
        begun += len(turn.rounds)
    return "\n\n".join(texts)


@pytest.fixture
def page(tokenizer, tmp_path):
    """A page whose prompts and text are markup, its turns, and the number of its last round."""
    texts = {CURSED: f"He said {CURSED} and {MANY_BYTES}\nand so on.", f"> {CURSED}\n\n": "No, not today."}
    turns = [Turn(prompt, rounds_of(tokenizer, text)) for prompt, text in texts.items()]
    page = html_page(turns, tokenizer, f"T {CURSED}", {"target <i>": CURSED, "gamma": 4})
    write_file(tmp_path / "page.html", page)
    return tmp_path / "page.html", turns, sum(len(turn.rounds) for turn in turns) - 1


def test_the_page_holds_text_as_text_and_loads_nothing(tokenizer, page):
    path, turns, last = page
    source = path.read_text(encoding="utf-8")
    parsed = Page(source)
    assert not {"img", "i", "link"} & {*parsed.tags}
    assert parsed.tags.count("script") == 2 and "default-src 'none'" in source
    assert not set("<>&\u2028") & set(parsed.texts["rounds"])
    assert "src=x" not in source.replace("&lt;img src=x", "") and "http" not in source.replace("http-equiv", "")
    assert parsed.texts["prompt"] == visible(CURSED)
    assert parsed.texts["text"] == text_until(tokenizer, turns, last)  # without any script
    rounds = [pieces for turn in turns for pieces in decoded_rounds(turn.rounds, tokenizer)]
    for kinds, pieces in zip(json.loads(parsed.texts["rounds"]), rounds, strict=True):
        assert list(map(len, kinds)) == list(map(len, pieces))
        assert "".join(kinds[1]) == visible("".join(pieces[1]), "\n\t\u200c\u200d")
    assert os.listdir(path.parent) == [path.name] and os.stat(path).st_mode & 0o777 == 0o644
    inner = [source.split(f"<{tag}>")[1].split(f"</{tag}>")[0].encode() for tag in ("style", "script")]
    style, script = ("sha256-" + base64.b64encode(hashlib.sha256(part).digest()).decode() for part in inner)
    assert [source.count(f"{name}-src") for name in ("default", "style", "script")] == [1, 1, 1]
    assert f"content=\"default-src 'none'; style-src '{style}'; script-src '{script}'\"" in source


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """`browser(address)`: the document when its scripts have had a while of virtual time."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("there is no Chromium to open the page with")
    profile = tmp_path_factory.mktemp("profile")

    def dump(address):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
        command = [program, *flags, f"--user-data-dir={profile}", address]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120).stdout

    (profile / "trivial.html").write_text("<p id=trivial>yes</p>")
    if Page(dump(f"file://{profile}/trivial.html")).texts.get("trivial") != "yes":
        pytest.skip(f"{program} cannot open a file here")
    return dump


def test_a_browser_opens_the_page_at_a_round_and_plays_its_turns_one_after_the_other(tokenizer, page, browser):
    path, turns, last = page
    first, second = (turn.rounds for turn in turns)
    third, between, played = (Page(browser(f"file://{path}#{at}")) for at in (3, len(first), "play"))
    for shown, at in (third, 3), (between, len(first)), (played, last):
        assert shown.texts["text"] == text_until(tokenizer, turns, at) and shown.texts["forwards"] == str(at + 1)
        assert shown.texts["prompt"] == visible(CURSED) and "img" not in shown.tags
    places = [shown.texts["where"] for shown in (third, between, played)]
    assert places == [f"Round 3 of {last}", "The next prompt is read", f"Round {last} of {last}"]
    accepted, rejected, target = map(len, first[3])
    dropped = ["rejected", *["dropped"] * rejected][:rejected]
    assert third.verdicts == ["accepted"] * accepted + dropped + ["target"] * target
    # Tokens a round, without those of the rounds that read a prompt.
    of_first, of_all = (sum(len(round.accepted + round.target) for round in of) for of in (first, first + second))
    assert between.texts["mean"] == f"{(of_first - 1) / (len(first) - 1):.2f}"
    assert played.texts["mean"] == f"{(of_all - 2) / (last - 1):.2f}" and played.texts["play"] == "Play"


DRIVER = """
const log = [], saw = () => log.push($("where").textContent + location.hash + $("play").textContent);
const press = (key, target = document.body) => { target.dispatchEvent(
  new KeyboardEvent("keydown", {key, bubbles: true})); saw(); };
const pressed = ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft", " ", " ", "x"];
pressed.forEach(key => press(key));
press(" ", $("back"));
$("slider").value = 2;
$("slider").oninput({target: $("slider")});
saw();
press("ArrowRight", $("slider"));
document.title = JSON.stringify(log);
"""


def test_keys_buttons_and_slider(tokenizer, tmp_path, browser, monkeypatch):
    shutil.copytree(play_module.PARTS, tmp_path / "parts")
    with (tmp_path / "parts" / "script.js").open("a") as script:
        script.write(DRIVER)
    monkeypatch.setattr(play_module, "PARTS", tmp_path / "parts")
    write_file(tmp_path / "page.html", html_page([Turn("", rounds_of(tokenizer, MANY_BYTES))], tokenizer, "", {}))
    log = json.loads(Page(browser(f"file://{tmp_path}/page.html")).texts["title"])
    last = int(log[0].split("#")[0].split()[-1])

    def at(round, play="Play"):
        return (f"Round {round} of {last}" if round else "The prompt is read") + f"#{round}{play}"

    pressed = [at(1), at(2), at(1), at(last), at(last), at(0), at(0), at(0, "Pause"), at(0), at(0)]
    assert log == [*pressed, at(0), at(2), at(3)]
