"""What is shown of a benchmark: tables, and a picture."""

import matplotlib
from rich.text import Text

from benchmark.parts import LARGE, PROMPT, WIDTHS
from benchmark.peers import SAMPLING
from experiments.measure import theory
from experiments.speed import interval, paired_ratios, summarize
from inputs.hub import gigabytes
from report.tables import grid, plain, span

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

ALPHAS = (0.4, 0.6, 0.8)  # of synthetic acceptance
COLOURS = {"transformers": "#c9c9c9", "compiled": "#5a9bd8", "no cache": "#f6c3bd", "": "#9fc5ec"}


def ratio(upper, lower):
    """Interval of the ratios of two lists measured in turn."""
    return interval([a / b for a, b in zip(upper, lower)])


def predict(record):
    """[{variant, alpha, measured, theory}]: speed-ups with synthetic acceptance, and theorem 3.8 with the measured
    costs of guessing and of scoring."""
    found, seconds = [], {(m["variant"], m["part"]): m["seconds"] for m in record["parts"]}
    for variant in dict.fromkeys(m["variant"] for m in record["parts"]):
        step = seconds[variant, "plain step"]
        c, scoring = (ratio(seconds[variant, part], step)[0] for part in ("draft step", "scoring"))
        for alpha in ALPHAS:
            found.append(
                {
                    "variant": variant,
                    "alpha": alpha,
                    "c": c,
                    "scoring": scoring,
                    "theory": theory.improvement(alpha, record["flags"]["gamma"], c, scoring),
                    "measured": interval(
                        paired_ratios(record["speed"], f"synthetic {alpha}, {variant}", f"plain, {variant}")
                    ),
                }
            )
    return found


def tables(record):
    """Everything shown, as rich renderables."""
    flags, lines, machine_ = record["flags"], record["speed"], record["machine"]
    yield plain(
        f"{flags['target']} and {flags['draft']}"
        + (", random weights" if flags["shapes"] else "")
        + f", {record['dtype']}; {machine_['processor']}, {machine_['threads']} threads, {record['device']}; "
        f"torch {machine_['torch']}, transformers {machine_['transformers']}"
    )
    table = grid(
        f"Tokens per second: {flags['prompts']} prompts of {PROMPT} tokens, maxLen {flags['maxLen']}, gamma "
        f"{flags['gamma']}, temperature {SAMPLING.temperature}, top_p {SAMPLING.top_p}",
        ["", "tokens/s", "of plain,\neager", "of trans-\nformers", "alpha", "tokens/\nround"],
    )
    theirs = {row["method"]: row["speedup"] for row in summarize(lines, "transformers")}
    for row in summarize(lines, "plain, eager"):
        guesses = row["acceptance_by_position"]
        table.add_row(
            row["method"],
            span(row["throughput"]),
            span(row["speedup"]),
            span(theirs[row["method"]]),
            f"{row['alpha']:.3f}" if guesses else "",
            span(row["tokens_per_round"][:1] * 3) if guesses else "",
        )
    yield table
    if flags["shapes"]:
        table = grid(
            "Synthetic acceptance: speed-up over plain decoding of the same kind",
            ["", "alpha", "measured", "theory", "c", "scoring"],
        )
        for row in predict(record):
            table.add_row(
                row["variant"],
                str(row["alpha"]),
                span(row["measured"]),
                f"{row['theory']:.2f}",
                f"{row['c']:.3f}",
                f"{row['scoring']:.2f}",
            )
        yield table
        yield Text(
            f"synthetic: each guess stands with probability alpha, by a coin. c: a draft step, scoring: "
            f"{flags['gamma'] + 1} tokens at once, in units of a plain step, sampling included."
        )
    kinds = list(dict.fromkeys(m["variant"] for m in record["forwards"]))
    table = grid(
        "Forwards beside what reading their bytes takes",
        ["", "tokens", "MB", *(f"{kind}\n{what}" for kind in kinds for what in ("ms", "of one", "% limit"))],
    )
    for role in ("target", "draft"):
        own = {(m["variant"], m["tokens"]): m for m in record["forwards"] if m["role"] == role}
        for n in WIDTHS:
            cells = [
                (
                    span(interval(m["seconds"]), 1e3),
                    f"{ratio(m['seconds'], own[kind, 1]['seconds'])[0]:.2f}",
                    span(interval(m["share"]), 100),
                )
                for kind in kinds
                for m in [own[kind, n]]
            ]
            table.add_row(role, str(n), f"{own[kinds[0], n]['bytes'] / 1e6:,.0f}", *sum(cells, ()))
    yield table
    reads = {
        what: f"{interval(speeds)[0] / 1e9:.1f}, at best {max(speeds) / 1e9:.1f}"
        for what, speeds in record["bandwidth"].items()
    }
    yield Text(
        f"GB/s read: as many bytes as the target's forward {reads['target']}; the draft's {reads['draft']}; a "
        f"buffer of {LARGE >> 20} MB {reads['memory']}. A small model's weights may stay in the processor's "
        "cache, so a forward is held against the reading of as many bytes, in the same turn."
    )
    table = grid(
        "A token of the target, drawn after so much context",
        ["context", *(f"{kind}\n{what}" for kind in kinds for what in ("ms", "of the first"))],
    )
    costs = {(m["variant"], m["context"]): m["seconds"] for m in record["growth"]}
    contexts = sorted({context for _, context in costs})
    for context in contexts:
        table.add_row(
            str(context),
            *(
                cell
                for kind in kinds
                for cell in (
                    span(interval(costs[kind, context]), 1e3),
                    span(ratio(costs[kind, context], costs[kind, contexts[0]])),
                )
            ),
        )
    yield table
    seconds = {(m["variant"], m["part"]): m["seconds"] for m in record["parts"]}
    table = grid(
        "A round in which all guesses stand, and the filters, draws and verification in it",
        ["", "draft step\nms", "scoring\nms", "round\nms", "sampling\nms", "share of\nround, %"],
    )
    for kind in kinds:
        table.add_row(
            kind,
            *(span(interval(seconds[kind, part]), 1e3) for part in ("draft step", "scoring", "round", "sampling")),
            span(ratio(seconds[kind, "sampling"], seconds[kind, "round"]), 100),
        )
    yield table
    yield Text(
        "Medians [95 % bootstrap interval], all in turn. Memory of the process at most "
        + gigabytes(record["peak_memory"])
        + "."
    )


def picture(record, path):
    """Tokens per second by method; beside it how near to the limit forwards are."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), dpi=120, width_ratios=(1.25, 1))
    rows = summarize(record["speed"], "plain, eager")[::-1]
    for y, row in enumerate(rows):
        middle, low, high = row["throughput"]
        colour = next(colour for word, colour in COLOURS.items() if word in row["method"])
        error = None if low != low else [[max(middle - low, 0)], [max(high - middle, 0)]]
        left.barh(y, middle, xerr=error, color=colour, ecolor="#555555", capsize=2, height=0.7)
        left.text(0, y + 0.02, f"  {middle:,.0f}" if middle >= 100 else f"  {middle:.3g}", va="center", fontsize=8)
    left.set(yticks=range(len(rows)), yticklabels=[row["method"] for row in rows], xlabel="tokens per second")
    left.tick_params(axis="y", labelsize=9, length=0)
    for (role, variant), style in {
        ("target", "eager"): "o--",
        ("target", "compiled"): "o-",
        ("draft", "eager"): "s--",
        ("draft", "compiled"): "s-",
    }.items():
        own = [m for m in record["forwards"] if (m["role"], m["variant"]) == (role, variant)]
        if own:
            middle, low, high = (
                [100 * value for value in values] for values in zip(*(interval(m["share"]) for m in own))
            )
            colour = "#2c3e50" if role == "target" else "#d98c3f"
            right.plot(range(len(own)), middle, style, color=colour, markersize=5, label=f"{role}, {variant}")
            right.fill_between(range(len(own)), low, high, color=colour, alpha=0.12, linewidth=0)
    right.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
    right.set(
        xticks=range(len(WIDTHS)),
        xticklabels=WIDTHS,
        xlabel="tokens scored at once",
        ylim=(0, None),
        ylabel="% of the limit",
    )
    right.set_title("time to read as many bytes / time of the forward", fontsize=9, loc="left")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    names = f"{record['flags']['target']} with {record['flags']['draft']}"
    figure.suptitle(
        names
        + (" (shapes; random weights, synthetic acceptance)" if record["flags"]["shapes"] else "")
        + f", {record['dtype']}, {record['machine']['processor']}, {record['machine']['threads']} threads",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
