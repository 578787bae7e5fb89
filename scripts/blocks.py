"""The contents of the documentation's blocks: tables as they are printed of a record, single figures, and what is read
from the code: layout, imports between folders, methods, flags, models."""

import ast
import graphlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import dropwhile
from pathlib import Path
from textwrap import fill, wrap
from typing import cast

from decoding.lengthRules import MENU
from experiments.flags import parser
from experiments.intervals import speedup
from experiments.schema import CostsLine, EngineLine, Run, SpeedLine, TextPerplexityLine, of_kind
from experiments.theory import predict
from inputs.commandLine import visible
from inputs.files import ROOT
from methods.catalogue import METHODS
from playback.trace import summary
from report.losslessReport import verdict
from report.results import Results, pieces_of_run
from report.runTables import swept_texts
from report.sources import BEST_SPEED_UP, SPEED_UP, text_table
from report.tables import Cell, Measured, Table, markdown, name_of, notation, span
from scripts.auditEngines import FIRST, bound, chance, engines_table, excluded, lookup_hits, mistakes_table, power
from scripts.costFrontier import OWN as COSTED
from scripts.costFrontier import cost_tables
from scripts.courseReport import CACHED, NO_CACHE, beside_report, speeds_beside
from scripts.keepRecord import Records, command_of, differing, source
from utils import UserError

PAIR, SHAPES, REAL = BENCHMARKS = "benchmark", "benchmark-pythia", "benchmark-SmolLM2"  # runs beside other engines
OF_MODELS, ABLATION = ("head-bundled-target", "head-SmolLM2-135M-Instruct"), "ablation-bundled-target"
HEADS = *OF_MODELS, "head-SmolLM2-short"
TRAININGS = *OF_MODELS, ABLATION  # what `python -m scripts.trainHead` writes, with a figure
RECIPES = "recipe-eagle-3", "recipe-eagle-1", "recipe-medusa"  # likewise: heads that are compared in docs/cost.md
OF_PROCESSORS = {f"{kind}-": f"{kind}-SmolLM2" for kind in ("avx2", "avx512")}  # runs on other processors
CATEGORIES = "categories", "categories-SmolLM2"  # runs with prompts of several categories
COMPILED = CACHED | {"speculative": "fixed"}
BESIDE = {  # {run of the bundled pair beside the course report: (how it decodes, {role in the report: row})}
    "compare": ("no KV cache, eager", NO_CACHE), "first": ("KV cache, eager", CACHED),
    "head": ("KV cache, compiled", COMPILED),
}  # fmt: skip
OWN = r"(?!.*:|.*no cache).*"  # this project's rows, with a KV cache
EAGER = (  # methods whose speed-up is quoted of the table of all methods
    "fixed", "block", "lookup", "lookupFirst", "self", "head", "cascade", "additive", "draftConfidence",
    "targetConfidence", "costAware", "tree", "contrastive", "speculativeContrastive",
)  # fmt: skip
FASTEST = r"(?!(llama.cpp|vllm|generate):lookup|llama.cpp:copy).*"  # No way of guessing that is slower than none.
ROOT_FILES = "test", "specSampling", "regrSampling", "PPL", "utils", "downloadModel", "downloadData"
DISTANCE = "audit, bundled pair"
WIDTH = 119  # characters of a line of the layout
OTHERS = {  # folders without code, and their descriptions in the layout
    "docs/ tests/": "the documentation, in docs/records/ the record of each figure in it; the test suite",
    "custom_generate/": "what `generate` of transformers loads by the folder's name",
    "models/ datasets/": "the bundled models and sample texts, and what you download",
    "results.txt": "the tables of every run, newest first; with an index above if there are several",
}


def printed(
    name: str, titles: str, records: Records, columns: str = "", rows: str = "", by: str = "", notes: bool = False
) -> str:
    """The tables of a record whose titles match a pattern, and a line on how they were measured.

    columns, rows: see `markdown`; the column DISTANCE is the bound of each row's text that docs/engines.md has. by: the
    column by which rows are sorted, the largest figure first. notes: with the sentences under the tables.
    """
    parts, taken = [], False
    run, lines = records[name]
    if name not in records.pieces:  # Their intervals take a second, and several blocks are of one record.
        records.pieces[name] = list(pieces_of_run(run, lines))
    for piece in records.pieces[name]:
        if isinstance(piece, Table):
            if taken := bool(re.match(titles, piece.title)):
                if by:
                    at = piece.titles().index(by)
                    piece = replace(piece, rows=sorted(piece.rows, key=lambda row: -cast(Measured, row[at]).value))
                if DISTANCE in columns:
                    cells_of = [cell for cell in records["engines"][0]["cells"] if cell.items() >= FIRST.items()]
                    # Of weights in few bits only that they are another model.
                    bounds = {name_of(cell["method"]): bound(cell).partition(",")[0] for cell in cells_of}
                    cells: list[list[Cell]] = [[*row, bounds.get(str(row[0]), "")] for row in piece.rows]
                    piece = replace(piece, heads=[*piece.heads, DISTANCE], rows=cells)
                medians = f"; medians{notation(piece)}" if notation(piece) and "medians" not in piece.title else ""
                parts.append(f"{markdown(piece, columns, rows)}\n\n{piece.title}{medians}.")
                parts += [piece.notes] if notes and piece.notes else []
        elif taken and notes and not re.match("Figure:|Medians|$", str(piece)):
            parts.append(str(piece))
    if not parts:
        raise UserError(f"no table of {name} has a title like {titles!r}")
    return "\n\n".join([*parts, source(run, lines)])


def excerpt(records: Records) -> str:
    """What `make run` prints, without the notes and without the perplexity of whole corpora."""
    run, lines = records["first"]
    shown = Results(records.folder).rendered([(run, [line for line in lines if line.get("of") != "corpus"])])
    text = "\n".join(line for line in shown.splitlines() if line.strip("="))
    text = re.sub(r"\nAcceptance.*?\n(?=Perplexity)", "\n[...]\n", text, flags=re.S)
    return f"```text\n{re.sub(r'speculative: .*', '', text, flags=re.S)}[...]\n```"


def lossless_verdict(records: Records) -> str:
    """The verdict of `--lossless`."""
    run, lines = records["lossless"]
    text = wrap(verdict(lines)[1], 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", f"$ {command_of(run)}", *text, "```"])


def conversation(records: Records) -> str:
    """A conversation round by round: accepted guesses are bold, rejected ones struck out."""
    (record, _), paragraphs = records["chat"], []
    for turn in record["turns"]:
        answer = ""
        for kinds in turn["rounds"]:
            for tag, keep, pieces in zip(("<b>", "<del>", ""), ("\n", "", "\n"), kinds):
                text = escape(visible("".join(pieces), keep), quote=False)
                answer += f"{tag}{text}{tag.replace('<', '</')}" if text else ""
        for line in escape(visible(turn["prompt"].strip()), quote=False), answer, summary(turn["rounds"]):
            paragraphs.append(f"<p>{line}</p>".replace("\n", "<br>"))  # A blank line would end the HTML.
    return "\n\n".join([*paragraphs, source(record)])


def screen(records: Records) -> str:
    """A terminal with `--chat`; what is faint there is italic here."""
    record, _ = records["screen"]
    text = re.sub(r"\x1b\[2m([^\x1b]*)", r"<i>\1</i>", escape(record["screen"], quote=False))
    text = re.sub(r"\x1b\[\d*m", "", text)
    return f"<pre>\n{text}\n</pre>\n\n{source(record)}"


def duration(command: str, records: Records) -> str:
    """How long a command of the README took."""
    return f"{records['screen'][0]['seconds'][command]:.0f} s"


def trainings(names: Sequence[str], records: Records) -> str:
    """What trained heads cost, and how good they are on text that is held out; of variants a row each."""
    heads = ["", "weights", "tokens trained", "minutes", "memory, GB"]
    table, sources = Table("", [*heads, "acceptance by position", "of all", "tokens/round"]), []
    for record, _ in map(records.__getitem__, names):
        target, written = record["models"]["target"]["name"], record["written"]
        for name, variant in record["variants"].items():
            last = variant["history"][-1]
            shares = " ".join(f"{share:.3f}" for share in last["acceptance"])
            what = target if names == HEADS else name, f"{variant['parameters']:,}"
            cost = f"{last['tokens']:,}", f"{last['seconds'] / 60:.0f}", f"{last['memory'] / 1e9:.1f}"
            table.add(*what, *cost, shares, f"{last['alpha']:.3f}", f"{last['tokens_per_round']:.2f}")
        texts = f"{target}: {written['tokens']:,} tokens, written and read in {written['seconds'] / 60:.0f} min"
        sources.append(f"Texts of {texts}. {source(record)}")
    return "\n\n".join([markdown(table), *sources])


def of_bundled_pair(records: Records) -> list[Run]:
    """The runs of the bundled pair in BESIDE. Raises UserError if they are not one experiment."""
    runs = [records[name] for name in BESIDE]
    if differ := differing(run for run, _ in runs):
        raise UserError(f"{', '.join(BESIDE)} are not one experiment: they differ in {', '.join(differ)}")
    return runs


def beside_the_report(records: Records) -> str:
    """The course report beside the bundled pair, and in a table of its own beside random weights of Pythia's shapes."""
    runs, (shapes, measured) = of_bundled_pair(records), records[SHAPES]
    pair = {
        f"bundled pair, {title}": (of_kind(lines, SpeedLine), methods)
        for (_, lines), (title, methods) in zip(runs, BESIDE.values())
    }
    coins = [pair for line in of_kind(measured, SpeedLine) for pair in line["acceptance_by_position"]]
    tested, accepted = map(sum, zip(*coins))
    title = (
        f"Pythia's shapes, random weights, KV cache, compiled; {100 * accepted / tested:.0f} % of guesses accepted "
        f"(synthetic: each with probability {shapes['flags']['acceptance']})"
    )
    random_weights = {title: (of_kind(measured, SpeedLine), COMPILED)}
    perplexities = text_table(of_kind(records["first"][1], TextPerplexityLine), True)
    pieces = [markdown(speeds_beside(pair)), " ".join(source(*run) for run in runs), markdown(perplexities)]
    return "\n\n".join([*pieces, markdown(speeds_beside(random_weights)), source(shapes, measured)])


def in_short(records: Records) -> str:
    """The README's table: the course report's main figures beside those of the bundled pair."""
    table = Table("", ["figure", "the report", "here, bundled pair", "command"])
    for (run, lines), (title, methods) in zip(of_bundled_pair(records), BESIDE.values()):
        there = f"{SPEED_UP} typical, {BEST_SPEED_UP} best" if methods is NO_CACHE else ""
        speed_up = beside_report(of_kind(lines, SpeedLine), methods)[-1]
        table.add(f"speed-up, {title}", there, speed_up, f"`{command_of(run)}`")
    run, lines = records["first"]
    here, report = text_table(of_kind(lines, TextPerplexityLine)[:1], True).rows
    names = "perplexity, draft", "perplexity, target", "perplexity, speculative", "relative difference of the last two"
    for what, ours, theirs in zip(names, here[3:], report[3:]):
        table.add(what, theirs, ours, f"`{command_of(run)}`")
    return markdown(table)


def row_ratio(name: str, method: str, baseline: str, records: Records, figure: str = "throughput") -> str:
    """The throughput, or another figure, of a row of a record over that of another."""
    return str(span(speedup(of_kind(records[name][1], SpeedLine), method, baseline, figure)))


def left_out(name: str, method: str, records: Records) -> str:
    """Why a method of another program has no times in a record."""
    return next(line["failed"] or "" for line in of_kind(records[name][1], EngineLine) if line["method"] == method)


def overall(name: str, records: Records) -> str:
    """The table of speeds by category of prompt, with the rows over all prompts alone."""
    table = printed(name, "Speed by category", records).splitlines()
    return "\n".join([*table[:2], *dropwhile(lambda row: not row.startswith("| overall"), table[2:])])


def within(name: str, records: Records) -> str:
    """In how many cells of a sweep over gamma the interval of the speed-up contains that of theory."""
    _, lines = records[name]
    costs = of_kind(lines, CostsLine)
    rows = [row for cost in costs for row in predict(swept_texts(lines, cost), cost)["rows"]]
    inside = [sum(row["speedup"].low <= row[of] <= row["speedup"].high for row in rows) for of in ("theory", "paper")]
    return f"{inside[0]} of the {len(rows)} intervals contain it, and {inside[1]} contain the paper's"


def quoted(block: str, pattern: str, records: Records) -> str:
    """What the group of a pattern matches in another block."""
    if not (match := re.search(pattern, " ".join(BLOCKS[block](records).split()))):
        raise UserError(f"block {block} has nothing like {pattern!r}")
    return match[1]


def records_table(records: Records) -> str:
    """The table of docs/records/README.md: every record, its command and its machine."""
    table = Table("", ["name", "record", "made by", "machine", "on"])
    for name in (*records.runs, *records.files):
        record, lines = records[name]
        on, place = record["machine"], f"run `{record['run']}` in results.jsonl" if lines else f"{name}.json"
        machine = f"{on['processor']}, threads: {on['threads']}, {record['device']}; torch {on['torch']}"
        table.add(f"`{name}`", place, f"`{command_of(record)}`", machine, record["time"][:10])
    return markdown(table)


def carried_table(records: Records) -> str:
    """Which changes of the code no record had to be measured again for, and what was repeated to show it."""
    table = Table("", ["on", "change", "repeated: texts and figures, all the same"])
    for change in records.carried:
        shown = ", ".join(f"`{one['record']}`: {one['same']:,}" for one in change["shown"])
        table.add(change["time"], change["why"], shown)
    return markdown(table)


def imports(root: Path = ROOT) -> dict[str, list[str]]:
    """{folder of code or file in the root: the others among them that it imports}, from the lowest to the highest."""
    files = {folder.parent.name: [*folder.parent.rglob("*.py")] for folder in root.glob("*/__init__.py")}
    files = {name: paths for name, paths in files.items() if name != "tests"} | {f.stem: [f] for f in root.glob("*.py")}
    imported: dict[str, list[str]] = {}
    for name, paths in sorted(files.items()):
        text = "\n".join(file.read_text(encoding="utf-8") for file in paths)
        modules = set(re.findall(r"^ *(?:from|import) (\w+)[. ,\n]", text, re.M))
        imported[name] = sorted(modules & files.keys() - {name})
    order = list(graphlib.TopologicalSorter(imported).static_order())
    return {name: [other for other in order if other in imported[name]] for name in order}


def layout(records: Records) -> str:
    """The annotated tree of the project: of each folder or file the first sentence of its docstring."""
    rows, files = {}, {f"{name}.py": ROOT / f"{name}.py" for name in ROOT_FILES}
    files |= {f"{name}/": ROOT / name / "__init__.py" for name in imports() if (ROOT / name).is_dir()}
    for name, file in files.items():
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        rows[name] = re.split(r"(?<=[^.])\.(?: |$)", " ".join(text.split("\n\n")[0].split()))[0]
    rows |= OTHERS
    left = max(map(len, rows)) + 2
    lines = [fill(f"{name:{left}}{text}", WIDTH, subsequent_indent=" " * left) for name, text in rows.items()]
    return "\n".join(["```text", *lines, "```"])


def graph(records: Records) -> str:
    """The folders and files as a Mermaid graph, each above what it imports. An import that others imply is left out."""
    reach: dict[str, set[str]] = {}
    lines: list[str] = []
    for name, others in imports().items():
        reach[name] = set(others).union(*(reach[other] for other in others))
        direct = [other for other in others if not any(other in reach[via] for via in others)]
        box = f'{name}["{name}/"]' if (ROOT / name).is_dir() else f'{name}(["{name}.py"])'
        lines = [f"    {box} --> {' & '.join(direct)}" if direct else f"    {box}", *lines]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def methods_table(records: Records) -> str:
    """The catalogue of methods."""
    table = Table("", ["method", "what it is", "needs", "measured by, beside `--compare`", "tested by `--lossless`"])
    for method in (method for method in METHODS.values() if not method.engine):
        modes = " ".join(f"`--{mode}`" for mode in method.modes)
        table.add(f"`{method.name}`", method.title, ", ".join(method.needs), modes, "yes" if method.lossless else "")
    return markdown(table)


def flags_tables(records: Records) -> str:
    """Every flag of test.py, group by group: its value as in the usage line, and its default, and its help."""
    pieces = []
    for group in parser()._action_groups:
        rows: list[list[Cell]] = []
        for action in group._group_actions:
            if not action.option_strings or action.dest == "help":
                continue
            choices = " or ".join(f"`{choice}`" for choice in action.choices or ())
            word = choices or f"`{action.metavar or 'NAME'}`"
            value = {"0": "", "+": f"{word} ...", "?": f"[{word}]"}.get(str(action.nargs), word)
            text = re.sub(r"(?<![\w-])--\w+", r"`\g<0>`", " ".join((action.help or "").split()).replace("%%", "%"))
            meaning, _, default = text.partition(" Default: ")
            rows.append([f"`{action.option_strings[0]}`", value, default.removesuffix("."), meaning])
        if rows:
            table, title = Table("", ["flag", "value", "default", "meaning"], rows), str(group.title)
            pieces.append(f"## {title[0].upper()}{title[1:]}\n\n{markdown(table)}")
    return "\n\n".join(pieces)


def architectures(records: Records) -> str:
    """The verdict on each type of model in transformers: right, or refused, and why."""
    groups: dict[str, list[str]] = {}
    for kind, (result, why) in records["kinds"][0]["kinds"].items():
        reason = re.sub(r"^.* are not (decoded here|supported): |; (name|choose) a model whose .*$", "", why)
        reason = re.sub(r" \(\w*Error.*\)$|(?<=logits are off) by \d+%", "", reason)  # which error: kinds.json says it
        reason = re.sub("of (the kind|type) [a-z_]+ keep", "keep", reason)
        groups.setdefault(f"{result}: {reason}" if reason else result, []).append(f"`{kind}`")
    table = Table("", ["verdict", "kinds", "transformers' names of them"])
    ordered = sorted(groups.items(), key=lambda of: (of[0][:5] != "right", of[0][:6] == "unmade", -len(of[1])))
    for name, kinds in ordered:
        table.add(name, str(len(kinds)), ", ".join(kinds))
    return markdown(table)


OF_GAMMA, OF_PLAIN = "Speed over gamma: .*temperature ", " | tokens/s | TTFT ms | TPOT ms | speed-up"
IN_POST = "target alone|fixed|target confidence"
OF_POST = " | tokens/s | speed-up | alpha | tokens/round | drafted | kept"
OF_COPY = OF_PROCESSORS | {"real-": REAL}
IN_FEW_BITS = {  # {a block: (its run, llama.cpp's row that is beside the copy)}
    "avx2-int8": ("avx2-SmolLM2", "int8"),
    "avx2-q4": ("avx2-SmolLM2", "q4_0"),
    **{f"{of}int4": (run, "int4") for of, run in (*OF_COPY.items(), ("tuned-", "tuned-SmolLM2"))},
}
RUNS = {"": PAIR, "real-": REAL}  # the beginning of a block's name, and the run that its figures are of
BLOCKS: dict[str, Callable[[Records], str]] = {
    "architectures": architectures,
    "engines": engines_table,
    "engines-mended": partial(engines_table, field="mended"),
    "engines-mistakes": mistakes_table,
    "audit-power": power,
    "audit-chance": chance,
    "audit-lookup": lookup_hits,
    "audit-universal": partial(quoted, "engines", r"generate:universal \|[^|]*\| \*\*(.*?)\*\*"),
    "audit-vllm": partial(excluded, "vllm:lookup"),
    "audit-openvino": partial(excluded, "openvino:draft"),
    "layout": layout,
    "graph": graph,
    "methods": methods_table,
    "flags": flags_tables,
    "records": records_table,
    "carried": carried_table,
    "kernels": lambda records: markdown(Table("", **records["kernels"][0]["table"])),
    "results": excerpt,
    "chat": conversation,
    "screen": screen,
    **{f"seconds-{command}": partial(duration, command) for command in ("download", "chat")},
    "compare": partial(printed, "compare", "Speed|Beside theory", notes=True),
    **{f"eager-{name_of(row).replace(' ', '-')}": partial(row_ratio, "compare", row, "target") for row in EAGER},
    **{name: partial(printed, name, "Speed:") for name in ("head", "head-tree", "greedy-SmolLM2", "gpu", "gpu-copy")},
    **{
        name: partial(printed, name, "Speed:", columns=OF_PLAIN, by="tokens/s")
        for name in ("top-k-SmolLM2", "tuned-SmolLM2")
    },
    "heads": partial(trainings, HEADS),
    "head-ablation": partial(trainings, (ABLATION,)),
    "head-recipes": partial(trainings, RECIPES),
    "sweep": partial(printed, "sweep", OF_GAMMA + "0.85", notes=True),
    "sweep-within": partial(within, "sweep"),
    "sweep-c": partial(quoted, "sweep", r"c: (\d+\.\d+)\."),
    **{name: partial(printed, name, "Speed-up over") for name in ("batch-copy", "batch-bundled")},
    **{name: partial(printed, name, "Speed by category") for name in CATEGORIES},
    "overall-copy": partial(overall, "categories-SmolLM2"),
    "diversity": partial(printed, "diversity", "Diversity", notes=True),
    "lossless-verdict": lossless_verdict,
    "lossless-tests": partial(printed, "lossless", "Drawn texts"),
    "lossless-greedy": partial(printed, "lossless", "Greedy texts"),
    "lossless-mistakes": partial(printed, "lossless", "Planted mistakes"),
    **{f"{of}kinds": partial(printed, run, "Speed:", columns=OF_PLAIN, rows=OWN) for of, run in RUNS.items()},
    **{f"{of}scoring": partial(printed, run, "Forwards") for of, run in (RUNS | OF_PROCESSORS).items()},
    **{f"{of}prefill": partial(printed, run, "Time to the first token") for of, run in RUNS.items()},
    **{
        f"{of}best": partial(printed, run, "Speed:", columns=OF_PLAIN, rows=FASTEST, by="tokens/s")
        for of, run in OF_PROCESSORS.items()
    },
    "avx512-lookup": partial(row_ratio, "avx512-SmolLM2", "llama.cpp:lookup", "llama.cpp:plain"),
    "avx512-q4": partial(left_out, "avx512-SmolLM2", "llama.cpp:q4_0"),
    "avx2-greedy": partial(printed, "avx2-SmolLM2", "Other", columns=" | greedy", rows=".*(int|q4).*"),
    **{f"{of}self": partial(row_ratio, run, "self", "target") for of, run in OF_COPY.items()},
    "gpu-fixed": partial(row_ratio, "gpu", "fixed", "target"),
    **{f"compiled-{name}": partial(row_ratio, "head", name, "target") for name in ("fixed", "block")},
    "copy-by-category": partial(row_ratio, "categories-SmolLM2", "self", "target"),
    # How many times as fast as the copy llama.cpp is in few bits, and per token: the copy's time over its own.
    **{name: partial(row_ratio, run, f"llama.cpp:{few}", "self") for name, (run, few) in IN_FEW_BITS.items()},
    **{
        f"{name}-token": partial(row_ratio, run, "self", f"llama.cpp:{few}", figure="tpot")
        for name, (run, few) in IN_FEW_BITS.items()
    },
    "post-ratio": partial(row_ratio, "compare", "targetConfidence", "fixed"),
    **{f"greedy-{name}": partial(row_ratio, "greedy-SmolLM2", name, "target") for name in ("lookup", "self")},
    "round": partial(printed, PAIR, "A round"),
    "over-plain": partial(row_ratio, PAIR, "fixed", "target"),
    "over-plain-block": partial(row_ratio, PAIR, "block", "target"),
    "over-assisted": partial(row_ratio, PAIR, "fixed", "generate:assisted"),
    "over-no-cache": partial(row_ratio, PAIR, "fixed", "speculativeNoCache"),
    "real-best": partial(printed, REAL, "Speed:", columns=f"{OF_PLAIN} | {DISTANCE}", rows=FASTEST, by="tokens/s"),
    "pythia-best": partial(printed, SHAPES, "Speed:", columns=OF_PLAIN, by="tokens/s"),
    "pythia-theory": partial(printed, SHAPES, "A round"),
    "cost-tree": lambda records: f"{MENU[-1].size} nodes in {len(MENU[-1].levels) - 1} levels",
    **{f"cost-{target}": partial(cost_tables, target) for target in COSTED},
    **{f"{name}-tables": partial(printed, name, "") for name in BENCHMARKS},
    "reproduction-report": beside_the_report,
    "reproduction-short": in_short,
    "reproduction-post": partial(printed, "compare", "Speed:", columns=OF_POST, rows=IN_POST),
    "reproduction-article": partial(printed, "diversity", "Div", rows="naive|contrastive|article.*", notes=True),
    "reproduction-article-times": partial(printed, "sweep", OF_GAMMA + "1.0", columns="gamma | tokens/s | speed-up"),
}
