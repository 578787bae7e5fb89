"""How the scripts of the root start: errors of the command line are reported at once, and an error while the libraries
are imported is one line.

Importing torch and transformers takes seconds. So the flags are first read with nothing behind the names of libraries:
--help, --version and a wrong flag need no more. Then everything is imported again, as it is.
"""

import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent


class Anything(type):
    """The type of `Something`, which stands for all a library has: its attributes and results are itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *values: Any, **options: Any) -> Any:
        return cls


class Something(metaclass=Anything):
    pass


class Libraries:
    """The finder and loader of a module that has every name, in the place of each that is a library's."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        top, loader = name.partition(".")[0], cast(Any, self)
        if top in sys.stdlib_module_names or is_own(top) or PathFinder.find_spec(top) is None:
            return None
        return ModuleSpec(name, loader, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(__file__="", __getattr__=lambda name: Something)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has its names already."""


def is_own(name: str) -> bool:
    """Whether a module is one of the project."""
    top = ROOT / name.partition(".")[0]
    return top.with_suffix(".py").exists() or (top / "__init__.py").exists()


def run(script: str, flags: str) -> int:
    """Run `main` of the script (its file) and return the exit code. flags: MODULE.FUNCTION that reads its flags."""
    name = os.path.basename(script)
    for variable in "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT":
        if not os.environ.get(variable, "1").isdecimal():
            print(f"{name}: error: {variable} must be a whole number of seconds", file=sys.stderr)
            return 2
    try:
        _ = urlsplit(os.environ.get("HF_ENDPOINT", "")).port
    except ValueError as error:
        print(f"{name}: error: HF_ENDPOINT is no address ({error}): it begins with https://", file=sys.stderr)
        return 2
    # Libraries that are imported may rename a KeyboardInterrupt, and those in C++ abort.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"\nInterrupted.\n"), os._exit(130)))
    try:
        if code := answered(name, flags):
            return code
        import psutil  # The flags are read without it.

        # Threads that spin while they wait keep a core from another process, and its time slices stop all of them.
        if psutil.cpu_percent(interval=0.2) / 100 * (os.cpu_count() or 1) > 0.5:
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        main = runpy.run_path(script, run_name=Path(script).stem)["main"]
        signal.signal(signal.SIGINT, before)
        return main()
    except ModuleNotFoundError as error:
        if is_own(error.name or "test"):
            raise
        here = "run it with .venv/bin/python, which `make run` makes, or install requirements.txt"
        print(f"{name}: error: the module {error.name} is missing: {here}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, before)


def answered(name: str, flags: str) -> int:
    """Read the flags without the libraries. Returns 2 after the line that says what is wrong with them, else 0; --help
    and --version raise SystemExit. Of several processes all read them with the libraries, as one of them speaks."""
    if any(variable.endswith(("WORLD_SIZE", "PMI_SIZE")) for variable in os.environ):
        return 0
    finder: Any = Libraries()
    before, (module_name, function) = set(sys.modules), flags.rsplit(".", 1)
    sys.meta_path.insert(0, finder)
    try:
        read, command = importlib.import_module(module_name), importlib.import_module("inputs.commandLine")
        return command.as_command(name, lambda: getattr(read, function)(sys.argv[1:]) and None, "")
    except Exception:  # A module does more with a library than name its parts. Then the libraries are needed.
        return 0
    finally:
        sys.meta_path.remove(finder)
        for module in sys.modules.keys() - before:
            if is_own(module) or getattr(sys.modules[module].__spec__, "loader", None) is finder:
                del sys.modules[module]
                package, _, part = module.rpartition(".")
                if package in before:  # `from inputs import hub` would find the module there.
                    vars(sys.modules[package]).pop(part, None)
