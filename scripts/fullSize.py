"""A dry run of the whole experiment at Pythia's true sizes, with random weights.

    python -m scripts.fullSize --folder /a/disk/with/14GB/free [--tokenizer tokenizer.json] [--sizes 70m 410m 2.8b]

It writes checkpoints with exactly the configurations of Pythia-70m, -410m and -2.8b (bfloat16) in the hub's layout,
serves them on localhost, and runs downloadModel.py and test.py as a user would, in a copy of the project. It prints the
time and the peak memory of each step. Random weights give nearly uniform distributions, so its figures say nothing
about the real weights. It is not part of `make test`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmark.shapes import random_model
from inputs.files import ROOT
from tests.localHub import LocalHub, Repository

SIZES = ("70m", "410m", "2.8b")
TOKENS = 50277  # entries of Pythia's tokenizer


def write_tokenizer(folder: Path, file: Path | None) -> int:
    """Save Pythia's tokenizer from its file, or else the bundled tokenizer filled up to as many entries. Returns the
    number of entries."""
    if file:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "bundled-target")
        tokenizer.add_tokens([f"<filler{i}>" for i in range(TOKENS - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_checkpoint(folder: Path, size: str) -> None:
    """Save random weights with the names and shapes of the real ones, and a file of pickles that must not be
    downloaded."""
    model = random_model(f"pythia-{size}", torch.bfloat16, "cpu", seed=0)
    model.save_pretrained(folder, max_shard_size="20GB")
    (folder / "generation_config.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80" * 1_000_000)
    gigabytes = (folder / "model.safetensors").stat().st_size / 1e9
    print(f"{folder.name}: {model.num_parameters():,} parameters, {gigabytes:.2f} GB", flush=True)


def make_repository(folder: Path, size: str, tokenizer: Path | None) -> Repository:
    """A model's repository: made in `folder`, unless an earlier run left it there."""
    if not (folder / "pytorch_model.bin").exists():  # It is written last.
        folder.mkdir(parents=True, exist_ok=True)
        print(f"tokenizer of {write_tokenizer(folder, tokenizer):,} entries", flush=True)
        # In a process of its own: the memory this process has used would count in the peaks of all it starts.
        process = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(folder, size))
        process.start()
        process.join()
    return Repository({file.name: file for file in folder.iterdir()})


def copy_project(copy: Path) -> None:
    """Copy the project without results, downloads and hidden files, and add a short text."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        results = {name for name in names if name.startswith((".", "__pycache__", "results."))}
        if Path(folder).name not in ("models", "datasets"):
            return results
        return results | {name for name in names if not name.startswith(("bundled-", "sample", "README"))}

    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=left_out)
    lines = (ROOT / "datasets/sample/articles.raw").read_text().split("\n")
    (copy / "short.raw").write_text("\n".join(lines[:24]))


def step(what: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a Python script in `folder`, and print its time and its peak resident memory. Memory-mapped files, such as
    weights, count there too, in addition to their copies."""
    print(f"\n$ {' '.join(command)}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, memory = time.monotonic() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"# {what}: exit {process.returncode}, {seconds:.0f} s, peak memory {memory / 1e9:.2f} GB", flush=True)
    if process.returncode:
        sys.exit(f"{what} failed")


def run_steps(hub: LocalHub, sizes: Sequence[str], copy: Path, environment: Mapping[str, str]) -> None:
    """Download the models, twice, and measure with the largest and the smallest."""
    for what in ("first download", "second run, which moves nothing"):
        hub.forget()
        step(what, ["downloadModel.py", *hub.models], copy, environment)
        print(f"# bytes of files moved: {hub.moved:,}")
    step("list", ["downloadModel.py", "--list"], copy, environment)
    pair = ["--target", f"pythia-{sizes[-1]}", "--draft", f"pythia-{sizes[0]}", "--offline"]
    speed = ["test.py", "--speed", "--maxLen", "20", "--sentences", "2", "--repeats", "1", *pair]
    step("speed", speed, copy, environment)
    step("speed, compiled", [*speed, "--compile"], copy, environment)
    step("perplexity", ["test.py", "--ppl", "--sentences", "2", "--dataset", "short.raw", *pair], copy, environment)


def main() -> None:
    """Make the checkpoints and the copy, and run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and the copy are written")
    parser.add_argument("--tokenizer", type=Path, help="Pythia's tokenizer.json (default: a stand-in of its size)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="smallest first")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    args = parser.parse_args()
    made, copy = args.folder / "hub", args.folder / "project"
    copy_project(copy)
    with LocalHub() as hub:
        for size in args.sizes:
            hub.models[f"EleutherAI/pythia-{size}"] = make_repository(made / f"pythia-{size}", size, args.tokenizer)
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(args.folder / "home")}
        run_steps(hub, args.sizes, copy, environment)
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
