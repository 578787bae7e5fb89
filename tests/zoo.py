"""Every kind of causal language model that the installed transformers has, made tiny: decoded as its own forward says,
or refused in one line.

    make test-zoo     (it says what each is, writes docs/records/kinds.json, and fails if a kind is wrong)

A kind is right if its greedy texts, beyond a window of 16 tokens too, are those of its own forward without a cache:
alone, in a ragged batch, with a draft that is often wrong, with itself as draft, with guesses from the text, and with
trees.
"""

import copy
import json
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from decoding.tree import Tree
from engine.cachedModel import CachedModel, check_kind, context_of
from engine.smallTwin import small_twin
from experiments.runRecord import origin
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, UserError

RECORD = Path(__file__).resolve().parent.parent / "docs" / "records" / "kinds.json"
# What some default configurations lack, so that transformers itself cannot make a model of them.
ADDED = {"head_dim": 16, "num_key_value_heads": 4, "norm_topk_prob": True}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1}
ADDED |= EXPERTS | {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
LENGTHS, NEW = (1, 5, 60), 16


def text_of(config):
    try:
        return config.get_text_config(decoder=True)
    except ValueError:
        return config


def config_of(config_class):
    """A configuration of a decoder: the default one, with what it lacks."""
    config = config_class()
    for part in {id(part): part for part in (config, text_of(config))}.values():
        missing = {name: value for name, value in ADDED.items() if vars(part).get(name, value) is None}
        roles = {"is_encoder_decoder": False, "is_decoder": True}
        for name, value in missing.items() | {pair for pair in roles.items() if hasattr(part, pair[0])}:
            setattr(part, name, value)
    if config.model_type == "dbrx":
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 1e4, 8.0
    if config.model_type == "cohere_compass_text":
        config.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    return config


@torch.inference_mode()
def greedy(model, prompt):
    """The greedy text after a prompt, and the least gap between its two best logits at any token."""
    tokens, gap = list(prompt), torch.inf
    for _ in range(NEW):
        best = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], gap


def texts_of(model):
    """{how: the greedy texts of the prompts}, as this project decodes them, and the prompts."""
    text_config, generator = model.config.get_text_config(decoder=True), torch.Generator().manual_seed(1)
    vocabulary, room = text_config.vocab_size, context_of(text_config) - NEW - 2
    prompts = [torch.randint(3, vocabulary, (min(n, room),), generator=generator).tolist() for n in LENGTHS]
    noisy, same = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for weight in (weight for weight in noisy.parameters() if weight.numel() > 1):
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 * weight.std())
    target, draft = CachedModel(model, name="the target"), CachedModel(noisy, name="the draft")
    plain = partial(regrSampling, target=target, max_len=NEW, sampling=GREEDY)
    texts = {"alone": [plain([prompt])[0][0] for prompt in prompts], "batch": plain(prompts)[0]}
    drafters = {"draft": ModelDrafter(draft), "itself": ModelDrafter(CachedModel(same))}
    for name, drafter in (drafters | {"lookup": LookupDrafter(vocabulary)}).items():
        texts[name] = specSampling(prompts, target, drafter, max_len=NEW, sampling=GREEDY)[0]
    if target.reads_trees and draft.reads_trees:
        how = {"tree": Tree.of("2,2,1"), "max_len": NEW, "sampling": GREEDY}
        texts["tree"] = treeSampling(prompts, target, TreeDrafter(draft), **how)[0]
    return texts, prompts


def verdict(config_class):
    """("right", what is missing), ("refused", why), ("wrong", where), or ("unmade", why)."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    try:
        model = small_twin(config_of(config_class), kind)
    except Exception as error:
        try:
            check_kind(config_of(config_class), kind)
        except UserError as refusal:
            return "refused", str(refusal)
        except Exception:
            pass
        return "unmade", f"no small model of it can be made here ({type(error).__name__})"
    pristine = copy.deepcopy(model)
    try:
        texts, prompts = texts_of(model)
    except UserError as error:
        return "refused", str(error)
    wanted = [greedy(pristine, prompt) for prompt in prompts]
    for name, found in texts.items():
        for text, (right, gap) in zip(found, wanted):
            if text != right and gap > 1e-3:
                return "wrong", name
    return "right", "" if "tree" in texts else "no trees"


def main():
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    record = {**origin(["make", "test-zoo"], {"zoo": True}, "cpu", {}), "kinds": {}}
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        start = time.perf_counter()
        try:
            found = verdict(config_class)
        except Exception as error:
            found = "traceback", f"{type(error).__name__}: {error}".split("\n")[0][:160]
        record["kinds"][config_class.model_type] = found
        seconds = time.perf_counter() - start
        print(f"{config_class.model_type:26} {found[0]:9} {seconds:5.1f} s  {found[1][:150]}", flush=True)
    counts = Counter(found[0] for found in record["kinds"].values())
    print(counts)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(counts.keys() - {"right", "refused", "unmade"}))


if __name__ == "__main__":
    main()
