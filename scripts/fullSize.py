"""The whole experiment at Pythia's true sizes, with random weights: a dry run of everything but the real weights.

    python tests/fullSize.py --folder /a/disk/with/14GB/free [--tokenizer tokenizer.json] [--sizes 70m 410m 2.8b]

Writes checkpoints of exactly Pythia-70m's, -410m's and -2.8b's configurations (bfloat16) in the hub's layout, serves
them on localhost, and runs downloadModel.py and test.py as a user would, in a copy of the project, printing time and
peak memory of each step. Figures of random weights, whose distributions are all but uniform, say nothing of the real
ones. Not part of `make test`.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from localHub import LocalHub, Repository
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer, GPTNeoXForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.peers import configuration  # noqa: E402 - the project's modules are found now

SIZES = ("70m", "410m", "2.8b")
TOKENS = 50277  # entries of Pythia's tokenizer


def write_tokenizer(folder, file):
    """Pythia's tokenizer from its file; without one, the bundled tokenizer filled up to as many entries."""
    if file:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "bundled-target")
        tokenizer.add_tokens([f"<filler{i}>" for i in range(TOKENS - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_checkpoint(folder, size):
    """Random weights under the names and in the shapes of the real ones; also a file of pickles that must not move."""
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = {
            name: tuple(p.shape) for name, p in GPTNeoXForCausalLM(configuration(f"pythia-{size}")).named_parameters()
        }
    weights = {}
    for name, shape in tqdm(shapes.items(), desc=f"making {folder.name}", disable=None, leave=False):
        weights[name] = torch.empty(shape, dtype=torch.bfloat16)
        if name.endswith("bias"):
            weights[name].zero_()
        elif len(shape) == 1:
            weights[name].fill_(1)
        else:
            weights[name].normal_(0, 0.02)
    configuration(f"pythia-{size}", dtype="bfloat16").save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "pytorch_model.bin").write_bytes(b"\x80" * 1_000_000)
    print(
        f"{folder.name}: {sum(w.numel() for w in weights.values()):,} parameters, "
        f"{(folder / 'model.safetensors').stat().st_size / 1e9:.2f} GB",
        flush=True,
    )


def step(what, command, folder, environment):
    """Run a command in the copy of the project; print its time and peak resident memory (the pages of files it has
    mapped, such as weights, count beside their copies)."""
    print(f"\n$ {' '.join(map(str, command[1:]))}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, memory = time.monotonic() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"# {what}: exit {process.returncode}, {seconds:.0f} s, peak memory {memory / 1e9:.2f} GB", flush=True)
    if process.returncode:
        sys.exit(f"{what} failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints and the copy are written")
    parser.add_argument("--tokenizer", type=Path, help="Pythia's tokenizer.json (default: a stand-in of its size)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="smallest first")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    args = parser.parse_args()
    made, copy = args.folder / "hub", args.folder / "project"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(
        ROOT,
        copy,
        ignore=lambda folder, names: [
            n
            for n in names
            if n.startswith(".")
            or n in ("__pycache__", "results.jsonl", "results.txt")
            or (Path(folder).name in ("models", "datasets") and not n.startswith(("bundled-", "sample", "README")))
        ],
    )
    (copy / "short.raw").write_text("\n".join((ROOT / "datasets/sample/articles.raw").read_text().split("\n")[:24]))
    with LocalHub() as hub:
        for size in args.sizes:
            folder = made / f"pythia-{size}"
            if not (folder / "pytorch_model.bin").exists():  # written last
                folder.mkdir(parents=True, exist_ok=True)
                print(f"tokenizer of {write_tokenizer(folder, args.tokenizer):,} entries", flush=True)
                # In a process of its own: what this one has taken would count as the peak of all it starts.
                process = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(folder, size))
                process.start()
                process.join()
            hub.models[f"EleutherAI/pythia-{size}"] = Repository({f.name: f for f in folder.iterdir()})
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(args.folder / "home")}
        for what in ("first download", "second run, which moves nothing"):
            hub.forget()
            step(what, [sys.executable, "downloadModel.py", *hub.models], copy, environment)
            print(f"# bytes of files moved: {hub.moved:,}")
        step("list", [sys.executable, "downloadModel.py", "--list"], copy, environment)
        pair = ["--target", f"pythia-{args.sizes[-1]}", "--draft", f"pythia-{args.sizes[0]}", "--offline"]
        speed = [sys.executable, "test.py", "--speed", "--maxLen", "20", "--sentences", "2", "--repeats", "1", *pair]
        step("speed", speed, copy, environment)
        step("speed, compiled", [*speed, "--compile"], copy, environment)
        step(
            "perplexity",
            [sys.executable, "test.py", "--ppl", "--sentences", "2", "--dataset", "short.raw", *pair],
            copy,
            environment,
        )
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
