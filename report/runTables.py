"""The tables of the speed that a run measured: by method, by category, over gamma beside theory, over batches, of other
programs, and of the steps of decoding."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

from numpy import nan_to_num
from rich.console import RenderableType
from rich.text import Text

from experiments import schema
from experiments.intervals import Interval, by_category, categories, interval, speedup, summarize
from experiments.schema import CostsLine, EngineLine, Line, QueueLine, RunLine, SpeedLine, StepLine, of_kind
from experiments.theory import MOST_GUESSES, expectations, improvement, predict, predict_batches
from inputs.commandLine import counted
from lossless.evidence import TESTS
from report.sources import BEST_SPEED_UP, SPEED_UP
from report.tables import Cell, Measured, Table, median, name_of, notation, plain, span, table_of

Summary = dict[str, Any]  # the figures of one method, a row of `intervals.summarize`
Prediction = dict[str, Any]  # what `theory.predict` returns

# Flags named above a table of speeds, each with the value at which it is not mentioned.
SHOWN: dict[str, Any] = {
    "maxLen": None, "gamma": None, "tree": None, "treeRule": "traversal", "draftLength": "fixed",
    "verification": "token", "lookupFirst": False, "draftVocab": None, "draftTemperature": None, "draftTop_p": None,
    "temperature": None, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "acceptance": None,
    "compile": False, "batch": 1,
}  # fmt: skip
# The legend of the tables of speed: {title of a column: its entry}.
LEGEND = {
    "TTFT ms": "TTFT: time to the first token",
    "TPOT ms": "TPOT: time for each token after it",
    "tokens/s": "tokens/s: throughput, prefill included",
    "s a text": "s a text: seconds for a text",
    "speed-up": "speed-up: median of paired throughput ratios to the target alone",
    "alpha": "alpha: share of the tested guesses that were accepted (in a tree: of its levels below accepted ones)",
    "gamma": "gamma: guesses in a round",
    "tokens/round": "tokens/round: tokens for one forward of the target",
    "rounds": "rounds, drafted, kept: forwards after prefill, guesses (or levels of a tree), and accepted ones; means",
    "total/n ms": "total/n: the course report's time per token",
    "alpha by position": "alpha by position: the share at position 1, 2, ... of a round, where it was tested",
    "Spec-Bench's": "Spec-Bench's: the speed-up as Spec-Bench defines it, the ratio of two mean speeds over questions",
}
OVERLAPS = (
    "expected: tokens a round that follow from the mean sum of min(p, q) at each position of a round; of expected: "
    "tokens a round over these."
)
THEORY_NOTES = "sum of min(p, q): the mean over contexts visited; so often one guess is accepted. " + OVERLAPS
OF_TREES = " In a tree, the sum is that of first siblings, and later ones add what they accept after the earlier ones."
BATCH_NOTES = (
    "batch: texts that are decoded at a time. A cell is a queue of texts, prefill included: medians over repeats{}. "
    "plain tokens/s: throughput of plain decoding. gamma: guesses in a round. costAware: the rule chooses gamma "
    "itself, for each row of the batch. its share of the best: of the fastest cell beside it, plain decoding included."
)
ENGINE_NOTES = (
    "greedy: tokens that are not the target's argmax, in float32. Of unquantised weights only those that rounding does "
    "not explain count, and a method with any is not timed. Quantised weights are another model: all count, and a few "
    "logits are allowed. sampled: what the tests of test.py --audit find in {texts} texts."
)
STEP_NOTES = (
    "MB: bytes that a forward must read. of one: over the time of one token. % limit: the time to read as many bytes "
    "over that of the forward. The limit is the fastest that as many bytes, or more, were read in any turn, by reading "
    "alone or by a forward: {read}. A small model's weights may stay in the processor's cache, so reading fewer bytes "
    "does not count. of the first: over the time in the first row. draft step, of a plain step: theory's c. scoring: "
    "of a block of gamma + 1 tokens, verified. sampling: the filters, draws and verification of a round alone. by "
    "theory: the speed-up of theorem 3.8 of Leviathan et al. at these costs, if every guess is accepted with "
    "probability alpha, independently of the others. alpha: the share of guesses accepted in the run's texts, if any."
)
POSITIONS = 4  # of a round, whose acceptance a table by category shows
TREES = "tree", "topDown"
ALONE = "draft", "mid", "target", "noCache"  # methods without guesses
ALPHAS = (0.4, 0.6, 0.8)  # of the speed-ups that the costs of a round allow, where no text tells alpha


def conditions(run: RunLine, lines: Sequence[SpeedLine]) -> str:
    """How many prompts were timed, the flags that matter for the times, and the dtype."""
    # Contrastive decoding has a temperature of its own.
    first: Mapping[str, Any] = next((line for line in lines if line["method"] == "target"), lines[0])
    values = {name: first.get(name, run["flags"].get(name, default)) for name, default in SHOWN.items()}
    if values["tree"] and first["mode"] == "speed":  # The one method with guesses guesses trees.
        values["gamma"] = None
    compiled = {role: model["compiled"] for role, model in run["models"].items() if "compiled" in model}
    if values["compile"] and compiled and not all(compiled.values()):  # What ran, not the flag.
        eager = ", ".join(role for role, is_compiled in compiled.items() if not is_compiled)
        exception = f"but for {eager}, which stayed eager"
        values["compile"] = exception if any(compiled.values()) else "requested, but all stayed eager"
    shown = "".join(f"{name} {value}, " for name, value in values.items() if value not in (SHOWN[name], None))
    lengths = {line["prompt_tokens"] for line in lines}
    of_tokens = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    prompts = counted(len({line["prompt"] for line in lines}), "prompt")
    return f"{prompts} of {of_tokens} tokens, {shown}{first['dtype']}"


def measured_on(record: Mapping[str, Any], lines: Sequence[Line] = ()) -> str:
    """Where a record's figures were measured: processor, device, models, the dtype of timed texts, torch, how many
    processes if there were several, the day."""
    machine, names = record["machine"], dict.fromkeys(model["name"] for model in record["models"].values())
    dtype = next((line["dtype"] for line in of_kind(lines, SpeedLine)), record.get("dtype"))
    place = f"{machine['processor']}, {counted(machine['threads'], 'thread')}, {record['device']}"
    kept = {line.get("process") for line in (*of_kind(lines, SpeedLine), *of_kind(lines, QueueLine))}
    count = max(len(kept), len(record.get("processes", ())))
    processes = f"{count} processes" if count > 1 else ""
    parts = place, ", ".join(names), dtype, f"torch {machine['torch']}", processes, record["time"][:10]
    return "; ".join(filter(None, parts))


def speed_tables(run: RunLine, lines: Sequence[Line], engines: Sequence[EngineLine]) -> Iterator[RenderableType]:
    """The methods of one mode and one prompt length, and how acceptance depends on the position. engines: what is known
    of the methods of other programs."""
    lines = finished(lines, engines)
    texts, queues, overlaps = of_kind(lines, SpeedLine), of_kind(lines, QueueLine), of_kind(lines, schema.OverlapLine)
    rows, timed = summarize(texts, queues=queues), queues or texts
    rows = ranked(rows) if texts[0]["mode"] == "compare" else rows
    yield speed_table(run, texts, rows, engines)
    if categories(texts):
        yield category_table(texts)
        if queues:
            yield Text("By category, the speed-up is that of single texts, from their rows of the batch.")
    chains = [row for row in rows if row["method"] not in (*TREES, *ALONE)]
    for tree in [row["method"] for row in rows if row["method"] in TREES] if chains else []:
        fastest = max(chains, key=lambda row: row["speedup"][0])["method"]
        ratio = span(speedup(timed, tree, fastest), digits=3)
        what = f"{name_of(tree)} over {name_of(fastest)}, the fastest of the others by these texts"
        yield Text(f"{what}: {ratio}, paired.")
    gain = speedup(timed, "speculativeNoCache", "noCache")  # the figure that the course report gives
    if not isnan(gain.middle):
        what = "Both without a KV cache, as in the course report's code, speculative over plain"
        yield Text(f"{what}: {span(gain, digits=3)} (paired).")
    if overlaps:
        # The tokens are counted in the texts in which overlaps were measured: a method that depends on measured times
        # has other shapes and lengths in other texts.
        of_method = {line["method"]: line for line in overlaps}
        table = Table("Beside theory", ["", "sum of min(p, q)", "tokens/round", "expected", "of expected"])
        for row in rows:
            if (line := of_method.get(row["method"])) and line["overlap_by_position"]:  # It made guesses.
                tokens, by_theory = tokens_a_round(line), expectations(line["overlap_by_position"])
                figures = [f"{figure:.2f}" for figure in (tokens, by_theory["tokens"], tokens / by_theory["tokens"])]
                table.add(name_of(row["method"]), f"{by_theory['overlap']:.3f}", *figures)
        yield table
        yield Text(THEORY_NOTES + (OF_TREES if any(line["method"] in TREES for line in overlaps) else ""))
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            rates = ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
            yield Text(f"Acceptance by position in the round: {rates}.")


def finished(lines: Iterable[Line], engines: Iterable[EngineLine]) -> list[Line]:
    """The lines without those of methods that failed while they were timed: their medians would be over fewer texts."""
    lines = list(lines)
    counts = Counter((line["mode"], line["promptLen"], line["method"]) for line in of_kind(lines, SpeedLine))
    failed = {line["method"] for line in engines if line["failed"]}
    partial = {key for key in counts if key[-1] in failed and counts[key] < counts[(*key[:2], "target")]}
    return [line for line in lines if tuple(map(line.get, ("mode", "promptLen", "method"))) not in partial]


def ranked(rows: Sequence[Summary]) -> list[Summary]:
    """Plain decoding first, then the methods with guesses, from the greatest speed-up to the least."""
    by_speed = sorted(rows, key=lambda row: -nan_to_num(row["speedup"][0]))
    return [row for row in rows if row["method"] in ALONE] + [row for row in by_speed if row["method"] not in ALONE]


def speed_table(
    run: RunLine, lines: Sequence[SpeedLine], rows: Sequence[Summary], engines: Sequence[EngineLine]
) -> Table:
    """One row for each method. `--speed` adds the course report's time per token; the other modes add counts of
    guesses, and have no room for every interval."""
    of_report = lines[0]["mode"] == "speed"
    brief = span if of_report else median
    guessing = {row["method"] for row in rows if row["acceptance_by_position"]} - {*ALONE}
    columns: dict[str, Callable[[Summary], Cell]] = {
        "": lambda row: name_of(row["method"]),
        "TTFT\nms": lambda row: brief(row["ttft"], 1e3),
        "TPOT\nms": lambda row: brief(row["tpot"], 1e3),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "alpha": lambda row: f"{row['alpha']:.3f}" if row["method"] in guessing else "",
        "tokens/\nround": lambda row: median(row["tokens_per_round"]) if row["method"] in guessing else "",
    }
    if of_report:
        columns["total/n\nms"] = lambda row: median(row["report_tpot"], 1e3)
    elif engines and lines[0]["mode"] == "compare":
        texts = {line["method"]: said_of(line).split(":")[0] for line in engines}
        columns["sampled\ntext"] = lambda row: texts.get(row["method"], "")
    else:
        columns["rounds"] = lambda row: f"{row['rounds']:,.0f}"
        columns["drafted"] = lambda row: f"{row['drafted']:,.0f}"
        columns["kept"] = lambda row: f"{row['accepted']:,.0f}"
    return table_of("Speed: " + conditions(run, lines), columns, rows)


def category_table(lines: Sequence[SpeedLine]) -> Table:
    """One row for each category and method, and at last the methods on all prompts."""
    columns: dict[str, Callable[[Summary], Cell]] = {
        "": lambda row: name_of(row["method"]),
        "TPOT\nms": lambda row: median(row["tpot"], 1e3),
        "tokens/\nround": lambda row: median(row["tokens_per_round"]) if row["acceptance_by_position"] else "",
        "alpha by\nposition": lambda row: " ".join(f"{r:.2f}" for r in row["acceptance_by_position"][:POSITIONS]),
        "speed-up": lambda row: span(row["speedup"]),
        "Spec-Bench's": lambda row: span(row["specBench"]),
    }
    table = Table("Speed by category", ["category", *columns], left=(1, 4))
    for category, rows in by_category(lines).items():
        for first, row in zip(itertools.chain([category], itertools.repeat("")), ranked(rows)):
            table.add(plain(first), *(cell(row) for cell in columns.values()))
    return table


def tokens_a_round(row: Mapping[str, Any]) -> float:
    """The mean over all rounds of a method; the column "tokens/round" is the median of texts."""
    return 1 + float(row["accepted"] / row["rounds"]) if row["rounds"] else float("nan")


def speed_notes(lines: Sequence[SpeedLine], tables: Sequence[Table], pythia: bool) -> str:
    """The text under the tables of speed. pythia: the models are those of the course report."""
    modes = dict.fromkeys(line["mode"] for line in lines)
    repeats = {mode: len({line["repeat"] for line in lines if line["mode"] == mode}) for mode in modes}
    counts = {str(count) for count in repeats.values()}
    if len(counts) > 1:
        counts = {", ".join(f"{count} (--{mode})" for mode, count in repeats.items())}
    words = "repeat" if counts == {"1"} else "interleaved repeats"
    notes = f"Medians over prompts and {counts.pop()} {words}{notation(*tables)}. "
    if any("batch" in line for line in lines):
        notes += "tokens/s and speed-up are of all prompts together, decoded as a queue; the other columns are of "
        notes += "single texts. TTFT: from the moment a text gets its row of the batch. "
    for temperature in {line["temperature"] for line in lines if line["method"].lower().endswith("contrastive")}:
        notes += f"contrastive: at temperature {temperature}, without filters. "
    titles = dict.fromkeys(title for table in tables for title in table.titles())
    notes += "; ".join(LEGEND[title] for title in titles if title in LEGEND) + "."
    if pythia:
        notes += f"\nThe report's speed-up, without a KV cache: {SPEED_UP}, at best {BEST_SPEED_UP}."
    return notes


def swept_texts(lines: Iterable[Line], cost: CostsLine) -> list[SpeedLine]:
    """The timed texts of `--sweep` at the temperature and prompt length of `cost`."""
    at = "sweep", cost["temperature"], cost["promptLen"]
    return [m for m in of_kind(lines, SpeedLine) if (m["mode"], m["temperature"], m["promptLen"]) == at]


def sweep_tables(run: RunLine, lines: Sequence[Line]) -> Iterator[Table]:
    """For each temperature: speed over gamma, and the alpha and the costs used by theory."""
    for cost in of_kind(lines, CostsLine):
        timed = swept_texts(lines, cost)
        if "target" in {line["method"] for line in timed}:  # Else the run was stopped before it.
            prediction = predict(timed, cost)
            scoring = ", ".join(f"{v:.2f}" for v in cost["scoring"])
            alphas = prediction["alpha"], cost["alpha"]  # nan where nothing was guessed, None with --acceptance
            counted, overlap = ("-" if alpha is None or alpha != alpha else f"{alpha:.3f}" for alpha in alphas)
            best = f"{prediction['best']}{' or more' * (prediction['best'] == MOST_GUESSES)}"
            by_paper = f"; by it, gamma {best} is best" if alphas[0] == alphas[0] else ""
            notes = (
                f"alpha: {counted} by counting, {overlap} as the mean of the sum of min(p, q). c: "
                f"{prediction['c']:.3f}. Scoring 1, 2, 3 ... tokens costs {scoring} times as much as one. theory: "
                "expected tokens a round / (c for each guess in it + the cost of scoring these and one more token), "
                "where c is the time of a draft step over that of a plain step; with --lookupFirst it counts for "
                "guesses from the text too. the paper's: theorem 3.8, which takes every round to have gamma guesses, "
                "each accepted with probability alpha, independently of the others, and scoring to cost as much as one "
                f"token{by_paper}. " + OVERLAPS
            )
            yield replace(sweep_table(run, timed, prediction), notes=notes)


def sweep_table(run: RunLine, lines: Sequence[SpeedLine], prediction: Prediction) -> Table:
    """One row for plain decoding, and one for each gamma."""
    columns: dict[str, Callable[[Summary], Cell]] = {
        "gamma": lambda row: str(row["gamma"]),
        "s a\ntext": lambda row: median(row["seconds"]),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "theory": lambda row: Measured(row["theory"], digits=2),
        "measured\n/ theory": lambda row: Measured(row["speedup"][0] / row["theory"], digits=2),
        "the\npaper's": lambda row: Measured(row["paper"], digits=2),
        "alpha": lambda row: Measured(row["alpha"], digits=3),
        "tokens/\nround": lambda row: Measured(row["tokens_per_round"][0], digits=2),
        "of\nexpected": lambda row: Measured(tokens_a_round(row) / row["expected"], digits=2),
    }
    table = table_of("Speed over gamma: " + conditions(run, lines), columns, prediction["rows"])
    target = prediction["plain"]
    table.rows.insert(0, ["plain", median(target["seconds"]), span(target["throughput"]), "1"])
    return table


def batch_table(lines: Sequence[Line]) -> Table:
    """The map of `--sweep batch`: a row for each batch."""
    rows, first = predict_batches(lines), of_kind(lines, QueueLine)[0]
    gammas = dict.fromkeys(row["gamma"] for prediction in rows.values() for row in prediction["rows"])
    fixed = [gamma for gamma in gammas if gamma != "costAware"]
    title = (
        f"Speed-up over plain decoding of the same batch: queues of texts of {first['maxLen']} tokens after prompts of "
        f"{first['promptLen']}, temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}"
    )
    heads = ["batch", "plain\ntokens/s", *map("gamma\n{}".format, fixed), "costAware", "its share\nof the best"]
    table = Table(title, heads)
    for batch, prediction in rows.items():
        cell: dict[Any, Cell] = {row["gamma"]: Measured(row["speedup"][0], digits=2) for row in prediction["rows"]}
        chosen = [cell.get(gamma, "") for gamma in (*fixed, "costAware")]
        table.add(str(batch), median(prediction["plain"]), *chosen, span(prediction["controller"]))
    return replace(table, notes=BATCH_NOTES.format(notation(table)))


def said_of(line: EngineLine) -> str:
    """The result of the check of the sampled text of another program's method."""
    if line["failed"]:
        return f"left out: {line['failed']}"
    if line["drawn"] is None:
        return "not tested"
    if line["quantised"]:
        return "another model"
    tests = [TESTS[name] for name in line["drawn"]["seen_by"]]
    if line["drawn"]["impossible"]:
        tests[-1:] = [f"impossible tokens {line['drawn']['impossible'] / line['drawn']['tokens']:.1%}"]
    return f"difference found: {', '.join(tests)}" if tests else "no difference found"


def engine_table(lines: Sequence[EngineLine]) -> Table:
    """The methods of other programs, and the results of the checks of their texts."""
    texts = max((line["drawn"]["texts"] for line in lines if line["drawn"]), default=0)
    notes = ENGINE_NOTES.format(texts=texts or "their")
    heads = ["", "version", "precision", "greedy", "sampled"]
    table = Table("Other programs", heads, left=(1, 2, 4), folded=(1, 4), notes=notes)
    # Of several prompt lengths the last, or one at which the method failed.
    for line in {line["method"]: line for line in [*lines, *(line for line in lines if line["failed"])]}.values():
        differ = ""
        if greedy := line["greedy"]:
            differ = f"{greedy['beyond'] + greedy['near_ties'] * line['quantised']} of {greedy['tokens']}"
        table.add(line["method"], line["version"] or "", line["precision"], differ, said_of(line))
    return table


def step_tables(lines: Sequence[StepLine], texts: Sequence[SpeedLine] = ()) -> Iterator[RenderableType]:
    """The tables of `--steps`. texts: those that the run timed too."""
    prefill = Table("Time to the first token after a prompt of so many tokens", ["prompt", "ms", "ms a token"])
    growth = Table("A token of the target after a context of so many tokens", ["context", "ms", "of the first"])
    first = next((line["seconds"] for line in lines if line["what"] == "growth"), [])
    for line in lines:
        if line["what"] == "prefill":
            took = interval(line["seconds"])
            prefill.add(str(line["tokens"]), span(took, 1e3), median(took, 1e3 / line["tokens"]))
        elif line["what"] == "growth":
            took = interval(line["seconds"])
            growth.add(str(line["tokens"]), span(took, 1e3), span(time_ratio(line["seconds"], first)))
    tables = [forwards_table(lines), prefill, growth]
    # With lookup there is none, and a run may have been stopped before all parts were kept.
    if {"plain step", "round", "scoring"} <= {line["role"] for line in lines if line["what"] == "round"}:
        tables.append(round_table(lines, texts))
    yield from tables
    read = ", ".join(f"{speed / 1e9:.1f} GB/s for the {role}'s bytes" for role, speed in limits_of(lines).items())
    note = STEP_NOTES.format(read=read.replace("memory's bytes", "buffer beyond the cache"))
    yield Text(f"Medians{notation(*tables)}, in turn. {note}")


def time_ratio(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Median and interval of the ratios of two lists that were measured interleaved."""
    return interval([a / b for a, b in zip(upper, lower)])


def limits_of(lines: Sequence[StepLine]) -> Mapping[str, float]:
    """{role: the memory limit of its forwards, in bytes per second}: the fastest that as many bytes, or more, were read
    in any turn (of several processes, in the median turn of any), by reading alone or by a forward.

    A pair of the same turn would not do: on a machine whose memory is shared, each of the two may meet another load,
    and the share would be above 1 where the reading was disturbed.
    """
    speeds = [(line["bytes"], line["bytes"] / min(line["seconds"])) for line in lines if "bytes" in line]
    least = {line["role"]: line["bytes"] for line in lines if line["what"] == "reading"}
    return {role: max(speed for size, speed in speeds if size >= read) for role, read in least.items()}


def forwards_table(lines: Sequence[StepLine]) -> Table:
    """One row for each model and number of tokens."""
    limits = limits_of(lines)
    one: dict[str, Sequence[float]] = {}
    table = Table("Forwards beside the time to read as many bytes", ["", "tokens", "MB", "ms", "of one", "% limit"])
    for line in lines:
        if line["what"] == "forward":
            seconds = line["seconds"]
            of_one = Measured(time_ratio(seconds, one.setdefault(line["role"], seconds)).middle, digits=2)
            share = interval([line["bytes"] / limits[line["role"]] / each for each in seconds])
            figures = span(interval(seconds), 1e3), of_one, span(share, 100)
            table.add(line["role"], str(line["tokens"]), f"{line['bytes'] / 1e6:,.0f}", *figures)
    return table


def round_table(lines: Sequence[StepLine], texts: Sequence[SpeedLine] = ()) -> Table:
    """The parts of a round in ms and in units of a plain step, and what speed-up they allow: at the alpha of `fixed` in
    the texts of the run, beside its speed-up there, or without such texts at ALPHAS."""
    parts = {line["role"]: line for line in lines if line["what"] == "round"}
    gamma, plain_step = parts["round"]["tokens"], parts["plain step"]["seconds"]
    cost = {name: time_ratio(line["seconds"], plain_step) for name, line in parts.items()}
    table = Table(f"A round of {gamma} guesses, all accepted, and its parts", ["", "ms", "of a plain step"])
    for name, line in parts.items():
        table.add(name, span(interval(line["seconds"]), 1e3), span(cost[name]))
    c = cost["draft step"].middle if "draft step" in parts else 0.0
    shortest = [text for text in texts if text["promptLen"] == texts[0]["promptLen"]]  # The parts have such a prompt.
    fixed = [row for row in summarize(shortest) if row["method"] == "fixed" and row["alpha"] == row["alpha"]]
    for alpha in [row["alpha"] for row in fixed] or ALPHAS:
        speed = improvement(alpha, gamma, c, cost["scoring"].middle)
        table.add(f"speed-up by theory, alpha {alpha:.3g}", "", Measured(speed, digits=2))
    for row in fixed:
        table.add("speed-up of fixed, measured", "", span(row["speedup"]))
    return table
