"""Blocks and pictures of the documentation that show trainings of `scripts.trainHead`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from matplotlib import pyplot as plt

from benchmark.records import BenchmarkRecord
from experiments.speed import summarize
from inputs.files import gigabytes
from report.figures import save
from report.runTables import ranked, speed_table
from scripts.docsTables import Render, Words, cells_of, of_kind, source, table, timed
from scripts.keepRecord import Records

HEADS, ABLATION = ("head-bundled-target", "head-SmolLM2-135M-Instruct"), "ablation-bundled-target"  # names of records
CURVES = *HEADS, ABLATION
SPEED = "head", "head-tree"  # runs beside the draft model, and with the head as the draft of other methods
GAMMA = 4  # positions in a table


def last_of(variant: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last measurement of a training."""
    return cast(Mapping[str, Any], variant["history"][-1])


def by_position(measured: Mapping[str, Any]) -> str:
    """The acceptance of the first guess, the second, ..."""
    return " ".join(f"{share:.3f}" for share in measured["acceptance"])


def hours(seconds: float) -> str:
    """A long time, in hours or minutes."""
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"


def trained(measured: Mapping[str, Any]) -> str:
    """How long a training was at a measurement."""
    return f"{measured['tokens']:,} tokens, {hours(measured['seconds'])}"


def heads(records: Records, words: Words) -> str:
    """What each head cost to train, and how good it is on text that is held out."""
    rows, sources = [], []
    for record in map(records.file, HEADS):
        (variant,), written = record["variants"].values(), record["written"]
        last = last_of(variant)
        texts = f"{written['tokens']:,} tokens, {hours(written['seconds'])}"
        quality = by_position(last), f"{last['alpha']:.3f}", f"{last['tokens_per_round']:.2f}"
        target = record["models"]["target"]["name"]
        rows.append(
            [target, f"{variant['parameters']:,}", texts, trained(last), gigabytes(last["memory"]).strip(), *quality]
        )
        sources.append(source(cast(BenchmarkRecord, record), record["dtype"]))
    titles = "target | weights | texts written and read | training | memory | acceptance by position | of all"
    return "\n\n".join([table(f"{titles} | tokens a round", rows), *sources])


def ablation(records: Records, words: Words) -> str:
    """The variants of a head, on the same texts, for as long each."""
    record, rows = records.file(ABLATION), []
    for name, variant in record["variants"].items():
        last, recipe = last_of(variant), variant["recipe"]
        of_head = recipe["kind"] == "head"
        parts = [
            f"`{name}`",
            {"three": "three", "last": "the last"}[recipe["layers"]] if of_head else "the last",
            str(recipe["unroll"]) if of_head else "",
            ("yes" if recipe["feature_loss"] else "no") if of_head else "",
            "yes" if recipe["finish"] else "no",
        ]
        quality = by_position(last), f"{last['alpha']:.3f}", f"{last['tokens_per_round']:.2f}"
        rows.append([*parts, trained(last), *quality])
    titles = "variant | layers of the feature | steps | feature loss | finished on acceptance | training"
    titles += " | acceptance by position"
    each = f"Trained on {record['written']['tokens']:,} tokens that the target wrote. "
    origin = source(cast(BenchmarkRecord, record), record["dtype"])
    return f"{table(f'{titles} | of all | tokens a round', rows)}\n\n{each}{origin}"


def draw(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the acceptance on held-out text over the tokens of training: of a head by position, of variants one line
    each. Returns the path."""
    figure, axes = plt.subplots(figsize=(8, 4.4), dpi=120, layout="constrained")
    lines = {name: [(m["tokens"], m["alpha"]) for m in v["history"]] for name, v in record["variants"].items()}
    if len(lines) == 1:
        ((name, history),) = ((name, v["history"]) for name, v in record["variants"].items())
        lines = {"all tested guesses": lines[name]} | {
            f"guess {i + 1}": [(m["tokens"], m["acceptance"][i]) for m in history]
            for i in range(len(history[0]["acceptance"]))
        }
    for number, (name, points) in enumerate(lines.items()):
        tokens, shares = zip(*points)
        whole = number == 0
        colour = "#2c3e50" if whole else plt.cm.plasma(0.95 * number / len(lines))
        axes.plot(
            [count / 1e6 for count in tokens], shares, "-" if whole else "--",
            label=name, linewidth=2.2 if whole else 1.2, color=colour,
        )  # fmt: skip
        if whole:
            axes.annotate(f"{shares[-1]:.3f}", (tokens[-1] / 1e6, shares[-1]), fontsize=8)
    axes.set(xlabel="tokens of training, millions", ylabel="share of tested guesses that pass")
    axes.set_title(f"{record['models']['target']['name']}, text that is held out", loc="left", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.spines[["top", "right"]].set_visible(False)
    return save(figure, path)


def speed(name: str, records: Records, words: Words) -> str:
    """Methods side by side, and how often the guess at each position of a round is accepted."""
    run, lines = records.run(name)
    timed_texts = of_kind(lines, "speed")
    methods = ranked(summarize(timed_texts))
    columns = " | TTFT ms | TPOT ms | tokens/s | speed-up | alpha | tokens/round"
    printed = cells_of(speed_table(run, timed_texts, methods), columns)
    shares = [" ".join(f"{share:.3f}" for share in row["acceptance_by_position"][:GAMMA]) for row in methods]
    rows = [[f"`{row['method']}`", *cells, share] for row, (_, *cells), share in zip(methods, printed, shares)]
    titles = "method | TTFT, ms | TPOT, ms | tokens/s | speed-up | alpha | tokens per round | alpha by position"
    body = table(titles, rows)
    return f"{body}\n\n{timed(run, timed_texts, body)}"


BLOCKS: dict[str, Render] = {
    "heads": heads,
    "head-ablation": ablation,
    **{name: partial(speed, name) for name in SPEED},
}
