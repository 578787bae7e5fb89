"""Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding method side by side.

Results go to results.txt. `python test.py --help` lists the flags; docs/glossary.md explains how to read them."""

import os
import sys
from collections.abc import Sequence

from inputs import starting

if __name__ == "__main__":  # Before the imports that take seconds.
    sys.exit(starting.run(__file__, "experiments.flags.read_flags"))

from benchmark.others import other_methods
from benchmark.steps import measure_steps
from experiments.loading import SCORED, Inputs, LoadedModels
from experiments.measure import measure_diversity, measure_perplexity, measure_speed
from experiments.prepare import load_inputs
from experiments.processes import Processes, together
from experiments.runRecord import changes, choose_run, compare, flags_of_run, run_record
from experiments.schema import Append, Line, Run, RunLine
from experiments.settings import models_used, parse
from inputs.commandLine import as_command, visible
from lossless.audit import audit
from lossless.trial import run_trials
from playback.play import play
from report import losslessReport
from report.results import Results, show
from report.selfCheck import self_check


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code: 0; 1 if a test fails; 2 for an error of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    said = "What was measured is kept in results.jsonl.", "use smaller models, a smaller --dtype, --maxLen or --window"

    def execute(processes: Processes) -> int:
        settings = parse(words)
        if settings.measuring.check:
            return self_check(settings.models.device)
        if settings.measuring.rerun:
            return repeat(settings.measuring.rerun, Results(settings.output.folder), words, processes)
        inputs = load_inputs(settings, processes)
        if settings.measuring.played:
            return play(inputs, words)
        print(end=models_used(settings, words))  # After all checks: no error follows it.
        return losslessReport.exit_code(measure_and_write(inputs, words)[1])

    return together(lambda work: as_command("test.py", work, *said), execute)


def repeat(name: str, store: Results, argv: Sequence[str], processes: Processes) -> int:
    """Repeat the run of a record and compare the results. Returns 1 if something differs."""
    earlier, lines = choose_run(store.runs(), store.lines, name)
    folder = os.path.abspath(store.lines.parent)
    flags = flags_of_run(earlier, lines, folder)
    if os.path.isdir(earlier.get("folder", "")):
        os.chdir(earlier["folder"])  # Relative paths among its flags start there.
    inputs = load_inputs(parse(flags, again=True), processes)
    record, new = measure_and_write(inputs, argv, earlier)
    if processes.index:
        return 0
    sentences, same = compare(earlier, lines, record, new)
    print(*sentences, sep="\n")
    return 0 if same else 1


def measure_and_write(inputs: Inputs, argv: Sequence[str], earlier: RunLine | None = None) -> Run:
    """Run the requested measurements and write the results; earlier: the record of the run that this one repeats.
    Returns the run. Processes other than the first write nothing."""
    models = inputs.load_first()
    store, record = Results(inputs.settings.output.folder), run_record(inputs, models, argv)
    if inputs.processes.index:
        measure_all(inputs, models, lambda line: None)
        return record, []
    for sentence in changes(earlier, record) if earlier else ():
        print(sentence)
    store.lines.parent.mkdir(parents=True, exist_ok=True)
    store.append(**record)
    name = record["run"]

    def append(line: Line) -> None:
        if not store.lines.exists():  # It was moved or removed: the lines that follow have their run all the same.
            store.append(**record)
        store.append(run=name, **line)

    try:
        measure_all(inputs, models, append)
        from report import figures  # Here, because matplotlib takes a second to import.

        append({"kind": "end", "figures": figures.draw_figures(*store.run(name), store.lines.parent)})
    finally:
        try:
            store.render()
        finally:  # The screen needs no room on a disk.
            show(*store.run(name))
        print(visible(f"Written to {store.text} (every measurement: {store.lines.name}).", ""))
    return store.run(name)


def measure_all(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Run all measurements of the settings. Models in another dtype are loaded after those before them are released."""
    measuring = inputs.settings.measuring
    for mode in measuring.timed:
        if mode == "steps":
            measure_steps(inputs, models, append)
        else:
            measure_speed(inputs, models, mode, append, other_methods)
    if measuring.lossless:
        run_trials(inputs, models, append)
    if measuring.audit:
        audit(inputs, models, append)
    if inputs.scores_others:
        models.clear()
        models = inputs.load_as_timed(inputs.text_dtype, SCORED)
    if measuring.diversity:
        measure_diversity(inputs, models, append)
    measure_perplexity(inputs, models, append)
