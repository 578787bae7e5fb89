"""`Processes`: the processes of a run that `accelerate launch` has started, and the exchange between them.

Process i of n computes the items (texts, windows, batches) i, i + n, i + 2n and so on, and after each item the
processes exchange their results, Python objects over gloo. A connection that closes tells that a process has died. Only
process 0 writes and prints. The result of an item must depend on the item alone: then it is the same for any n.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn, TypeVar

import torch

from inputs.commandLine import one_line
from inputs.devices import pick_device
from utils import UserError

T = TypeVar("T")
R = TypeVar("R")
SIZES = "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"  # as the launchers set them
DIED = "another process ended unexpectedly (killed, or out of memory); what was measured is kept in results.jsonl"
LONELY = (
    "accelerate started one process: its --cpu starts several under mpirun alone (--mpirun_hostfile). For two on this "
    "machine: accelerate launch --multi_gpu --num_processes 2 test.py --device cpu"
)


@dataclass(eq=False)
class Processes:
    """The processes of a run, of which this one is number `index` of `count`, and number `local` on its machine.

    gather: f(list of this process) -> the lists of all processes, one after the other. Raises RuntimeError if a process
        has died. A process that fails sends its UserError instead of results.
    over: nothing more is exchanged, because one has failed.
    """

    index: int = 0
    count: int = 1
    local: int = 0
    gather: Callable[[list[Any]], list[Any]] = list
    over: bool = False

    def share(self, items: Sequence[object]) -> range:
        """The numbers of the items that this process computes."""
        return range(self.index, len(items), self.count)

    def exchange(self, items: list[T]) -> list[T]:
        """The `items` of all processes, on every process. Raises UserError if one of them has failed or died."""
        try:
            gathered = self.gather(items)
        except RuntimeError:
            gathered = [UserError(DIED)]
        if failures := [item for item in gathered if isinstance(item, UserError)]:
            self.stop(failures[0])
        return gathered

    def stop(self, failure: UserError) -> NoReturn:
        """End this process's part of the run too."""
        self.over = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The launcher ends all processes if one has; once is enough.
        raise failure

    def merged(self, items: Iterator[T]) -> Iterator[T]:
        """The items of all processes, on every process; `items` are those of this one. All must be read to the end."""
        while gathered := self.exchange(list(islice(items, 1))):
            yield from gathered

    def mapped(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """`function` of each item, in order, on every process: the builtin `map`, shared out."""
        return self.merged(function(items[number]) for number in self.share(items))

    def gathered(self, value: T) -> list[T]:
        """`value` of each process, on every process."""
        return self.exchange([value])

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work()`, such as a download, first in process 0, then in one of each other machine, then in the rest."""
        for turn in range(3):
            if turn == (0 if self.index == 0 else 1 if self.local == 0 else 2):
                result = work()
            self.exchange([])
        return result

    def own_device(self, name: str | None) -> str:
        """The device of this process if `--device` is `name`: a GPU of its own, or the CPU. Raises UserError."""
        gpus = torch.cuda.device_count()
        if self.count == 1 or name == "cpu" or (name is None and not gpus):
            return pick_device(name)
        if name not in (None, "cuda"):
            raise UserError(f"--device {name} is for a single process; with several use cuda (one GPU each) or cpu")
        if gpus and self.local >= gpus:
            raise UserError(f"this machine has {gpus} GPUs: start at most {gpus} processes on it (--num_processes)")
        return pick_device(f"cuda:{self.local}")


SINGLE = Processes()


def started() -> Processes:
    """The processes that a launcher has started, as its environment variables say; `SINGLE` if there are no others."""
    if all(os.environ.get(name, "1") in ("0", "1") for name in SIZES):
        if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ:
            print(LONELY, file=sys.stderr)
        return SINGLE
    from accelerate import PartialState  # Most runs do not need it, and its import takes time.
    from accelerate.utils import gather_object

    state = PartialState(cpu=True, backend="gloo", timeout=timedelta(days=365))  # An item may take long.
    processes = Processes(state.process_index, state.num_processes, state.local_process_index, gather_object)
    signal.signal(signal.SIGTERM, lambda *_: processes.stop(UserError(DIED)))
    return processes


def together(command: Callable[[Callable[[], int]], int], work: Callable[[Processes], int]) -> int:
    """Run `work` in every process. Returns the exit code.

    command: runs a function as a command, and turns errors into one line and an exit code. What other processes than 0
    print is kept from the screen. If one of them fails, process 0 prints its line.
    """
    processes = started()
    if processes.count == 1:
        return command(lambda: work(processes))

    def to_the_end() -> int:
        try:
            code = work(processes)
            processes.exchange([])
        except BaseException as error:
            failure = UserError(f"process {processes.index} of {processes.count}: {one_line(error)}")
            with contextlib.suppress(UserError):
                if not processes.over:  # Else the others have been told.
                    processes.exchange([failure])
            raise
        torch.distributed.destroy_process_group()
        return code

    with contextlib.ExitStack() as silent:
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr) if processes.index else ():
            silent.enter_context(redirect(io.StringIO()))
        code = command(to_the_end)
    sys.stdout.flush()
    if torch.distributed.is_initialized():  # A group that has lost a process cannot be taken down.
        os._exit(code)
    return code
