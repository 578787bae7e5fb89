"""Install the programs that the benchmark can time beside this project: `python -m benchmark.install`.

They go into .peers/ and not into .venv, whose libraries are not changed. One that does not install is left out with a
line. llama.cpp is compiled, which takes minutes.
"""

import sys
import sysconfig
from collections.abc import Sequence

from inputs.commandLine import as_script, one_line, script_parser
from methods.programs.program import FOLDER
from methods.programs.registry import PROGRAMS


@as_script("benchmark.install", "What was installed is kept.")
def main(argv: Sequence[str] | None = None) -> int:
    """Install all programs, but for those whose versions are installed; returns 1 if none could be installed."""
    script_parser("python -m benchmark.install", __doc__).parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    programs = [program for program in PROGRAMS.values() if program.requirements]
    failed = 0
    for program in programs:
        stamp = FOLDER / f"{program.name}.txt"
        wanted = "\n".join([f"Python {sysconfig.get_python_version()}", *program.requirements])
        if program.installed.exists() and stamp.exists() and stamp.read_text() == wanted:
            continue
        print(f"installing {program.name} ...", flush=True)
        try:
            program.install()
            stamp.write_text(wanted)
        except (RuntimeError, OSError, ValueError) as error:
            failed += 1
            print(f"{program.name} is left out: {one_line(error)}", file=sys.stderr)
    return int(failed == len(programs))


if __name__ == "__main__":
    sys.exit(main())
