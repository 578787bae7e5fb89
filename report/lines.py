"""Lines of `results.jsonl`, and how the reports choose among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]  # {field: value}, one measurement or one run; its field "kind" says what it holds


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    """The lines of that kind."""
    return [line for line in lines if line["kind"] == kind]


def mode_of(line: Line) -> str:
    """The mode of `test.py` that timed a text. The oldest records have no such field."""
    return line.get("mode", "speed")


def swept(lines: Iterable[Line], cost: Line) -> list[Line]:
    """The timed texts of `--sweep` at the temperature and prompt length of `cost`, a line of kind "costs"."""
    return [
        line
        for line in of_kind(lines, "speed")
        if mode_of(line) == "sweep"
        and line["temperature"] == cost["temperature"]
        and line["promptLen"] == cost["promptLen"]
    ]
