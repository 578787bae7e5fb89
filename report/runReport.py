"""What is shown of a run: tables on the screen, and the same in `results.txt`."""

from rich.console import Console
from rich.text import Text

from experiments.diversity import ARTICLE, FIGURES
from experiments.speed import summarize
from experiments.sweep import predict
from report.runReport import losslessReport
from report.tables import WIDTH, give_or_take, grid, name_of, number, plain, span

# Flags named above a table of speeds, with the value that needs no mention.
SHOWN = {
    "maxLen": None,
    "gamma": None,
    "draftLength": "fixed",
    "verification": "token",
    "draftVocab": None,
    "temperature": None,
    "top_p": 1,
    "top_k": 0,
    "repetition_penalty": 1,
    "compile": False,
}
DIVERSITY_NOTES = (
    "Means over texts, ± half of the 95 % bootstrap interval. Entropy in bits, distinct-n and repeated "
    "4-grams of prompt and text, parted at white space; perplexity under the target of the text after "
    "the prompt. The article: GPT-2 large, GPT-2."
)
# What the course report prints for Pythia-70m and Pythia-2.8b on WikiText-2 and for its speed-up without a KV cache.
REPORT = {"draft": 84.37, "target": 17.141058, "speculative": 17.141059, "speedup": "1.8 - 2.5"}


def show(run, measurements, **options):
    """Print a run's report on the screen, or where the `options` of a `rich` console say."""
    pieces = list(report(run, measurements))
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False, **options)
    for piece in pieces:
        console.print(piece)


def report(run, measurements):
    """Everything shown of a run, as rich renderables: the same on screen and in `results.txt`."""
    flags, machine = run["flags"], run["machine"]
    yield Text("=" * WIDTH)
    yield plain(f"Run {run['run']} of {run['time']}" + ("" if finished(measurements) else ", not finished"))
    yield plain("python test.py " + run["command"])
    for role, model in run["models"].items():
        yield plain(f"{role}: {model['name']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['version']}")
    yield plain(
        f"{machine['processor']}, {machine['threads']} threads, {run['device']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; seed {flags['seed']}"
    )
    pythia = run["models"]["target"]["name"] == "pythia-2.8b" and run["models"]["draft"]["name"] == "pythia-70m"
    speed = [m for m in measurements if m["kind"] == "speed"]
    for mode, length in dict.fromkeys((m.get("mode", "speed"), m.get("promptLen")) for m in speed):
        group = [m for m in speed if (m.get("mode", "speed"), m.get("promptLen")) == (mode, length)]
        if mode == "sweep":
            yield from sweep_tables(
                run, group, [m for m in measurements if m["kind"] == "costs" and m["promptLen"] == length]
            )
        else:
            rows = summarize(group)
            yield speed_table(run, group, rows)
            yield from acceptance(rows)
    yield from losslessReport.report(measurements)
    for m in measurements:
        if m["kind"] == "figure":
            yield plain(f"Figure: {m['file']}")
    if speed:
        yield Text(speed_notes(speed, pythia))
    diverse = [m for m in measurements if m["kind"] == "diversity"]
    if diverse:
        yield diversity_table(diverse)
        yield Text(DIVERSITY_NOTES)
    for kind, table in (("ppl_text", text_table), ("ppl_corpus", corpus_table)):
        chosen = [m for m in measurements if m["kind"] == kind]
        if chosen:
            yield table(chosen, pythia)
    yield Text()


def finished(measurements):
    return any(m["kind"] == "end" for m in measurements)


def titled(run, measurements):
    """What was timed, and the flags that matter for it."""
    first, flags = measurements[0], run["flags"]
    low, high = (f(m["prompt_tokens"] for m in measurements) for f in (min, max))
    values = {name: first.get(name, flags.get(name, off)) for name, off in SHOWN.items()}
    shown = "".join(f"{name} {value}, " for name, value in values.items() if value not in (SHOWN[name], None))
    tokens = low if low == high else f"{low} to {high}"
    return f"{len({m['prompt'] for m in measurements})} prompts of {tokens} tokens, {shown}{first['dtype']}"


def speed_table(run, measurements, rows):
    """The methods of one mode; for the report's own experiment with its figure, else with what was guessed."""
    report = measurements[0].get("mode", "speed") == "speed"
    table = grid(
        "Speed: " + titled(run, measurements),
        [
            "",
            "TTFT\nms",
            "TPOT\nms",
            "tokens/s",
            "speed-up",
            "alpha",
            "tokens/\nround",
            *(["total/n\nms"] if report else ["rounds", "drafted", "kept"]),
        ],
    )
    for row in rows:
        guesses = row["method"] not in ("draft", "mid", "target") and row["acceptance_by_position"]
        if report:
            more = [span(row["report_tpot"][:1] * 3, 1e3)]
        else:  # no room for every interval
            row = row | {name: row[name][:1] * 3 for name in ("ttft", "tpot", "tokens_per_round")}
            more = [f"{row[name]:,.0f}" for name in ("rounds", "drafted", "accepted")]
        table.add_row(
            name_of(row["method"]),
            span(row["ttft"], 1e3),
            span(row["tpot"], 1e3),
            span(row["throughput"]),
            span(row["speedup"]),
            f"{row['alpha']:.3f}" if guesses else "",
            span(row["tokens_per_round"]) if guesses else "",
            *more,
        )
    return table


def sweep_tables(run, measurements, costs):
    """One table a temperature, and the alpha and the costs that theory was given."""
    for cost in costs:
        chosen = [m for m in measurements if m["temperature"] == cost["temperature"]]
        if "target" not in {m["method"] for m in chosen}:  # the run was stopped before it
            continue
        found = predict(chosen, cost)
        table = grid(
            "Speed over gamma: " + titled(run, chosen),
            [
                "gamma",
                "s a text",
                "tokens/s",
                "speed-up",
                "theory",
                "measured/\ntheory",
                "the paper's",
                "alpha",
                "tokens/\nround",
            ],
        )
        table.add_row("plain", span(found["plain"]["seconds"]), span(found["plain"]["throughput"]), "1", *[""] * 5)
        for row in found["rows"]:
            table.add_row(
                str(row["gamma"]),
                span(row["seconds"]),
                span(row["throughput"]),
                span(row["speedup"]),
                f"{row['theory']:.2f}",
                f"{row['speedup'][0] / row['theory']:.2f}",
                f"{row['paper']:.2f}",
                f"{row['alpha']:.3f}",
                f"{row['tokens_per_round'][0]:.2f}",
            )
        yield table
        scoring = ", ".join(f"{v:.2f}" for v in cost["scoring"])
        overlap = float("nan") if cost["alpha"] is None else cost["alpha"]
        yield Text(
            f"alpha {found['alpha']:.3f} by counting, {overlap:.3f} as the mean of the sum of min(p, q); c "
            f"{found['c']:.3f}; scoring 1, 2, 3 ... tokens costs {scoring} of one. theory: tokens a round over "
            "gamma c + scoring's cost; the paper's takes that for 1, and then finds gamma "
            f"{found['best']} best."
        )


def diversity_table(measurements):
    """The methods, and below them the article's figures."""
    first = measurements[0]
    table = grid(
        f"Diversity: {first['prompts']} prompts, maxLen {first['maxLen']}, "
        f"temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}",
        ["", "texts", "entropy\n1", "entropy\n2", "entropy\n3", "distinct\n1", "distinct\n2", "repeated", "perplexity"],
    )
    for m in measurements:
        table.add_row(
            name_of(m["method"]),
            str(m["texts"]),
            *(give_or_take([each[name] for each in m["each"]]) for name in FIGURES),
        )
    for method, figures in ARTICLE.items():
        table.add_row(f"article, {method}", "5", *(f"{value:.3g}" for value in figures), "", "")
    return table


def acceptance(rows):
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            yield Text(
                "Acceptance by position in the round: "
                + ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
                + "."
            )


def speed_notes(measurements, pythia):
    repeats = len({m["repeat"] for m in measurements})
    return (
        f"Medians over prompts and {repeats} interleaved repeats [95 % bootstrap interval]; speed-up: median of "
        "paired throughput ratios to the target alone."
        + (" total/n: the report's time per token." if any(m.get("mode") == "speed" for m in measurements) else "")
        + (f"\nThe report measured a speed-up of {REPORT['speedup']} (without a KV cache)." if pythia else "")
    )


def text_table(measurements, pythia):
    table = grid(
        f"Perplexity per text (mean over texts of at least {measurements[0]['sentenceLimit']} characters), "
        + measurements[0]["dtype"],
        ["", "texts", "tokens", "draft", "target", "speculative", "relative\ndifference"],
    )
    for m in measurements:
        ppl = m["ppl"]
        table.add_row(
            plain(m["corpus"]),
            str(m["texts"]),
            f"{m['tokens']:,}",
            number(ppl["draft"], 4),
            number(ppl["target"], 6),
            number(ppl["speculative"], 6),
            difference(ppl),
        )
    if pythia:
        table.add_row(
            "the report (WikiText-2)",
            "",
            "",
            str(REPORT["draft"]),
            str(REPORT["target"]),
            str(REPORT["speculative"]),
            difference(REPORT),
        )
    return table


def corpus_table(measurements, pythia):
    first = measurements[0]
    table = grid(
        f"Perplexity of the corpus (windows of {first['window']} tokens, stride {first['stride']}), " + first["dtype"],
        ["", "tokens", "per", "draft", "target", "speculative", "relative\ndifference"],
    )
    for m in measurements:
        for unit in ("token", "word", "byte"):
            ppl = {role: m["ppl"][role][unit] for role in ("draft", "target", "speculative")}
            lead = (plain(m["corpus"]), f"{m['tokens']:,}") if unit == "token" else ("", "")
            table.add_row(
                *lead,
                unit,
                number(ppl["draft"], 4),
                number(ppl["target"], 6),
                number(ppl["speculative"], 6),
                difference(ppl),
            )
    return table


def difference(ppl):
    """Of the speculative perplexity from the target's, relative."""
    return f"{abs(ppl['speculative'] / ppl['target'] - 1):.1e}"
