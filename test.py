"""Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding method side by side.

Results go to results.txt. `python test.py --help` lists the flags; README.md explains how to read the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from experiments import rerun
from experiments.measure import Append, measure_diversity, measure_perplexity, measure_speed
from experiments.prepare import LoadedModels, Prepared, prepare
from experiments.runRecord import run_record
from experiments.settings import parse
from inputs.commandLine import as_command
from lossless.proof import prove, prove_greedy
from report import figures, losslessReport, runReport
from report.play import play
from report.results import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code: 0, 1 for a "no", 2 for what cannot be done."""
    given = list(sys.argv[1:] if argv is None else argv)
    smaller = "use smaller models, a smaller --dtype, --maxLen or --window"
    return as_command("test.py", lambda: work(given), "What was measured is kept in results.txt.", smaller)


def work(argv: Sequence[str]) -> int:
    """Parse, prepare, measure, report."""
    settings = parse(argv)
    if settings.rerun:
        return repeat(settings.rerun, Results(settings.output.folder), argv)
    prepared = prepare(settings)
    if settings.measuring.played:
        play(prepared)
        return 0
    _, lines = run(prepared, argv)
    return losslessReport.exit_code(lines) if "lossless" in settings.measuring.groups else 0


def repeat(asked: str, store: Results, argv: Sequence[str]) -> int:
    """Run again what a record says, and compare. Returns 1 if something differs."""
    earlier, lines = rerun.choose(store, asked)
    folder = os.path.abspath(store.lines.parent)
    if os.path.isdir(earlier.get("folder", "")):
        os.chdir(earlier["folder"])  # Relative paths among its flags start there.
    prepared = prepare(parse(rerun.arguments(earlier, folder)))
    sentences, same = rerun.compare(earlier, lines, *run(prepared, argv, earlier))
    print(*sentences, sep="\n")
    return 0 if same else 1


def run(
    prepared: Prepared, argv: Sequence[str], earlier: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure what was asked for and write the results; earlier: the record of the run that this one repeats. Returns
    the run's record and its lines."""
    models = prepared.load_first()
    store, record = Results(prepared.settings.output.folder), run_record(prepared, models, argv)
    for line in rerun.changes(earlier, record) if earlier else ():
        print(line)
    store.append(**record)
    name = record["run"]

    def append(**line: object) -> None:
        store.append(run=name, **line)

    try:
        measure(prepared, models, store, name, append)
        append(kind="end")
    finally:
        try:
            store.render()
        finally:  # The screen needs no room on a disk.
            runReport.show(*store.run(name))
    print(f"Written to {store.text.name} (every measurement: {store.lines.name}).")
    return store.run(name)


def measure(prepared: Prepared, models: LoadedModels, store: Results, name: str, append: Append) -> None:
    """Everything the settings ask for. Models in another dtype are loaded after those before them are released."""
    measuring, pictures = prepared.settings.measuring, store.lines.parent / "figures"
    for mode in measuring.timed:
        measure_speed(prepared, models, mode, append)
    if "sweep" in measuring.groups:
        figure = figures.draw_sweep(store.run(name)[1], pictures / f"sweep-{name}.png")
        append(kind="figure", of="sweep", file=f"figures/{figure.name}")
    if "lossless" in measuring.groups:
        prove(prepared, models, append)
        if any(line["kind"] == "lossless" for line in store.run(name)[1]):
            figure = figures.draw_lossless(store.run(name)[1], pictures / f"lossless-{name}.png")
            append(kind="figure", of="lossless", file=f"figures/{figure.name}")
        models.clear()
        prove_greedy(prepared, append)  # in another dtype too
    other = prepared.settings.models.compile or prepared.dtype != prepared.text_dtype
    if measuring.timed and other and ("diversity" in measuring.groups or measuring.ppl):
        models.clear()
        prepared.folders.pop("mid", None)
        models = prepared.load(prepared.text_dtype)
    if "diversity" in measuring.groups:
        measure_diversity(prepared, models, append)
    if measuring.ppl:
        measure_perplexity(prepared, models, append)


if __name__ == "__main__":
    sys.exit(main())
