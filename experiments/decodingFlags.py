"""The flags of `test.py` that say how tokens are guessed, verified and drawn. flags.py adds them to the parser."""

from __future__ import annotations

import argparse

from decoding.lengthRules import RULES as DRAFT_LENGTHS
from decoding.treeVerification import TREE_RULES
from decoding.verification import RULES as VERIFICATIONS
from inputs.commandLine import number, whole

Group = argparse._ArgumentGroup


def add_decoding(group: Group) -> None:
    """How many tokens are guessed, and how guesses are verified."""
    group.add_argument(
        "--gamma",
        type=whole(1, 1000),
        metavar="N",
        help="How many tokens to guess in a round. For the additive rule it is the least, for draftConfidence and "
        "costAware the most. Default: 4; for draftConfidence, costAware and lookup 10.",
    )
    group.add_argument(
        "--draftLength",
        choices=DRAFT_LENGTHS,
        default="fixed",
        help="The rule that decides how many tokens to guess. fixed: always gamma. additive: one more after a round "
        "accepted in full, else half as many. draftConfidence: until the draft is unsure. targetConfidence: only while "
        "the target is sure. costAware: as many as pay, by measured costs. Default: fixed.",
    )
    group.add_argument(
        "--draftThreshold",
        type=number(0, 1),
        default=0.4,
        metavar="P",
        help="draftConfidence stops guessing after a token that the draft gave a probability below this. Default: 0.4.",
    )
    group.add_argument(
        "--targetThreshold",
        type=number(0, 1),
        default=0.5,
        metavar="P",
        help="targetConfidence does not guess after a token that the target gave a probability below this. "
        "Default: 0.5.",
    )
    group.add_argument(
        "--verification",
        choices=VERIFICATIONS,
        default="token",
        help="The rule that accepts guesses. token: one after the other. block: the guesses of a round together, which "
        "accepts at least as many on average. Default: token.",
    )
    group.add_argument(
        "--tree",
        metavar="SHAPE",
        help="Guess a tree instead of a chain. 3,2,1,1: the last token has 3 children, each of these 2, and so on. "
        "3/2,1,0: level by level, with one number for each node. auto: the shape with the most tokens per second, by "
        "measured acceptance and costs; plain decoding and chains are among its choices. Default: a chain; for the "
        "methods tree and topDown of --compare and --lossless auto.",
    )
    group.add_argument(
        "--treeRule",
        choices=TREE_RULES,
        default="traversal",
        help="The rule that accepts guesses of a tree. traversal: whole paths, from the leaves to the root. topDown: "
        "token by token, from the root. Default: traversal.",
    )


def add_drafters(group: Group) -> None:
    """The settings of drafters other than a whole draft model: cascade, lookup, and a restricted draft."""
    group.add_argument(
        "--gamma1",
        type=whole(1, 1000),
        default=4,
        metavar="N",
        help="In a cascade, how many tokens the draft guesses for the mid model in a round. Default: 4.",
    )
    group.add_argument(
        "--gamma2",
        type=whole(1, 1000),
        default=4,
        metavar="N",
        help="In a cascade, how many tokens the draft and the mid model together guess for the target in a round. "
        "Default: 4.",
    )
    group.add_argument(
        "--lookupFirst",
        action="store_true",
        help="Let the text so far guess where its last tokens occurred before, as for --draft lookup, and the draft "
        "model elsewhere.",
    )
    group.add_argument(
        "--ngram",
        type=whole(1),
        metavar="N",
        help="For lookup: at least so many of the last tokens must have occurred before. As many as possible are "
        "looked up. Default: 1; 4 where a draft model guesses elsewhere.",
    )
    group.add_argument(
        "--draftVocab",
        type=whole(1),
        metavar="N",
        help="Let the draft guess only the N most frequent tokens, which makes its output layer smaller. Default: all "
        "tokens.",
    )
    group.add_argument(
        "--draftTemperature",
        type=number(0, 1000),
        metavar="T",
        help="The temperature of the draft alone. The text stays distributed as the target's; how many guesses are "
        "accepted changes. Default: the target's.",
    )
    group.add_argument(
        "--draftTop_p",
        type=number(0, 1),
        metavar="P",
        help="The top_p of the draft alone, likewise. Default: the target's.",
    )


def add_contrastive(group: Group) -> None:
    """The settings of contrastive decoding."""
    group.add_argument(
        "--plausibility",
        type=number(0, 1),
        default=0.1,
        metavar="A",
        help="Drop tokens that the target gives less than this share of its highest probability. Default: 0.1.",
    )
    group.add_argument(
        "--amateurTemperature",
        type=number(1e-4, 1000),
        default=1.0,
        metavar="T",
        help="The temperature of the draft's distribution, which is subtracted in logarithms from the target's. "
        "Default: 1.",
    )
    group.add_argument(
        "--contrastiveTemperature",
        type=number(0, 1000),
        default=0.0,
        metavar="T",
        help="The temperature at which tokens are drawn from the scores. 0 takes the token of the highest score. "
        "Default: 0.",
    )


def add_sampling(group: Group) -> None:
    """How many tokens are drawn, and from which distribution."""
    group.add_argument(
        "--maxLen",
        type=whole(1),
        metavar="N",
        help="The most new tokens of a text. Default: 200; for --speedNew 1000, for --diversity 45.",
    )
    group.add_argument(
        "--temperature",
        type=number(0, 1000),
        nargs="+",
        metavar="T",
        help="The temperature of the target, and of the draft unless --draftTemperature is given. 0 is greedy "
        "decoding. --sweep takes several. Default: 0.85; for --diversity 1.",
    )
    group.add_argument(
        "--top_p",
        type=number(0, 1),
        metavar="P",
        help="Keep the smallest set of most probable tokens that holds this much probability (nucleus sampling). 1 "
        "keeps all. Default: 0.9; for --diversity 1.",
    )
    group.add_argument(
        "--top_k",
        type=whole(0),
        default=0,
        metavar="K",
        help="Keep the K most probable tokens. 0 keeps all. Default: 0.",
    )
    group.add_argument(
        "--repetition_penalty",
        type=number(0.01, 100),
        default=1.0,
        metavar="R",
        help="Divide positive logits, and multiply negative ones, of tokens already in the text by this. 1 does "
        "nothing. Default: 1.",
    )
