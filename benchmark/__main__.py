"""The benchmark: `test.py` with the flags that compare every method, and `transformers`' own, and time the steps.

    python -m benchmark                          the pair that test.py uses by default
    python -m benchmark --target random:pythia-2.8b --draft random:pythia-70m --acceptance 0.6     Pythia's shapes
    python -m benchmark --compare all,generate,llama.cpp,openvino      other engines too; make bench-peers installs them

Flags that are given come after these and win.
"""

import runpy
import sys

from inputs.files import ROOT

PRESET = ["--compare", "all,generate", "--steps", "--compile", "--maxLen", "300", "--repeats", "3"]
PROMPTS = {"--prompt", "--prompts", "--promptFile", "--question"}  # With these no text of the data set is used.

if __name__ == "__main__":
    given = {word.split("=")[0] for word in sys.argv[1:]}
    sys.argv[:1] = [str(ROOT / "test.py"), *PRESET, *([] if given & PROMPTS else ["--sentences", "5"])]
    runpy.run_path(sys.argv[0], run_name="__main__")
