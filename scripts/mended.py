"""Released engines without the faults that docs/engines.md names as the causes of their errors.

`python -m scripts.auditEngines --mended` audits their texts. If a test rejected them, another fault would be left.
"""

import os
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from benchmark.peers import MATCHED
from methods.programs.openvinoGenai import OpenVino
from methods.programs.program import LoadRequest
from methods.programs.vllmCpu import Vllm

METHODS = "vllm:lookup", "vllm:draft", "openvino:draft", "generate:universal"


def expand(output: Tensor, values: Tensor, ends: Tensor, replaced: int, replacement: int, *_: Any, **__: Any) -> None:
    """Fill `output` `[positions]` with the value of each text, `ends[i]` being the end of text i: vLLM's
    `_expand_kernel_impl`, which fills a copy if the dtype is not int64."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.where(values == replaced, replacement, values).repeat_interleave(counts))


class MendedVllm(Vllm):
    """vLLM that fills the settings of guessed positions, and lets top-k be if there are none."""

    def __init__(self, request: LoadRequest) -> None:
        os.environ.update(self.VARIABLES, OMP_NUM_THREADS=str(request.threads))  # vLLM reads them when it is imported.
        from vllm.utils import cpu_triton_utils
        from vllm.v1.sample.ops import topk_topp_sampler

        top_k = topk_topp_sampler.apply_top_k_only
        topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k(logits, k) if len(logits) else logits
        cpu_triton_utils._expand_kernel_impl = expand
        super().__init__(request)


class MendedOpenVino(OpenVino):
    """OpenVINO GenAI with a draft model whose guesses are verified as those of prompt lookup: a guess is accepted if
    the token that is drawn from the target is the guess."""

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        self.matched = MATCHED


PROGRAMS: dict[str, Any] = {"vllm": MendedVllm, "openvino": MendedOpenVino}


def mend_generate() -> None:
    """Let `generate` of transformers keep the rows of a pruned draft in the order of their ids, in this process."""
    released = AssistantToTargetTranslator._get_assistant_to_target_input_ids

    def sorted_by_id(self: AssistantToTargetTranslator) -> tuple[Tensor, dict[int, int]]:
        to_target, to_assistant = released(self)
        return to_target, dict(sorted(to_assistant.items(), key=itemgetter(1)))

    AssistantToTargetTranslator._get_assistant_to_target_input_ids = sorted_by_id
