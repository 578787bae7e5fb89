"""How fast the target decodes if its own copy guesses, over the copy's bits, how they were rounded, and gamma.

    python -m scripts.copySweep --target SmolLM2-135M-Instruct --out FOLDER

Writes selfDraft-TARGET.json and figures/selfDraft-TARGET.png: for each copy the timed texts of plain decoding, of the
copy alone, and of speculative sampling, all compiled and in turn. Copies come one after the other, each with plain
decoding beside it. `python -m scripts.keepRecord selfDraft-TARGET --from FOLDER` keeps the record.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, cast

from benchmark.__main__ import sample_prompts
from benchmark.contenders import SAMPLING, Contender, as_contender, as_timed
from decoding.rows import check_room
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from engine.copies import CALIBRATED, Copies, rounded_copy
from engine.quantised import BITS, GROUP
from engine.sharedWeights import sharing_copy
from experiments.lines import TimedText
from experiments.runRecord import model_record, origin
from experiments.speed import measure
from experiments.sweep import predict, scoring_costs
from inputs.commandLine import Parser, as_command, path, text, whole
from inputs.devices import pick_dtype
from inputs.files import ROOT, replace_file
from inputs.models import DTYPES, default_pair, find_model, load_model, model_version, outline
from inputs.progress import Bar, followed
from inputs.tokenizers import load_tokenizer
from methods.drafters import ModelDrafter
from methods.selfDraft import copies_of
from regrSampling import regrSampling
from report.figures import draw_heat_maps
from specSampling import specSampling
from utils import UserError

GAMMAS = range(1, 9)
GROUPS = (GROUP, 2 * GROUP)  # inputs that share a scale, where weights are rounded each by itself
HEAD, HEAD_GAMMA = 8, 5  # bits of the output layer if it has others than the copy, and the one gamma there


class Kind(TypedDict):
    """A copy. calibrated: on the target's own text, or else each weight by itself. head: bits of the output layer, if
    they are others."""

    bits: int
    group: int
    calibrated: bool
    head: int | None


class CopyLine(Kind):
    """A copy, and its timed texts, of the methods that `experiments.sweep.predict` takes: "target" is plain decoding,
    "draft" the copy alone."""

    speed: list[TimedText]


def kinds() -> Iterator[tuple[Kind, Sequence[int]]]:
    """Each copy that is measured, with its gammas. With many bits, what else is chosen makes no difference: there only
    the copies of `--draft self` are measured, whose codes are on disk. Rounding takes longer than timing."""
    for bits in BITS:
        yield {"bits": bits, "group": GROUP, "calibrated": bits in CALIBRATED, "head": None}, GAMMAS
    for group in GROUPS:
        for bits in CALIBRATED:
            yield {"bits": bits, "group": group, "calibrated": False, "head": None}, GAMMAS
    yield {"bits": BITS[0], "group": GROUP, "calibrated": False, "head": HEAD}, [HEAD_GAMMA]


def copy_of(kind: Kind, copies: Copies, eager: CachedModel, target: CachedModel) -> CachedModel:
    """The copy of that kind, compiled. eager: the target, whose weights are rounded. target: it, compiled."""
    if kind["calibrated"] or kind["bits"] not in CALIBRATED:
        return compiled(copies.of(kind["bits"], eager), target)
    return compiled(rounded_copy(eager, kind["bits"], kind["group"], kind["head"]), target)


def methods_of(target: CachedModel, copy: CachedModel, gammas: Sequence[int]) -> dict[str, Contender]:
    """What is timed beside each other for a copy."""
    methods = {"target": as_contender(regrSampling, target=target), "draft": as_contender(regrSampling, target=copy)}
    guessed = partial(as_contender, specSampling, target=target, drafter=ModelDrafter(copy))
    return methods | {f"gamma {gamma}": guessed(gamma=gamma) for gamma in gammas}


def measured(
    eager: CachedModel, target: CachedModel, prompts: Sequence[list[int]], max_len: int, repeats: int, seed: int
) -> list[CopyLine]:
    """One line for each copy."""
    work, lines = list(kinds()), []
    copies = copies_of(eager, BITS, followed)
    texts = sum(2 + len(gammas) for _, gammas in work) * len(prompts) * repeats
    with Bar("copies", texts) as bar:
        for kind, gammas in work:
            copy = copy_of(kind, copies, eager, target)
            if not is_compiled(copy):
                raise UserError(f"the copy of {eager.name} in {kind['bits']} bits cannot be compiled here")
            timed = {name: as_timed(row, max_len) for name, row in methods_of(target, copy, gammas).items()}
            speed = []
            for line in measure(timed, prompts, repeats, seed, "cpu", 1):
                speed.append(line)
                bar.update()
            lines.append(cast(CopyLine, kind | {"speed": speed}))
    return lines


def predictions(record: dict[str, Any]) -> list[tuple[Kind, dict[str, Any]]]:
    """Each copy of a record, and what `experiments.sweep.predict` says of it."""
    costs = cast(Any, {"scoring": record["scoring"], "overlap_by_position": []})
    return [(line, predict(line["speed"], costs)) for line in record["copies"]]


def by_bits(record: dict[str, Any], calibrated: Collection[int] = CALIBRATED) -> dict[int, dict[str, Any]]:
    """{bits: what `predictions` says} of copies with groups of the usual size. calibrated: which of them are, as
    `--draft self` has them, or none."""
    return {
        kind["bits"]: prediction
        for kind, prediction in predictions(record)
        if kind["group"] == GROUP and not kind["head"] and kind["calibrated"] == (kind["bits"] in calibrated)
    }


def draw(record: dict[str, Any], file: Path) -> None:
    """Write the figure of a record: the speed-up over the copy's bits and gamma, with and without calibration."""
    titles = {f"{' and '.join(map(str, CALIBRATED))} bits calibrated": CALIBRATED, "without calibration": ()}
    panels = {title: dict(sorted(by_bits(record, chosen).items())) for title, chosen in titles.items()}
    draw_heat_maps(panels, "bits of the copy", file)


def work(argv: Sequence[str]) -> None:
    """Parse the flags, measure and write."""
    parser = Parser(prog="python -m scripts.copySweep", allow_abbrev=False, description=__doc__)
    parser.add_argument("--target", type=text, default=default_pair()[0], metavar="MODEL", help="(as test.py)")
    for flag, value in {"prompts": 3, "repeats": 1, "maxLen": 64}.items():
        parser.add_argument(f"--{flag}", type=whole(1, 10_000), default=value, metavar="N", help=f"({value})")
    parser.add_argument("--dtype", choices=[name for name in DTYPES if name != "float16"], help="(as test.py)")
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0, metavar="N")
    parser.add_argument("--out", type=path, default=ROOT, metavar="FOLDER", help="(the project's folder)")
    args = parser.parse_args(argv)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    folder, tokenizer, dtype = find_model(args.target), load_tokenizer(args.target), args.dtype or pick_dtype("cpu")
    prompts = sample_prompts(tokenizer, args.prompts)
    check_room(prompts, args.maxLen, [outline(folder, tokenizer)])
    eager = load_model(args.target, tokenizer, dtype, "cpu")
    target = compiled(CachedModel(sharing_copy(eager.model), eager.vocabulary, eager.name))
    if not is_compiled(target):
        raise UserError(f"{eager.name} cannot be compiled here")
    models = {"target": model_record(folder.name, model_version(folder), eager)}
    flags = vars(args) | {"out": str(args.out), "prompts": len(prompts)}
    record: dict[str, Any] = {"program": "-m scripts.copySweep", **origin(argv, flags, "cpu", models), "dtype": dtype}
    record["scoring"] = scoring_costs(prompts[0], target, SAMPLING, "cpu")
    record["copies"] = measured(eager, target, prompts, args.maxLen, args.repeats, args.seed)
    name = f"selfDraft-{folder.name}"
    replace_file(args.out / f"{name}.json", json.dumps(record, ensure_ascii=False) + "\n")
    draw(record, args.out / "figures" / f"{name}.png")
    print(f"Written to {name}.json and figures/{name}.png.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command("copySweep", lambda: work(sys.argv[1:] if argv is None else argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
