"""`self_check`: whether a device decodes correctly, and how fast it can be, on one page (`test.py --check`). It runs
the bundled models, times random weights, and computes where Pythia-2.8b would fit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from benchmark.steps import forward_lines, times
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from engine.cudaModel import CudaModel
from experiments.loading import Inputs
from experiments.prepare import load_inputs
from experiments.runRecord import machine
from experiments.settings import parse
from inputs.devices import available_memory, pick_dtype
from inputs.files import gigabytes
from inputs.models import DTYPES, working_bytes
from inputs.progress import Bar, Printer
from inputs.randomModels import config_of, random_model, weight_count
from methods.catalogue import build
from report.tables import Cell, Table, name_of
from utils import GREEDY

PAIR = "pythia-70m", "pythia-2.8b"  # the shapes whose memory is computed
TEXT, LENGTH = "The lamp on the table went out, and the whole house was quiet.", 48
CHECKED = "all"  # methods
BUNDLED = "--target bundled-target --draft bundled-draft --mid bundled-mid --draftBits 8"


def self_check(device: str | None) -> int:
    """Print the page. Returns 0 if every method writes plain decoding's greedy text, eager and compiled, every model
    was compiled and every step captured; else 1."""
    flags = f"--lossless {CHECKED} --temperature 0 --dtype float32 {BUNDLED} --maxLen {LENGTH}".split()
    inputs = load_inputs(parse([*flags, "--prompt", TEXT, *(["--device", device] if device else [])]))
    console, device = Printer(width=100, highlight=False, markup=False), inputs.device
    for sentence in about(device):
        console.print(sentence)
    table, faults = check_methods(inputs)
    console.print(table, *faults or ["Every method writes plain decoding's greedy text."], sep="\n")
    return int(bool(faults))


def about(device: str) -> Iterator[str]:
    """The device and the versions; whether Pythia's pair fits, as it is timed and as its perplexity is
    measured; how fast memory is read, and how fast a forward of one token reads its weights."""
    versions, on_gpu, dtype = machine(device), device.startswith("cuda"), pick_dtype(device)
    yield f"{versions['processor']} ({device}), {versions['threads']} threads, {versions['system']}"
    torch_build = f"torch {versions['torch']} (CUDA {versions['cuda']})"
    yield f"Python {versions['python']}, {torch_build}, transformers {versions['transformers']}"
    if on_gpu:
        yield "compute capability {}.{}".format(*torch.cuda.get_device_capability(device))
    free = available_memory(device)
    yield f"Free memory: {gigabytes(free)}. Weights are in {dtype} by default."
    for use, name in ("speed", dtype), ("perplexity", "float32"):
        needed = sum(map(weight_count, PAIR)) * DTYPES[name].itemsize + working_bytes(config_of(PAIR[1]), tokens=1024)
        fits = "which fits" if needed <= free else "which does not fit"
        if needed > free and use == "perplexity" and on_gpu:
            fits = f"of which {gigabytes(needed - free)} stay in the CPU's memory"
        yield f"{use.capitalize()} of {PAIR[1]} with {PAIR[0]} needs {gigabytes(needed)} in {name}, {fits}."
    shape = "pythia-1.4b" if on_gpu else "pythia-160m"
    model = CachedModel(random_model(shape, DTYPES[dtype], device), name=f"random:{shape}")
    for engine in "eager", "compiled":
        lines = forward_lines({"target": model}, lambda steps: times(steps, device), widths=[1])
        rate = {(line["what"], line["role"]): line["bytes"] / np.median(line["seconds"]) / 1e9 for line in lines}
        if engine == "eager":
            yield f"Memory is read at {rate['reading', 'memory']:.0f} GB/s."
        yield f"A forward of one token, {shape}'s shape in {dtype}, {engine}: {rate['forward', 'target']:.0f} GB/s."
        if not is_compiled(model := compiled(model)):
            break


def check_methods(inputs: Inputs) -> tuple[Table, list[str]]:
    """A table with a row for each method, and a sentence for each fault."""
    names, prompts, faults = inputs.settings.measuring.groups["lossless"], inputs.rows, list[str]()
    rows: dict[str, list[Cell]] = {name: [name_of(name)] for name in names}
    plain: list[list[int]] = []
    with Bar("methods", 2 * len(names)) as bar:
        for engine in "eager", "compiled":
            settings = inputs.settings
            inputs.settings = replace(settings, models=replace(settings.models, compile=engine == "compiled"))
            models = inputs.load_as_timed("float32")
            stayed = [model.name for model in models.values() if engine == "compiled" and not is_compiled(model)]
            faults += [f"{name} stays eager: it cannot be compiled here." for name in stayed]
            for name, write in build(["target", *names], models, settings.decoding).items():
                texts, _ = write(prompts, max_len=LENGTH, sampling=GREEDY)  # Captures graphs.
                plain = plain or texts
                if name not in rows:
                    continue
                again, _ = write(prompts, max_len=LENGTH, sampling=GREEDY)
                is_right = texts == again == plain
                rows[name].append(
                    ("stays eager" if models["target"].name in stayed else "as plain's") if is_right else "WRONG"
                )
                if not is_right:
                    faults.append(f"{name_of(name)}, {engine}: its greedy text is not that of plain decoding.")
                bar.update()
            graphs = [model for model in models.values() if isinstance(model, CudaModel)]
            faults += [f"{model.name}: no CUDA graph of {step}." for model in graphs for step in sorted(model.refused)]
    heads = ["", "eager\ngreedy text", "compiled\ngreedy text"]
    return Table("Methods, float32", heads, list(rows.values())), faults
