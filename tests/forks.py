"""Runs of the command line in processes of their own: forks of the test's process, so that none imports torch again."""

import os
import signal
import sys
import time

import accelerate.state  # noqa: F401 - so that no fork has to import it
import torch


def fork(cli, argv, log, index=0, count=1, port=0):
    """The id of a new process that runs `cli.main(argv)` as number `index` of `count`. It writes to the file `log`."""
    child = os.fork()
    if child:
        return child
    code = 70
    sys.settrace(None)  # What the fork covers is not kept.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.stdout = sys.stderr = log.open("w", buffering=1)  # noqa: SIM115
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
        if count > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            here = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ.update(where | {name: str(value) for name, value in here.items()})
        code = cli.main(argv)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child, seconds=60):
    """The exit code of a process, negative for a signal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the process does not end")


def interrupted(child, how, ready, seconds=60):
    """The exit code of a process that gets the signal `how` once `ready()` is true."""
    end = time.monotonic() + seconds
    while not ready():
        assert os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < end
        time.sleep(0.02)
    os.kill(child, how)
    return wait(child)
