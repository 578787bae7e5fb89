"""Bytes read for each committed token: tokens a round against a pair of models whose rounds are known in closed form,
the bound for two guesses against a linear program, and the table and the figure of a record."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linprog

from decoding.drafter import Fixed
from decoding.model import Model
from experiments.theory import by_position, expected_chain, overlap, overlaps_of, rounds_along, uncut
from methods.drafters import ModelDrafter
from scripts import costFrontier
from scripts.costFrontier import at_each_gamma, cheapest, cost_tables, costs_at, counts_of, draw_cost, two_drafts
from scripts.medusa import MedusaHeads
from specSampling import specSampling
from utils import Sampling

GAMMA = 4
# Where the last token is 0 the draft is the target; after a 1 it guesses badly. Such contexts come in runs.
P, Q = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.9, 0.1], [0.9, 0.1]])


class Chain(Model):
    """The next token depends on the last one alone: row `token` of `table[V, V]`."""

    name, vocabulary, context, device, dtype = "chain", 2, 1 << 20, torch.device("cpu"), torch.float32

    def __init__(self, table):
        self.logits = torch.tensor(table, dtype=torch.float32).log()

    def forward(self, tokens, positions, places=None, keep=None):
        return self.logits[tokens if keep is None else tokens[:, keep]]

    def copy_row(self, source, row):
        """It keeps nothing."""


def tokens_by_gamma():
    """The expected tokens of a round, cut at 0, 1, ..., GAMMA guesses, of rounds of GAMMA guesses: the paths that are
    accepted have the probabilities of the powers of min(P, Q), and a round ends with P - min(P, Q), or with P."""
    both = np.minimum(P, Q)
    powers = [np.linalg.matrix_power(both, n) for n in range(GAMMA + 1)]
    step = sum(power @ (P - both) for power in powers[:-1]) + powers[-1] @ P
    start = np.linalg.matrix_power(step, 200)[0]  # the last token where a round starts
    return np.cumsum([start @ power @ np.ones(2) for power in powers])


def test_tokens_a_round_are_the_closed_form_and_those_of_the_sampler_and_mistakes_are_not():
    sampler = partial(specSampling, target=Chain(P), drafter=ModelDrafter(Chain(Q)), gamma=Fixed(GAMMA))
    seeds = [torch.Generator().manual_seed(number) for number in range(40)]
    options = {"max_len": 300, "sampling": Sampling(1.0, 0, 1.0), "generator": seeds}
    rounds = rounds_along(sampler, [[0]] * 40, **options)
    texts = [{"line": i, "reach": [[row[0], row[2]] for row in by_position(of)]} for i, of in enumerate(rounds)]
    found, exact = at_each_gamma(counts_of(texts).sum(0)), tokens_by_gamma()
    assert found == pytest.approx(exact, rel=0.02)
    of_all = [one for of in rounds for one in of]
    assert 1 + sum(passed for *_, passed in of_all) / len(of_all) == pytest.approx(exact[-1], rel=0.02)
    row = cheapest({"texts": texts, "a_guess": 0.0, "whole": True})
    assert row["cost"].low < 1 / exact[-1] < row["cost"].high and row["cost"].high / row["cost"].low < 1.1
    # Planted: every guess accepted with the mean probability, independently; and the contexts of the target's own text
    # instead of those after accepted guesses.
    reached, accepted = np.sum([depth for text in texts for depth in text["reach"]], 0)
    stationary = np.linalg.matrix_power(P, 200)[0]
    along = np.minimum(P, Q).sum(1)
    of_text, reach = 1.0, stationary
    for _ in range(GAMMA):
        reach = reach * along
        of_text += reach.sum()
        reach = reach @ P
    for mistaken in expected_chain([accepted / reached] * GAMMA), of_text:
        assert abs(mistaken / exact[-1] - 1) > 0.04


@pytest.mark.parametrize("gamma", (4, 8))
def test_what_the_end_of_a_text_cuts_off_counts_as_no_rejection(gamma):
    """Here every guess is accepted with the probability 0.7, whatever came before."""
    target, draft = (Chain(np.array([row] * 2)) for row in ([0.8, 0.2], [0.5, 0.5]))
    sampler = partial(specSampling, target=target, drafter=ModelDrafter(draft), gamma=Fixed(gamma))
    seeds = [torch.Generator().manual_seed(number) for number in range(20)]
    options = {"max_len": 12, "sampling": Sampling(1.0, 0, 1.0), "generator": seeds}
    for ends in (), (1,):  # of texts
        of_texts = rounds_along(sampler, [[0]] * 20, end_of_text=ends, **options)
        whole, cut = (
            [{"reach": [[row[0], row[2]] for row in by_position(of(rounds))]} for rounds in of_texts]
            for of in (lambda rounds: uncut(rounds, 12), list)
        )
        found = at_each_gamma(counts_of(whole).sum(0))
        assert found == pytest.approx([expected_chain([0.7] * n) for n in range(len(found))], abs=1e-5)
        assert at_each_gamma(counts_of(cut).sum(0))[-1] < found[-1] - 0.05
    swept = overlaps_of(sampler, [[0]] * 20, "cpu", Sampling(1.0, 0, 1.0), 12, 0, ends=False)["overlap_by_position"]
    assert len(swept) == gamma and all(share == pytest.approx(0.7 * reached) for reached, _, share in swept)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_two_guesses_is_the_optimal_transport(seed):
    p, q = (torch.rand(5, generator=torch.Generator().manual_seed(seed + 9 * i)) ** 3 for i in (1, 2))
    p[seed], q[seed - 1] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    pairs = [(x, y) for x in range(5) for y in range(5) if x != y and q[x] * q[y] > 0]
    # How much of each pair becomes its first token, and its second: at most the pair's probability, and p in all.
    drawn = np.zeros((len(pairs) + 5, 2 * len(pairs)))
    for i, pair in enumerate(pairs):
        drawn[i, 2 * i : 2 * i + 2] = 1
        drawn[len(pairs) + pair[0], 2 * i] = drawn[len(pairs) + pair[1], 2 * i + 1] = 1
    most = [float(q[x] * q[y] / (1 - q[x])) for x, y in pairs] + p.tolist()
    best = -linprog(-np.ones(2 * len(pairs)), A_ub=drawn, b_ub=most).fun
    assert two_drafts(p, q) == pytest.approx(best, abs=1e-5) and best > float(overlap(p, q)) - 1e-5
    assert two_drafts(p, torch.eye(5)[1]) == pytest.approx(float(p[1]))  # There is no second guess.


def test_the_best_gamma_is_that_of_the_fewest_bytes_for_a_token_and_the_record_is_shown():
    texts = [{"line": 1, "category": "qa", "reach": [[10, 8.0], [8, 4.0]]}, {"line": 2, "category": "rag", "reach": []}]
    row = {"way": "draft", "temperature": 0.85, "a_guess": 0.3, "whole": False, "texts": texts}
    best = cheapest(row)
    assert (best["gamma"], best["tokens"]) == (1, 1.8) and best["cost"].middle == pytest.approx(1.3 / 1.8)
    assert cheapest(row | {"whole": True})["cost"].middle == pytest.approx(1.6 / 2.2)
    tree = row | {"way": "draft, tree", "siblings": [10, 6.0, 7.0, 8.0]}
    machine = {"processor": "one", "threads": 1, "torch": "2"}
    record = {"rows": [row, tree], "models": {"bundled-target": {"name": "bundled-target"}}, "machine": machine}
    record |= {"command": "bundled-target", "device": "cpu", "time": "2026-11-26 00:00:00", "top_p": 0.9}
    text = cost_tables("bundled-target", {"cost-bundled-target": (record, [])})
    assert "| draft, tree | 0.300 | 0.72" in text and "| 1 | 1.80 | 0.60 | 0.70 | 0.80 |" in text
    labels = [text.get_text() for text in draw_cost(record).axes[0].texts]
    assert {"plain decoding (0)", "draft (1)", "draft, tree (1)"} <= {*labels}


def test_a_copy_of_two_bits_is_counted_with_its_bits_though_no_kernel_reads_them(monkeypatch):
    for name, value in {"TOKENS": 4, "TEXTS": {"bundled-target": 1}}.items():
        monkeypatch.setattr(costFrontier, name, value)
    inputs, models, sizes = costFrontier.load_way("bundled-target", costFrontier.OWN["bundled-target"]["copy, 2 bits"])
    keys = 2 * 12 * 192 * costFrontier.CONTEXT * 2  # of 12 layers, in 16 bits
    assert sizes["draft"] - keys == pytest.approx((2 + 0.5) / 16 * (sizes["target"] - keys), rel=0.01)
    row = costFrontier.count_way(inputs, models, sizes, 0.85)
    assert row["a_guess"] == sizes["draft"] / sizes["target"] and len(row["texts"]) == 24
    assert 1 < at_each_gamma(counts_of(row["texts"]).sum(0))[1] < 1.9


def test_a_guess_of_medusas_heads_reads_one_of_them(monkeypatch, tmp_path, capsys):
    for name, value in {
        "ROOT": tmp_path,
        "TOKENS": 8,
        "TEXTS": {"bundled-target": 1},
        "TEMPERATURES": (0.85,),
        "OWN": {"bundled-target": {costFrontier.MEDUSA: costFrontier.OWN["bundled-target"][costFrontier.MEDUSA]}},
        "MEDUSA_HEADS": str(folder := tmp_path / "heads"),
    }.items():
        monkeypatch.setattr(costFrontier, name, value)
    (file := tmp_path / "docs" / "records" / "cost-bundled-target.json").parent.mkdir(parents=True)
    assert costFrontier.main(["bundled-target"]) == 2
    assert "heads, Medusa's recipe: there is no model" in capsys.readouterr().err and not file.exists()
    folder.mkdir()
    MedusaHeads(torch.zeros(4096, 192)).save(folder, "", {})  # All their guesses are drawn from all tokens alike.
    assert costFrontier.main(["bundled-target"]) == 0
    record = json.loads(file.read_text())
    (row,) = record["rows"]
    assert row["a_guess"] * record["bytes"] == pytest.approx(2 * (192 * 192 + 192 + 4096 * 192))
    assert 0 < at_each_gamma(counts_of(row["texts"]).sum(0))[1] - 1 < 0.1


def test_inner_rounds_of_a_cascade_are_those_of_rounds_with_room_for_all_guesses(monkeypatch):
    for name, value in {"TOKENS": 12, "TEXTS": {"bundled-target": 1}}.items():
        monkeypatch.setattr(costFrontier, name, value)
    flags = costFrontier.OWN["bundled-target"]["cascade: draft, mid"]
    inputs, models, sizes = costFrontier.load_way("bundled-target", flags)
    row = costFrontier.count_way(inputs, models, sizes, 0.85)
    assert all(
        rounds <= inner <= 4 * rounds <= 4 * text["rounds"]
        for text in row["texts"]
        for rounds, inner in [text["inner"]]
    )
    rounds, inner = np.sum([text["inner"] for text in row["texts"]], 0)
    assert 0 < rounds < sum(text["rounds"] for text in row["texts"])
    assert row["a_guess"] == pytest.approx(inner / rounds * (sizes["draft"] + sizes["mid"] / 4) / sizes["target"])


def test_bytes_of_some_texts_of_a_cascade_are_those_of_their_inner_rounds():
    reach = {"reach": [[10, 8.0], [8, 4.0]]}
    row = {"a_guess": 0.3, "whole": True, "texts": [reach | {"line": i, "inner": [10, 10 + 20 * i]} for i in (0, 1)]}
    assert cheapest(row)["cost"].middle == pytest.approx(1.6 / 2.2)
    assert (cheapest(row)["cost"].low, cheapest(row)["cost"].high) == pytest.approx((1.3 / 2.2, 1.9 / 2.2))
    assert costs_at(row, 2, counts_of(row["texts"][1:])[0], np.array([10, 30])) == pytest.approx(1.9 / 2.2)


def test_noise_moves_the_weights_that_a_file_rounded_by_half_a_step_at_most(tmp_path):
    real = tmp_path / costFrontier.REAL
    real.mkdir()
    levels = torch.randint(16, (4, 2, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    few = (torch.rand(4, 2, 1) + levels * 0.1).flatten(1)
    weights = {"few": few, "many": torch.rand(4, 64), "norm": torch.rand(64)}
    save_file(weights, real / "model.safetensors")
    costFrontier.write_off_grid(tmp_path / "noisy")
    moved = {name: weight - weights[name] for name, weight in load_file(tmp_path / "noisy/model.safetensors").items()}
    assert 0.045 < moved["few"].abs().max() <= 0.051 and moved["few"].mean().abs() < 0.01
    assert not moved["many"].any() and not moved["norm"].any()


def test_rows_of_other_code_are_counted_again(monkeypatch, tmp_path):
    inputs = SimpleNamespace(folders={"target": Path("bundled-target")}, device="cpu", dtype="float32")
    counted = []
    for name, value in {
        "ROOT": tmp_path,
        "OWN": {"bundled-target": {"one": "", "other": ""}},
        "TEMPERATURES": (0.85,),
        "load_way": lambda target, flags: (inputs, {"target": None}, {"target": 1}),
        "count_way": lambda *_: {"texts": counted.append(1)},
        "model_version": str,
        "model_record": lambda *_: {},
    }.items():
        monkeypatch.setattr(costFrontier, name, value)
    file = tmp_path / "docs" / "records" / "cost-bundled-target.json"
    file.parent.mkdir(parents=True)
    for _ in range(2):
        costFrontier.count_all("bundled-target")
    assert len(counted) == 2
    record = json.loads(file.read_text())
    record["rows"][1]["code"] = "sha256:0"
    file.write_text(json.dumps(record))
    costFrontier.count_all("bundled-target")
    assert len(counted) == 3 and json.loads(file.read_text())["rows"][1]["code"] == record["rows"][0]["code"]
