"""The pictures in the documentation that are drawn from records or from the code.

Each picture carries the digest of what it was drawn from, in a text field of its PNG file. The digest tells whether a
picture is older than its record.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import matplotlib
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmark.figure import draw
from benchmark.records import BenchmarkRecord
from report.figures import draw_lossless, draw_sweep
from scripts.docsCode import arrows, shown
from scripts.docsRecords import BENCHMARKS, Records, digest

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

FIELD = "Record"
FOLDER, FILE = "#bfd3f2", "#c7e9c0"  # colours of boxes
TRIES = 8000


class Picture(NamedTuple):
    """A picture: what it is drawn from, how, and whether the project's own commands also write the file (a file of
    theirs carries no digest)."""

    source: Callable[[Records], object]
    draw: Callable[[Records, Path], object]
    shared: bool = False


def benchmark_picture(name: str) -> Picture:
    """The picture of a benchmark's record."""
    return Picture(
        lambda records: records.benchmark(name),
        lambda records, path: draw(cast(BenchmarkRecord, records.benchmark(name)), path),
        True,
    )


PICTURES = {
    "docs/architecture.png": Picture(lambda records: arrows(), lambda records, path: draw_arrows(path)),
    "figures/sweep.png": Picture(
        lambda records: records.run("sweep"), lambda records, path: draw_sweep(records.run("sweep")[1], path)
    ),
    "figures/lossless.png": Picture(
        lambda records: records.run("lossless"), lambda records, path: draw_lossless(records.run("lossless")[1], path)
    ),
} | {f"figures/{name}.png": benchmark_picture(name) for name in BENCHMARKS}


def stamp_of(path: Path) -> str | None:
    """The digest that a picture carries; None if it carries none."""
    with Image.open(path) as image:
        return image.info.get(FIELD)


def fault_of(name: str, records: Records) -> str | None:
    """What is wrong with a picture; None if nothing is."""
    if not (records.root / name).exists():
        return "is missing"
    stamp = stamp_of(records.root / name)
    if stamp is None and PICTURES[name].shared:
        return None
    return None if stamp == digest(PICTURES[name].source(records)) else "was drawn from another record"


def redraw(name: str, records: Records) -> bool:
    """Draw a picture, unless it was drawn from this record. Returns whether it was drawn."""
    path, stamp = records.root / name, digest(PICTURES[name].source(records))
    if path.exists() and stamp_of(path) == stamp:
        return False
    PICTURES[name].draw(records, path)
    with Image.open(path) as image:
        image.load()
        info = PngInfo()
        info.add_text(FIELD, stamp)
        image.save(path, pnginfo=info, optimize=True)
    return True


def direct(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The arrows that do not follow from others. found: {name: what it imports}, from the lowest to the highest."""
    reach: dict[str, set[str]] = {}
    for name, others in found.items():
        reach[name] = set(others).union(*(reach[other] for other in others))
    return {name: [o for o in others if not any(o in reach[each] for each in others)] for name, others in found.items()}


def places(found: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """{name: x, y}: each above what it imports. The places in a row are searched for few crossings and short arrows."""
    level: dict[str, int] = {}
    for name, others in found.items():
        level[name] = 1 + max((level[other] for other in others), default=-1)
    rows = [[name for name in found if level[name] == height] for height in range(max(level.values()) + 1)]
    x = {name: 2.0 * i - len(row) + 1 for row in rows for i, name in enumerate(row)}
    chance, names = random.Random(0), list(found)
    cost = untidiness(found, level, x)
    for _ in range(TRIES):
        moved = x | {chance.choice(names): float(chance.randint(-4, 4))}
        new = untidiness(found, level, moved)
        if new <= cost:
            x, cost = moved, new
    return {name: (x[name], float(level[name])) for name in found}


def untidiness(found: dict[str, list[str]], level: dict[str, int], x: dict[str, float]) -> float:
    """How hard the arrows are to follow: boxes on boxes, arrows through boxes, crossings, and length across."""
    edges = [(name, other) for name, others in found.items() for other in others]
    total = sum(20.0 for a, b in itertools.combinations(found, 2) if level[a] == level[b] and abs(x[a] - x[b]) < 2)
    for high, low in edges:
        total += 0.2 * (x[high] - x[low]) ** 2
        for name in found:
            if level[low] < level[name] < level[high]:
                share = (level[name] - level[low]) / (level[high] - level[low])
                total += 10.0 * (abs(x[low] + share * (x[high] - x[low]) - x[name]) < 1.1)
    for (a, b), (c, d) in itertools.combinations(edges, 2):
        bottom, top = max(level[b], level[d]), min(level[a], level[c])
        if bottom < top and len({a, b, c, d}) == 4:
            sides = [at(a, b, y, level, x) - at(c, d, y, level, x) for y in (bottom, top)]
            total += 3.0 * (sides[0] * sides[1] <= 0)
    return total


def at(high: str, low: str, y: int, level: dict[str, int], x: dict[str, float]) -> float:
    """Where an arrow is at the height y."""
    return x[low] + (x[high] - x[low]) * (y - level[low]) / (level[high] - level[low])


def draw_arrows(path: Path) -> None:
    """The folders and files of the project, each above what it imports. Arrows that follow from others are left out."""
    found = direct(arrows())
    placed = places(found)
    xs, ys = zip(*placed.values())
    figure, axes = plt.subplots(figsize=(7.6, 7.6), dpi=120)
    axes.set(xlim=(min(xs) - 1.2, max(xs) + 1.2), ylim=(-0.5, max(ys) + 0.5))
    axes.axis("off")
    boxes = {}
    for name, (x, y) in placed.items():
        label = shown(name)
        box = {"boxstyle": "round,pad=0.5", "facecolor": FOLDER if label.endswith("/") else FILE, "edgecolor": "none"}
        boxes[name] = axes.text(x, y, label, fontsize=10, family="monospace", ha="center", va="center", bbox=box)
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for colour in (FOLDER, FILE)]
    axes.legend(handles, ["folder", "file in the root"], loc="upper right", fontsize=9, frameon=False)
    figure.tight_layout(pad=0.3)
    figure.canvas.draw()  # The boxes have their sizes now, and arrows can end at them.
    for name, others in found.items():
        for other in others:
            style = {"arrowstyle": "-|>", "color": "#777777", "shrinkA": 0, "shrinkB": 0}
            style |= {"patchA": boxes[name].get_bbox_patch(), "patchB": boxes[other].get_bbox_patch()}
            axes.annotate("", placed[other], placed[name], arrowprops=style)
    figure.savefig(path)
    plt.close(figure)
