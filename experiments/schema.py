"""The lines of `results.jsonl`: eight kinds.

A line is a JSON object, and its field "kind" is its type: "run", "speed", "queue", "costs", "ppl", "diversity",
"lossless" or "end". Of costs and perplexities the field "of", and of "lossless" the field "test", tell the variant. A
run begins with its `RunLine`; each line after it is a measurement, and names the run in a field "run", which is added
when the line is written. A field that is NotRequired is missing if it does not apply. nan is written as null.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args

from typing_extensions import NotRequired

# The counts of one depth of a round, (reached, tested, overlap, tested, chance, ...), summed over rounds:
#   reached: rounds in which all guesses before this depth were accepted;
#   tested, overlap: of these, the rounds with a guess here, and the sum of their overlaps;
#   tested, chance: in a tree, the same for second children, and so on: the rounds that had one, and the sum of the
#     probabilities that it is the child accepted.
# (10, 10, 7.0, 6, 0.9): ten rounds came this far, each with a guess whose overlap was 0.7 on average; six had a second
# child too, accepted with a probability of 0.15 on average.
Positions = Sequence[Sequence[float]]


class ModelRecord(TypedDict):
    name: str
    version: str  # identifies its weights
    parameters: int
    compiled: NotRequired[bool]  # whether it was, and did not stay eager
    device: NotRequired[str]  # of a draft that has a device of its own
    processor: NotRequired[str]


class RunLine(TypedDict):
    """The first line of a run: all that is needed to run it again."""

    kind: Literal["run"]
    run: str  # its name
    folder: NotRequired[str]  # where it was started
    time: str
    command: str
    flags: dict[str, Any]
    device: str
    code: NotRequired[str]  # the digest of the source
    load: NotRequired[float]  # of the machine, as the run began
    waiting: NotRequired[str | None]  # OMP_WAIT_POLICY of the threads: "passive" if the machine was busy before
    machine: dict[str, Any]  # processor, cores, threads that torch computes with, system, and versions of libraries
    models: dict[str, ModelRecord]  # {role: model}
    processes: NotRequired[list[dict[str, str]]]  # the host, device and processor of each


class TimedText(TypedDict):
    """The figures of one timed text: times in seconds, throughput in tokens per second."""

    method: str
    batch: NotRequired[int]  # texts decoded at a time, if more than one; times count from when the text gets its row
    process: NotRequired[int]  # its number, if a record has several
    rank: NotRequired[int]  # the number of the process that timed it, if accelerate launch started several
    stalled: NotRequired[int]  # how often it was timed again
    prompt: int  # its number
    category: NotRequired[str]  # of a prompt of --prompts
    question: NotRequired[int]  # the number of its line; the turns of a conversation have the same
    repeat: int
    prompt_tokens: int
    tokens: int
    ttft: float
    tpot: float | None
    throughput: float
    report_tpot: float  # the course report's time per token, prefill included
    tokens_per_round: float | None
    seconds: float
    rounds: int  # of the text, as are drafted and accepted
    drafted: int
    accepted: int
    acceptance_by_position: Sequence[Sequence[int]]  # (tested, accepted) for the guess at each position of a round
    input: str  # digest of the prompt
    sha256: str  # digest of the new tokens


class Conditions(TypedDict):
    """The conditions shared by the timed texts of one mode."""

    dtype: str
    promptLen: int
    mode: str
    maxLen: int
    gamma: int | None  # None: each method has its own
    temperature: float  # as the flags say; of contrastive decoding its own, as is top_p
    top_p: float


class SpeedLine(Conditions, TimedText):
    kind: Literal["speed"]
    repeatable: bool  # flags and seed fix its tokens


class QueueFigures(TypedDict):
    """A queue of texts that a method decoded, `batch` at a time."""

    method: str
    repeat: int
    batch: int
    texts: int
    tokens: int
    seconds: float  # of all, prefill included
    throughput: float
    tokens_per_round: float | None  # means over the rounds of all texts; None without rounds
    drafted_per_round: float | None


class QueueLine(Conditions, QueueFigures):
    """A queue of texts. With --batch, each text has a line of its own too."""

    kind: Literal["queue"]


class CostsLine(Conditions):
    """The measurements from which theory predicts speed."""

    kind: Literal["costs"]
    of: Literal["sweep"]
    alpha: float | None  # the mean overlap of p and q where a guess was tested
    scoring: list[float]  # the cost of scoring 1, 2, ... tokens, in units of the cost of one
    drafting: float  # of a guess; 0 without a draft model
    overlap_by_position: Positions


class BatchCostsLine(Conditions):
    """The measurements from which theory predicts the speed of a batch, in units of a plain step of the batch."""

    kind: Literal["costs"]
    of: Literal["batch"]
    batch: int
    scoring: list[float]  # the cost of scoring 1, 2, ... tokens of each row
    drafting: float  # of a guess of each row; 0 without a draft model


class OverlapLine(Conditions):
    """The overlaps of p and q of a method of --compare, in texts that are not timed."""

    kind: Literal["costs"]
    of: Literal["overlap"]
    method: str
    overlap_by_position: Positions
    rounds: int  # of these texts
    accepted: int


class StepLine(Conditions):
    """The times of a step of decoding (--steps), which reads `bytes` bytes."""

    kind: Literal["costs"]
    of: Literal["step"]
    what: str  # "reading"; a "forward" of or a "prefill" of `tokens` tokens; "growth": a token after them; "round"
    role: str  # of the model, "memory" for a large buffer, or the part of a round (`benchmark.steps.round_lines`)
    tokens: NotRequired[int]  # in a round, guesses
    bytes: NotRequired[int]
    seconds: list[float]  # one number a turn


FIGURES = ("entropy_1", "entropy_2", "entropy_3", "distinct_1", "distinct_2", "repetition", "perplexity")


class DiversityLine(TypedDict):
    kind: Literal["diversity"]
    dtype: str
    method: str
    repeatable: bool
    input: str  # digest of all prompts
    sha256: str  # digest of all texts
    prompts: int
    texts: int
    maxLen: int
    temperature: float
    top_p: float
    each: list[dict[str, float]]  # {figure: value} of each text


class PerplexityLine(TypedDict):
    kind: Literal["ppl"]
    dtype: str
    compiled: NotRequired[bool]  # whether both models' forwards were computed by kernels
    sentenceLimit: int
    corpus: str
    tokens: int
    input: str


class TextPerplexityLine(PerplexityLine):
    of: Literal["text"]
    texts: int
    each: list[dict[str, float]]  # {role: perplexity} of each text
    ppl: dict[str, float]  # their means


class CorpusPerplexityLine(PerplexityLine):
    """Perplexities of a whole corpus, read in windows."""

    of: Literal["corpus"]
    documents: int
    window: int
    stride: int
    ppl: dict[str, dict[str, float]]  # {role: {"token", "word" or "byte": perplexity}}


# "hits": tokens that are the guess; "expected": their number by the target's distribution.
GuessFigures = dict[str, Any]


class EvidenceFigures(TypedDict):
    """The figures of drawn texts that are tested against the target's distributions (`lossless.evidence.Evidence`)."""

    texts: int
    tokens: int
    excluded: int  # tokens outside of top-p or top-k, no more and no further than rounding explains
    impossible: int  # other tokens with no probability
    counts: list[int]  # the histogram of u
    p: dict[str, float]  # {test: p-value}
    z: float  # of the surprise
    guesses: NotRequired[GuessFigures]  # if some are known
    perplexity: float | None
    expected_perplexity: float | None
    # The histogram of u in the figure, with impossible tokens at u = 1: of as many tokens in each line of a run.
    counts_shown: NotRequired[list[int]]
    tokens_shown: NotRequired[int]


class TrialConditions(TypedDict):
    """The conditions shared by all drawn texts of --lossless."""

    temperature: float
    top_p: float
    maxLen: int
    dtype: str
    limit: float  # the p-value below which a test rejects a method
    batch: NotRequired[int]  # texts decoded at a time, if --batch says so


class LosslessLine(TrialConditions, EvidenceFigures):
    kind: Literal["lossless"]
    test: Literal["drawn"]
    method: str
    seconds: float  # that it took to write and score them


class PowerLine(TrialConditions, EvidenceFigures):
    """The tests of the texts of a method with a planted mistake. tokens: those that were needed to notice it."""

    kind: Literal["lossless"]
    test: Literal["mistake"]
    mistake: str
    method: str
    what: str
    seen_in: str  # the public code that makes or made it
    seen_by: list[str]  # the tests that noticed it
    order: str  # of the vocabulary: the role of the model whose q / p it is; "p"


class GreedyFigures(TypedDict):
    """Greedy texts beside those of plain decoding (`lossless.scorer.greedy_figures`). Gaps are in logits."""

    texts: int
    tokens: int
    differing: NotRequired[int]  # from plain decoding's; audited texts have none beside them
    near_ties: int
    beyond: int
    largest_gap: float
    allowed: float
    expected: NotRequired[float]  # tokens that rounding puts beside the argmax, at most; older records lack it


class GreedyLine(GreedyFigures):
    kind: Literal["lossless"]
    test: Literal["greedy"]
    method: str
    dtype: str


TokenPlace = dict[str, int]  # of an audited token: "line" of the file, "position" in the text from 1, "token": its id
Power = dict[str, float]  # the least "surprise" and "variation" that an audit would see (`lossless.audit.power_of`)


class AuditFigures(EvidenceFigures):
    """The tests of audited texts (`lossless.audit.Auditor.drawn`), under the settings that they are tested for."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    unit: float  # the unit roundoff of the arithmetic that wrote them
    limit: float  # the p-value below which a test rejects them
    order: str  # of the vocabulary, "q / p" or "p"
    seen_by: list[str]  # the tests that reject them
    places: list[TokenPlace]  # of impossible tokens
    alike: NotRequired[float]  # the p-value of `lossless.audit.alike`
    power: Power
    variation: NotRequired[list[float]]  # `lossless.audit.variation_of`
    fits: list[dict[str, float]]  # other settings under which no test rejects them


class GreedyAuditFigures(GreedyFigures):
    """Audited greedy texts; see `AuditFigures`."""

    repetition_penalty: float
    unit: float
    places: list[TokenPlace]  # of the tokens that rounding does not explain


class AuditSource(TypedDict):
    file: str
    sha256: str  # digest of all prompts and texts
    dtype: str  # the target's here
    written_in: str  # the dtype of the engine
    after_end: NotRequired[int]  # texts with more after a token that ends a text
    retokenised: int  # texts without token ids
    pieces: dict[str, str]  # {token: its text}, of the places


class AuditLine(AuditSource, AuditFigures):
    kind: Literal["lossless"]
    test: Literal["audit"]


class GreedyAuditLine(AuditSource, GreedyAuditFigures):
    kind: Literal["lossless"]
    test: Literal["greedyAudit"]


class EngineLine(TypedDict):
    """A method of another program, and the checks of its texts, if there were any."""

    kind: Literal["lossless"]
    test: Literal["engine"]
    method: str
    precision: str  # that it computes in
    quantised: bool  # whether its weights are not the target's
    version: str | None
    settings: dict[str, Any]
    failed: str | None  # why it is left out
    greedy: GreedyAuditFigures | None
    drawn: AuditFigures | None


class EndLine(TypedDict):
    """The last line of a run that was not stopped."""

    kind: Literal["end"]
    figures: NotRequired[list[str]]  # the pictures that were drawn, paths in the folder of the results


Costs = CostsLine | BatchCostsLine | OverlapLine | StepLine
Lossless = LosslessLine | PowerLine | GreedyLine | AuditLine | GreedyAuditLine | EngineLine
# All but RunLine.
Line = SpeedLine | QueueLine | Costs | TextPerplexityLine | CorpusPerplexityLine | DiversityLine | Lossless | EndLine
Run = tuple[RunLine, list[Line]]  # a run's first line, and its measurements
Append = Callable[[Line], object]  # writes a line

L = TypeVar("L")


def of_kind(lines: Iterable[Line], kind: type[L]) -> list[L]:
    """The lines of a kind, which is given as its type: `of_kind(lines, SpeedLine)`."""
    words = {field: get_args(hint) for field, hint in kind.__annotations__.items() if field in ("kind", "of", "test")}
    return [cast(L, line) for line in lines if all(line.get(field) in word for field, word in words.items())]


def name_of_kind(line: Mapping[str, Any]) -> str:
    """The kind of a line in words: "speed", "costs sweep", "lossless greedy"."""
    words = (line.get(field) for field in ("kind", "of", "test"))
    return " ".join(word for word in words if isinstance(word, str))
