"""Audit the texts of released engines, for docs/engines.md: which of them sample the target's text, to what bound?

    python -m scripts.auditEngines                          every cell that docs/records/engines.json lacks
    python -m scripts.auditEngines openvino:draft --seed 1  those of one engine, with other texts
    python -m scripts.auditEngines --mistakes               how many tokens the tests need to see a planted mistake

A cell is a method with the settings of its sampling, on the bundled pair in float32. It is judged as `test.py --audit`
judges, and kept as soon as it is done. `make bench-peers` installs the engines.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from benchmark.others import CHECKED_BATCH, GREEDY_TOKENS, drawn_texts, method_of, sources_of
from benchmark.peers import OtherMethod, PeerError
from experiments.loading import Inputs, LoadedModels
from experiments.prepare import load_inputs
from experiments.runRecord import code_version, model_record, origin
from experiments.settings import parse
from experiments.speed import Written
from inputs.commandLine import as_command, script_parser, text, whole
from inputs.devices import available_memory
from inputs.files import ROOT, replace_file
from inputs.models import model_version, read_json
from inputs.texts import write_texts
from lossless.audit import Auditor
from lossless.evidence import limit_of
from lossless.trial import Trial
from methods.catalogue import METHODS, Role, build, choose
from methods.programs.program import FOLDER
from methods.samplers import Models
from utils import GREEDY, Sampling

FILE, TEXTS = ROOT / "docs/records/engines.json", FOLDER / "texts"
TEXT_TOKENS, PROMPTS, GAMMA, ROWS = 200, 40, 4, 32  # ROWS: of this project's batches
LIMIT = limit_of(128)  # The cells share the chance of a false alarm.
SETTINGS = {
    "T 0.85, top-p 0.9": Sampling(0.85, 0, 0.9),
    "T 1": Sampling(1.0, 0, 1.0),
    "T 0.85, top-k 40": Sampling(0.85, 40, 1.0),
    "T 0.85, top-p 0.9, penalty 1.2": Sampling(0.85, 0, 0.9, 1.2),
    "greedy": GREEDY,
}
ENGINES = (
    "vllm:lookup,openvino:draft,openvino:lookup,llama.cpp:draft,llama.cpp:lookup,generate:lookup,generate:draft,"
    "generate:assisted,generate:universal,vllm,openvino,llama.cpp,ctranslate2,generate:plain,generate:custom"
)
OWN = "fixed,block,tree,topDown,lookup,lookupFirst,self,head,cascade,additive,draftConfidence,targetConfidence"
FLAGS = (
    "--target bundled-target --draft bundled-draft --mid bundled-mid "
    f"--head bundled-head --draftBits 5 --tree 4,2 --gamma {GAMMA} --sentences {PROMPTS} --dtype float32"
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


def loaded(name: str, inputs: Inputs, models: LoadedModels) -> OtherMethod:
    """The method of this name, ready to write."""
    if not METHODS[name].engine:
        return OwnMethod(build([name], cast(Models, models), inputs.settings.decoding)[name])
    method = method_of(name, inputs, CHECKED_BATCH if METHODS[name].engine in ("vllm", "llama.cpp") else 1)
    context = max(map(len, inputs.rows)) + TEXT_TOKENS + 2 * GAMMA + 8
    method.load(sources_of(inputs, models), GAMMA, context, available_memory("cpu"))
    return method


def judged(
    method: OtherMethod, key: dict[str, Any], inputs: Inputs, models: LoadedModels, tokens: int
) -> Mapping[str, Any]:
    """The figures of a cell. A quantised engine is judged by the rounding of 16 bits. Drawn texts stay in a file for
    `test.py --audit`, and a run with more tokens goes on with them."""
    name, setting, seed = key.values()
    sampling, rows, guessing = SETTINGS[setting], inputs.rows, None
    unit = method.unit_roundoff if method.precision != "int8" else torch.finfo(torch.float16).eps / 2
    if "lookup" in name:
        guessing = build(["lookup"], cast(Models, models), inputs.settings.decoding)["lookup"]
    auditor = Auditor(models["target"], models["draft"], unit, seed, LIMIT, guessing=guessing)
    if not sampling.temperature:
        return auditor.greedy(rows, drawn_texts(method, rows, GREEDY_TOKENS, sampling, seed), sampling)
    file = TEXTS / f"{name} {method.version} {setting} {seed}.jsonl".replace(":", "-")
    texts = [json.loads(line)["tokens"] for line in file.read_text().splitlines()] if file.exists() else []
    prompts = [rows[number % len(rows)] for number in range(-(-tokens // TEXT_TOKENS))]
    for first in range(len(texts), len(prompts), PROMPTS):
        texts += drawn_texts(method, prompts[first : first + PROMPTS], TEXT_TOKENS, sampling, seed, first)
        write_texts(file, zip(prompts, texts))
    return auditor.drawn(prompts, texts[: len(prompts)], sampling)


def audit_engines(names: str | None, mistakes: bool, tokens: int, seed: int) -> None:
    """Fill in the cells that the record lacks, or find the planted mistakes with the vocabulary in both orders."""
    record = read_json(FILE) if FILE.exists() else {"cells": [], "mistakes": []}
    mode = f"--lossless {OWN} --tokens {tokens}" if mistakes else f"--compare {ENGINES},{OWN}"
    inputs = load_inputs(parse(f"{mode} {FLAGS}".split()))
    models, methods = inputs.load_first(), dict[str, OtherMethod]()
    versions = {
        role: model_record(path.name, model_version(path), models[role]) for role, path in inputs.folders.items()
    }

    def keep() -> None:
        about = origin([], {"tokens": tokens}, "cpu", versions) | {"command": "make audit", "dtype": "float32"}
        replace_file(FILE, json.dumps(record | about) + "\n")

    if mistakes:
        record["mistakes"] = []
        for order in ("draft", "p"):
            Trial(inputs, models, "float32", record["mistakes"].append).find_mistakes(order)
        return keep()
    TEXTS.mkdir(parents=True, exist_ok=True)
    chosen = choose(names, Role)[1:] if names else inputs.settings.measuring.groups["compare"]
    for setting, name in [(setting, name) for setting in SETTINGS for name in chosen]:
        key = {"method": name, "setting": setting, "seed": seed}
        before = [cell for cell in record["cells"] if cell.items() >= key.items()]
        if any(not cell["failed"] and (cell["tokens"] >= tokens or setting == "greedy") for cell in before):
            continue
        start, cell = time.time(), key | {"failed": None, "code": code_version()}
        try:
            method = methods[name] = methods.get(name) or loaded(name, inputs, models)
            cell |= {"version": method.version, "precision": method.precision, "settings": dict(method.settings)}
            cell |= judged(method, key, inputs, models, tokens)
        except (PeerError, ValueError) as error:
            cell["failed"] = str(error)
            if name in methods:  # It may be in the middle of a text.
                methods.pop(name).close()
        cell["seconds"] = time.time() - start
        record["cells"] = [other for other in record["cells"] if other not in before] + [cell]
        keep()
        print(time.strftime("%H:%M"), name, setting, cell["failed"] or cell.get("seen_by", cell.get("beyond")))
    for method in methods.values():
        method.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser("python -m scripts.auditEngines", __doc__)
    parser.add_argument("names", type=text, nargs="?", metavar="METHODS", help="as of --compare; all if none is named")
    parser.add_argument("--mistakes", action="store_true", help="find the planted mistakes")
    parser.add_argument("--tokens", type=whole(1), default=100_000, metavar="N", help="of a cell (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of its texts (%(default)s)")
    arguments = vars(parser.parse_args(argv))
    return as_command("auditEngines", lambda: audit_engines(**arguments), "The cells that are done are kept.")


if __name__ == "__main__":
    sys.exit(main())
