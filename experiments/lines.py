"""The lines of `results.jsonl`: eight kinds.

A line is a JSON object, and its field "kind" is its type: "run", "speed", "queue", "costs", "ppl", "diversity",
"lossless" or "end". Of costs and perplexities the field "of", and of "lossless" the field "test", tell the variant.

A run begins with its `RunLine`; each line after it is a measurement, and names the run in a field "run", which is added
when the line is written. A field that is NotRequired is missing if it does not apply. JSON has no nan: it is
written as null, and read as None.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

from typing_extensions import NotRequired

# The counts of one depth of a round, (reached, tested, overlap, tested, chance, ...), summed over rounds:
#   reached: rounds in which all guesses before this depth were accepted;
#   tested, overlap: of these, the rounds with a guess here, and the sum of their overlaps;
#   tested, chance: in a tree, the same for second children, and so on: the rounds that had one, and the sum of the
#     probabilities that it is the child accepted.
# (10, 10, 7.0, 6, 0.9): ten rounds came this far, and each had a guess here. The overlap was 0.7 on average. Six had a
# second child too, which was accepted with a probability of 0.15 on average.
Position = Sequence[float]
Positions = Sequence[Position]


class Machine(TypedDict):
    """The machine and the library versions of a run. threads: that torch computes with."""

    processor: str
    cores: int | None
    threads: int
    system: str
    python: str
    torch: str
    transformers: str
    numpy: str
    cuda: str | None


class ModelRecord(TypedDict):
    """A model of a run. version: identifies its weights. compiled: whether it was, and did not stay eager. device,
    processor: of a draft that has a device of its own."""

    name: str
    version: str
    parameters: int
    compiled: NotRequired[bool]
    device: NotRequired[str]
    processor: NotRequired[str]


class ProcessRecord(TypedDict):
    """Where one process of a run computes."""

    host: str
    device: str
    processor: str


class Origin(TypedDict):
    """Where measurements come from. flags: {name: value}. code: the digest of the source. load: of the machine, as it
    began. models: {role: model}."""

    time: str
    command: str
    flags: dict[str, Any]
    device: str
    code: NotRequired[str]
    load: NotRequired[float]
    machine: Machine
    models: dict[str, ModelRecord]
    processes: NotRequired[list[ProcessRecord]]


class RunLine(Origin):
    """The first line of a run: all that is needed to run it again. run: its name. folder: where it was started."""

    kind: Literal["run"]
    run: str
    folder: NotRequired[str]


class Label(TypedDict, total=False):
    """The labels of a prompt of --prompts. question: the number of the line; the turns of a conversation have the
    same."""

    category: str
    question: int


class TimedText(Label):
    """The figures of one timed text: times in seconds, throughput in tokens per second.

    prompt: its number. report_tpot: the course report's time per token, prefill included. rounds, drafted, accepted: of
    the text. acceptance_by_position: (tested, accepted) for the guess at each position of a round. input, sha256: the
    digests of the prompt and of the new tokens. stalled: how often it was timed again. process: its number, if a
    record has several. batch: texts decoded at a time, if more than one. Then the times count from the moment the text
    gets its row of the batch.
    """

    method: str
    batch: NotRequired[int]
    process: NotRequired[int]
    stalled: NotRequired[int]
    prompt: int
    repeat: int
    prompt_tokens: int
    tokens: int
    ttft: float
    tpot: float | None
    throughput: float
    report_tpot: float
    tokens_per_round: float | None
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    acceptance_by_position: Sequence[Sequence[int]]
    input: str
    sha256: str


class Conditions(TypedDict):
    """The conditions shared by the timed texts of one mode. gamma: None if each method has its own."""

    dtype: str
    promptLen: int
    mode: str
    maxLen: int
    gamma: int | None
    temperature: float
    top_p: float


class SpeedLine(Conditions, TimedText):
    """One timed text. repeatable: flags and seed fix its tokens."""

    kind: Literal["speed"]
    repeatable: bool


class QueueFigures(TypedDict):
    """A queue of texts that a method decoded, `batch` at a time. seconds: of all, prefill included. tokens_per_round,
    drafted_per_round: means over the rounds of all texts; None without rounds."""

    method: str
    repeat: int
    batch: int
    texts: int
    tokens: int
    seconds: float
    throughput: float
    tokens_per_round: float | None
    drafted_per_round: float | None


class Costs(TypedDict):
    """The measurements from which theory predicts speed. alpha: the mean overlap of p and q where a guess was tested.
    scoring: the cost of scoring 1, 2, ... tokens, in units of the cost of one."""

    alpha: float | None
    scoring: list[float]
    overlap_by_position: NotRequired[Positions]


class CostsLine(Conditions, Costs):
    """The costs measured by --sweep at one temperature."""

    kind: Literal["costs"]
    of: Literal["sweep"]


class QueueLine(Conditions, QueueFigures):
    """A queue of texts. With --batch, each text has a line of its own too."""

    kind: Literal["queue"]


class BatchCostsLine(Conditions):
    """The measurements from which theory predicts the speed of a batch. scoring: the cost of scoring 1, 2, ... tokens
    of each row. drafting: of a guess of each row; 0 without a draft model. In units of a plain step of the batch."""

    kind: Literal["costs"]
    of: Literal["batch"]
    batch: int
    scoring: list[float]
    drafting: float


class OverlapLine(Conditions):
    """The overlaps of p and q of a method of --compare, in texts that are not timed. rounds, accepted: of these."""

    kind: Literal["costs"]
    of: Literal["overlap"]
    method: str
    overlap_by_position: Positions
    rounds: NotRequired[int]
    accepted: NotRequired[int]


class StepLine(Conditions):
    """The times of a step of decoding (--steps), one number a turn.

    what: "reading" of `bytes` bytes; "forward" of `tokens` tokens, which must read `bytes` bytes; "prefill" of a prompt
    of `tokens` tokens; "growth": a token after `tokens` tokens; "round": a part of a round with `tokens` guesses. role:
    of the model, "memory" for a large buffer, or the part of a round (`benchmark.steps.round_lines`).
    """

    kind: Literal["costs"]
    of: Literal["step"]
    what: str
    role: str
    tokens: NotRequired[int]
    bytes: NotRequired[int]
    seconds: list[float]


class DiversityLine(TypedDict):
    """Texts of a method and how varied they are. each: {figure: value} of each text. input, sha256: the digests of all
    prompts and of all texts."""

    kind: Literal["diversity"]
    dtype: str
    method: str
    repeatable: bool
    input: str
    sha256: str
    prompts: int
    texts: int
    maxLen: int
    temperature: float
    top_p: float
    each: list[dict[str, float]]


class TextPerplexityLine(TypedDict):
    """Perplexities of the texts of a corpus. each, ppl: {role: perplexity} of each text, and their means."""

    kind: Literal["ppl"]
    of: Literal["text"]
    dtype: str
    sentenceLimit: int
    corpus: str
    texts: int
    tokens: int
    input: str
    each: list[dict[str, float]]
    ppl: dict[str, float]


class CorpusPerplexityLine(TypedDict):
    """Perplexities of a whole corpus, read in windows. ppl: {role: {"token", "word" or "byte": perplexity}}."""

    kind: Literal["ppl"]
    of: Literal["corpus"]
    dtype: str
    sentenceLimit: int
    corpus: str
    tokens: int
    documents: int
    input: str
    window: int
    stride: int
    ppl: dict[str, dict[str, float]]


class GuessFigures(TypedDict):
    """hits: tokens that are the guess. expected: their number by the target's distribution. z: of the difference, of
    all and at each place of a round, or of each sibling in a tree."""

    hits: int
    expected: float
    z: list[float]


class EvidenceFigures(TypedDict):
    """The figures of drawn texts that are tested against the target's distributions (`lossless.evidence.Evidence`).

    excluded: tokens that only rounding put outside of top-p or top-k. impossible: tokens with no probability. counts:
    the histogram of u. p: {test: p-value}. z: of the surprise. guesses: if some are known.
    """

    texts: int
    tokens: int
    excluded: int
    impossible: int
    counts: list[int]
    p: dict[str, float]
    z: float
    guesses: NotRequired[GuessFigures]
    perplexity: float | None
    expected_perplexity: float | None


class ShownCounts(TypedDict):
    """The data of the figure: the histogram of u of the first `tokens_shown` tokens, as many in each line of a run,
    with impossible tokens at u = 1."""

    counts_shown: list[int]
    tokens_shown: int


class TrialConditions(TypedDict):
    """The conditions shared by all drawn texts of --lossless. limit: the p-value below which a test rejects a method.
    batch: texts decoded at a time, if --batch says so."""

    temperature: float
    top_p: float
    maxLen: int
    dtype: str
    limit: float
    batch: NotRequired[int]


class LosslessLine(TrialConditions, EvidenceFigures, ShownCounts):
    """The tests of the texts that a method drew. seconds: that it took to write and score them."""

    kind: Literal["lossless"]
    test: Literal["drawn"]
    method: str
    seconds: float
    repeatable: NotRequired[bool]


class MistakeFigures(EvidenceFigures, ShownCounts):
    """The tests of the texts of a method with a planted mistake. tokens: those that were needed to notice it. seen_by:
    the tests that did. seen_in: the public code that makes or made it."""

    mistake: str
    method: NotRequired[str]
    what: str
    seen_in: NotRequired[str]
    seen_by: list[str]


class PowerLine(TrialConditions, MistakeFigures):
    """The number of tokens needed to detect one planted mistake."""

    kind: Literal["lossless"]
    test: Literal["mistake"]


class GreedyFigures(TypedDict):
    """Greedy texts beside those of plain decoding (`lossless.scorer.greedy_figures`). gaps are in logits."""

    texts: int
    tokens: int
    differing: int
    near_ties: int
    beyond: int
    largest_gap: float
    allowed: float


class GreedyLine(GreedyFigures):
    """The greedy texts of a method in one dtype."""

    kind: Literal["lossless"]
    test: Literal["greedy"]
    method: str
    dtype: str
    repeatable: NotRequired[bool]


class Place(TypedDict):
    """A token of audited texts. line: of the file. position: in the text, from 1. token: its id."""

    line: int
    position: int
    token: int


class Power(TypedDict):
    """The least departures from the target that an audit would have seen (`lossless.audit.power_of`)."""

    surprise: float
    variation: float


class AuditFigures(EvidenceFigures):
    """The tests of audited texts (`lossless.audit.Auditor.drawn`), under the settings that they are tested for.

    unit: the unit roundoff of the arithmetic that wrote them. limit: the p-value below which a test rejects them.
    order: of the vocabulary, "q / p" or "p". seen_by: the tests that reject them. places: of impossible tokens. fits:
    other settings under which no test rejects them. alike: the p-value of `lossless.audit.alike`.
    """

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    unit: float
    limit: float
    order: str
    seen_by: list[str]
    places: list[Place]
    alike: NotRequired[float]
    power: Power
    fits: list[dict[str, float]]


class GreedyAuditFigures(TypedDict):
    """Audited greedy texts. places: of the tokens that rounding does not explain. The other fields are those of
    `GreedyFigures` and `AuditFigures`."""

    texts: int
    tokens: int
    near_ties: int
    beyond: int
    largest_gap: float
    allowed: float
    repetition_penalty: float
    unit: float
    places: list[Place]


class AuditSource(TypedDict):
    """The audited texts. sha256: the digest of all prompts and texts. written_in: the dtype of the engine; dtype: the
    target's here. after_end: texts with more after a token that ends a text. retokenised: texts without token ids.
    pieces: {token: its text}, of the places."""

    file: str
    sha256: str
    dtype: str
    written_in: str
    after_end: NotRequired[int]
    retokenised: int
    pieces: dict[str, str]


class AuditLine(AuditSource, AuditFigures):
    """The audit of drawn texts."""

    kind: Literal["lossless"]
    test: Literal["audit"]


class GreedyAuditLine(AuditSource, GreedyAuditFigures):
    """The audit of greedy texts."""

    kind: Literal["lossless"]
    test: Literal["greedyAudit"]


class EngineLine(TypedDict):
    """A method of another program. precision: that it computes in. quantised: whether its weights are not the target's.
    settings: its settings. failed: why it is left out. greedy, drawn: the checks of its texts, if there were any.
    """

    kind: Literal["lossless"]
    test: Literal["engine"]
    method: str
    precision: str
    quantised: bool
    version: str | None
    settings: dict[str, Any]
    failed: str | None
    greedy: GreedyAuditFigures | None
    drawn: AuditFigures | None


class EndLine(TypedDict):
    """The last line of a run that was not stopped. figures: the pictures that were drawn, paths in the folder of the
    results."""

    kind: Literal["end"]
    figures: NotRequired[list[str]]


# Any line but the first of a run.
Line = (
    SpeedLine
    | CostsLine
    | QueueLine
    | BatchCostsLine
    | OverlapLine
    | StepLine
    | DiversityLine
    | TextPerplexityLine
    | CorpusPerplexityLine
    | LosslessLine
    | PowerLine
    | GreedyLine
    | AuditLine
    | GreedyAuditLine
    | EngineLine
    | EndLine
)
Run = tuple[RunLine, list[Line]]  # a run's first line, and its measurements
Append = Callable[[Line], object]  # writes a line

L = TypeVar("L")


def of_kind(lines: Iterable[Line], kind: type[L]) -> list[L]:
    """The lines of a kind, which is given as its type: `of_kind(lines, SpeedLine)`."""
    words = {field: get_args(hint) for field, hint in kind.__annotations__.items() if field in ("kind", "of", "test")}
    return [cast(L, line) for line in lines if all(line.get(field) in word for field, word in words.items())]


def name_of_kind(line: Mapping[str, Any]) -> str:
    """The kind of a line in words: "speed", "costs sweep", "lossless greedy"."""
    return " ".join(filter(None, (line["kind"], line.get("of"), line.get("test"))))
