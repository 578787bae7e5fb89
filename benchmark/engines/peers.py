"""`prepare`: the optional rows, ready to be timed: converted, loaded and checked. What fails is a row that says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from benchmark.engines.engineModule import FOLDER, Load, Row
from benchmark.engines.engineProcess import Child, PeerError, one_line
from benchmark.engines.textCheck import Checker
from benchmark.peers import SAMPLING, Generated
from decoding.record import Record
from engine.progress import followed
from inputs.devices import available_memory
from inputs.files import gigabytes

MODELS = FOLDER / "models"
DONE = "done"  # a file in the folder of a converted model that is complete
ROOM = 1.25  # memory and disk that a model takes, over the bytes of its weights
WORKING = 2  # bytes for each weight while a model is converted: engines keep what they write, but for 16-bit weights


@dataclass(frozen=True)
class Source:
    """A model to convert: its folder of safetensors, where converted models go, its size.

    folder: a function, because the weights of a model that exists only in memory are written when they are needed.
    """

    folder: Callable[[], Path]
    converted: Path
    parameters: int
    vocabulary: int


class Peer:
    """A row of another engine. `failed` says why it is left out; None if it is timed."""

    def __init__(self, row: Row, max_len: int) -> None:
        self.row, self.max_len = row, max_len
        self.child: Child | None = None
        self.failed: str | None = None
        self.memory = 0.0  # bytes that it takes while it is loaded
        self.version: str | None = None
        self.greedy: dict[str, Any] | None = None
        self.lossless: dict[str, Any] | None = None

    def load(self, fields: Load, child: Child) -> None:
        """Load the converted models in a child process."""
        self.child = child
        words = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(fields).items()}
        self.version = child.ask("load", module=self.row.module, **words)["version"]

    def ask(self, prompt: list[int], count: int, temperature: float, seed: int) -> Generated:
        """The text after a prompt, and its record. Raises PeerError if it does not come or has another length."""
        assert self.child is not None
        answer = self.child.ask(
            "generate", prompt=prompt, count=count, temperature=temperature, top_p=SAMPLING.top_p, seed=seed
        )
        tokens, times = answer["tokens"], [(when, came) for when, came in answer["times"] if came]
        if len(tokens) != count or sum(came for _, came in times) != count:
            raise PeerError(f"it wrote {len(tokens)} tokens, and {count} were asked for")
        record = Record()
        for when, came in times:
            record.add(when, came, 0, 0)
        return [tokens], [record]

    def write(self, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """The text after a prompt."""
        return list(self.ask(prompt, count, temperature, seed)[0][0])

    def sampler(self, prompt: list[int], generator: Generator) -> Generated:
        """The function that is timed. If the engine fails, the time is nan, and the row is left out from then on."""
        if self.failed is None:
            try:
                return self.ask(prompt, self.max_len, SAMPLING.temperature, generator.initial_seed())
            except PeerError as error:
                self.fail(error)
        return [[0]], [Record([float("nan")], [1], [0], [0])]

    def fail(self, error: Exception) -> None:
        """Leave the row out."""
        self.failed = one_line(str(error))
        self.close()

    def close(self) -> None:
        """End the child process."""
        if self.child is not None:
            self.child.close()
        self.child, self.memory = None, 0.0

    def line(self) -> dict[str, Any]:
        """What the record says of the row."""
        row = asdict(self.row) | {"method": self.row.name, "quantised": self.row.quantised}
        return row | {"version": self.version, "failed": self.failed, "greedy": self.greedy, "lossless": self.lossless}


def convert(row: Row, source: Source, make_child: Callable[[], Child]) -> Path:
    """The folder of a model in the row's form. Converts the model if that was not done before. Raises PeerError if
    there is too little memory or disk."""
    folder, size = source.converted / row.form, source.parameters * row.stored
    if (folder / DONE).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    working = source.parameters * WORKING
    check_room("converting", ROOM * working, available_memory("cpu"), "of memory")
    check_room("converting", ROOM * size, shutil.disk_usage(folder).free, "on the disk")
    with make_child() as child:
        child.ask(
            "convert",
            module=row.module,
            source=str(source.folder()),
            folder=str(folder),
            vocabulary=source.vocabulary,
            bits=8 * row.stored,
        )
    (folder / DONE).touch()
    return folder


def check_room(what: str, needed: float, free: float, where: str) -> None:
    """Raise PeerError if there is too little room."""
    if needed > free:
        raise PeerError(f"{what} needs about {gigabytes(needed)} {where}, and {gigabytes(free)} are free")


def load(
    peer: Peer, sources: Mapping[str, Source], gamma: int, context: int, free: float, make_child: Callable[[], Child]
) -> None:
    """Convert and load what a row needs, into at most `free` bytes of memory."""
    row = peer.row
    roles = ("target", "draft") if row.speculative else ("target",)
    folders = {role: convert(row, sources[role], make_child) for role in roles}
    needed = ROOM * row.stored * sum(sources[role].parameters for role in roles)
    check_room("loading", needed, min(free, available_memory("cpu")), "of memory")
    threads = torch.get_num_threads()
    fields = Load(folders["target"], folders.get("draft"), row.precision, threads, gamma, context, row.alpha)
    peer.load(fields, make_child())
    peer.memory = needed


def prepare(
    rows: Sequence[Row],
    sources: Mapping[str, Source],
    checker: Checker,
    prompts: Sequence[list[int]],
    max_len: int,
    gamma: int,
    make_child: Callable[[], Child] = Child,
) -> list[Peer]:
    """The rows, each converted, loaded and checked, or failed."""
    peers: list[Peer] = []
    room = available_memory("cpu")
    context = max(map(len, prompts)) + max_len + 2 * gamma + 8
    for row in followed(rows, "other engines", len(rows)):
        peer = Peer(row, max_len)
        peers.append(peer)
        try:
            # What an engine maps from a file counts as available, and must stay in memory all the same.
            free = room - sum(each.memory for each in peers)
            load(peer, sources, gamma, context, free, make_child)
            # Synthetic acceptance writes tokens that are not the target's.
            if not row.alpha:
                peer.greedy = checker.greedy(row, peer.write, prompts)
                peer.lossless = checker.sampled(row, peer.write, prompts)
        except (PeerError, ValueError, OSError) as error:
            peer.fail(error)
    return peers


def written(folder: Path, save: Callable[[Path], object], size: float) -> Path:
    """A folder that `save` has written, once."""
    if not (folder / DONE).exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        check_room("writing the weights", size, shutil.disk_usage(folder).free, "on the disk")
        save(folder)
        (folder / DONE).touch()
    return folder
