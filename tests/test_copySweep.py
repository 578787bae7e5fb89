"""The sweep over the target's own copies: its record, its figure, and the blocks of the documentation."""

import json
import shutil

import pytest
from conftest import ROOT
from PIL import Image

from scripts import copySweep, docsBenchmark, renderDocs
from scripts.keepRecord import COPIES


def text(method, throughput, tested=10, passed=9):
    """A timed text of one method."""
    figures = dict.fromkeys(
        ("ttft", "report_tpot", "tokens_per_round", "seconds", "rounds", "drafted", "accepted"), 1.0
    )
    acceptance = [[tested, passed]] if method.startswith("gamma") else []
    return figures | {
        "method": method,
        "prompt": 0,
        "repeat": 0,
        "throughput": throughput,
        "tpot": 1 / throughput,
        "acceptance_by_position": acceptance,
    }


@pytest.fixture
def record():
    """A made-up record: plain decoding at 10 tokens/s, the copy alone at 80 / bits, and gamma g at 10 + g."""
    copies = []
    for kind, gammas in copySweep.kinds():
        passed = 10 if kind["head"] else 9 if kind["calibrated"] else 8
        speed = [text("target", 10.0), text("draft", 80 / kind["bits"])]
        speed += [text(f"gamma {gamma}", 10.0 + gamma, 10, passed) for gamma in gammas]
        copies.append(kind | {"speed": speed})
    kept = json.loads((ROOT / "docs" / "records" / "benchmark.json").read_text(encoding="utf-8"))
    flags = {"prompts": 1, "repeats": 1, "maxLen": 64}
    return kept | {"program": "-m scripts.copySweep", "flags": flags, "scoring": [1.0] * 12, "copies": copies}


def rows_of(block):
    """The cells of a block's table."""
    return [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("|")]


def test_a_sweep_writes_its_record_and_its_figure(kernels, pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(copySweep, "GAMMAS", (1, 2))
    monkeypatch.setattr(copySweep, "HEAD_GAMMA", 2)
    monkeypatch.setattr(copySweep, "BITS", (4, 8))
    monkeypatch.setattr(copySweep, "GROUPS", (32,))
    flags = f"--target {pair_folder / 'target'} --prompts 1 --maxLen 6 --dtype float32 --out {tmp_path}"
    assert copySweep.main(flags.split()) == 0
    record = json.loads((tmp_path / "selfDraft-target.json").read_text())
    assert [(copy["bits"], copy["calibrated"], copy["head"]) for copy in record["copies"]] == [
        (4, True, None),
        (8, False, None),
        (4, False, None),
        (5, False, None),
        (4, False, 8),
    ]
    methods = [[line["method"] for line in copy["speed"]] for copy in record["copies"]]
    assert methods == [["target", "draft", "gamma 1", "gamma 2"]] * 4 + [["target", "draft", "gamma 2"]]
    for copy in record["copies"]:  # Plain decoding is the same each time.
        assert copy["speed"][0]["sha256"] == record["copies"][0]["speed"][0]["sha256"]
    alphas = [prediction["alpha"] for _, prediction in copySweep.predictions(record)]
    assert all(0 < alpha <= 1 for alpha in alphas) and alphas[1] > 0.9
    with Image.open(tmp_path / "figures" / "selfDraft-target.png") as picture:
        assert picture.width > 1000
    assert "Written to selfDraft-target.json" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--target nowhere", "--maxLen 100000", "--dtype float16", "--prompts 0"])
def test_a_wrong_flag_is_one_line(wrong, tmp_path, capsys):
    assert copySweep.main(["--out", str(tmp_path), *wrong.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("copySweep: error: ") and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_blocks_show_acceptance_cost_and_speed_beside_theory(record, tmp_path):
    shutil.copytree(ROOT / "docs" / "records", tmp_path / "docs" / "records")
    (tmp_path / "docs" / "records" / f"{COPIES}.json").write_text(json.dumps(record))
    records = renderDocs.Records(tmp_path)
    titles, _, *rows = rows_of(docsBenchmark.BLOCKS["self-draft-bits"](records, {}))
    assert titles[-4:] == ["c", "best gamma", "measured speed-up", "theory"] and len(rows) == 8
    tokens = sum(0.9**i for i in range(9))
    assert rows[0] == ["calibrated", "4", "32", "0.900", "0.50", "8", "1.80", f"{tokens / (8 * 0.5 + 1):.2f}"]
    assert [row[:3] for row in rows[6:]] == [["weight by weight", bits, "64"] for bits in "45"]
    titles, _, *rows = rows_of(docsBenchmark.BLOCKS["self-draft-gamma"](records, {}))
    assert [row[0] for row in rows] == list("12345678") and len(titles) == 9
    assert rows[0][1:3] == ["1.10", f"{1.9 / 1.5:.2f}"]
    _, _, *rows = rows_of(docsBenchmark.BLOCKS["self-draft-head"](records, {}))
    assert [row[:3] for row in rows] == [
        [bits, head, alpha] for bits in "4" for head, alpha in ((bits, "0.800"), ("8", "1.000"))
    ]


def test_the_figure_has_a_panel_with_calibration_and_one_without(record, tmp_path, monkeypatch):
    panels = []
    monkeypatch.setattr(copySweep, "draw_heat_maps", lambda *given: panels.append(given))
    copySweep.draw(record, tmp_path / "figure.png")
    ((found, label, _),) = panels
    assert label == "bits of the copy" and [list(rows) for rows in found.values()] == [[4, 5, 6, 8]] * 2
    usual, alone = found.values()
    assert [usual[bits]["alpha"] == alone[bits]["alpha"] for bits in usual] == [False, False, True, True]


def test_the_best_row_of_a_copy_stands_beside_the_others(tmp_path):
    """In a record of the benchmark with rows of a copy; older records have none."""
    record = json.loads((ROOT / "docs" / "records" / f"{docsBenchmark.REAL}.json").read_text(encoding="utf-8"))
    record["speed"] = [line for line in record["speed"] if "own copy" not in line["method"]]
    assert not any("own copy" in row for row in docsBenchmark.best_rows(record))
    plain = [line for line in record["speed"] if line["method"] == "plain, compiled"]
    for name, factor in {"own copy in 4 bits": 2, "draft, own copy in 4 bits": 3}.items():
        changes = {"method": f"{name}, compiled"}
        record["speed"] += [line | changes | {"throughput": factor * line["throughput"]} for line in plain]
    first, *others = docsBenchmark.best_rows(record)
    assert first == "draft, own copy in 4 bits, compiled" and not any("own copy" in row for row in others)
