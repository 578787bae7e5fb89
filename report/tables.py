"""A table: rows of cells with heads. `rich` prints it on the screen and in results.txt, `markdown` writes it for the
documentation."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from experiments.intervals import FEW, Range, interval
from inputs.commandLine import visible
from utils import UserError

WIDTH = 100
NAME_WIDTH = 11  # of the longest word in the name of a method: "contrastive"
NAMES = {
    "draft": "draft alone",
    "target": "target alone",
    "mid": "mid alone",
    "speculativeContrastive": "spec. contrastive",
}


@dataclass(frozen=True)
class Measured:
    """A cell with a figure, and the ends of its 95 % interval, or of the range of few values.

    digits: decimals; None: about three figures in all.
    """

    value: float
    ends: tuple[float, ...] = ()
    of_range: bool = False
    digits: int | None = None

    def written(self, between: str = " ") -> str:
        """The figure, and after `between` its ends: [low, high], or (low–high) of a range; "-" for nan."""
        if self.value != self.value:
            return "-"
        largest, digits = max(self.value, *self.ends, 0), self.digits
        if digits is None:
            digits = 2 if largest < 10 else 1 if largest < 100 else 0
        value, *ends = (f"{number:.{digits}f}" for number in (self.value, *self.ends))
        if not ends or ends[0] == ends[1] or self.ends[0] != self.ends[0]:
            return value
        return f"{value}{between}" + ("({}–{})" if self.of_range else "[{}, {}]").format(*ends)

    def __str__(self) -> str:
        return self.written()


Cell = str | Text | Measured
Row = TypeVar("Row")
Columns = Mapping[str, Callable[[Row], Cell]]  # {title of a column: f(row), the row's cell}


@dataclass
class Table:
    """heads: titles of the columns, broken where they have a newline. left: columns of words beside the first.
    folded: those among them that may be folded to fit the screen. notes: are shown below it."""

    title: str
    heads: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    left: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    notes: str = ""

    def add(self, *cells: Cell) -> None:
        self.rows.append([*cells])

    def titles(self) -> list[str]:
        """The titles of the columns, in one line each."""
        return [head.replace("/\n", "/").replace("\n", " ").strip() for head in self.heads]

    def __rich__(self) -> Group:
        """The table and its notes on the screen. It never cuts its numbers: if it is too wide, the names in its first
        column are folded, but not the words of its title."""
        look = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "padding": (0, 0, 0, 1)}
        shown = RichTable(title=plain(self.title), show_edge=False, pad_edge=False, **look)  # type: ignore[arg-type]
        first = max(map(len, self.heads[0].split()), default=NAME_WIDTH)
        shown.add_column(self.heads[0], min_width=first, overflow="fold")
        for index, head in enumerate(self.heads[1:], 1):
            side: Literal["left", "right"] = "left" if index in (*self.left, *self.folded) else "right"
            shown.add_column(head, justify=side, no_wrap=index not in self.folded, overflow="fold")
        for row in self.rows:
            shown.add_row(*(cell.written("\n") if isinstance(cell, Measured) else cell for cell in row))
        return Group(shown, *[Text(self.notes)] * bool(self.notes))


def markdown(table: Table, columns: str = "", rows: str = "") -> str:
    """A table for the documentation; its columns of numbers are aligned right.

    columns: which ones, "a | b | c"; none: all that are not empty. rows: a pattern of the names in the first column;
        none: all rows.
    """
    titles = table.titles()
    if unknown := set(columns.split(" | ") if columns else []) - {*titles}:
        raise UserError(f"the table {table.title!r} has no column {min(unknown)!r}")
    # [rows, columns]; rows may be shorter than the heads.
    cells = [[str(cell).replace("\n", " ").replace("|", r"\|") for cell in row] for row in table.rows]
    cells = [row + [""] * (len(titles) - len(row)) for row in cells if not rows or re.fullmatch(rows, row[0])]
    nonempty = [[cell for cell in column if cell] for column in zip(*cells)] or [[]] * len(titles)
    filled = [index for index, column in enumerate(nonempty) if column]
    chosen = [titles.index(title) for title in columns.split(" | ")] if columns else filled or range(len(titles))
    numbers = [all(re.match(r"[-+]?\d|-$", cell) for cell in column) and column != [] for column in nonempty]
    lines = titles, ["---:" if is_number else "---" for is_number in numbers], *cells
    return "\n".join(f"| {' | '.join(line[index] for index in chosen)} |" for line in lines)


def table_of(title: str, columns: Columns[Row], rows: Iterable[Row]) -> Table:
    """A table with one row of cells for each of `rows`."""
    return Table(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def notation(*tables: Table) -> str:
    """The legend of what follows the medians in `tables`, such as " [95 % bootstrap interval]", or an empty string."""
    words = {False: " [95 % bootstrap interval]", True: f" (range: fewer than {FEW} independent values)"}
    figures = [cell for table in tables for row in table.rows for cell in row if isinstance(cell, Measured)]
    kinds = {figure.of_range for figure in figures if "\n" in figure.written("\n")}
    return " or".join(words[of_range] for of_range in sorted(kinds))


def span(figures: Sequence[float], scale: float = 1.0, digits: int | None = None) -> Measured:
    """A median and its interval or range. figures: median, low, high."""
    middle, *ends = (figure * scale for figure in figures)
    return Measured(middle, tuple(ends), isinstance(figures, Range), digits)


def median(figures: Sequence[float], scale: float = 1.0) -> Measured:
    """`span` without the interval, for tables that have no room for it."""
    return Measured(figures[0] * scale)


def give_or_take(values: Sequence[float | None], clusters: Sequence[Sequence[int]]) -> str:
    """A mean, and on a second line half the width of its 95 % interval, ±, or the range of few values, (low–high).
    clusters: see `interval`."""
    mean, low, high = figures = interval(values, np.mean, clusters)
    if not high > low:
        return f"{mean:.3g}"
    ends = "–".join(f"{float(f'{end:.2g}'):g}" for end in (low, high))
    return f"{mean:.3g}\n" + (f"({ends})" if isinstance(figures, Range) else f"±{(high - low) / 2:.2g}")


def name_of(method: str) -> str:
    """A method's name in words."""
    return NAMES.get(method) or visible(re.sub("[A-Z]", lambda capital: " " + capital[0].lower(), method), "")


def plain(value: object) -> Text:
    """Text for the screen, without markup and control characters: names may come from anywhere."""
    return Text(visible(str(value), ""))
