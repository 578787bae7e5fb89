"""How many tokens an audit needs to notice each planted mistake, and how often it raises a false alarm.

    python -m scripts.auditPower                                 20,000 tokens of each mistake, 300 audits of plain text
    python -m scripts.auditPower --part plain --audits 5         one part of the record; the other stays as it is

The texts are the bundled pair's. docs/lossless.md shows the record, docs/records/audit.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from experiments.runRecord import model_record, origin
from inputs.commandLine import as_command, path, script_parser, whole
from inputs.files import ROOT, replace_file
from inputs.models import DTYPES, find_model, load_model, model_version
from inputs.progress import followed
from inputs.prompts import choose_prompts
from inputs.texts import load_corpora
from inputs.tokenizers import load_tokenizer
from lossless.audit import Auditor, resembled
from lossless.evidence import Evidence, seen_by
from lossless.plantedMistakes import MISTAKES, Mistake, one_hot_rule
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling

SAMPLING, PROMPT, TEXT, FIRST, ROWS = Sampling(), 64, 100, 4, 64  # tokens of a prompt and of a text; texts at a time
GAMMA, THRESHOLD = 4, 0.4
# Samplers without a mistake in what they write, to show that the audit does not see one.
EXACT = {
    "none": Mistake("speculative sampling as it should be"),
    "q taken for 1": Mistake("no mistake: fewer guesses are accepted", one_hot_rule, seen_in="vllm 40149"),
}
Pair = dict[str, CachedModel]


def speculative(models: Pair) -> Any:
    """Speculative sampling of the pair."""
    drafter = ModelDrafter(models["draft"])
    return partial(specSampling, target=models["target"], drafter=drafter, gamma=GAMMA, verify=token_rule)


def auditors(models: Pair) -> dict[str, Auditor]:
    """{order of the vocabulary: what judges texts}."""
    unit = torch.finfo(DTYPES["bfloat16"]).eps / 2  # the default of --writtenIn
    with_draft = Auditor(models["target"], models["draft"], unit, guessing=speculative(models))
    return {"q / p": with_draft, "p": Auditor(models["target"], None, unit)}


def mistake_lines(
    name: str, mistake: Mistake, models: Pair, prompts: list[list[int]], most: int
) -> Iterator[dict[str, Any]]:
    """How many tokens of a sampler are needed until a test rejects them, in each order. Texts are twice as many each
    time, until there are `most` tokens."""
    sampler = mistake.planted(speculative(models), SAMPLING, THRESHOLD)
    evidence: dict[str, Evidence] = {}
    found: dict[str, dict[str, Any]] = {}
    written, judges = 0, auditors(models)
    while len(found) < len(judges) and written * TEXT < most:
        count = min(max(FIRST, written), ROWS, -(-most // TEXT) - written)
        rows = [prompts[i % len(prompts)] for i in range(written, written + count)]
        generator = torch.Generator().manual_seed(1_000_003 * written)
        texts, _ = sampler(rows, max_len=TEXT, sampling=SAMPLING, generator=generator)
        written += count
        for order, judge in judges.items():
            if order not in found:
                new = judge.evidence(rows, texts, SAMPLING)
                evidence[order] = evidence[order] + new if order in evidence else new
                figures = evidence[order].figures()
                if tests := seen_by(figures, judge.limit):
                    found[order] = {"tokens": written * TEXT, "seen_by": tests, "figures": figures}
    about = {"mistake": name, "what": mistake.what, "seen_in": mistake.seen_in}
    for order in judges:
        missed = {"tokens": written * TEXT, "seen_by": [], "figures": evidence[order].figures()}
        line = found.get(order, missed)
        like = resembled(line["figures"], SAMPLING) if order == "q / p" and line["seen_by"] else []
        yield about | {"order": order, "resembles": like} | line


def plain_audits(models: Pair, prompts: list[list[int]], audits: int, length: int) -> Iterator[dict[str, Any]]:
    """The audits of texts of plain sampling, `length` tokens each, with the draft's guesses."""
    judge, texts_each = auditors(models)["q / p"], -(-length // TEXT)
    together = max(1, ROWS // texts_each)  # audits whose texts are written in one batch
    for first in range(0, audits, together):
        numbers = range(first, min(first + together, audits))
        rows = [prompts[i % len(prompts)] for i in range(first * texts_each, (numbers[-1] + 1) * texts_each)]
        generator = torch.Generator().manual_seed(first)
        texts, _ = regrSampling(rows, models["target"], TEXT, SAMPLING, generator=generator)
        for number, at in zip(numbers, itertools.count(0, texts_each)):
            own = slice(at, at + texts_each)
            figures = replace(judge, seed=number).evidence(rows[own], texts[own], SAMPLING).figures()
            yield {"tokens": figures["tokens"], "p": figures["p"], "seen_by": seen_by(figures, judge.limit)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return as_command("auditPower", lambda: work(words), "Nothing was written.")


def work(argv: Sequence[str]) -> None:
    """Measure the parts of the record, and write it."""
    parser = script_parser("python -m scripts.auditPower", __doc__)
    parser.add_argument("--part", choices=("mistakes", "plain"), help="(both)")
    parser.add_argument("--tokens", type=whole(1), default=20_000, metavar="N", help="of each mistake (20000)")
    parser.add_argument("--audits", type=whole(1), default=300, metavar="N", help="of plain text (300)")
    parser.add_argument("--length", type=whole(1), default=2000, metavar="N", help="tokens of each of them (2000)")
    parser.add_argument("--out", type=path, default=ROOT / "docs" / "records" / "audit.json", metavar="FILE")
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer("bundled-target")
    models = {role: load_model(f"bundled-{role}", tokenizer, "float32", "cpu") for role in ("target", "draft")}
    prompts = choose_prompts(tokenizer, load_corpora("sample"), [PROMPT], 500, ROWS)[PROMPT]
    versions = {
        role: model_record(model.name, model_version(find_model(model.name)), model) for role, model in models.items()
    }
    flags = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    source = origin([word for word in argv if word != "--out" and word != str(args.out)], flags, "cpu", versions)
    about = {
        "program": "-m scripts.auditPower",
        **source,
        **asdict(SAMPLING),
        "limit": auditors(models)["p"].limit,
        "gamma": GAMMA,
    }
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.part != "plain":
        tested = EXACT | {name: mistake for name, mistake in MISTAKES.items() if not mistake.own_copy}
        done = followed(tested.items(), "planted mistakes", len(tested))
        lines = [line for name, mistake in done for line in mistake_lines(name, mistake, models, prompts, args.tokens)]
        record["mistakes"] = about | {"lines": lines}
    if args.part != "mistakes":
        lines = list(followed(plain_audits(models, prompts, args.audits, args.length), "plain text", args.audits))
        record["plain"] = about | {"lines": lines}
        print(f"{sum(bool(line['seen_by']) for line in lines)} false alarms in {len(lines)} audits.")
    replace_file(args.out, json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
