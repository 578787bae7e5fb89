"""What the flags of `test.py` mean together: what cannot be right, as far as it shows before anything is loaded; and
the values that depend on what is measured."""

import os

from decoding.draftLength import RULES as DRAFT_LENGTHS
from experiments.flags import parser
from inputs.models import default_mid, default_pair
from methods.catalogue import catalogue as methods
from utils import Sampling, UserError

# What each mode that times or generates compares, and how many new tokens are its default.
GROUPS = {
    "speed": ("draft", "target", "speculative"),
    "speedNew": ("draft", "target", "additive"),
    "speedMulti": ("draft", "mid", "target", "speculative", "cascade"),
    "contrastive": ("target", "contrastive", "speculativeContrastive"),
    "compare": (),
    "sweep": ("draft", "target"),
    "diversity": ("target", "speculative", "contrastive", "speculativeContrastive"),
    "lossless": (),
}
MODES = (*GROUPS, "ppl", "show", "html")
MAX_LEN = {"speedNew": 1000, "diversity": 45}
TOKENS, ROWS = 100_000, 64  # --lossless: tokens tested, and how many texts are written at a time
SAMPLING = {"diversity": (1.0, 1.0)}  # temperature and top_p; the article's naive sampling has neither


def parse(argv):
    """The flags as a namespace, with the models' names filled in. Raises UserError for what cannot be right."""
    args = parser().parse_args(argv)
    if args.rerun:
        usual = vars(parser().parse_args([]))
        for name, value in vars(args).items():
            if name not in ("rerun", "out") and value != usual[name]:
                raise UserError(f"--rerun takes its flags from the run; leave out --{name}")
    check_numbers(args)
    check_prompts(args)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    if args.rerun:
        return args
    args.promptLen = sorted(set(args.promptLen))
    args.temperature = args.temperature and list(dict.fromkeys(args.temperature))
    if not any(getattr(args, mode) for mode in MODES):  # none is asked for: the two, but for one that is switched off
        args.speed, args.ppl = int(args.speed is None), int(args.ppl is None)
        if args.draft == "lookup" or args.draftVocab:
            args.ppl = 0
    if not any(getattr(args, mode) for mode in MODES):
        raise UserError("nothing to measure: leave out --speed 0 or --ppl 0")
    if args.lossless is None and args.tokens:
        raise UserError("--tokens is of --lossless; give both or neither")
    if args.lossless is not None and any(getattr(args, mode) for mode in MODES if mode != "lossless"):
        raise UserError("--lossless is a run of its own: leave out the other things to do")
    args.sentences = args.sentences or (10 if args.lossless is None else ROWS)
    name_models(args)
    groups_of(args)
    if not played(args) and not os.access(args.out, os.W_OK):
        raise UserError(f"{args.out} is a folder that you may not write to; name another with --out")
    if args.sweep and (args.maxLen or 3) < 3:
        raise UserError("--sweep needs a round of guesses between the first token and the last: --maxLen 3 or more")
    if played(args):
        for mode in "speed", "ppl", "compare", "sweep", "diversity":
            if getattr(args, mode):
                raise UserError(f"--show and --html play one text and measure nothing; leave out --{mode}")
        if args.speedNew + args.speedMulti + args.contrastive > 1:
            raise UserError("--show and --html play one method: of --speedNew, --speedMulti and --contrastive give one")
    if args.draft == "lookup" and args.ppl:
        raise UserError("--draft lookup has no perplexity: it is no model; leave out --ppl")
    if args.draftVocab:
        check_draft_vocabulary(args)
    return args


def check_numbers(args):
    if args.stride >= args.window:
        raise UserError(f"--stride ({args.stride}) must be less than --window ({args.window})")
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
        elif mode == "lossless" and args.lossless is not None:
            groups[mode] = methods.choose_lossless(args.lossless, roles)
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


def graphs(args, names):
    """{role: (widths, runs)} that are worth a graph for the methods `names`, as `CachedModel.compile` takes them."""
    gamma, names = args.gamma or 4, set(names)
    varied = args.sweep or args.draftLength != "fixed" or names & set(DRAFT_LENGTHS) - {"fixed"}
    contrast = names & {"contrastive", "speculativeContrastive"}  # of two models: they read alike, and have no runs
    step_by_step = args.repetition_penalty != 1 or "draftConfidence" in (*names, args.draftLength)
    target = {2, 3, 5, 8, 11} if varied else set()
    target |= {gamma + 1} | ({args.gamma2 + 1} if "cascade" in names else set())
    target |= {1} if contrast or step_by_step else set()
    draft = target if contrast else {1, 2} if step_by_step else set()
    mid = {args.gamma1 + 2} | ({1} if step_by_step else set())
    counts = {1, 2, 4, 8} if varied else {gamma}
    counts |= {args.gamma1} if "cascade" in names else set()
    counts |= {1} if "draft" in names else set()
    return {
        "target": (target, {(1, 1)} if "target" in names else set()),
        "draft": (draft, {(2, count) for count in counts} if names != {"draft"} else {(1, 1)}),
        "mid": (mid, {(1, 1)} if "mid" in names else set()),
    }


def guesses_at_once(args, names):
    """Guesses in a round that is worth one graph (`CachedModel.compile_round`) for the methods `names`; 0: in none."""
    steady = {"fixed", "block", "targetConfidence"} | (
        {"speculative"} if args.draftLength in ("fixed", "targetConfidence") else set()
    )
    if args.sweep or args.draft == "lookup" or args.repetition_penalty != 1 or not steady & set(names):
        return 0
    return args.gamma or 4


def max_len(args, mode):
    """New tokens at most in that mode."""
    return args.maxLen or MAX_LEN.get(mode, 200)


def rows(args):
    """Texts that are decoded at a time; else than for `--lossless` each is timed alone."""
    return 1 if args.lossless is None else min(ROWS, -(-(args.tokens or TOKENS) // max_len(args, "lossless")))


def repeats(args, mode):
    return args.repeats or {"compare": 2, "sweep": 2, "diversity": 20}.get(mode, 3)


def sampling(args, mode, temperature=None):
    """`Sampling` of that mode; of one of several temperatures."""
    usual, top_p = SAMPLING.get(mode, (0.85, 0.9))
    temperature = temperature if temperature is not None else args.temperature[0] if args.temperature else usual
    return Sampling(temperature, args.top_k, top_p if args.top_p is None else args.top_p, args.repetition_penalty)
