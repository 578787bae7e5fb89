"""The report of `--lossless`: a verdict in one sentence, and the tables behind it."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from rich.console import RenderableType
from rich.text import Text

from experiments.schema import AuditLine, EndLine, GreedyAuditLine, GreedyLine, Line, LosslessLine, PowerLine, of_kind
from inputs.commandLine import counted
from lossless.audit import FITTED
from lossless.evidence import BINS, CONFIDENCE, FALSE_ALARM, LISTED, RETOKENISED, SEEN, TESTS, seen_by
from report.tables import Columns, name_of, plain, table_of

SAMPLED_COLUMNS: Columns[LosslessLine] = {
    "": lambda line: name_of(line["method"]),
    "tokens": lambda line: f"{line['tokens']:,}",
    f"{BINS} bins\np": lambda line: f"{line['p']['chi_square']:.2g}",
    "K-S\np": lambda line: f"{line['p']['kolmogorov_smirnov']:.2g}",
    "surprise\nz": lambda line: f"{line['z']:+.2f}",
    "\np": lambda line: f"{line['p']['surprise']:.2g}",
    "serial\np": lambda line: f"{line['p']['neighbours']:.2g}",
    "guesses\np": lambda line: f"{line['p']['guesses']:.2g}" if "guesses" in line["p"] else "",
    "PPL\nof text": lambda line: "" if line["perplexity"] is None else f"{line['perplexity']:.3f}",
    "PPL\nof p": lambda line: "" if line["expected_perplexity"] is None else f"{line['expected_perplexity']:.3f}",
    "at the\nedge": lambda line: f"{line['excluded']:,}",
    "p=0": lambda line: f"{line['impossible']:,}",
}
SAMPLED_NOTES = (
    "u: the place of each token in the target's cumulative distribution, uniform if the text is the target's. p: "
    f"p-values of the tests: chi-square of u in {BINS} bins; Kolmogorov-Smirnov (K-S) of u; the surprise, -log p(x), "
    "summed; the serial correlation of u with its neighbours; and how many tokens are what the method guesses when it "
    "is asked once more. surprise z: how many standard deviations the sum is from what the target expects. A p-value "
    "below {limit:.1e} is a difference; with exact samplers this happens in at most one of "
    f"{1 / FALSE_ALARM:,.0f} runs. PPL of text: the perplexity of its tokens but those of the last two columns. PPL of "
    "p: from the target's own entropy. at the edge: tokens outside of top-p or top-k, no more and no further than "
    "rounding explains; they are in no test. p=0: impossible tokens, to which the target gives no probability."
)
GREEDY_COLUMNS: Columns[GreedyLine] = {
    "": lambda line: name_of(line["method"]),
    "dtype": lambda line: line["dtype"],
    "texts": lambda line: f"{line['texts']:,}",
    "tokens": lambda line: f"{line['tokens']:,}",
    "of them\ndiffer": lambda line: f"{line['differing']:,}",
    "near-ties": lambda line: f"{line['near_ties']:,}",
    "beyond\nrounding": lambda line: f"{line['beyond']:,}",
    "largest\ngap": lambda line: f"{line['largest_gap']:.2g}",
    "allowed": lambda line: f"{line['allowed']:.2g}",
}
GREEDY_NOTES = (
    "near-ties: tokens that are not the argmax when the target reads the whole text at once, but whose logit is within "
    "rounding of the largest. beyond rounding: tokens further below it. largest gap: how far below the largest, in "
    "logits; allowed: what rounding in that dtype explains."
)
POWER_COLUMNS: Columns[PowerLine] = {
    "": lambda line: line["mistake"],
    "planted in": lambda line: name_of(line.get("method", "")),
    "what is wrong": lambda line: line["what"],
    "known from": lambda line: line["seen_in"],
    "tokens\nneeded": lambda line: f"{'' if line['seen_by'] else '> '}{line['tokens']:,}",
    "seen by": lambda line: ", ".join(TESTS[test] for test in line["seen_by"]) or "none",
}
POWER_NOTES = (
    "Each row is a method with one mistake. It writes texts, twice as many each time (at most 64 more), until a test "
    "rejects it."
)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether no test rejects a method, and the verdict as a sentence. lines: of a run that has ended."""
    failures, greedy = [], of_kind(lines, GreedyLine)
    for line in of_kind(lines, LosslessLine):
        if tests := seen_by(line, line["limit"]):
            reasons = " and ".join(TESTS[test] for test in tests)
            said = f"{name_of(line['method'])} fails in {line['dtype']} by {reasons}"
            failures.append(f"{said} ({hits_of(line)})" if "guesses" in tests else said)
    for text in greedy:
        if text["beyond"]:
            beyond = f"{counted(text['beyond'], 'greedy token')} in {text['dtype']}"
            failures.append(f"{name_of(text['method'])} writes {beyond} that the target would not write")
    if failures:
        return False, f"Difference found: {'; '.join(failures)}."
    tested = []  # clauses on drawn texts, planted mistakes, and greedy texts in each dtype
    if sampled := of_kind(lines, LosslessLine):
        p = [value for line in sampled for value in line["p"].values()]
        names = list(dict.fromkeys(line["method"] for line in sampled))
        methods = name_of(names[0]) if len(names) == 1 else f"each of {len(names)} methods"
        dtypes = " and in ".join(dict.fromkeys(line["dtype"] for line in sampled))
        tested.append(
            f"{min(line['tokens'] for line in sampled):,} drawn tokens of {methods} were tested in {dtypes} (the least "
            f"of {len(p)} p-values is {min(p):.2g}; less than {sampled[0]['limit']:.1e} would be a difference)"
        )
        guessed = [f"{hits_of(line)} (in {line['dtype']})" for line in sampled if "guesses" in line]
        tested += [", and ".join(guessed)] if guessed and len(names) == 1 else []
        tested += [] if of_kind(lines, PowerLine) else ["no mistake was planted: what the tests would see is not known"]
    if power := of_kind(lines, PowerLine):
        missed = [" in ".join(filter(None, (m["mistake"], m.get("method")))) for m in power if not m["seen_by"]]
        most = f"{max(line['tokens'] for line in power):,} tokens"
        counts = Counter(name_of(line.get("method", "")) for line in power)
        planted = ", ".join(f"{count} in {method}" for method, count in counts.items())
        if missed:
            tested.append(f"but {', '.join(missed)} would not be seen with {most}: give more --tokens")
        else:
            tested.append(f"each planted mistake is detected, within {most}: {planted}")
    for dtype in dict.fromkeys(line["dtype"] for line in greedy):
        others = [line for line in greedy if line["dtype"] == dtype and line["method"] != "target"]
        differing, texts = sum(line["differing"] for line in others), sum(line["texts"] for line in others)
        if differing:
            share = f"{differing:,} of {texts:,} greedy texts ({100 * differing / texts:.0f} %)"
            tested.append(f"in {dtype} {share} differ from plain decoding's, each first at a near-tie")
        elif others:
            tested.append(f"greedy text in {dtype} equals plain decoding's token for token")
        else:
            tested.append(f"greedy text in {dtype} is the target's, up to rounding")
    return True, f"No difference found: {'; '.join(tested)}."


def hits_of(line: LosslessLine) -> str:
    """How many guesses of a method, asked once more along its texts, are the text's token, and how many `p` expects."""
    hits, expected = line["guesses"]["hits"], line["guesses"]["expected"]
    return f"guesses hit {counted(hits, 'token')}, and {expected:,.1f} were expected"


def exit_code(lines: Sequence[Line]) -> int:
    """1 if the verdict of a test or of an audit is no, else 0."""
    return 0 if verdict(lines)[0] and all(audit_verdict(line)[0] for line in audits_of(lines)) else 1


def audits_of(lines: Sequence[Line]) -> list[AuditLine | GreedyAuditLine]:
    return [*of_kind(lines, AuditLine), *of_kind(lines, GreedyAuditLine)]


def audit_verdict(line: AuditLine | GreedyAuditLine) -> tuple[bool, str]:
    """Whether no test rejects audited texts, and the verdict as a sentence."""
    texts = f"{counted(line['tokens'], 'token')} in {counted(line['texts'], 'text')}"
    if line["test"] == "greedyAudit":
        rounding = f"the largest logit gap is {line['largest_gap']:.2g}, and rounding explains {line['allowed']:.2g}"
        rounding += f" at up to {math.ceil(line['expected']):,} tokens" if "expected" in line else ""
        if not line["beyond"]:
            return True, f"Greedy text of the target: {texts}, {line['near_ties']:,} of them near-ties ({rounding})."
        drawn = "; so many that the text may be drawn: give its --temperature" * (10 * line["beyond"] > line["tokens"])
        return False, f"Not the target's: {line['beyond']:,} of {texts} are not its argmax ({rounding}){drawn}."
    settings = settings_of(line)
    if tests := [TESTS[test] for test in line["seen_by"]]:
        return False, f"Not the target's at {settings}: {texts} are rejected by {' and '.join(tests)}."
    p, limit = min(line["p"].values()), line["limit"]
    tested = (
        f"No test rejects the text: {texts} cannot be told from the target's own at {settings} (the least of "
        f"{len(line['p'])} p-values is {p:.2g}; {limit:.1e} would be too small)."
    )
    if line["excluded"]:
        tested += (
            f" {counted(line['excluded'], 'token')} of these are outside of top-p or top-k, which rounding explains."
        )
    return True, tested


def settings_of(values: Any) -> str:
    """Settings of sampling in words. values: a mapping with the fields of `Sampling`."""
    words = [f"temperature {values['temperature']:g}", f"top-p {values['top_p']:g}"]
    words += [f"top-k {values['top_k']}"] * (values["top_k"] > 0)
    penalty = values["repetition_penalty"]
    return ", ".join(words + [f"repetition penalty {penalty:g}"] * (penalty != 1))


def audit_details(line: AuditLine | GreedyAuditLine) -> Iterator[str]:
    """The sentences after an audit's verdict: where, why, and the smallest deviation it would have detected."""
    if line["places"]:
        count = line["impossible"] if line["test"] == "audit" else line["beyond"]
        what = "Impossible tokens" if line["test"] == "audit" else "Tokens that are not the argmax"
        listed = "; ".join(
            f"line {place['line']}, token {place['position']} of the text: {place['token']} "
            f"{line['pieces'][str(place['token'])]!r}"
            for place in line["places"]
        )
        yield f"{what}{f' (the first {LISTED} of {count:,})' if count > LISTED else ''}: {listed}."
    if after_end := line.get("after_end"):
        yield f"{counted(after_end, 'text')} with a token that ends a text, and more after it: the engine continued."
    if line["test"] == "audit" and line.get("alike", 1) < line["limit"] and not line["impossible"]:
        yield (
            f"The random numbers at one position of the texts are alike (p = {line['alike']:.1g}): were all drawn with "
            "one seed? Give each text a seed of its own, or none; texts that share theirs cannot be tested together."
        )
    elif line["test"] == "audit":
        if "surprise" in line["seen_by"]:
            likelier, hotter = ("less", "higher") if line["z"] > 0 else ("more", "lower")
            yield f"The tokens are {likelier} probable than the target's own, as at a {hotter} temperature."
        if line["fits"]:
            settings = ", nor at ".join(map(settings_of, line["fits"]))
            first = f"its first texts (some {FITTED:,} tokens at most)"
            yield f"No test rejects {first} at {settings}: was a setting not applied?"
        elif line["seen_by"]:
            if line["order"] == "p":
                yield "If a draft model guessed, name it with --draft: then a leak from it shows after fewer tokens."
            yield "Are target, tokenizer and sampling flags those of the engine?"
    if line["retokenised"]:
        drawn = f", so up to {RETOKENISED:.0%} of impossible tokens there are no reason to reject"
        yield (
            f"{counted(line['retokenised'], 'text')} without token ids, encoded here. An engine may have written other "
            f"tokens with the same letters{drawn if line['test'] == 'audit' else ''}. Give tokens to be sure."
        )
    if line["test"] == "audit" and (power := line["power"])["surprise"]:  # Else no token could vary.
        yield (
            f"These tokens show, in {SEEN:.0%} of cases, a mean surprise that is off by {power['surprise']:.2g} nats "
            f"a token, and a distance of {power['variation']:.2g} in the order of {line['order']}."
        )
        low, high = line["variation"]
        yield f"The distance is between {low:.2g} and {high:.2g} there, with {CONFIDENCE:.0%} confidence."


def lossless_report(lines: Sequence[Line]) -> Iterator[RenderableType]:
    """The verdict and the tables of a run, as rich renderables; nothing if the run tested nothing."""
    for audit in audits_of(lines):
        yield from map(plain, [audit_verdict(audit)[1], *audit_details(audit)])
        if audit["test"] == "audit":
            columns = {title: cell for title, cell in SAMPLED_COLUMNS.items() if title}
            yield table_of(f"Audit of {audit['file']}", cast(Columns[AuditLine], columns), [audit])
            yield Text(SAMPLED_NOTES.format(limit=audit["limit"]))
    sampled, greedy = of_kind(lines, LosslessLine), of_kind(lines, GreedyLine)
    if (sampled or greedy) and of_kind(lines, EndLine):
        yield plain(verdict(lines)[1])
    for dtype in dict.fromkeys(line["dtype"] for line in sampled):
        drawn = [line for line in sampled if line["dtype"] == dtype]
        batch = f"batch {drawn[0]['batch']}, " if "batch" in drawn[0] else ""
        conditions = f"temperature {drawn[0]['temperature']}, top_p {drawn[0]['top_p']}, {batch}{dtype}"
        yield table_of(f"Drawn texts: {conditions}", SAMPLED_COLUMNS, drawn)
        guessed = [(name_of(line["method"]), line["guesses"]) for line in drawn if "guesses" in line]
        if len(guessed) > 1:  # The verdict has those of one method.
            hits = ", ".join(f"{name} {of['hits']:,} ({of['expected']:,.1f})" for name, of in guessed)
            yield Text(f"Tokens that are the method's guess, asked once more (in brackets: expected): {hits}.")
    if sampled:
        yield Text(SAMPLED_NOTES.format(limit=sampled[0]["limit"]))
    if greedy:
        yield replace(table_of("Greedy texts beside plain decoding's", GREEDY_COLUMNS, greedy), notes=GREEDY_NOTES)
    if power := of_kind(lines, PowerLine):
        table = table_of("Planted mistakes", POWER_COLUMNS, power)
        yield replace(table, folded=(1, 2, 3, 5), notes=POWER_NOTES)
