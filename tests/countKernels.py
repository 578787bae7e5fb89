"""Count the CUDA kernels of a round of Pythia's pair without a GPU, and write docs/records/kernels.json.

    make kernels     (it needs Triton: pip install triton)

Captured: the operators of the graphs on the software device, each with the kernels that ATen's sources launch for it.
Compiled: a layer by the kernels and the calls of libraries in the code that Inductor writes for a CUDA device, which is
not run; filters and draw by one kernel. Beside: copies and kernels between the graphs. Layers are narrow: how many
kernels there are does not depend on their widths. Speeds follow by arithmetic from these counts and the bytes that are
read, with what CARDS, READ, KERNEL, DRAW and ALPHA assume.
"""

import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import softwareCuda
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from engine import kvCache
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.cudaModel import CudaModel, layer_forward
from experiments.runRecord import code_version, origin
from inputs.randomModels import SHAPES, VOCABULARY
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import pick, probabilities

RECORD = Path(__file__).resolve().parent.parent / "docs" / "records" / "kernels.json"
PAIR, GAMMA = {"target": "pythia-2.8b", "draft": "pythia-70m"}, 4
CARDS = {"RTX 3060": 360, "A100 40 GB": 1555, "H100 SXM": 3350}  # GB of memory that are read in a second: data sheets
READ, KERNEL, ALPHA = 0.85, 2.5e-6, 0.6  # the share of that, seconds of a kernel, the acceptance rate
DRAW = 33e-6  # seconds of the kernels of filters and a draw, counted as one: an H100's, for 50,304 tokens and top-p
SLOTS = 264  # of the KV cache
SOME = 20_000  # entries of the vocabulary: more than CUDA sorts in one block
# Their graphs: (role, step, tokens of a block).
PLAIN, TARGET, DRAFT = ("target", "draw", 1), ("target", "score_block", GAMMA + 1), ("draft", "draw", 2)
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def kernels_of(operator, args, result):
    """Kernels that CUDA launches for an operator. A view launches none.

    A sort is a fill and, of 32 bits, a histogram, a scan and four passes; of several rows it sorts by row again, and
    gathers (SortStable.cu, cub). Attention makes numbers of a boolean mask by a fill and a selection (attention.cpp).
    Padding fills and copies (PadNd.cpp).
    """
    name, inputs = operator._schema.name.split("::")[1], [x for x in args if isinstance(x, torch.Tensor)]
    output = result[0] if isinstance(result, (tuple, list)) else result
    memory = {x.untyped_storage().data_ptr() for x in inputs}
    is_view = isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() in memory
    if name in NO_KERNEL or (is_view and not name.endswith("_")):
        return 0
    if name == "sort":
        return 7 if inputs[0].numel() == inputs[0].shape[-1] else 11
    if name == "scaled_dot_product_attention":
        return 3 if any(x.dtype == torch.bool for x in inputs) else 1
    return 2 if name == "constant_pad_nd" else 1


def narrow(layers):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "attn_implementation": "sdpa"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=SOME, num_hidden_layers=layers, **sizes)).bfloat16()


def formulas(model, logits, sampling, seen, u=None):
    """`CudaModel.by_kernel`, where Triton's kernel is not."""
    probs = probabilities(logits, sampling)
    return None if u is None else pick(probs, u), probs


def captured():
    """{a graph of PLAIN, TARGET or DRAFT: (its kernels, those beside layers and draws, its layers, its draws)}, and how
    many kernels there are outside of graphs in a step of plain decoding, and in a round."""
    inside, outside = [], []  # (graph, kernels, what) of its layers and draws; kernels of each step

    def tape(graph):
        return [kernels_of(operator, args, result) for operator, args, _, result in graph.tape] if graph else []

    def marked(what, function):
        def call(*args, **options):
            graph = softwareCuda.MACHINE.recording
            before = len(tape(graph))
            result = function(*args, **options)
            inside.append((graph, sum(tape(graph)[before:]), what))
            return result

        return call

    def perform(compute, operator, args, options):
        result = compute(operator, args, options)
        outside[-1] += 0 if softwareCuda.MACHINE.recording else kernels_of(operator, args, result)
        return result

    def step_ends(*args):
        outside.append(0)

    with softwareCuda.machine(), ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", lambda forward, **options: marked("layer", forward)))
        stack.enter_context(mock.patch.object(CudaModel, "by_kernel", marked("draw", formulas)))
        stack.enter_context(mock.patch.object(softwareCuda, "perform", partial(perform, softwareCuda.perform)))
        step_ends()
        models = {
            role: compiled(CachedModel(narrow(SHAPES[name][1]).to("cuda"), SOME, role)) for role, name in PAIR.items()
        }
        prompt, options, between = [[5, 9, 2] * 10], {"generator": torch.Generator("cuda").manual_seed(0)}, []
        drafter = ModelDrafter(models["draft"])
        for write in (
            partial(regrSampling, prompt, models["target"], 60, **options, callback=step_ends),
            partial(specSampling, prompt, models["target"], drafter, 60, GAMMA, **options, observer=step_ends),
        ):
            write()  # It captures.
            outside.clear()
            step_ends()
            write()
            between.append(sorted(outside)[len(outside) // 2])
    graphs = {}
    for role, model in models.items():
        for (step, _, shape, *_), graph in model.graphs.items():
            parts, whats = zip(*[(kernels, what) for of, kernels, what in inside if of is graph.graph] or [(0, "")])
            whole = sum(tape(graph.graph))
            row = whole, whole - sum(parts), whats.count("layer"), whats.count("draw")
            graphs[role, step, shape[1]] = max(row, graphs.get((role, step, shape[1]), row))  # as many draws as guesses
    return graphs, between


# A GPU that is not there, as Inductor asks about it.
PROPERTIES = SimpleNamespace(
    name="none", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32, gcnArchName="",
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
)  # fmt: skip
DRIVER = {
    "is_available": lambda: True,
    "get_device_properties": lambda *device: PROPERTIES,
    "get_device_capability": lambda *device: (9, 0),
    "is_bf16_supported": lambda *args, **options: True,
    "get_rng_state": lambda *device: torch.zeros(1),
    "device_count": lambda: 1,
    **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), lambda *device: 0),
    **dict.fromkeys(("set_rng_state", "synchronize", "init", "_lazy_init", "set_device"), lambda *args: None),
}


class Written(BaseException):
    """Inductor's code, which cannot run here."""


def written(graph):
    code = graph.codegen()[0]
    raise Written(getattr(code, "value", code))


def on_cuda(module, inputs, **options):
    """What Inductor makes of a forward that was traced on the CPU, as if all its tensors were on CUDA."""
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))

    def moved(x):
        return FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), "cuda:0")

    with mode:
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
            node.meta["val"] = tree_map_only(torch.Tensor, moved, node.meta.get("val"))
        inputs = tree_map_only(torch.Tensor, moved, inputs)
    with ExitStack() as stack:
        for name, says in DRIVER.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, says))
            for place in CudaInterface, CudaInterface.Worker:  # They hold the functions that were there before.
                stack.enter_context(mock.patch.object(place, name.removeprefix("_"), says, create=True))
        stack.enter_context(mock.patch.object(CudaInterface, "raise_if_triton_unavailable", lambda *device: None))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", lambda *device: True))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", written))
        return compile_fx.compile_fx_inner(module, inputs, **options)


def attention(query, key, value, attn_mask, dropout_p=0.0, scale=None, is_causal=False):
    """The kernel that torch chooses on CUDA for a block with a mask."""
    mask = attn_mask.expand(*query.shape[:3], -1)
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, False, scale=scale)[0]


def joined(n):
    """Kernels, and calls of libraries, of a layer's forward of n tokens in Inductor's code."""
    model, tokens, positions = CudaModel(narrow(1), SOME), torch.zeros(1, n).long(), torch.arange(n)[None]
    model.reads_filled, model.cache_dtype = False, torch.bfloat16  # as on CUDA
    CachedModel.reserve(model, 1, 320)
    CachedModel.forward(model, tokens, positions)  # It allocates the cache.
    backend = partial(compile_fx.compile_fx, inner_compile=on_cuda)
    fused = torch.compile(layer_forward, fullgraph=True, dynamic=False, backend=backend)
    model.network = lambda tokens: partial(model.by_layers, fused)
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", attention):
        try:
            CachedModel.forward(model, tokens, positions)
        except Written as code:
            calls = str(code).partition("def call(")[2].partition("def get_args(")[0]
            return len(re.findall(r"\w+\.run\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(", calls))
    raise RuntimeError("Inductor wrote no code")


def counted():
    """{engine: {"plain": kernels of a step of plain decoding, "target", "draft", "beside": of a round}}."""
    AttentionInterface.register(kvCache.SDPA, kvCache.sdpa_attention_forward)
    AttentionMaskInterface.register(kvCache.SDPA, partial(kvCache.mask_over_slots, eager_mask))
    graphs, (beside_step, beside_round) = captured()
    layers = {role: SHAPES[name][1] for role, name in PAIR.items()}
    of = {n: joined(n) for n in (1, 2, GAMMA + 1)}

    def fused(role, step, n):
        _, rest, computed, draws = graphs[role, step, n]
        return rest + layers[role] * of[n] + (computed - layers[role]) * of[1] + draws

    engines = {"captured": lambda *key: graphs[key][0], "compiled, then captured": fused}
    return {
        name: {"plain": kernels(*PLAIN) + beside_step, "target": kernels(*TARGET), "draft": kernels(*DRAFT)}
        | {"beside": beside_round}
        for name, kernels in engines.items()
    }


def table(engines):
    """The counts, and what follows: tokens/s of speculative decoding (its speed-up)."""
    heads, rows = ["", "a plain step", "target", "draft", "beside", "a round", *CARDS], []
    for name, kernels in engines.items():
        plain, *parts = kernels.values()
        speeds = [rates(plain, sum(parts), speed) for speed in CARDS.values()]
        written = [f"{fast:.0f} ({fast / slow:.2f})" for slow, fast in speeds]
        rows.append([name, *map(str, (plain, *parts, sum(parts))), *written])
    return {"heads": heads, "rows": rows}


def rates(plain, launched, speed):
    """Tokens/s of plain decoding, and of speculative decoding, on a card that reads `speed` GB/s. plain, launched: the
    kernels of a step and of a round."""

    def seconds(name):
        hidden, layers, _ = SHAPES[name]
        weights, cache = 12 * layers * hidden**2 + VOCABULARY * hidden, 2 * layers * hidden * SLOTS
        return 2 * (weights + cache) / (speed * READ * 1e9)

    target, draft = map(seconds, PAIR.values())
    tokens = (1 - ALPHA ** (GAMMA + 1)) / (1 - ALPHA)
    plain_step, round_ = target + KERNEL * plain + DRAW, target + GAMMA * draft + KERNEL * launched + (GAMMA + 1) * DRAW
    return 1 / plain_step, tokens / round_


if __name__ == "__main__":
    code = {"code": code_version("cuda")}  # A GPU's, though none runs it.
    record = {**origin(["make", "kernels"], {}, "cpu", {}), **code, "table": table(counted())}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
