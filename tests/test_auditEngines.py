"""The audit of engines: which cells are run, and what the page says of them."""

import json
from unittest.mock import Mock

import pytest
import torch
from conftest import prompted, refused
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from benchmark.others import LibraryMethod
from benchmark.peers import PeerError
from lossless import trial
from lossless.mistakes import MISTAKES
from report.runTables import engine_table
from scripts import auditEngines, mended
from utils import GREEDY, Sampling


@pytest.fixture
def audit(flags, tmp_path, monkeypatch):
    """`audit_engines` for a method of each kind on the tiny pair: it returns the cells of the record."""
    settings = {"T 1": Sampling(1.0, 0, 1.0), "greedy": GREEDY}
    changed = {"FILE": tmp_path / "engines.json", "TEXTS": tmp_path / "texts", "SETTINGS": settings, "OWN": "fixed"}
    words = f"{' '.join(prompted(flags, '--repeats'))} --dtype float32 --gamma 2"
    changed |= {"ENGINES": "generate:plain", "FLAGS": words, "TEXT_TOKENS": 20, "PROMPTS": 4}
    for name, value in changed.items():
        monkeypatch.setattr(auditEngines, name, value)

    def run(names=None, tokens=100, seed=0, mend=False):
        auditEngines.audit_engines(names, False, mend, tokens, seed)
        run.record = json.loads(auditEngines.FILE.read_text())
        cells = run.record["mended" if mend else "cells"]
        return {(cell["method"], cell["setting"], cell["seed"]): cell for cell in cells}

    return run


def test_a_cell_that_is_done_is_not_run_again_and_a_larger_one_goes_on(audit, monkeypatch):
    cells = audit()
    assert len(cells) == 6 and not any(cell["failed"] for cell in cells.values())
    assert all(cell["tokens"] == 100 for cell in cells.values() if "variation" in cell)
    monkeypatch.setattr(auditEngines, "drawn_texts", drawn := Mock(wraps=auditEngines.drawn_texts))
    assert audit() == cells and not drawn.called
    with monkeypatch.context() as patch:  # What other code measured is measured again, with as many tokens as it had.
        patch.setattr(auditEngines, "code_version", lambda *_: "sha256:0")
        patch.setattr(auditEngines.Records, "is_of_now", lambda records, code: code == "sha256:0")
        again = audit("fixed", 60)
        assert {key[0] for key, cell in again.items() if cell["code"] == "sha256:0"} == {"fixed"}
        assert again["fixed", "T 1", 0]["tokens"] == 100
    now = audit()
    assert now == again | {key: cell for key, cell in now.items() if key[0] == "fixed"}
    drawn.reset_mock()
    assert audit("fixed", 140)["fixed", "T 1", 0]["tokens"] == 140
    assert [call.args[5] for call in drawn.call_args_list] == [5]  # texts that there were
    record = audit.record
    for cell in record["cells"]:
        cell["processor"] = "Z80"
    auditEngines.FILE.write_text(json.dumps(record))
    again = audit("fixed , target", 100, 1).keys() - cells.keys()
    assert again == {(name, setting, 1) for name in ("fixed", "target") for setting in ("T 1", "greedy")}
    page = auditEngines.engines_table({"engines": (audit.record, [])})
    assert f"Cells are of several machines: Z80, {audit.record['machine']['processor']}." in page


def test_the_page_names_what_is_rejected_and_an_engine_that_fails_is_tried_again(audit, monkeypatch):
    honest, prompt = LibraryMethod.text, []

    def wrong(method, tokens, count, sampling, seed):
        """Its text is always the same, so it is the target's only where that is drawn greedily."""
        prompt[:] = prompt or [tokens]
        return honest(method, tokens if sampling is GREEDY else prompt[0], count, GREEDY, seed)

    monkeypatch.setattr(LibraryMethod, "text", wrong)
    cells = audit()
    cell = cells["generate:plain", "T 1", 0]
    assert cell["seen_by"] and cell["variation"][0] > 0
    page = auditEngines.engines_table({"engines": (audit.record, [])})
    table = {row.split(" | ")[0][2:]: row for row in page.splitlines() if row.startswith("| ")}
    assert "**no**" in table["generate:plain"] and "the target's" in table["generate:plain"]
    assert "no difference found" in table["fixed"] and "≤ " in table["fixed"] and "several machines" not in page
    monkeypatch.setattr(LibraryMethod, "text", Mock(side_effect=PeerError("no such cache")))
    assert audit("generate:plain", seed=1)["generate:plain", "T 1", 1]["failed"] == "PeerError: no such cache"
    monkeypatch.setattr(LibraryMethod, "text", honest)
    assert not audit("generate:plain", seed=1)["generate:plain", "T 1", 1]["seen_by"]


def test_a_measured_cell_stays_where_the_engine_fails_or_is_not_installed_now(audit, monkeypatch, capsys):
    before = audit("generate:plain")
    for broken in "load", "text":
        with monkeypatch.context() as patch:
            patch.setattr(LibraryMethod, broken, Mock(side_effect=PeerError("it is not installed")))
            assert audit("generate:plain", tokens=200) == before
            assert broken == "text" or audit("generate:plain", seed=1) == before
        assert "it is not installed; the record keeps what it has" in capsys.readouterr().err


def test_planted_mistakes_are_kept_by_both_orders_and_found_anew_beside_the_cells(audit, monkeypatch):
    cells = audit("fixed")
    monkeypatch.setattr(trial, "MISTAKES", dict(list(MISTAKES.items())[:2]))
    for _ in range(2):
        auditEngines.audit_engines(None, True, False, 400, 0)
        record = json.loads(auditEngines.FILE.read_text())
        found = {(line["order"], line["mistake"]): line["seen_by"] for line in record["mistakes"]}
        assert len(found) == len(record["mistakes"]) == 4
        assert found["draft", "always accept"] and found["p", "always accept"]
    assert record["cells"] == list(cells.values())
    assert "always accept" in auditEngines.mistakes_table({"engines": (record, [])})


def test_a_mended_engine_is_audited_beside_the_released_one(audit, monkeypatch):
    method, name = AssistantToTargetTranslator, "_get_assistant_to_target_input_ids"
    monkeypatch.setattr(method, name, lambda translator: ("ids", {5: 9, 4: 2, 7: 3}))  # It is mended for good.
    monkeypatch.setattr(mended, "METHODS", ("generate:plain",))
    monkeypatch.setattr(mended, "PROGRAMS", {"generate": "mended"})
    programs, honest = set(), LibraryMethod.load
    monkeypatch.setattr(LibraryMethod, "load", lambda self, *_: (programs.add(self.program), honest(self, *_)))
    cells = audit("generate:plain")
    again = audit(mend=True)
    assert again.keys() == cells.keys() and len(programs) == 2 and "mended" in programs
    assert audit.record["cells"] == [*cells.values()]
    assert "generate:plain" in auditEngines.engines_table({"engines": (audit.record, [])}, "mended")
    assert getattr(method, name)(None) == ("ids", {4: 2, 7: 3, 5: 9})
    with refused("--mended is for generate:plain"):
        audit("fixed", mend=True)


def test_settings_of_guessed_positions_are_those_of_their_text():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in torch.tensor([0.5, 1.0, 0.0]), torch.tensor([3, 1, 0], dtype=torch.int32):
        output = values.new_full((5,), 7)
        mended.expand(output, values, ends, 0, 1, MAX_NUM_TOKENS=8)
        assert output.tolist() == [values[0].item()] * 2 + [1] * 3


def test_where_weights_are_quantised_all_greedy_tokens_that_differ_count():
    greedy = {"tokens": 9, "beyond": 1, "near_ties": 2}
    for precision, differ in {"int4": "3 of 9", "float16": "1 of 9"}.items():
        found = {"precision": precision, "failed": None}
        assert auditEngines.bound(greedy | found) == f"**{differ} differ**"
        of_run = {
            "method": "an engine",
            "version": None,
            "quantised": precision == "int4",
            "greedy": greedy,
            "drawn": None,
        }
        assert engine_table([of_run | found]).rows[0][3] == differ
