"""How tables look: their columns, and numbers, names and intervals as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from experiments.speed import interval
from inputs.commandLine import visible

WIDTH = 100
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
    """A median to about three digits, and its 95 % interval on a second line. interval: median, low, high."""
    digits = next((2 - power for power in (0, 1) if max(interval) * scale < 10 ** (power + 1)), 0)
    middle, low, high = (f"{value * scale:.{digits}f}" for value in interval)
    return middle if low == high or low == "nan" else f"{middle}\n[{low}, {high}]"


def median(interval: Sequence[float], scale: float = 1.0) -> str:
    """`span` without the interval, for tables that have no room for it."""
    return span([interval[0]] * 3, scale)


def give_or_take(values: Sequence[float]) -> str:
    """A mean, and half the width of its 95 % interval on a second line."""
    mean, low, high = interval(values, np.mean)
    return f"{mean:.3g}" + (f"\n±{(high - low) / 2:.2g}" if high > low else "")


def grid(title: str, columns: Iterable[str]) -> Table:
    """An empty table that never cuts its numbers: if it is too wide, the names in its first column are folded."""
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
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    return table


def table_of(title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
    """A table with one row of cells for each of `rows`."""
    table = grid(title, columns)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table
