"""Writes FOLDER/custom_generate/ with everything that `generate(custom_generate=FOLDER)` of transformers needs.

The folder works without this project, and on the hub. transformers loads generate.py and what that imports from the
same folder. So the modules of this project that it needs are copied beside it, and their imports are rewritten.
"""

import re
import shutil
import sys
from collections.abc import Sequence

from inputs.commandLine import as_script, path, script_parser
from inputs.files import ROOT, new_folder
from utils import UserError


@as_script("packGenerate", "Nothing was written.")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags and write the folder. A module keeps the last part of its name."""
    parser = script_parser("python -m scripts.packGenerate", __doc__)
    parser.add_argument("folder", type=path)
    source, folder = ROOT / "custom_generate", parser.parse_args(argv).folder / "custom_generate"
    if folder.exists():
        raise UserError(f"{folder} exists already; name another folder, or remove it first")
    files, texts = [source / "generate.py"], {}
    for file in files:  # The list grows by what its files import, anywhere in them.
        text = file.read_text(encoding="utf-8")
        for module in re.findall(r"^ *from ([\w.]+) import", text, re.M):
            if (copied := ROOT / f"{module.replace('.', '/')}.py").exists():
                files += [copied] if copied not in files else []
                pattern = rf"^( *)from {re.escape(module)} import"
                text = re.sub(pattern, rf"\1from .{copied.stem} import", text, flags=re.M)
        texts[file.name] = text
    with new_folder(folder) as written:
        shutil.copy(source / "requirements.txt", written)
        for name, text in texts.items():
            (written / name).write_text(text, encoding="utf-8")
    print(f"Written to {folder}")


if __name__ == "__main__":
    sys.exit(main())
