"""The start of the root's scripts: what needs no library is answered without one, and what goes wrong is one line."""

import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, with_ctrl_c

from inputs.commandLine import VERSION


def run(*argv, cwd=ROOT):
    """The process of a script."""
    return subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "argv, said",
    [
        (("test.py", "--gama", "3"), "unrecognized arguments: --gama 3"),
        (("test.py", "--verification", "x"), "argument --verification: invalid choice: 'x' (choose from "),
        (("test.py", "--compare", "fixed,blok"), "unknown method 'blok'; known are: all, draft"),
        (("downloadModel.py", "--lst"), "unrecognized arguments: --lst; did you mean --list?"),
        (("downloadData.py", "--books", "0"), "argument --books: must be a whole number"),
    ],
)
def test_a_wrong_flag_is_told_before_a_library_is_imported(argv, said):
    start = time.monotonic()
    done = run(*argv)
    assert done.returncode == 2 and done.stderr.startswith(f"{argv[0]}: error: {said}"), done.stderr
    assert done.stderr.count("\n") == 1 and time.monotonic() - start < 4


def test_version_and_help_need_no_library(tmp_path):
    assert run(str(ROOT / "test.py"), "--version", cwd=tmp_path).stdout == f"{VERSION}\n"
    shown = run("-X", "importtime", "test.py", "--help")
    assert shown.returncode == 0 and "--lossless" in shown.stdout and "--verification" in shown.stdout
    assert "decoding.verification" in shown.stderr and "torch._C" not in shown.stderr  # The stand-ins have no parts.


def test_the_help_of_the_benchmark_has_its_own_defaults():
    defaults = {"maxLen": "300", "repeats": "3", "sentences": "5", "compare": "all,generate", "steps": "on"}
    shown = run("-m", "benchmark", "--help").stdout
    helps = {" ".join(part.split()) for part in re.split(r"\n  --|\n\n", shown)}
    for name, value in defaults.items():
        (said,) = (text for text in helps if re.match(rf"{name}\b", text))
        assert said.endswith(f" Default: {value}."), said
    assert "what to measure (the default is --compare --steps):" in shown


@pytest.mark.parametrize("others, waiting", [(20, "None"), (90, "passive")])
def test_beside_a_busy_process_threads_do_not_spin(tmp_path, monkeypatch, others, waiting):
    script = tmp_path / "script.py"
    script.write_text("import os\ndef main(): print(os.environ.get('OMP_WAIT_POLICY'))")
    usage = f"import os, psutil; os.cpu_count = lambda: 1; psutil.cpu_percent = lambda interval: {others}"
    start = f"starting.answered = lambda *_: 0; starting.run({str(script)!r}, 'm.f')"
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = run("-c", f"{usage}; from inputs import starting; {start}")
    assert done.stdout == f"{waiting}\n", done.stderr


def test_no_module_with_stand_ins_is_left():
    """`from inputs import hub` takes the attribute of the package, if there is one."""
    answer = "starting.answered('downloadData.py', 'downloadData.data_flags')"
    left = "{*vars(inputs)} & {'commandLine', 'files', 'hub', 'progress', 'texts'}"
    done = run("-c", f"import inputs; from inputs import starting; {answer}; print({left} or 'none')")
    assert done.stdout == "none\n", done.stderr


@pytest.mark.parametrize("script", ["test.py", "downloadModel.py", "downloadData.py"])
def test_a_missing_library_is_one_line(script):
    """-S hides what is installed; the standard library is there."""
    done = run("-S", script)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{script}: error: the module" in done.stderr and ".venv/bin/python" in done.stderr


def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path):
    command = [sys.executable, "test.py", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=with_ctrl_c)
    time.sleep(1)
    process.send_signal(2)
    assert process.communicate(timeout=60)[1].strip() == "Interrupted." and process.returncode == 130


@pytest.mark.parametrize("name, value", [("HF_HUB_DOWNLOAD_TIMEOUT", "abc"), ("HF_ENDPOINT", "https://mirror:80a")])
def test_a_wrong_variable_is_one_line(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    done = run("downloadModel.py", "--list")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and name in done.stderr
