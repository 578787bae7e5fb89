"""Draw figures/rounds.gif: one prompt continued by plain and by speculative decoding, at the speed at which they ran.
`python -m scripts.drawRounds` decodes the texts anew, greedily and compiled, the target's own copy guessing, for
docs/records/rounds.json, which `make docs` draws."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from PIL import Image, ImageDraw
from PIL.ImageFont import load_default as font

from experiments.prepare import load_inputs
from experiments.runRecord import run_record
from experiments.settings import parse
from experiments.speed import quiet
from inputs.commandLine import as_script, script_parser, visible
from inputs.files import ROOT, replace_file
from methods.catalogue import build
from playback.trace import Trace, decoded_rounds
from scripts.keepRecord import without_places
from utils import GREEDY, UserError

FLAGS = (  # In bfloat16 rounding may fork a greedy text.
    "--target SmolLM2-135M-Instruct --draft self --draftBits 6 --compare fixed --compile --temperature 0 --device cpu "
    "--dtype float32"
)
PROMPT, TOKENS, REPEATS = "Photosynthesis is the process by which", 169, 9
SIZE, TOP, LINE, COLUMNS, ROWS = (860, 432), 118, 16, 60, 16  # pixels; characters of a line, lines of a text
STEP, BEFORE, AFTER = 40, 900, 4500  # milliseconds of a frame, of the prompt alone, and of the whole texts
STYLES = (  # background, colour and name of each kind of token, as in `playback.trace.KINDS`, and of the prompt
    *(("#c7e9c0", "#222222", "guessed by the draft, accepted"), ("#f6c3bd", "#c0392b", "guessed, rejected")),
    *(("#bfd3f2", "#222222", "the target's own token"), ("#fafafa", "#777777", "the prompt")),
)


def lines_of(prompt: str, rounds: Sequence[Sequence[Sequence[str]]], ended: bool) -> Iterator[list[tuple[str, int]]]:
    """The lines of a text after some rounds, of (glyph, kind) each. Rejected guesses are those of the last round."""
    glyphs = [(glyph, 3) for glyph in visible(prompt.replace("\n", " "))]
    for index, kinds in enumerate(rounds):
        for kind, pieces in enumerate(kinds):
            if kind != 1 or (index + 1 == len(rounds) and not ended):
                glyphs += [(glyph, kind) for glyph in visible("".join(pieces).replace("\n", " "))]
    text, at = "".join(glyph for glyph, _ in glyphs), 0
    for line in wrap(text, COLUMNS, break_on_hyphens=False):
        at = text.index(line, at) + len(line)
        yield glyphs[at - len(line) : at]


def draw_rounds(record: dict[str, Any], path: Path, comment: str) -> None:
    """Write the moving picture of a record as a GIF. comment: is kept in the file."""
    longest, frames = max(text["seconds"][-1] for text in record["texts"].values()), []
    models, machine = " with ".join(model["name"] for model in record["models"].values()), record["machine"]
    where = f"true speed: {models}, greedy, compiled, {record['dtype']}; {machine['processor']}, "
    where += f"{machine['threads']} threads"
    for seconds in [*(1e-3 * STEP * n for n in range(int(1e3 * longest / STEP) + 1)), longest]:
        frames.append(Image.new("RGB", SIZE, "white"))
        canvas = ImageDraw.Draw(frames[-1])
        for left, (name, text) in zip((26, 448), record["texts"].items()):
            rounds = [kinds for kinds, end in zip(text["rounds"], text["seconds"]) if end <= seconds]
            tokens, now = sum(len(kinds[0]) + len(kinds[2]) for kinds in rounds), min(seconds, text["seconds"][-1])
            canvas.rounded_rectangle((left - 12, 8, left + 398, SIZE[1] - 40), 8, fill="#fafafa", outline="#dddddd")
            canvas.text((left, 20), f"{name.capitalize()} decoding", font=font(18), fill="black")
            mean = tokens / max(1, len(rounds))
            counts = f"{tokens} tokens, {len(rounds)} target forwards, {mean:.2f} tokens a forward"
            canvas.text((left, 50), counts, font=font(15), fill="black")
            canvas.text((left, 74), f"{now:.2f} seconds", font=font(20), fill="#2f6fb3" if now < seconds else "black")
            lines = list(lines_of(record["prompt"], rounds, len(rounds) == len(text["rounds"])))[-ROWS:]
            for y, line in zip(range(TOP, SIZE[1], LINE), lines):
                end = float(left)
                for kind, group in groupby(line, key=lambda glyph: glyph[1]):  # each token on its kind's background
                    words, (background, colour, _), x = "".join(glyph for glyph, _ in group), STYLES[kind], end
                    end += font(13).getlength(words)
                    canvas.rectangle((x, y, end, y + LINE - 2), fill=background)
                    canvas.text((x, y), words, font=font(13), fill=colour)
                    canvas.line((x, y + 8, end, y + 8), fill=colour, width=int(kind == 1))
        x = 18.0
        for background, _, label in STYLES[:-1]:
            canvas.rectangle((x, SIZE[1] - 34, x + 20, SIZE[1] - 22), fill=background)
            canvas.text((x + 26, SIZE[1] - 36), label, font=font(12), fill="black")
            x += 46 + font(12).getlength(label)
        canvas.text((18, SIZE[1] - 18), visible(where), font=font(11), fill="#777777")
    palette = frames[-2].quantize(128, Image.Quantize.MAXCOVERAGE)  # One for all: what stays is not stored again.
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in frames)
    times, about = [BEFORE, *[STEP] * (len(others) - 1), AFTER], comment.encode()
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, comment=about, optimize=True)


@as_script("drawRounds", "Nothing was written.")
def main() -> None:
    """Decode the text with and without guesses, alternately; the repeat that took the median time is kept."""
    script_parser("python -m scripts.drawRounds", __doc__).parse_args()  # There is only --help.
    inputs = load_inputs(parse([*FLAGS.split(), "--prompt", PROMPT]))
    models = inputs.load_first()
    samplers = build(["target", "fixed"], models, inputs.settings.decoding)
    runs: dict[str, list[Any]] = {"plain": [], "speculative": []}
    for name, sampler in [*zip(runs, samplers.values())] * (1 + REPEATS):  # The first time warms up.
        trace, seeded = Trace(), torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"observer": trace.observer} if name == "speculative" else {}
        with quiet(inputs.device):
            _, (timed,) = sampler(
                inputs.rows, max_len=TOKENS, sampling=GREEDY, generator=seeded, callback=trace.callback, **options
            )
        runs[name].append({"rounds": decoded_rounds(trace.rounds, inputs.tokenizer), "seconds": timed.times})
    texts = {name: sorted(of[1:], key=lambda run: run["seconds"][-1])[REPEATS // 2] for name, of in runs.items()}
    written = ["".join(chain(*(chain(*kinds[::2]) for kinds in text["rounds"]))) for text in texts.values()]
    if len(set(written)) > 1:
        raise UserError("The two texts differ.")
    record = without_places(run_record(inputs, models, [])) | {"program": "-m scripts.drawRounds"}
    record |= {"dtype": inputs.dtype, "prompt": PROMPT, "texts": texts}
    replace_file(ROOT / "docs/records/rounds.json", json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
