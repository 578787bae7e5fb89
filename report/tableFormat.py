"""How tables look: their columns, and numbers, names and intervals as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from experiments.speed import FEW, Range, interval
from inputs.commandLine import visible

WIDTH = 100
NAME_WIDTH = 11  # of the longest word in the name of a method: "contrastive"
Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], str | Text]]  # {title of a column: f(row), the row's cell}
NAMES = {
    "draft": "draft alone",
    "target": "target alone",
    "mid": "mid alone",
    "speculativeContrastive": "spec. contrastive",
}


def name_of(method: str) -> str:
    """A method's name in words."""
    return NAMES.get(method) or visible(re.sub("[A-Z]", lambda capital: " " + capital[0].lower(), method), "")


def plain(value: object) -> Text:
    """Text for the screen, without markup and control characters: names may come from anywhere."""
    return Text(visible(str(value), ""))


def number(value: float, digits: int) -> str:
    """A number with that many decimals; from a million on in powers of ten, so that it fits its column."""
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"


def span(interval: Sequence[float], scale: float = 1.0) -> str:
    """A median to about three digits, and on a second line its 95 % interval, [low, high], or its range, (low–high).
    interval: median, low, high."""
    digits = next((2 - power for power in (0, 1) if max(interval) * scale < 10 ** (power + 1)), 0)
    middle, low, high = (f"{value * scale:.{digits}f}" for value in interval)
    if low == high or low == "nan":
        return middle
    return f"{middle}\n" + (f"({low}–{high})" if isinstance(interval, Range) else f"[{low}, {high}]")


def notation(*texts: str) -> str:
    """What stands beside the medians in these texts, in a legend's words, after a space; nothing if nothing does."""
    found = {" [95 % bootstrap interval]": r"\[\S+, \S+\]", f" (range of fewer than {FEW} values)": r"\(\S+–\S+\)"}
    return " or".join(words for words, pattern in found.items() if any(re.search(pattern, text) for text in texts))


def title_of(header: object) -> str:
    """The title of a column in one line."""
    return str(header).replace("/\n", "/").replace("\n", " ")


def cells(*tables: Table) -> list[str]:
    """All cells of some tables."""
    return [str(cell) for table in tables for column in table.columns for cell in column.cells]


def median(interval: Sequence[float], scale: float = 1.0) -> str:
    """`span` without the interval, for tables that have no room for it."""
    return span([interval[0]] * 3, scale)


def give_or_take(values: Sequence[float]) -> str:
    """A mean, and on a second line half the width of its 95 % interval, ±, or the range of few values, (low–high)."""
    mean, low, high = figures = interval(values, np.mean)
    if not high > low:
        return f"{mean:.3g}"
    ends = "–".join(f"{float(f'{end:.2g}'):g}" for end in (low, high))
    return f"{mean:.3g}\n" + (f"({ends})" if isinstance(figures, Range) else f"±{(high - low) / 2:.2g}")


def grid(title: str, columns: Iterable[str]) -> Table:
    """An empty table that never cuts its numbers: if it is too wide, the names in its first column are folded, but not
    the words of its title. A title breaks between words, where it has a newline."""
    table = Table(
        title=plain(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        if index:
            table.add_column(column, justify="right", no_wrap=True, overflow="fold")
        else:
            widest = max(map(len, column.split()), default=NAME_WIDTH)
            table.add_column(column, min_width=widest, overflow="fold")
    return table


def table_of(title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
    """A table with one row of cells for each of `rows`."""
    table = grid(title, columns)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
