"""The flags of `test.py`: what there is to be said. What they mean together is in `settings.py`."""

from decoding.draftLength import RULES as DRAFT_LENGTHS
from decoding.verification import RULES as VERIFICATIONS
from inputs.commandLine import Parser, number, path, text, whole
from inputs.models import DTYPES, HERE
from methods.catalogue import catalogue as methods


def parser():
    """The parser; its defaults of None depend on what is measured (see `settings.py`)."""
    parser = Parser(
        prog="test.py",
        allow_abbrev=False,
        description="Speculative decoding, measured: speed (TTFT, "
        "TPOT, throughput), perplexity, and every method side by side. Results go to results.txt; "
        "README.md explains the flags.",
    )
    mode = parser.add_argument_group("what to do (with none of these: --speed --ppl)")
    mode.add_argument(
        "--speed",
        nargs="?",
        type=whole(0, 1),
        const=1,
        choices=(0, 1),
        help="time to first token, time per token, tokens per second; --speed 0 leaves it out",
    )
    mode.add_argument(
        "--ppl",
        nargs="?",
        type=whole(0, 1),
        const=1,
        choices=(0, 1),
        help="perplexity, per text and of the corpus; --ppl 0 leaves it out",
    )
    mode.add_argument("--speedNew", action="store_true", help="speed with the additive draft-length rule, 1000 tokens")
    mode.add_argument("--speedMulti", action="store_true", help="speed of a cascade of three models")
    mode.add_argument("--contrastive", action="store_true", help="speed of contrastive decoding, plain and speculative")
    mode.add_argument(
        "--compare",
        type=text,
        metavar="METHODS",
        help="speed of any methods, interleaved: all, or some of " + ", ".join(methods.METHODS),
    )
    mode.add_argument(
        "--sweep",
        action="store_true",
        help="speed over gamma 1 to 10 and what theory expects, with a figure; --temperature may name several",
    )
    mode.add_argument("--diversity", action="store_true", help="how varied the texts of each method are")
    mode.add_argument(
        "--lossless",
        type=text,
        nargs="?",
        const="speculative",
        metavar="METHODS",
        help="prove that the text is distributed as the target's own: of speculative sampling as the flags say, of "
        "all methods, or of some of " + ", ".join(methods.PROVABLE),
    )
    mode.add_argument(
        "--show",
        action="store_true",
        help="write one text on the screen as it is decoded: guesses "
        "accepted, guesses rejected, the target's own tokens",
    )
    mode.add_argument("--html", type=path, metavar="FILE", help="the same as a page that plays it back step by step")
    mode.add_argument(
        "--rerun",
        type=text,
        metavar="RUN",
        help="a run of results.jsonl again, by its name or 1 for the newest, 2 for the one before, and whether it "
        "gives the same tokens; with no other flag but --out",
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        type=text,
        metavar="MODEL",
        help="the large model: a folder under models/, any path, or a hub "
        "id owner/name, downloaded on first use (default: pythia-2.8b if it and pythia-70m are there, "
        "else the bundled pair)",
    )
    models.add_argument(
        "--draft", type=text, metavar="MODEL", help="the small model that guesses; lookup: the text so far does"
    )
    models.add_argument("--mid", type=text, metavar="MODEL", help="the model between the two, for a cascade")
    models.add_argument("--offline", action="store_true", help="download nothing")
    models.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of the weights (default: bfloat16 for speed where the device computes in it, float32 for perplexity and "
        "--lossless)",
    )
    models.add_argument(
        "--compile",
        action="store_true",
        help="compile the forwards that --speed and its like time; the first time takes minutes",
    )
    models.add_argument(
        "--device",
        type=text,
        help="cpu, cuda, cuda:1 ..., or auto: a model too large for one GPU is spread over all of them and the "
        "processor's memory (default: cuda if there is one)",
    )
    how = parser.add_argument_group("how to guess and to verify")
    how.add_argument(
        "--gamma",
        type=whole(1, 1000),
        metavar="N",
        help="tokens guessed in a round, for some rules the most or the least (4; draftConfidence and costAware: 10)",
    )
    how.add_argument(
        "--draftLength",
        choices=DRAFT_LENGTHS,
        default="fixed",
        help="the rule that says how many tokens to guess (fixed)",
    )
    how.add_argument(
        "--draftThreshold",
        type=number(0, 1),
        default=0.4,
        metavar="P",
        help="draftConfidence: guess no further after a token the draft gave less than this (0.4)",
    )
    how.add_argument(
        "--targetThreshold",
        type=number(0, 1),
        default=0.5,
        metavar="P",
        help="targetConfidence: do not guess after a token the target gave less than this (0.5)",
    )
    how.add_argument(
        "--verification", choices=VERIFICATIONS, default="token", help="the rule that accepts guesses (token)"
    )
    how.add_argument(
        "--gamma1",
        type=whole(1, 1000),
        default=4,
        metavar="N",
        help="cascade: tokens the draft guesses for the mid model (4)",
    )
    how.add_argument(
        "--gamma2", type=whole(1, 1000), default=4, metavar="N", help="cascade: tokens both guess for the target (4)"
    )
    how.add_argument("--ngram", type=whole(1), default=3, metavar="N", help="lookup: tokens matched, at most (3)")
    how.add_argument(
        "--draftVocab",
        type=whole(1),
        metavar="N",
        help="the draft guesses only the N most frequent tokens, "
        "and its output layer is that much smaller (all tokens)",
    )
    contrast = parser.add_argument_group("contrastive decoding")
    contrast.add_argument(
        "--plausibility",
        type=number(0, 1),
        default=0.1,
        metavar="A",
        help="tokens less probable than this share of the target's most probable one are dropped (0.1)",
    )
    contrast.add_argument(
        "--amateurTemperature", type=number(1e-4, 1000), default=1.0, metavar="T", help="of the draft's part (1)"
    )
    contrast.add_argument(
        "--contrastiveTemperature",
        type=number(0, 1000),
        default=0.0,
        metavar="T",
        help="0 takes the token of the highest score, above 0 draws (0)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--maxLen", type=whole(1), metavar="N", help="new tokens at most (200; --speedNew: 1000, --diversity: 45)"
    )
    sampling.add_argument(
        "--temperature", type=number(0, 1000), nargs="+", metavar="T", help="0 is greedy (0.85; --diversity: 1)"
    )
    sampling.add_argument("--top_p", type=number(0, 1), metavar="P", help="nucleus, 1 is off (0.9; --diversity: 1)")
    sampling.add_argument("--top_k", type=whole(0), default=0, metavar="K", help="0 is off (0)")
    sampling.add_argument("--repetition_penalty", type=number(0.01, 100), default=1.0, metavar="R", help="1 is off (1)")
    data = parser.add_argument_group("texts")
    data.add_argument(
        "--dataset",
        type=text,
        default="sample",
        metavar="NAME",
        help="sample, wikitext, pg19, another that "
        "downloadData.py installed, or the path of a text file, a folder of them, or a saved data set "
        "(sample)",
    )
    data.add_argument("--books", type=whole(1), metavar="N", help="documents of the data set used at most (all)")
    data.add_argument(
        "--sentences",
        type=whole(1),
        metavar="N",
        help="texts used: prompts of timed texts, texts of each corpus in --ppl (10; --lossless: 64)",
    )
    data.add_argument(
        "--sentenceLimit", type=whole(1), default=500, metavar="N", help="characters a text has at least (500)"
    )
    data.add_argument("--prompt", type=text, metavar="TEXT", help="continue this text instead of the data set's")
    data.add_argument(
        "--question", type=text, metavar="TEXT", help="the same for a chat model: asked by its chat template"
    )
    data.add_argument("--promptFile", type=path, metavar="FILE", help="the same for every line of a file")
    data.add_argument(
        "--promptLen",
        type=whole(1),
        nargs="+",
        default=[64],
        metavar="N",
        help="tokens of a text used as a prompt; several lengths are timed one after the other (64)",
    )
    data.add_argument(
        "--window",
        type=whole(2),
        default=1024,
        metavar="N",
        help="tokens of a corpus perplexity window (1024; no more than the models' context)",
    )
    data.add_argument(
        "--stride", type=whole(1), default=512, metavar="N", help="tokens from one window to the next (512)"
    )
    other = parser.add_argument_group("measuring")
    other.add_argument(
        "--repeats",
        type=whole(1),
        metavar="N",
        help="times each prompt is timed, in --diversity continued (3; --compare and --sweep: 2, --diversity: 20)",
    )
    other.add_argument(
        "--tokens", type=whole(1), metavar="N", help="tokens of each method that --lossless tests at least (100000)"
    )
    other.add_argument(
        "--seed", type=whole(0, (1 << 62) - 1), default=0, metavar="N", help="of every random choice (0)"
    )
    other.add_argument(
        "--out",
        type=path,
        default=HERE,
        metavar="FOLDER",
        help="where results.txt, results.jsonl and figures/ are (the project's folder)",
    )
    return parser
