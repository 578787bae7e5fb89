"""The benchmark: `test.py` with the flags that compare every method, and `transformers`' own, and time the steps.

    python -m benchmark                          the pair that test.py uses by default
    python -m benchmark --target random:pythia-2.8b --draft random:pythia-70m --acceptance 0.6     Pythia's shapes
    python -m benchmark --compare all,generate,llama.cpp,openvino      other engines too; make bench-peers installs them

Flags that are given come after these and win.
"""

import runpy
import sys

from inputs.files import ROOT

PRESET = ["--compare", "all,generate", "--steps", "--compile", "--maxLen", "300", "--sentences", "5", "--repeats", "3"]

if __name__ == "__main__":
    sys.argv = [str(ROOT / "test.py"), *PRESET, *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
