"""Keeps coverage out of what is not this project's code: before Python 3.12 it makes imports and compilers half as slow
again. conftest.py imports this module before any test."""

import functools
import sys
from collections.abc import Callable
from typing import Any

TRACER = sys.gettrace()
sys.settrace(None)

import accelerate.state  # noqa: E402, F401
import hypothesis.strategies  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import scipy.stats  # noqa: E402, F401
import torch  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402, F401
from transformers import (  # noqa: E402, F401
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

import datasets  # noqa: E402, F401

sys.settrace(TRACER)


def untraced(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, without coverage."""

    @functools.wraps(work)
    def quiet(*given: Any, **named: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return work(*given, **named)
        finally:
            sys.settrace(tracer)

    return quiet


def without_coverage(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, whose functions compile when they are first called."""
    return functools.wraps(compiler)(lambda *given, **options: untraced(compiler(*given, **options)))


torch.compile = without_coverage(torch.compile)
