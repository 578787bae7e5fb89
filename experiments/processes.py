"""`Processes`: the processes of a run that `accelerate launch` has started, and what they share.

Work that consists of independent items (texts, windows, batches) is shared out: process i of n takes the items i,
i + n, i + 2n and so on. `merged` and `mapped` bring the results together. Only process 0 writes and prints. The result
of an item must depend on the item alone; then it is the same for any number of processes.

Python objects travel over gloo between process 0 and each other process, also where the models are on GPUs: results
are small, and a connection that closes tells at once that a process has died.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from inputs.commandLine import one_line
from inputs.devices import check_device, pick_device
from utils import UserError

T = TypeVar("T")
R = TypeVar("R")
SIZES = "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"  # as the launchers set them
GRACE = 2.0  # seconds in which the news of a death arrives after the launcher's signal to end
DIED = " ended unexpectedly (killed, or out of memory); what was measured is kept in results.jsonl"

LONELY = (
    "accelerate started one process: its --cpu starts several under mpirun alone (--mpirun_hostfile). For two on this "
    "machine: accelerate launch --multi_gpu --num_processes 2 test.py --device cpu"
)


class Link(Protocol):
    """A connection to another process. Both methods raise RuntimeError if that process has died."""

    def send(self, value: object) -> None: ...

    def receive(self) -> Any: ...


class Processes:
    """The processes of a run, of which this one is number `index` of `count`.

    links: {index: connection}. Process 0 has one to each other process, and each other process has one to process 0.
    local: the number of this process on its machine.
    interrupt: makes the main thread call `stop`, whatever it is doing.
    """

    def __init__(
        self,
        index: int = 0,
        count: int = 1,
        links: Mapping[int, Link] | None = None,
        local: int = 0,
        interrupt: Callable[[], object] = lambda: None,
    ) -> None:
        self.index, self.count, self.local = index, count, local
        self.links, self.interrupt = dict(links or {}), interrupt
        self.names = {peer: f"process {peer} of {count}" for peer in range(count)}
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.loss: str | None = None  # the line that says who ended too early; "" if process 0 says it itself
        self.open = set(self.links)  # the connections that have not ended
        self.over = False  # this process's work is done, or has failed
        for peer in self.links:
            threading.Thread(target=self.listen, args=(peer,), daemon=True).start()

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def share(self, items: Sequence[object]) -> range:
        """The numbers of the items that this process computes."""
        return range(self.index, len(items), self.count)

    def merged(self, items: Iterable[T]) -> Iterator[T]:
        """The items of all processes. items: those that this one computes.

        Process 0 gets them as they come; the others, when all are there. Every process must read them to the end.
        """
        if self.count == 1:
            yield from items
        elif self.first:
            collected: list[T] = []
            for item in self.arriving(items):
                collected.append(item)
                yield item
            for peer in self.links:
                self.send(peer, "all", collected)
        else:
            for item in items:
                self.send(0, "item", item)
            self.send(0, "done")
            yield from self.inbox.get()[1]

    def arriving(self, items: Iterable[T]) -> Iterator[T]:
        """In process 0: its own items, after each those that have come from others, and at last the rest."""
        done = 0

        def received(wait: bool = False) -> Iterator[T]:
            nonlocal done
            while wait or not self.inbox.empty():
                kind, value = self.inbox.get()
                done += kind == "done"
                wait = wait and done < self.count - 1
                if kind == "item":
                    yield value

        try:
            for item in items:
                yield item
                yield from received()
            yield from received(wait=done < self.count - 1)
        except (UserError, KeyboardInterrupt):  # The run ends here. What has come is kept.
            yield from received()
            raise

    def mapped(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`function` of each item, in order, on every process: the builtin `map`, shared out."""
        results: dict[int, R] = {}  # that have come, but not yet those before them
        following = 0
        for number, result in self.merged((number, function(items[number])) for number in self.share(items)):
            results[number] = result
            while following in results:
                yield results.pop(following)
                following += 1

    def gathered(self, value: T) -> list[T]:
        """`value` of each process, on every process."""
        return list(self.mapped(lambda _: value, range(self.count)))

    def in_turn(self, work: Callable[[], T]) -> T:
        """`work()` in process 0, then in one process of each other machine, then in the rest: for what must not be
        done twice at once, such as a download."""
        own_turn = 0 if self.first else 1 if self.local == 0 else 2
        results = []
        for turn in range(3):
            if turn == own_turn:
                results.append(work())
            self.gathered(None)  # Everyone waits until this turn is over.
        return results[0]

    def own_device(self, name: str | None) -> str:
        """The device that this process uses if `--device` says `name`: a GPU of its own, or the CPU. Raises UserError
        if there is none."""
        gpus = torch.cuda.device_count()
        if self.count == 1 or name == "cpu" or (name is None and not gpus):
            return pick_device(name)
        if name not in (None, "cuda"):
            raise UserError(f"--device {name} is for one process; several take cuda, a GPU for each, or cpu")
        if gpus and self.local >= gpus:
            raise UserError(f"this machine has {gpus} GPUs: start at most {gpus} processes on it (--num_processes)")
        return pick_device(f"cuda:{self.local}")

    def own_draft_device(self, name: str | None) -> str | None:
        """The device of the draft if `--draftDevice` says `name`. Raises UserError if it cannot be used."""
        if name is not None:
            if self.count > 1 and name != "cpu":
                raise UserError(f"--draftDevice {name} is for one process; several take cpu, or leave it out")
            check_device(name)
        return name

    # How processes end.

    def send(self, peer: int, kind: str, value: object = None) -> None:
        """Send a message to another process."""
        try:
            self.links[peer].send((kind, value))
        except RuntimeError:
            self.lose(peer, DIED)

    def listen(self, peer: int) -> None:
        """In a thread of its own: take what another process sends, until it says goodbye or dies."""
        while True:
            try:
                kind, value = self.links[peer].receive()
            except RuntimeError:
                return self.lose(peer, DIED)
            if kind == "end":
                return self.lose(peer, value)
            self.inbox.put((kind, value))

    def lose(self, peer: int, reason: str | None) -> None:
        """A connection has ended. If the run has not, the first such news stops this process too. reason: what went
        wrong there, if anything did."""
        self.open.discard(peer)
        if not self.over and self.loss is None and (reason or not self.first):
            self.loss = f"{self.names[peer]}{reason}" if reason else ""
            self.interrupt()

    def stop(self, *_: object) -> None:
        """In the main thread: end the run, because another process has ended or the launcher says so.

        A launcher that sees a process die ends all others. Its signal may come before the news of the death.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Once is enough: what follows must not be interrupted.
        end = time.monotonic() + GRACE
        while self.loss is None and time.monotonic() < end:
            time.sleep(0.02)
        if self.loss is None:
            raise KeyboardInterrupt
        raise UserError(self.loss)

    def run(self, work: Callable[[Processes], T]) -> T:
        """`work`, after all processes have said who they are. The loss of another process stops either."""
        try:
            place = f"{socket.gethostname()}, process id {os.getpid()}"
            for peer, place_of_peer in enumerate(self.gathered(place)):
                self.names[peer] += f" ({place_of_peer})"
            return work(self)
        finally:
            self.over = True
            if self.count > 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def farewell(self, problem: str | None) -> None:
        """Say goodbye to the others and wait for theirs, so that no launcher sees a process end before process 0 has.
        problem: the line that says why this process cannot go on."""
        if problem and not self.first:
            self.await_others(1)  # The same may be wrong in process 0, which then says so itself.
        for link in self.links.values():
            with contextlib.suppress(RuntimeError):
                link.send(("end", f": {problem}" if problem and not self.first else None))
        self.await_others(10 if self.first else 60)

    def await_others(self, seconds: float) -> None:
        """Wait until all connections have ended, but no longer than that."""
        end = time.monotonic() + seconds
        while self.open and time.monotonic() < end:
            time.sleep(0.02)


ALONE = Processes()


class GlooLink:
    """A connection to process `peer`, in a process group over gloo."""

    def __init__(self, group: Any, peer: int) -> None:
        self.group, self.peer = group, peer

    def send(self, value: object) -> None:
        torch.distributed.send_object_list([value], dst=self.peer, group=self.group)

    def receive(self) -> Any:
        box = [None]
        torch.distributed.recv_object_list(box, src=self.peer, group=self.group)
        return box[0]


def started() -> Processes:
    """The processes that a launcher has started, as its environment variables say; `ALONE` if there are no others."""
    if not any(os.environ.get(name, "1") not in ("0", "1") for name in SIZES):
        if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ:
            print(LONELY, file=sys.stderr)
        return ALONE
    from accelerate import PartialState  # Most runs do not need it, and its import takes time.

    state = PartialState(cpu=True, backend="gloo")
    index, count = state.process_index, state.num_processes
    forever = timedelta(days=365)  # A link waits for the next message as long as it lives.
    group = torch.distributed.new_group(backend="gloo", timeout=forever)
    links = {peer: GlooLink(group, peer) for peer in (range(1, count) if index == 0 else [0])}
    main = threading.main_thread().ident
    assert main is not None
    processes = Processes(
        index, count, links, state.local_process_index, lambda: signal.pthread_kill(main, signal.SIGTERM)
    )
    signal.signal(signal.SIGTERM, processes.stop)
    return processes


def together(command: Callable[[Callable[[], int]], int], work: Callable[[Processes], int]) -> int:
    """Run `work` in every process. Returns the exit code.

    command: runs a function as a command, and turns errors into one line and an exit code. What other processes than 0
    print is kept from the screen. If one of them cannot go on, process 0 prints its line.
    """
    processes = started()
    if processes.count == 1:
        return command(lambda: work(processes))
    code, stderr, problem = 1, io.StringIO(), None
    try:
        with contextlib.ExitStack() as silent:
            if not processes.first:
                silent.enter_context(contextlib.redirect_stdout(io.StringIO()))
                silent.enter_context(contextlib.redirect_stderr(stderr))
            code = command(lambda: processes.run(work))
        problem = last_line(stderr.getvalue()) if code else None
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise
    finally:
        processes.farewell(problem)
        if processes.index == 1 and processes.loss:  # Process 0 cannot say that it has died.
            print(stderr.getvalue(), end="", file=sys.stderr)
    sys.stdout.flush()
    if processes.loss is not None:  # A group that has lost a process cannot be taken down.
        os._exit(code)
    torch.distributed.destroy_process_group()
    return code


def last_line(printed: str) -> str:
    """The last line of what a command printed, without the words that every such line begins with."""
    return printed.strip().split("\n")[-1].split("error: ", 1)[-1]
