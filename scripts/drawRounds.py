"""Draw figures/rounds.gif: one prompt continued by plain and by speculative decoding, at the speed at which they ran.

python -m scripts.drawRounds              draws the record docs/records/rounds.json
python -m scripts.drawRounds --measure    decodes the texts anew, writes the record and draws it
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import matplotlib
import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont

from decoding.record import Record
from experiments.runRecord import model_record, origin
from experiments.speed import quiet
from inputs.commandLine import Parser, as_command, number, path, text, visible, whole
from inputs.devices import pick_dtype
from inputs.files import ROOT, replace_file
from inputs.models import default_pair, find_model, load_model, model_version
from inputs.tokenizers import check_tokenizers, load_tokenizer
from methods.drafters import ModelDrafter
from playback.trace import RecordingDrafter, Trace, pieces_of
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, UserError

RECORD = ROOT / "docs" / "records" / "rounds.json"
REPEATS = 5  # of each text; the one that took the median time is kept
SIZE, MARGIN, GAP = (860, 560), 14, 12  # of the picture, in pixels
TOP, LINE, COLUMNS = 118, 16, 53  # where the text begins; the height of a line; its characters
STEP, BEFORE, AFTER = 40, 900, 4500  # milliseconds of a frame, of the prompt alone, and of the whole texts
INK, GREY, DONE, CARD, EDGE = "#222222", "#777777", "#2f6fb3", "#fafafa", "#dddddd"
STYLES = (  # background, colour and name of each kind of token, in the order of `playback.trace.KINDS`
    ("#c7e9c0", INK, "guessed by the draft, accepted"),
    ("#f6c3bd", "#c0392b", "guessed, rejected"),
    ("#bfd3f2", INK, "the target's own token"),
)
TITLES = {
    "plain": ("Plain decoding", "each token takes a forward of the target"),
    "speculative": ("Speculative decoding", "the draft guesses {gamma} tokens, the target scores all in one forward"),
}


class Timed(TypedDict):
    """A text: the pieces of each round, `[round][kind][token]`, and the seconds from the call to each round's end."""

    rounds: list[list[list[str]]]
    seconds: list[float]


class Character(NamedTuple):
    """A character of a text: the number of its token, and its kind; None for the prompt."""

    glyph: str
    token: int
    kind: int | None


@cache
def font(size: int, face: str = "DejaVuSansMono") -> ImageFont.FreeTypeFont:
    """A font that comes with matplotlib."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf", size)


def characters(prompt: str, rounds: Sequence[Sequence[Sequence[str]]], ended: bool) -> Iterator[Character]:
    """The characters of a text after some rounds. Rejected guesses are shown in the last round alone."""
    yield from (Character(glyph, -1, None) for glyph in shown(prompt))
    tokens = 0
    for index, round in enumerate(rounds):
        for kind, pieces in enumerate(round):
            if kind == 1 and (ended or index + 1 < len(rounds)):
                continue
            for piece in pieces:
                yield from (Character(glyph, tokens, kind) for glyph in shown(piece))
                tokens += 1


def shown(piece: str) -> str:
    """A piece of text as it is drawn: in one line, and without control characters."""
    return visible(piece.replace("\n", " "))


def lines_of(text: Iterable[Character]) -> list[list[Character]]:
    """The lines of a text, broken between words. Of several spaces one is drawn."""
    lines: list[list[Character]] = [[]]
    word: list[Character] = []
    for character in [*text, Character(" ", -2, None)]:
        word.append(character)
        if character.glyph != " " and len(word) < COLUMNS:
            continue
        if len(lines[-1]) + len(word) > COLUMNS + (character.glyph == " "):
            lines.append([])
        if word != [character] or character.glyph != " " or (lines[-1] and lines[-1][-1].glyph != " "):
            lines[-1] += word
        word = []
    return lines


def draw_text(canvas: ImageDraw.ImageDraw, left: int, text: Iterable[Character]) -> None:
    """Draw a text below its counters: each token on the background of its kind, rejected guesses struck through."""
    width = font(12).getlength("m")
    rows = (SIZE[1] - TOP - 52) // LINE
    for row, line in enumerate(lines_of(text)[-rows:]):
        y, start = TOP + row * LINE, 0
        while start < len(line):
            first = line[start]
            end = start
            while end < len(line) and line[end].token == first.token and line[end].kind == first.kind:
                end += 1
            words = "".join(character.glyph for character in line[start:end])
            x = left + start * width
            colour = GREY
            if first.kind is not None:
                background, colour, _ = STYLES[first.kind]
                canvas.rectangle((x, y, left + end * width - 2, y + LINE - 3), fill=background)
            canvas.text((x, y), words, font=font(12), fill=colour)
            if first.kind == 1:
                canvas.line((x, y + 7, left + end * width - 2, y + 7), fill=colour)
            start = end


def draw_panel(canvas: ImageDraw.ImageDraw, left: int, name: str, record: dict[str, Any], seconds: float) -> None:
    """Draw one of the two texts as it is after some seconds."""
    text: Timed = record["texts"][name]
    rounds = [round for round, end in zip(text["rounds"], text["seconds"]) if end <= seconds]
    ended = len(rounds) == len(text["rounds"])
    right = left + (SIZE[0] - 2 * MARGIN - GAP) // 2
    canvas.rounded_rectangle((left, 8, right, SIZE[1] - 40), 8, fill=CARD, outline=EDGE)
    title, words = TITLES[name]
    canvas.text((left + 12, 16), title, font=font(17, "DejaVuSans-Bold"), fill=INK)
    canvas.text((left + 12, 40), words.format(**record["flags"]), font=font(11, "DejaVuSans"), fill=GREY)
    tokens = sum(len(accepted) + len(own) for accepted, _, own in rounds)
    counters = {
        "tokens": str(tokens),
        "target forwards": str(len(rounds)),
        "tokens a forward": f"{tokens / len(rounds):.2f}" if rounds else "",
        "seconds": f"{min(seconds, text['seconds'][-1]):.2f}",
    }
    for column, (label, value) in enumerate(counters.items()):
        x = left + 12 + 100 * column
        canvas.text((x, 60), value, font=font(20, "DejaVuSansMono-Bold"), fill=DONE if ended else INK)
        canvas.text((x, 86), label, font=font(10, "DejaVuSans"), fill=GREY)
    draw_text(canvas, left + 12, characters(record["prompt"], rounds, ended))


def frame(record: dict[str, Any], seconds: float) -> Image.Image:
    """The picture after some seconds."""
    image = Image.new("RGB", SIZE, "white")
    canvas = ImageDraw.Draw(image)
    for column, name in enumerate(TITLES):
        draw_panel(canvas, MARGIN + column * ((SIZE[0] - 2 * MARGIN + GAP) // 2), name, record, seconds)
    x, y, small = MARGIN + 4, SIZE[1] - 32, font(11, "DejaVuSans")
    for background, _, label in STYLES:
        canvas.rectangle((x, y + 1, x + 20, y + 12), fill=background)
        canvas.text((x + 26, y), label, font=small, fill=INK)
        x += 46 + int(small.getlength(label))
    models, machine, slower = record["models"].values(), record["machine"], record["flags"]["slower"]
    pair = " with ".join(f"{model['name']} ({model['parameters'] / 1e6:.1f} M)" for model in models)
    speed = "true speed" if slower == 1 else f"shown {slower} times slower than it ran"
    where = f"{speed}: {pair}, {record['dtype']}, eager, {machine['processor']}, {machine['threads']} thread"
    where += "s" if machine["threads"] > 1 else ""
    canvas.text((MARGIN + 4, y + 16), visible(where), font=font(10, "DejaVuSans"), fill=GREY)
    canvas.text((x + 20, y), "rejected guesses vanish with the next round", font=font(10, "DejaVuSans"), fill=GREY)
    return image


@cache
def palette() -> Image.Image:
    """The colours of the picture: each background, and its blends with what is written on it."""
    pairs = [(paper, ink) for paper in ("#ffffff", CARD) for ink in (INK, GREY, DONE)]
    pairs += [(background, ink) for background, ink, _ in STYLES]
    colours = [
        round(a + (b - a) * step / 6)
        for pair in pairs
        for step in range(7)
        for a, b in zip(*(ImageColor.getrgb(colour) for colour in pair))
    ]
    image = Image.new("P", (1, 1))
    image.putpalette([*ImageColor.getrgb(EDGE), *colours])
    return image


def draw_rounds(record: dict[str, Any], path: Path, comment: str = "") -> None:
    """Write the moving picture of a record as a GIF. comment: is kept in the file."""
    slower = record["flags"]["slower"]
    longest = max(text["seconds"][-1] for text in record["texts"].values())
    times = [0.0, *(1e-3 * STEP * n / slower for n in range(1, int(1e3 * longest * slower / STEP) + 1)), longest]
    colours = palette()  # One for all frames: what does not change is not stored.
    frames = [frame(record, seconds).quantize(palette=colours, dither=Image.Dither.NONE) for seconds in times]
    path.parent.mkdir(exist_ok=True)
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=[BEFORE, *[STEP] * (len(frames) - 2), AFTER],
        loop=0,
        comment=comment.encode(),
        optimize=True,  # stores of a frame only what has changed
    )


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Decode the text with and without guesses, in turn; the record of both."""
    sampling, dtype = Sampling(args.temperature), pick_dtype("cpu")
    tokenizer = load_tokenizer(args.target)
    check_tokenizers(tokenizer, load_tokenizer(args.draft), (args.target, args.draft))
    names = {"target": args.target, "draft": args.draft}
    models = {role: load_model(name, tokenizer, dtype, "cpu") for role, name in names.items()}
    prompt = tokenizer(args.prompt)["input_ids"]
    watched = RecordingDrafter(ModelDrafter(models["draft"]))
    decoders = {
        "plain": (partial(regrSampling, [prompt], models["target"], args.maxLen), None),
        "speculative": (partial(specSampling, [prompt], models["target"], watched, args.maxLen, args.gamma), watched),
    }
    runs: dict[str, list[tuple[Record, Trace]]] = {name: [] for name in decoders}
    for _ in range(1 + REPEATS):  # The first time warms up.
        for name, (decode, drafter) in decoders.items():
            trace, generator = Trace(drafter), torch.Generator().manual_seed(args.seed)
            with quiet("cpu"):
                _, (record,) = decode(sampling=sampling, generator=generator, callback=trace.callback)
            runs[name].append((record, trace))
    texts: dict[str, Timed] = {}
    for name, repeats in runs.items():
        middle = statistics.median_low(record.times[-1] for record, _ in repeats[1:])
        record, trace = next(run for run in repeats if run[0].times[-1] == middle)
        seconds = [round(seconds, 5) for seconds in record.times]
        texts[name] = {"rounds": pieces_of(trace.rounds, tokenizer), "seconds": seconds}
    versions = {role: model_record(name, model_version(find_model(name)), models[role]) for role, name in names.items()}
    flags = {name: value for name, value in vars(args).items() if name not in ("measure", "out")}
    made = origin(argv, flags, "cpu", versions)
    return {"program": "-m scripts.drawRounds", **made, "dtype": dtype, "prompt": args.prompt, "texts": texts}


def work(argv: Sequence[str] | None) -> None:
    """Parse the flags, measure if they say so, and draw."""
    parser = Parser(
        prog="python -m scripts.drawRounds",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target, draft = default_pair()
    parser.add_argument("--measure", action="store_true", help="decode anew; all flags but --out need this one")
    parser.add_argument("--target", type=text, default=target)
    parser.add_argument("--draft", type=text, default=draft)
    parser.add_argument("--prompt", type=text, default="The old man closed the door behind him, and")
    parser.add_argument("--gamma", type=whole(1, 1000), default=4)
    parser.add_argument("--temperature", type=number(0, 1000), default=0.85)
    parser.add_argument("--maxLen", type=whole(1), default=320)
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0)
    parser.add_argument("--slower", type=whole(1, 1000), default=1, help="play the text so many times slower")
    parser.add_argument("--out", type=path, default=ROOT / "figures" / "rounds.gif")
    args = parser.parse_args(argv)
    if args.out.suffix != ".gif" or not args.out.resolve().parent.is_dir():
        raise UserError(f"--out {args.out} must name a .gif file in a folder that exists")
    changed = [name for name, value in vars(args).items() if name != "out" and value != parser.get_default(name)]
    if changed and not args.measure:
        raise UserError(f"--{changed[0]} needs --measure: without it the record is drawn as it is")
    if args.measure:
        words = list(sys.argv[1:] if argv is None else argv)
        replace_file(RECORD, json.dumps(measure(args, words), ensure_ascii=False) + "\n")
    draw_rounds(json.loads(RECORD.read_text(encoding="utf-8")), args.out)
    print(f"Written to {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command("drawRounds", lambda: work(argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
