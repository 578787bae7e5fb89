"""Blocks of the documentation that are read from the code: layout, arrows between folders, flags, methods."""

from __future__ import annotations

import ast
import graphlib
import re
from argparse import Action
from functools import cache
from pathlib import Path

from experiments.flags import parser
from inputs.files import ROOT
from methods.catalogue import METHODS
from scripts.docsRecords import Records
from scripts.docsRuns import CHINESE, table
from utils import UserError

ROOT_FILES = ("test", "specSampling", "regrSampling", "PPL", "utils", "downloadModel", "downloadData")
WIDTH = 119  # characters of a line of the layout
# Folders without code, and what the layout says of them.
OTHERS = {
    "docs/ tests/": "the documentation, in docs/records/ the record of each figure in it; the test suite",
    "custom_generate/": "what `generate` of transformers loads by the folder's name",
    "models/ datasets/": "the bundled models and sample texts, and what you download",
    "results.txt": "the tables of every run, newest first",
}
CHINESE_LAYOUT = {
    "test.py": "命令行：解析参数、准备、测量、输出报告",
    "specSampling.py": "投机采样的主循环，与论文的算法 1 逐步对应",
    "regrSampling.py": "基线：普通自回归采样",
    "PPL.py": "困惑度",
    "utils.py": "从 logits 到概率、采样、残差分布",
    "downloadModel.py": "下载并校验模型",
    "downloadData.py": "下载并校验数据集",
    "decoding/": "一轮解码的组成：批次的各行、猜测长度规则、验证规则、模型的每一步",
    "engine/": "模型怎样运行：按位置寻址的 KV cache、CPU 上编译的计算图、GPU 上的 CUDA graph、C++ kernel",
    "methods/": "解码方法：草稿生成器、对比解码，以及每种方法一条的目录",
    "inputs/": "用户输入的读取与检查：参数、模型、分词器、文本、提示词",
    "experiments/": "测量什么：设置、速度、gamma 扫描、多样性、重跑",
    "lossless/": "无损性的证明：统计证据与故意植入的错误",
    "report/": "结果怎样呈现：results.jsonl、results.txt、表格、图、无损性的结论",
    "playback/": "一段文本的每一轮：在终端上逐轮显示，或写成可回放的网页",
    "benchmark/": "与 transformers 和内存带宽上限的对比（`python -m benchmark`）",
    "scripts/": "维护者的工具：训练自带模型、画图、生成文档",
    "docs/ tests/": "文档，docs/records/ 是其中每个数字的原始记录；测试",
    "custom_generate/": "transformers 的 `generate` 按文件夹名加载的入口",
    "models/ datasets/": "自带的模型和样例文本，以及下载的模型和文本",
    "results.txt": "每次运行的表格，最新的在最前",
}


@cache
def code(root: Path = ROOT) -> dict[str, list[Path]]:
    """{name of a code folder or of a file in the root: its Python files}, from the lowest to the highest.

    A folder of code has an `__init__.py`. What a name imports stands before it.
    """
    found = {folder.parent.name: sorted(folder.parent.rglob("*.py")) for folder in root.glob("*/__init__.py")}
    found.pop("tests", None)
    found |= {file.stem: [file] for file in root.glob("*.py")}
    try:
        order = list(graphlib.TopologicalSorter(imports_of(found)).static_order())
    except graphlib.CycleError as error:
        raise UserError(f"imports go round in a circle: {', '.join(error.args[1])}") from None
    return {name: found[name] for name in order}


def imports_of(files: dict[str, list[Path]]) -> dict[str, list[str]]:
    """{name: the others among the keys of `files` that it imports}, read from the code."""
    found: dict[str, list[str]] = {}
    for name, paths in sorted(files.items()):
        modules: list[str] = []
        for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.append(node.module)
        heads = {module.split(".")[0] for module in modules}
        found[name] = sorted(heads & set(files) - {name})
    return found


def arrows(root: Path = ROOT) -> dict[str, list[str]]:
    """{name: what it imports}, from the lowest to the highest."""
    files = code(root)
    found = imports_of(files)
    return {name: [other for other in files if other in found[name]] for name in files}


def docstring(name: str) -> str:
    """The docstring of a code folder or of a file in the root, in one line."""
    file = ROOT / name / "__init__.py" if (ROOT / name).is_dir() else ROOT / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def in_short(text: str, width: int) -> str:
    """The first sentence, as far as its clauses fit in `width` characters."""
    sentence = re.split(r"(?<=[^.])\.(?: |$)", text)[0]
    if len(sentence) <= width:
        return sentence
    clauses = [found.start() for found in re.finditer(r"[:,;] | \(| and ", sentence) if found.start() <= width]
    return sentence[: clauses[-1]] if clauses else sentence


def shown(name: str) -> str:
    """A name as the documentation writes it: engine/, test.py."""
    return f"{name}/" if (ROOT / name).is_dir() else f"{name}.py"


def layout(records: Records, language: str) -> str:
    """The annotated tree of the project."""
    folders = [name for name in code() if (ROOT / name).is_dir()]
    rows = {shown(name): docstring(name) for name in (*ROOT_FILES, *folders)} | OTHERS
    left = max(map(len, rows)) + 2
    texts = {name: in_short(text, WIDTH - left) for name, text in rows.items()}
    if language == CHINESE:
        texts |= CHINESE_LAYOUT
    return "\n".join(["```text", *(f"{name:{left}}{texts[name]}" for name in rows), "```"])


def folders(records: Records, language: str) -> str:
    """The table of folders and files, what they hold and what they import, from the highest to the lowest."""
    rows = []
    for name, others in reversed(arrows().items()):
        text = docstring(name).replace("|", "\\|")
        rows.append([f"`{shown(name)}`", text, " ".join(f"`{shown(other)}`" for other in others)])
    return table(["folder or file", "what it is", "what it imports"], rows)


def methods(records: Records, language: str) -> str:
    """The catalogue of methods."""
    rows = []
    for method in METHODS.values():
        modes = " ".join(f"`--{mode}`" for mode in method.modes)
        rows.append(
            [f"`{method.name}`", method.title, ", ".join(method.needs), modes, "yes" if method.lossless else ""]
        )
    return table(["method", "what it is", "needs", "measured by, beside `--compare`", "lossless"], rows)


def value_of(action: Action) -> str:
    """What a flag takes, as its usage line says it."""
    if action.nargs == 0:
        return ""
    one = " or ".join(f"`{choice}`" for choice in action.choices) if action.choices else f"`{action.metavar or 'NAME'}`"
    return {"+": f"{one} ...", "?": f"[{one}]"}.get(str(action.nargs), one)


def meaning_of(action: Action) -> tuple[str, str]:
    """(default, meaning) of a flag: its help ends with "Default: ..." if it has one."""
    text = " ".join((action.help or "").split()).replace("%%", "%").replace("|", "\\|")
    text = re.sub(r"(?<![\w-])--\w+", r"`\g<0>`", text)
    meaning, _, default = text.partition(" Default: ")
    return default.removesuffix("."), meaning


def flags(records: Records, language: str) -> str:
    """Every flag of test.py, group by group."""
    lines: list[str] = []
    for group in parser()._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        if not actions:
            continue
        title = str(group.title)
        rows = [[f"`{action.option_strings[0]}`", value_of(action), *meaning_of(action)] for action in actions]
        lines += [f"## {title[0].upper()}{title[1:]}", "", table(["flag", "value", "default", "meaning"], rows), ""]
    return "\n".join(lines[:-1])


BLOCKS = {"layout": layout, "folders": folders, "methods": methods, "flags": flags}
