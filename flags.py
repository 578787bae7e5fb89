"""The flags of `test.py`, checked as far as they can be before anything is loaded."""

import os
from pathlib import Path

import methods
from commandLine import Parser
from draftLength import RULES as DRAFT_LENGTHS
from loading import DTYPES, HERE, default_mid, default_pair
from utils import Sampling, UserError, check_share
from verification import RULES as VERIFICATIONS

LIMITS = {
    "maxLen": 1,
    "gamma": 1,
    "gamma1": 1,
    "gamma2": 1,
    "ngram": 1,
    "draftVocab": 1,
    "sentences": 1,
    "sentenceLimit": 1,
    "books": 1,
    "repeats": 1,
    "promptLen": 1,
    "window": 2,
    "stride": 1,
    "seed": 0,
}
# What each mode that times or generates compares, and how many new tokens are its default.
GROUPS = {
    "speed": ("draft", "target", "speculative"),
    "speedNew": ("draft", "target", "additive"),
    "speedMulti": ("draft", "mid", "target", "speculative", "cascade"),
    "contrastive": ("target", "contrastive", "speculativeContrastive"),
    "compare": (),
    "sweep": ("draft", "target"),
    "diversity": ("target", "speculative", "contrastive", "speculativeContrastive"),
}
MODES = (*GROUPS, "ppl", "show", "html")
MAX_LEN = {"speedNew": 1000, "diversity": 45}
SAMPLING = {"diversity": (1.0, 1.0)}  # temperature and top_p; the article's naive sampling has neither


def parser():
    """The parser; its defaults of None depend on what is measured (see `parse`)."""
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
        type=int,
        const=1,
        choices=(0, 1),
        help="time to first token, time per token, tokens per second; --speed 0 leaves it out",
    )
    mode.add_argument(
        "--ppl",
        nargs="?",
        type=int,
        const=1,
        choices=(0, 1),
        help="perplexity, per text and of the corpus; --ppl 0 leaves it out",
    )
    mode.add_argument("--speedNew", action="store_true", help="speed with the additive draft-length rule, 1000 tokens")
    mode.add_argument("--speedMulti", action="store_true", help="speed of a cascade of three models")
    mode.add_argument("--contrastive", action="store_true", help="speed of contrastive decoding, plain and speculative")
    mode.add_argument(
        "--compare",
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
        "--show",
        action="store_true",
        help="write one text on the screen as it is decoded: guesses "
        "accepted, guesses rejected, the target's own tokens",
    )
    mode.add_argument("--html", type=Path, metavar="FILE", help="the same as a page that plays it back step by step")
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="MODEL",
        help="the large model: a folder under models/, any path, or a hub "
        "id owner/name, downloaded on first use (default: pythia-2.8b if it and pythia-70m are there, "
        "else the bundled pair)",
    )
    models.add_argument("--draft", metavar="MODEL", help="the small model that guesses; lookup: the text so far does")
    models.add_argument("--mid", metavar="MODEL", help="the model between the two, for a cascade")
    models.add_argument("--offline", action="store_true", help="download nothing")
    models.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of the weights (default: bfloat16 for speed where the device computes in it, float32 for perplexity)",
    )
    models.add_argument(
        "--compile",
        action="store_true",
        help="compile the forwards that --speed and its like time; the first time takes minutes",
    )
    models.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    how = parser.add_argument_group("how to guess and to verify")
    how.add_argument(
        "--gamma",
        type=int,
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
        type=float,
        default=0.4,
        metavar="P",
        help="draftConfidence: guess no further after a token the draft gave less than this (0.4)",
    )
    how.add_argument(
        "--targetThreshold",
        type=float,
        default=0.5,
        metavar="P",
        help="targetConfidence: do not guess after a token the target gave less than this (0.5)",
    )
    how.add_argument(
        "--verification", choices=VERIFICATIONS, default="token", help="the rule that accepts guesses (token)"
    )
    how.add_argument(
        "--gamma1", type=int, default=4, metavar="N", help="cascade: tokens the draft guesses for the mid model (4)"
    )
    how.add_argument("--gamma2", type=int, default=4, metavar="N", help="cascade: tokens both guess for the target (4)")
    how.add_argument("--ngram", type=int, default=3, metavar="N", help="lookup: tokens matched, at most (3)")
    how.add_argument(
        "--draftVocab",
        type=int,
        metavar="N",
        help="the draft guesses only the N most frequent tokens, "
        "and its output layer is that much smaller (all tokens)",
    )
    contrast = parser.add_argument_group("contrastive decoding")
    contrast.add_argument(
        "--plausibility",
        type=float,
        default=0.1,
        metavar="A",
        help="tokens less probable than this share of the target's most probable one are dropped (0.1)",
    )
    contrast.add_argument("--amateurTemperature", type=float, default=1.0, metavar="T", help="of the draft's part (1)")
    contrast.add_argument(
        "--contrastiveTemperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the token of the highest score, above 0 draws (0)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--maxLen", type=int, metavar="N", help="new tokens at most (200; --speedNew: 1000, --diversity: 45)"
    )
    sampling.add_argument(
        "--temperature", type=float, nargs="+", metavar="T", help="0 is greedy (0.85; --diversity: 1)"
    )
    sampling.add_argument("--top_p", type=float, metavar="P", help="nucleus, 1 is off (0.9; --diversity: 1)")
    sampling.add_argument("--top_k", type=int, default=0, metavar="K", help="0 is off (0)")
    sampling.add_argument("--repetition_penalty", type=float, default=1.0, metavar="R", help="1 is off (1)")
    data = parser.add_argument_group("texts")
    data.add_argument(
        "--dataset",
        default="sample",
        metavar="NAME",
        help="sample, wikitext, pg19, another that "
        "downloadData.py installed, or the path of a text file, a folder of them, or a saved data set "
        "(sample)",
    )
    data.add_argument("--books", type=int, metavar="N", help="documents of the data set used at most (all)")
    data.add_argument(
        "--sentences",
        type=int,
        default=10,
        metavar="N",
        help="texts used: prompts of timed texts, texts of each corpus in --ppl (10)",
    )
    data.add_argument(
        "--sentenceLimit", type=int, default=500, metavar="N", help="characters a text has at least (500)"
    )
    data.add_argument("--prompt", metavar="TEXT", help="continue this text instead of the data set's")
    data.add_argument("--question", metavar="TEXT", help="the same for a chat model: asked by its chat template")
    data.add_argument("--promptFile", type=Path, metavar="FILE", help="the same for every line of a file")
    data.add_argument(
        "--promptLen",
        type=int,
        nargs="+",
        default=[64],
        metavar="N",
        help="tokens of a text used as a prompt; several lengths are timed one after the other (64)",
    )
    data.add_argument(
        "--window",
        type=int,
        default=1024,
        metavar="N",
        help="tokens of a corpus perplexity window (1024; no more than the models' context)",
    )
    data.add_argument("--stride", type=int, default=512, metavar="N", help="tokens from one window to the next (512)")
    other = parser.add_argument_group("measuring")
    other.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="times each prompt is timed, in --diversity continued (3; --compare and --sweep: 2, --diversity: 20)",
    )
    other.add_argument("--seed", type=int, default=0, metavar="N", help="of every random choice (0)")
    other.add_argument(
        "--out",
        type=Path,
        default=HERE,
        metavar="FOLDER",
        help="where results.txt, results.jsonl and figures/ are (the project's folder)",
    )
    return parser


def parse(argv):
    """The flags as a namespace, with the models' names filled in. Raises UserError for what cannot be right."""
    args = parser().parse_args(argv)
    check_numbers(args)
    check_prompts(args)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    args.promptLen = sorted(set(args.promptLen))
    if not any(getattr(args, mode) for mode in MODES):  # none is asked for: the two, but for one that is switched off
        args.speed, args.ppl = int(args.speed is None), int(args.ppl is None)
        if args.draft == "lookup" or args.draftVocab:
            args.ppl = 0
    if not any(getattr(args, mode) for mode in MODES):
        raise UserError("nothing to measure: leave out --speed 0 or --ppl 0")
    name_models(args)
    groups_of(args)
    if played(args):
        for mode in "ppl", "compare", "sweep", "diversity":
            if getattr(args, mode):
                raise UserError(f"--show and --html play one text and measure nothing; leave out --{mode}")
    if args.draft == "lookup" and args.ppl:
        raise UserError("--draft lookup has no perplexity: it is no model; leave out --ppl")
    if args.draftVocab:
        check_draft_vocabulary(args)
    return args


def check_numbers(args):
    for flag, least in LIMITS.items():
        value = getattr(args, flag)
        for each in value if isinstance(value, list) else [least if value is None else value]:
            if each < least:
                raise UserError(f"--{flag} must be {least} or more, not {each}")
    if args.seed >= 1 << 62:
        raise UserError("--seed must be less than 2**62")
    if args.stride >= args.window:
        raise UserError(f"--stride ({args.stride}) must be less than --window ({args.window})")
    for flag in "draftThreshold", "targetThreshold", "plausibility":
        check_share(f"--{flag}", getattr(args, flag))
    if not 0 < args.amateurTemperature < float("inf"):
        raise UserError(f"--amateurTemperature must be above 0, not {args.amateurTemperature}")
    Sampling(args.contrastiveTemperature)
    if args.temperature and len(args.temperature) > 1 and not args.sweep:
        raise UserError("several temperatures are for --sweep; give one")
    for temperature in args.temperature or [None]:
        sampling(args, "speed", temperature)


def check_draft_vocabulary(args):
    """Raise UserError for what needs a draft that knows every token, or has no use for one that does not."""
    if args.draft == "lookup":
        raise UserError("--draftVocab restricts a draft model, and --draft lookup is none; leave out one of them")
    if args.ppl:
        raise UserError(
            "a draft restricted by --draftVocab has no perplexity: it gives most tokens none; leave out "
            "--ppl or --draftVocab"
        )
    used = {name for names in (*groups_of(args).values(), played(args)) for name in names}
    if used & {"contrastive", "speculativeContrastive"}:
        raise UserError(
            "contrastive decoding (in --contrastive, --diversity, --compare all) needs a draft that knows "
            "every token; leave it or --draftVocab out"
        )


def check_prompts(args):
    given = [flag for flag in ("prompt", "question", "promptFile") if getattr(args, flag) is not None]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} both say what to continue; give one of them")
    for flag in "prompt", "question":
        text = getattr(args, flag)
        if text is not None and not text.strip("\n"):
            raise UserError(f"--{flag} is empty: give some text")
        if text and text != text.encode(errors="replace").decode():
            raise UserError(f"--{flag} is not text in this terminal's encoding: give UTF-8")
    if args.html and not os.path.isdir(os.path.dirname(os.path.abspath(args.html))):
        raise UserError(f"--html {args.html} is in no folder that exists")
    if args.html and os.path.isdir(args.html):
        raise UserError(f"--html {args.html} is a folder; name a file")


def name_models(args):
    """Fill in the models that were not named."""
    if args.mid and not args.draft:
        raise UserError("--mid stands between the target and a draft: name that too, with --draft")
    ours, pair = args.target is None and args.draft is None and args.mid is None, default_pair()
    if ours:
        print(
            f"No models named: using {pair[0]} (target) and {pair[1]} (draft)."
            + ("" if pair[0].startswith("pythia") else " README.md says how to get Pythia.")
        )
        args.mid = default_mid(pair)
    args.target, args.draft = args.target or pair[0], args.draft or pair[1]


def roles_of(args):
    """The models there are beside the target."""
    return {role for role in ("draft", "mid") if getattr(args, role)} - ({"draft"} if args.draft == "lookup" else set())


def groups_of(args):
    """{mode: the methods it measures}, of the modes asked for. Raises UserError where one lacks a model."""
    roles, groups = roles_of(args), {}
    for mode, names in GROUPS.items() if not played(args) else ():
        if mode == "compare" and args.compare is not None:
            groups[mode] = methods.choose(args.compare, roles)
        elif getattr(args, mode):
            groups[mode] = [name for name in names if name != "draft" or "draft" in roles]
            methods.check_roles(groups[mode], roles)
    return groups


def played(args):
    """The one method whose text --show and --html play, in a tuple; empty where neither is asked for."""
    if not (args.show or args.html):
        return ()
    name = (
        "speculativeContrastive"
        if args.contrastive
        else "cascade"
        if args.speedMulti
        else "additive"
        if args.speedNew
        else "speculative"
    )
    methods.check_roles([name], roles_of(args))
    return (name,)


def widths(args, names):
    """{role: widths of the blocks that are worth a graph, for the methods `names`}. Narrower blocks are filled up."""
    gamma = args.gamma or 4
    target = {1, gamma + 1, args.gamma2 + 1} if "cascade" in names else {1, gamma + 1}
    if args.sweep or args.draftLength != "fixed" or set(names) & set(DRAFT_LENGTHS) - {"fixed"}:
        target |= {2, 3, 5, 8, 11}
    reads_all = set(names) & {"contrastive", "speculativeContrastive"}  # the draft does, what the target does
    return {"target": target, "draft": {1, 2} | (target if reads_all else set()), "mid": {1, args.gamma1 + 2}}


def max_len(args, mode):
    """New tokens at most in that mode."""
    return args.maxLen or MAX_LEN.get(mode, 200)


def repeats(args, mode):
    return args.repeats or {"compare": 2, "sweep": 2, "diversity": 20}.get(mode, 3)


def sampling(args, mode, temperature=None):
    """`Sampling` of that mode; of one of several temperatures."""
    usual, top_p = SAMPLING.get(mode, (0.85, 0.9))
    temperature = temperature if temperature is not None else args.temperature[0] if args.temperature else usual
    return Sampling(temperature, args.top_k, top_p if args.top_p is None else args.top_p, args.repetition_penalty)
