"""Checks of the flags of `test.py` that need no other settings. settings.py checks what flags mean together."""

from __future__ import annotations

import argparse
import os

from experiments.flags import parser
from utils import Sampling, UserError


def check_rerun(args: argparse.Namespace) -> None:
    """Raise UserError if other flags stand beside --rerun."""
    usual = vars(parser().parse_args([]))
    for name, value in vars(args).items():
        if name not in ("rerun", "out") and value != usual[name]:
            raise UserError(f"--rerun takes its flags from the run; leave out --{name}")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for numbers that no single flag can refuse."""
    if args.stride >= args.window:
        raise UserError(f"--stride ({args.stride}) must be less than --window ({args.window})")
    Sampling(args.contrastiveTemperature)
    Sampling().but(args.draftTemperature, args.draftTop_p)
    if args.temperature and len(args.temperature) > 1 and not args.sweep:
        raise UserError("several temperatures are for --sweep; give one")
    for temperature in args.temperature or [1.0]:
        Sampling(temperature, args.top_k, 1.0 if args.top_p is None else args.top_p, args.repetition_penalty)


def check_prompts(args: argparse.Namespace) -> None:
    """Raise UserError for prompts that cannot be continued, and a page that cannot be written."""
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
