"""The gate: a type of model is either decoded correctly or refused in one line. This is tested by computing.

A small twin of the model (smallTwin.py) reads a ragged batch over the slots of a KV cache: prompts, blocks of any
width, wrong guesses that are rolled back, siblings of a tree. Its logits must be those of its own forward without a
cache. Only if they are not, a reason is searched for, for the error message.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from decoding.tree import Places, Tree
from engine.kernels.loader import cache_folder
from engine.kvCache import Block
from engine.smallTwin import BUILDING, small_twin
from utils import UserError, excluded

if TYPE_CHECKING:
    from decoding.model import Model

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of logits, relative: 16 bits give a few hundredths alone
LENGTHS = (56, 23)  # tokens of the two rows: beyond the windows of a small twin, within its original context
TREE = Tree((0, 0, 1, 1, 2))
UNRELATED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id"}
RECORDS = "output_capturing_hook"  # by which transformers returns hidden states; once registered, it stays
BLOCKS, BRANCHES, PREFIX = "blocks", "a tree", "a prefix"  # what was compared

Wrap: TypeAlias = "Callable[[PreTrainedModel], Model]"  # a model as the samplers see it, without asking the gate
# Of this process, {(key, class): whether models of a type read trees}; a notebook may define a class anew.
VERDICTS: dict[tuple[str, type], bool] = {}


def reads_trees(
    config: PretrainedConfig, kind: type[PreTrainedModel], wrap: Wrap, model: PreTrainedModel | None = None
) -> bool | None:
    """Whether models of class `kind` with this configuration read trees of guesses, too. Raises UserError if they are
    not decoded correctly.

    model: the model itself, tested where a twin cannot show how it is decoded. Without it, the answer is None if no
        small twin can be created.

    A positive verdict is stored beside the built kernels, in a file whose name has a hash of the configuration, the
    class, and the versions of the code. A later process computes nothing.
    """
    settings = {name: value for name, value in config.to_dict().items() if name not in UNRELATED}
    parts = [settings, f"{kind.__module__}.{kind.__qualname__}", torch.__version__, transformers.__version__]
    text = json.dumps([*parts, digest_of_code(wrap)], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    key, file = (digest, kind), cache_folder() / "decodedRight" / digest
    if key not in VERDICTS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            VERDICTS[key] = {"trees": True, "no trees": False}[file.read_text(encoding="utf-8")]
    altered = model is not None and is_altered(model)
    if key not in VERDICTS:
        with BUILDING:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # The products of a twin are small, and several threads mostly wait.
            try:
                VERDICTS[key] = trees_of(small_twin(config, kind), config, wrap, TOLERANCE[torch.float32])
            except UserError:
                raise
            except Exception as error:  # A class that cannot be instantiated at this size can raise nearly anything.
                if reason := known_reason(config, kind):
                    raise refusal(config, reason) from error
            finally:
                torch.set_num_threads(threads)
        if key in VERDICTS and kind.__module__.startswith("transformers.") and not altered:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("trees" if VERDICTS[key] else "no trees", encoding="utf-8")
    trees = VERDICTS.get(key)
    if model is not None and (trees is None or altered or has_other_parts(model, parts_of(*key, config))):
        try:
            return trees_of(model, config, wrap, TOLERANCE.get(model.dtype, 0.1))
        except UserError as error:
            if trees is None:
                raise
            changed = f"this {kind.__name__} has hooks, modules or a forward that its class does not have"
            raise UserError(f"{changed}, and with them it is not decoded correctly; remove them") from error
    return trees


@functools.cache
def digest_of_code(wrap: Wrap) -> str:
    """A digest of the modules that read over slots, and of those that check it."""
    modules = [sys.modules[part.__module__] for part in (wrap, Block, Places, small_twin, trees_of, excluded)]
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()


def trees_of(model: PreTrainedModel, config: PretrainedConfig, wrap: Wrap, tolerance: float) -> bool:
    """Whether this model reads trees of guesses, too. Raises UserError if it is not decoded correctly."""
    try:
        with torch.autocast(model.device.type, enabled=False):  # It would round the products of a float32 model.
            errors = errors_of(model, wrap)
    except Exception as error:  # A model that does not support such a cache can raise nearly anything.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        reason = known_reason(config, type(model)) or f"it does not run with a KV cache of slots ({words[:160]})"
        raise refusal(config, reason) from error
    wrong = [what for what, error in errors.items() if not error < tolerance]
    if set(wrong) - {BRANCHES}:
        computed = f"its logits are off by {errors[wrong[0]]:.0%} where it reads {wrong[0]}"
        if PREFIX in wrong:
            not_decoder = ", as is_decoder is false" if getattr(config, "is_decoder", None) is False else ""
            computed = f"its tokens attend to those after them{not_decoder}"
        raise refusal(config, known_reason(config, type(model)) or computed)
    return not wrong


def refusal(config: PretrainedConfig, reason: str) -> UserError:
    """The UserError for a type of model that is not decoded correctly."""
    return UserError(
        f"models of type {config.model_type} are not supported: {reason}; choose a model whose layers use attention "
        "only, such as Llama, GPT-NeoX or Qwen"
    )


def known_reason(config: PretrainedConfig, kind: type[PreTrainedModel]) -> str | None:
    """Why models of this type cannot be decoded over slots, by their configuration or class; None if unknown."""
    text = config.get_text_config(decoder=True)
    names = ("layer_types", "layers_block_type", "block_types")
    kinds = {layer for name in names for layer in getattr(text, name, None) or []}
    states = sorted(
        kinds - {*LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, "attention", "mlp", "moe"} | kinds & {"linear_attention"}
    )
    if states or kind._is_stateful:
        which = f"its layers of type {states[0]}" if states else "its layers"
        return f"{which} keep a state that positions cannot address"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        return "its forward takes no position_ids"
    return None


def comparable(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Two computations of logits, with 0 for the tokens that both exclude: beside these any error would seem small."""
    out = excluded(logits) & excluded(wanted)
    return logits.masked_fill(out, 0), wanted.masked_fill(out, 0)


@torch.inference_mode()
def errors_of(model: PreTrainedModel, wrap: Wrap) -> dict[str, float]:
    """{what was read: the largest relative error of its logits}. The reference is a forward without a cache."""
    vocabulary, device = model.config.get_text_config(decoder=True).vocab_size, model.device
    first, length = 3 if vocabulary > 9 else 0, max(LENGTHS) + TREE.size  # Small ids may be that of padding.
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(first, vocabulary, (2, length), generator=generator).to(device)
    errors = dict.fromkeys((PREFIX, BLOCKS, BRANCHES), 0.0)

    def alone(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()

    def compare(what: str, logits: Tensor, wanted: Tensor) -> None:
        logits, wanted = comparable(logits, wanted)
        error = ((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)).nan_to_num(nan=torch.inf).max()
        errors[what] = max(errors[what], float(error))

    right = [alone(text[:end]) for text, end in zip(texts, LENGTHS)]
    compare(PREFIX, alone(texts[0, :30]), right[0][:30])
    # The tokens after a text are the nodes of a tree; each path to a leaf continues the text.
    paths = [TREE.path(node) for node, children in enumerate(TREE.children) if not children]
    branches = [
        [alone(torch.cat([text[:end], text[[end - 1 + node for node in path]]]))[end - 1 :] for path in paths]
        for text, end in zip(texts, LENGTHS)
    ]
    cached = wrap(model)
    cached.reserve(2, length + 1)

    def read(starts: list[int], width: int, rejected: bool = False) -> None:
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        tokens = texts.gather(1, positions)
        logits = cached.forward((tokens + 1) % vocabulary if rejected else tokens, positions)
        for row, start in enumerate(starts if not rejected else []):
            count = min(width, LENGTHS[row] - start)
            compare(BLOCKS, logits[row, :count], right[row][start : start + count])

    read([0, 0], 30)
    keep, positions = torch.tensor([7, 29], device=device), torch.arange(30, device=device).repeat(2, 1)
    compare(BLOCKS, cached.forward(texts[:, :30], positions, keep=keep)[0], right[0][keep])
    starts = [30, 9]  # The second prompt is shorter: what was read beyond its end is stale.
    for width in (5, 3, 1, 4, 9):
        read(starts, width, rejected=True)
        read(starts, width - width // 3)
        starts = [start + width - width // 3 for start in starts]
    read([starts[0], LENGTHS[1] - 1], LENGTHS[0] - starts[0])
    places = Places.at(torch.tensor(LENGTHS, device=device) - 1, TREE)
    nodes = torch.stack([text[end - 1 : end + TREE.size] for text, end in zip(texts, LENGTHS)])
    logits = cached.forward(nodes, places.positions, places)
    for row, wanted in enumerate(branches):
        for path, of_path in zip(paths, wanted):
            compare(BRANCHES, logits[row, [0, *path]], of_path)
    return errors


Parts: TypeAlias = "dict[str, tuple[type, int | None]]"  # {name of a module: its class, the slots of the cache it uses}
PARTS: dict[tuple[str, type], Parts] = {}  # of this process, what `parts_of` returned


def modules_of(model: nn.Module) -> Parts:
    """The modules of a model. A layer that stands in another's place reads and writes that one's keys and values."""
    return {name: (type(module), getattr(module, "layer_idx", None)) for name, module in model.named_modules()}


def parts_of(digest: str, kind: type[PreTrainedModel], config: PretrainedConfig) -> Parts:
    """The modules that a model of class `kind` creates; {} if none can be created. digest: of the configuration."""
    if (digest, kind) not in PARTS:
        with contextlib.suppress(Exception), torch.device("meta"):
            fresh = copy.deepcopy(config)
            fresh._attn_implementation = None
            PARTS[digest, kind] = modules_of(kind._from_config(fresh))
    return PARTS.setdefault((digest, kind), {})


def has_other_parts(model: nn.Module, own: Parts) -> bool:
    """Whether any module is not that of its class, nor one of this package, which packs layers."""
    parts, package = modules_of(model), __name__.rpartition(".")[0]
    ours = tuple(name for name, (kind, _) in parts.items() if kind.__module__.startswith(package))
    return any(own.get(name) != part and not name.startswith(ours) for name, part in parts.items())


def is_altered(model: nn.Module) -> bool:
    """Whether hooks or replaced forwards, of a module or of its class, change the computation. Those of accelerate do
    not: they move layers between devices. Nor do those by which transformers records hidden states."""
    return any(
        any(getattr(hook, "__name__", "") != RECORDS for hook in module._forward_hooks.values())
        or module._forward_pre_hooks
        or ("forward" in vars(module) and not hasattr(module, "_hf_hook"))
        or has_other_forward(type(module))
        for module in model.modules()
    )


def has_other_forward(kind: type[nn.Module]) -> bool:
    """Whether code elsewhere has replaced the forward of a class, or of the one that it has it from."""
    owner = next(each for each in kind.__mro__ if "forward" in vars(each))
    return getattr(vars(owner)["forward"], "__module__", None) != owner.__module__
