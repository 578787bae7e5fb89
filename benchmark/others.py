"""`other_methods`: methods of other programs, checked and ready to be timed beside this project's methods.

A method is timed only if its greedy text is the argmax of the target in float32, up to rounding: otherwise the
conversion is wrong. With `--texts`, sampled text is audited too. Both are judged as `test.py --audit` judges
(lossless/audit.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from benchmark.peers import MODELS, SPACE, OtherMethod, Peer, PeerError, Source, check_free
from decoding.rows import Record
from engine.kvCache import cache_bytes
from experiments.loading import Inputs, LoadedModels
from experiments.schema import Append, EngineLine, GreedyAuditFigures
from experiments.speed import Timed, Written
from inputs.devices import available_memory
from inputs.models import model_limits, model_version, weight_files
from inputs.progress import followed
from inputs.texts import write_texts
from lossless.audit import Auditor
from lossless.evidence import limit_of
from methods import customGenerate
from methods.catalogue import METHODS
from methods.programs.program import LOADING
from utils import GREEDY, Sampling, UserError

COMPILING: dict[str, Any] = {}  # how transformers compiles its forward: arguments of its `CompileConfig`
GREEDY_TOKENS, TEXTS, TEXT_TOKENS = 50, 40, 100  # of the greedy text of each prompt; drawn texts, and of each of them
CHECKED_BATCH = 8  # texts at once, of a method that decodes many


class LibraryMethod(OtherMethod):
    """A method of `transformers` (`methods.programs.registry.Generate`).

    On a CPU the library compiles its forward only if requested. models: {role: model}, with the library's own
    attention. vocabulary: models may have more logits than the tokenizer has tokens. tokenizer: of both models, which
    "universal" takes.
    """

    def __init__(
        self,
        name: str,
        models: Mapping[str, PreTrainedModel],
        vocabulary: int,
        gamma: int | None,
        batch: int = 1,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.kind, self.model = name.partition(":")[2], models["target"]
        super().__init__(name, str(self.model.dtype).removeprefix("torch."), gamma, batch)
        self.version = transformers.__version__
        self.settings = {"gamma": self.gamma} if self.kind in ("lookup", "draft", "custom") else {}
        self.assistant = models["draft"] if self.kind in ("draft", "assisted") else None
        outside = list(range(vocabulary, self.model.config.vocab_size))
        self.options: dict[str, Any] = {"suppress_tokens": outside} if outside and self.kind != "custom" else {}
        if self.kind == "static":
            self.options |= {"cache_implementation": "static", "disable_compile": True}
        elif self.kind == "compiled":
            config = CompileConfig(**COMPILING)
            config._compile_all_devices = True  # Without it, accelerators alone.
            self.options |= {"cache_implementation": "static", "compile_config": config}
        elif self.kind == "lookup":
            self.options["prompt_lookup_num_tokens"] = self.gamma
        elif self.kind == "universal":
            self.assistant = copy.deepcopy(models["draft"])  # The library cuts its output layer.
            if other := copy.deepcopy(tokenizer):  # The target's own is refused: this one has a token more.
                other.add_tokens("<another>")
                self.assistant.resize_token_embeddings(vocabulary + 1, mean_resizing=False)
            self.options |= {"tokenizer": tokenizer, "assistant_tokenizer": other}
        elif self.kind == "custom":
            plug_in = customGenerate.speculative(models["draft"], self.gamma, vocabulary=vocabulary)
            self.options["custom_generate"] = plug_in

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        """Raises PeerError if the library fails: some models, devices and versions do not support what it does."""
        try:
            pairs = [self.text(prompt, count, sampling, seed) for prompt, seed in zip(prompts, seeds)]
        except Exception as error:
            raise PeerError(f"{type(error).__name__}: {error}") from error
        return [tokens for tokens, _ in pairs], [record for _, record in pairs]

    def text(self, prompt: list[int], count: int, sampling: Sampling, seed: int) -> tuple[list[int], Record]:
        """One text and its record."""
        model = self.model
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if self.assistant is not None:  # The assistant's own configuration decides how it guesses.
            config, gamma = self.assistant.generation_config, self.gamma if self.kind == "draft" else None
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(seed)
        streamer, tokens = RecordStreamer(), torch.tensor([prompt], device=model.device)
        filters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=sampling.temperature > 0,
            assistant_model=self.assistant,
            streamer=streamer,
            repetition_penalty=sampling.repetition_penalty,
            **(filters if sampling.temperature else {}),
            **self.options,
        )
        if self.kind == "compiled" and not hasattr(model, "_compiled_call"):
            raise RuntimeError("this version of the library does not compile its forward on this device")
        return output[0, len(prompt) :].tolist(), streamer.record


class RecordStreamer(BaseStreamer):
    """Notes when `generate` has new tokens on the host: after each forward of the target."""

    def __init__(self) -> None:
        self.start, self.record = time.perf_counter(), Record()
        self.prompt = True  # The library passes the prompt first.

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.record.add(time.perf_counter() - self.start, value.numel(), 0, 0)
        self.prompt = False

    def end(self) -> None:
        pass


class InFloat32(TorchFunctionMode):
    """Widens the arguments of each operation to float32, weights too: no second copy of all weights is needed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


class Float32Model:
    """The model in the folder of a source, with the weights that other programs read, computing in float32.

    Has the interface of `CachedModel` that `TextScorer` uses. dtype: of the weights, for the rounding to allow. memory:
    bytes that it takes. Raises PeerError if there are fewer.
    """

    def __init__(self, source: Source, device: str) -> None:
        self.memory = SPACE * sum(file.stat().st_size for file in weight_files(source.folder))
        check_free("checking its text", self.memory, available_memory(device), "of memory")
        self.model = AutoModelForCausalLM.from_pretrained(source.folder, **LOADING).eval().to(device)
        self.vocabulary, self.device, self.dtype = source.vocabulary, self.model.device, self.model.dtype
        self.name = source.folder.name

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Tensor:
        """Logits after each token: int64 `[B, n]` -> float32 `[B, n, V]`."""
        with InFloat32():
            return self.model(input_ids=tokens, use_cache=False).logits[..., : self.vocabulary]


def check_greedy(
    method: OtherMethod, target: Float32Model, prompts: Sequence[list[int]], sampling: Sampling, seed: int
) -> GreedyAuditFigures:
    """The figures of greedy texts with the repetition penalty of `sampling`. Raises ValueError if rounding does not
    explain one of their tokens, and PeerError if the program fails."""
    sampling = replace(GREEDY, repetition_penalty=sampling.repetition_penalty)
    texts = drawn_texts(method, prompts, GREEDY_TOKENS, sampling, seed)
    figures = Auditor(target, None, method.unit_roundoff, seed).greedy(prompts, texts, sampling)
    if figures["beyond"]:
        raise ValueError(
            f"not timed: {figures['beyond']} of {figures['tokens']} greedy tokens are not the target's; the "
            f"largest logit gap is {figures['largest_gap']:.2g}, and rounding explains {figures['allowed']:.2g}"
        )
    return figures


def method_of(name: str, inputs: Inputs, batch: int = 1) -> OtherMethod:
    """A method of another program, which is not loaded yet. batch: the texts that it must be able to decode at once."""
    decoding = inputs.settings.decoding
    gamma = decoding.gamma if name.endswith(":lookup") else decoding.gamma_of("fixed")
    if METHODS[name].engine != "generate":
        return Peer(name, inputs.dtype, gamma, batch)
    vocabulary = model_limits(inputs.folders["target"], inputs.tokenizer).vocabulary
    return LibraryMethod(name, inputs.library, vocabulary, gamma, batch, inputs.tokenizer)


def drawn_texts(
    method: OtherMethod, prompts: Sequence[list[int]], count: int, sampling: Sampling, seed: int, first: int = 0
) -> Sequence[Sequence[int]]:
    """`count` tokens after each prompt. Each text has a seed of its own. first: the number of the first text."""
    seeds = [seed + 7919 * number for number in range(first + 1, first + len(prompts) + 1)]
    return method.write(prompts, count, sampling, seeds, min(CHECKED_BATCH, method.batch))[0]


def sources_of(inputs: Inputs, models: LoadedModels) -> dict[str, Source]:
    """{role: what a program converts} of the target and of a draft with its tokenizer."""
    sources: dict[str, Source] = {}
    roles = ["target"] if inputs.translation else ["target", "draft"]
    for role in [role for role in roles if role in inputs.folders]:
        model, folder = models[role], inputs.folders[role]
        slot = cache_bytes(model.model.config.get_text_config(), 1, model.dtype)
        converted = MODELS / f"{folder.name}-{model_version(folder).replace(':', '-')}"
        sources[role] = Source(folder, converted, model.parameters, model.vocabulary, slot)
    return sources


@contextmanager
def other_methods(
    inputs: Inputs,
    models: LoadedModels,
    names: Sequence[str],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_len: int,
    append: Append,
) -> Iterator[dict[str, Timed]]:
    """{method: the function that `speed.time_texts` times} of those among `names` that other programs compute. Each is
    loaded and checked first, and a line of results describes it, with the reason if it is left out. They run until the
    context ends."""
    settings, methods, checked = inputs.settings, dict[str, OtherMethod](), dict[str, Timed]()
    alpha, folder, judges = settings.decoding.acceptance, settings.output.texts, dict[str, Float32Model]()
    prefixes = [prompts[number % len(prompts)] for number in range(TEXTS)]  # of drawn texts
    context = max(map(len, prompts)) + max(max_len, GREEDY_TOKENS, TEXT_TOKENS)
    sources = sources_of(inputs, models) if names else {}
    memory = available_memory("cpu")
    with ExitStack() as stack:
        for name in followed(names, "other programs", len(names)):
            methods[name] = method = method_of(name, inputs, settings.measuring.batch or 1)
            stack.callback(method.close)
            greedy, drawn = None, None
            try:
                if (judged := alpha is None or not METHODS[name].guesses) and not judges:
                    used = sources.items() if folder else [("target", sources["target"])]
                    judges = {role: Float32Model(source, inputs.device) for role, source in used}
                # What a program maps from a file counts as available, and must stay in memory all the same.
                free = memory - sum(judge.memory for judge in judges.values()) - sum(m.memory for m in methods.values())
                method.load(sources, context + 2 * method.gamma + 8, free, alpha)
                if judged:  # With synthetic acceptance, texts are not the target's.
                    greedy = check_greedy(method, judges["target"], prompts, sampling, settings.measuring.seed)
                if judged and folder and sampling.temperature:  # Greedy text says nothing of sampling.
                    texts = drawn_texts(method, prefixes, TEXT_TOKENS, sampling, settings.measuring.seed)
                    options = method.unit_roundoff, settings.measuring.seed, limit_of(len(names))
                    drawn = Auditor(judges["target"], judges.get("draft"), *options).drawn(prefixes, texts, sampling)
            except (PeerError, UserError, ValueError, OSError) as error:
                method.fail(error)
            if folder and drawn:  # Not above: a full disk is no fault of the program.
                write_texts(folder / f"{name.replace(':', '-')}.jsonl", zip(prefixes, texts))
            line: EngineLine = {
                "kind": "lossless",
                "test": "engine",
                "method": name,
                "precision": method.precision,
                "quantised": method.is_quantised,  # other weights than the target's
                "version": method.version,
                "settings": dict(method.settings),
                "failed": method.failed,
                "greedy": greedy,
                "drawn": drawn,
            }
            append(line)
            if not method.failed:
                checked[name] = partial(timed, method, line, append, max_len, sampling)
        yield checked
        for name, method in methods.items():
            if method.failed:
                print(f"{name} is left out: {method.failed}")


def timed(
    method: OtherMethod,
    line: EngineLine,
    append: Append,
    max_len: int,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    generators: Sequence[Generator],
    batch: int,
    first: int | None = None,
) -> Written:
    """A method as `speed.time_texts` calls it. If it fails, its times are nan from then on, and its line of results is
    appended once more, with the reason."""
    if method.failed is None:
        seeds = [generator.initial_seed() for generator in generators]
        try:
            return method.write(prompts, min(first or max_len, max_len), sampling, seeds, batch)
        except PeerError as error:
            method.fail(PeerError(f"it failed while it was timed, and its earlier texts stay in the record: {error}"))
            append({**line, "failed": method.failed})
    return [[0]] * len(prompts), [Record([float("nan")], [1], [0], [0]) for _ in prompts]
