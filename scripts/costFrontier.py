"""Bytes read for each committed token, of every way of guessing: docs/records/cost-MODEL.json.

    python -m scripts.costFrontier bundled-target            what it lacks, or has of other code

Counted, not timed. A round of gamma guesses reads the draft's weights gamma times and the target's once, and the keys
and values of CONTEXT tokens with each of these forwards; its tokens follow from the sum of min(p, q) at each position
of the rounds of a real decoding (`experiments.theory.rounds_along`).
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmark.steps import bytes_of_weights
from decoding.drafter import Drafter, Fixed
from decoding.lengthRules import MENU
from engine.cachedModel import CachedModel
from engine.kvCache import cache_bytes
from engine.quantised import BITS, GROUP
from engine.sharedWeights import sharing_copy
from experiments.intervals import Interval
from experiments.loading import SCALE, Inputs, LoadedModels, make_copies
from experiments.prepare import load_inputs
from experiments.runRecord import code_version, model_record, origin
from experiments.settings import parse
from experiments.theory import by_position, chances, overlap, rounds_along, uncut
from inputs.commandLine import as_script, script_parser
from inputs.files import ROOT, replace_file
from inputs.models import find_model, model_version, read_json
from methods.catalogue import build
from report.figures import DARK, GREY, RED, Figure, plt
from report.tables import Table, markdown, span
from scripts.keepRecord import Records, has_bundled_weights, source
from scripts.medusa import MedusaDrafter
from scripts.training import GAMMA as HEADS
from utils import Sampling, UserError

CHAIN, TREE, CASCADE = "--compare fixed", "--compare topDown", "--compare cascade"
COPIES = {f"copy, {bits} bits": f"--draft self --draftBits {bits} {CHAIN}" for bits in (8, 6, 5, 4, 3, 2)}
OF_KERNELS = [f"copy, {bits}" for bits in BITS]
COPIES |= {f"copy, {bits} bits, tree": f"--draft self --draftBits {bits} {TREE}" for bits in (6, 5, 4)}
BOTH = COPIES | {
    "lookup": f"--draft lookup {CHAIN}",
    "cascade: lookup, copy in 4 bits": f"--draft lookup --mid self --draftBits 4 {CASCADE}",
}
OWN = {  # {target: {way of guessing: flags of test.py}}
    "bundled-target": {
        "draft": f"--draft bundled-draft {CHAIN}",
        "draft, tree": f"--draft bundled-draft {TREE}",
        "head": f"--draft head --head bundled-head {CHAIN}",
        "head, tree": f"--draft head --head bundled-head {TREE}",
        "head, EAGLE-3's recipe": f"--draft head --head eagle-3-head {CHAIN}",
        "head, EAGLE-1's recipe": f"--draft head --head eagle-1-head {CHAIN}",
        (MEDUSA := "heads, Medusa's recipe"): f"--draft lookup {CHAIN}",  # guessing is replaced by `MedusaDrafter`
        "mid": f"--draft bundled-mid {CHAIN}",
        "cascade: draft, mid": f"--draft bundled-draft --mid bundled-mid {CASCADE}",
        "cascade: draft, copy in 4 bits": f"--draft bundled-draft --mid self --draftBits 4 {CASCADE}",
        **BOTH,
    },
    (REAL := "SmolLM2-135M-Instruct"): {
        "other tokenizer, 1M": f"--draft bundled-draft {CHAIN}",
        "other tokenizer, 7M": f"--draft bundled-target {CHAIN}",
        "cascade: 1M, copy in 4 bits": f"--draft bundled-draft --mid self --draftBits 4 {CASCADE}",
        "head": f"--draft head --head SmolLM2-head {CHAIN}",
        "head, tree": f"--draft head --head SmolLM2-head {TREE}",
        **BOTH,
    },
    (OFF_GRID := "SmolLM2-135M-off-grid"): {way: flags for way, flags in COPIES.items() if way[:7] in OF_KERNELS},
}
MEDUSA_HEADS = "medusa-heads"  # their folder in models/
TEMPERATURES, TOP_P = (0.85, 0.0, 1.0, 0.5), 0.9
SHOWN = 0.85  # the temperature of the figure and of the table by category
TOKENS, CONTEXT = 64, 256  # of each text; before the tokens of a forward, whose keys and values it reads
TEXTS = {"bundled-target": 2, REAL: 1, OFF_GRID: 1}  # after each prompt; greedy ones are the same
COLOURS = {"copy": "#2f6fb3", "cascade": "#8e44ad", "head": "#1e8449", "lookup": "#b9770e", "other": "#c2185b"}
LEFT = 0.8  # end of the figure
RESAMPLES = 200  # of the prompts, for an interval
ROWS = 12  # texts that are decoded together
GAMMA, GAMMAS_OF_CASCADE = 8, (4, 4)  # the most guesses of a chain; of the inner and of the outer sampler


def write_off_grid(folder: Path) -> None:
    """Write REAL with noise on its weights: what a model of 16 bits might be that the same file was rounded from.

    The file has 16 levels for each 32 inputs. Rounding moved each weight by at most half the distance of two levels, so
    the noise is uniform in that range. Weights with more levels (the output layer) stay.
    """
    real, generator = folder.with_name(REAL), torch.Generator().manual_seed(0)
    weights = load_file(real / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() == 2:
            groups = weight.float().unflatten(1, (-1, GROUP)).sort(-1).values
            step = (groups[..., -1:] - groups[..., :1]) / 15
            few = ((groups.diff(dim=-1) > 0).sum(-1) < 16).double().mean() > 0.99
            noise = step * (torch.rand(groups.shape, generator=generator) - 0.5) * few
            weights[name] = (weight.float() + noise.flatten(1)).to(weight.dtype)
    shutil.copytree(real, incomplete := folder.with_name(f"{folder.name}.incomplete"), dirs_exist_ok=True)
    save_file(weights, incomplete / "model.safetensors", {"format": "pt"})
    incomplete.rename(folder)


def load_way(target: str, flags: str) -> tuple[Inputs, LoadedModels, dict[str, float]]:
    """The inputs of a row, its models, and the bytes that a forward of each reads, {role: bytes}."""
    words, bits = f"--target {target} --prompts sample --compile --maxLen {TOKENS} {flags}".split(), 0
    if "--draftBits" in words:
        bits = int(words[at := words.index("--draftBits") + 1])
        words[at] = str(max(bits, min(BITS)))
    inputs = load_inputs(parse(words))
    models = inputs.load(inputs.dtype)
    if bits and bits not in BITS:  # No kernel multiplies by such weights: they are written out.
        copies, twin = make_copies(models["target"], [bits]), sharing_copy(models["target"].model)
        for name in copies.names:
            weight = copies.read(bits, name).weight().to(twin.dtype)
            twin.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        copy = CachedModel(twin, models["target"].vocabulary, f"{target} in {bits} bits", models["target"])
        models |= dict.fromkeys(inputs.roles_of("self"), copy)
    sizes = {}
    for role, model in models.items():
        copied = inputs.copies.weights * (bits / 8 + SCALE) if inputs.copies and model.cache_of else 0
        keys = cache_bytes(model.model.config.get_text_config(), CONTEXT, torch.bfloat16)
        sizes[role] = (copied or bytes_of_weights(model)) + keys
    return inputs, inputs.as_timed(models, inputs.dtype), sizes


def two_drafts(p: Tensor, q: Tensor) -> float:
    """The most that any rule accepts of two guesses that are drawn from q without replacement, `p, q [V]`.

    An optimal transport (Sun et al., SpecTr, arXiv 2310.15141): by the theorem of minimum cut it is the least of
    p(H) + 1 - P(both guesses are in H) over all sets H of tokens. Sets of the largest q / p are tried, and any set
    gives an upper bound (Hu et al., arXiv 2502.18779, show that the least is among these).
    """
    if q.max() > 1 - 1e-6:
        return float(overlap(p, q))  # There is no second guess.
    p, q = p.double(), q.double()
    order = (p / q).nan_to_num(torch.inf).argsort()
    p, q = p[order], q[order]
    inside = q.cumsum(0)
    both = inside * (q / (1 - q)).cumsum(0) - (q * q / (1 - q)).cumsum(0)
    return min(1.0, float((p.cumsum(0) + 1 - both).min()))


def count_way(
    inputs: Inputs, models: LoadedModels, sizes: Mapping[str, float], temperature: float, drafter: Drafter | None = None
) -> dict[str, Any]:
    """A row: what each text says of acceptance, and the bytes that a guess reads, in units of a target's forward.
    drafter: instead of that of the inputs.

    reach: of each text [rounds that reached a depth, the sum over them of the probability that a guess there is
    accepted], depth by depth. inner: of each text of a cascade [rounds that had room for all guesses, inner rounds in
    them]. siblings: of trees the number of roots, and the sums over them of the probabilities that the first, one of
    the first two, and one of two by the best rule is accepted.
    """
    (name,) = inputs.settings.measuring.names - {"target"}
    sampler: Any = build([name], models, inputs.settings.decoding)[name]
    if drafter:
        sampler = partial(sampler, drafter=drafter)
    siblings, texts, inner = [0.0] * 4, list[dict[str, Any]](), Counter[tuple[int, int]]()  # {(text, 0 or 1): rounds}
    shape = {"tree": Fixed(MENU[-1])} if name == "topDown" else {"gamma": Fixed(GAMMA)}
    if name == "cascade":
        mid, shape = sampler.keywords["drafter"].model, {"gamma": Fixed(GAMMAS_OF_CASCADE[1])}
        verify = mid.score_and_verify

        def counted(rows: Any, *rest: Any) -> Any:
            whole = [row for row, guesses in enumerate(rows.wanted) if guesses == GAMMAS_OF_CASCADE[1]]
            inner.update((rows.numbers[row], 1) for row in whole if not rows.ended[row])
            return verify(rows, *rest)

        mid.score_and_verify = counted

    def watched(*prompts: Any, observer: Any, **options: Any) -> Any:
        def watch(rows: Any, guesses: Any, p: Tensor, last: Tensor) -> None:
            observer(rows, guesses, p, last)
            going = [row for row, ended in enumerate(rows.ended) if not ended]
            inner.update((rows.numbers[row], 0) for row in going if rows.left[row] > GAMMAS_OF_CASCADE[1])
            for row in going if guesses.tree else ():
                if not guesses.q[row, 0].any():  # A row without room for a guess has none.
                    continue
                one, two = chances(p[row, 0], guesses.q[row, :2], guesses.drafts[row, :2])
                for i, value in enumerate((1.0, one, one + two, two_drafts(p[row, 0], guesses.q[row, 0]))):
                    siblings[i] += value

        return sampler(*prompts, observer=watch, **shape, **options)

    chosen = [(row, question) for row, (question, turn) in zip(inputs.rows, inputs.turns) if turn == 0]
    chosen *= TEXTS[inputs.settings.models.target] if temperature else 1
    options: dict[str, Any] = {"max_len": TOKENS, "sampling": Sampling(temperature, 0, TOP_P)}
    for first in range(0, len(chosen), ROWS):
        prompts, questions = zip(*chosen[first : first + ROWS])
        seeds = [torch.Generator().manual_seed(first + number) for number in range(len(prompts))]
        of_texts = rounds_along(watched, prompts, end_of_text=inputs.ends, generator=seeds, **options)
        for number, (question, rounds) in enumerate(zip(questions, of_texts)):
            reach = [[row[0], round(sum(row[2::2]), 3)] for row in by_position(uncut(rounds, TOKENS))]
            text = {"line": question.line, "category": question.category, "reach": reach, "rounds": len(rounds)}
            texts.append(text | ({"inner": [inner[number, at] for at in (0, 1)]} if name == "cascade" else {}))
        inner.clear()
    a_guess = sizes.get("draft", 0.0)
    if name == "cascade":  # The draft's guesses and the mid model's forward, for each inner round.
        a_guess = (GAMMAS_OF_CASCADE[0] * a_guess + sizes["mid"]) / GAMMAS_OF_CASCADE[1]
        a_guess *= float(inner_rounds(np.sum([text["inner"] for text in texts], 0)))
    row = {"a_guess": a_guess / sizes["target"], "whole": name == "cascade", "texts": texts}
    return row | {"siblings": [round(value, 3) for value in siblings]} if siblings[0] else row


def inner_rounds(counts: np.ndarray) -> np.ndarray:
    """The inner rounds of a round, of `counts[..., 2]` as each text has: `[...]`; 1 where there is no whole round."""
    return np.where(counts[..., 0] > 0, counts[..., 1] / counts[..., 0].clip(1), 1.0)


def counts_of(texts: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """`[texts, depths, 2]`: the rounds that reached a depth with every guess accepted, and the sum of the chances that
    their next guess is."""
    by_depth = [*zip_longest(*(text["reach"] for text in texts), fillvalue=(0, 0))]
    return np.array(by_depth).reshape(-1, len(texts), 2).swapaxes(0, 1)


def at_each_gamma(counts: np.ndarray) -> np.ndarray:
    """`[..., depths + 1]`: the expected tokens of a round of 0, 1, 2, ... guesses, from `counts [..., depths, 2]`. The
    mean at a depth is over the rounds whose guesses before it were accepted. So the product of the means is the
    probability that a round gets beyond that depth: no guess is taken to be independent of the others."""
    rates = counts[..., 1] / counts[..., 0].clip(1)
    return np.insert(rates, 0, 1.0, -1).cumprod(-1).cumsum(-1)


def inner_of(texts: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """`[texts, 2]`: "inner" of each text; equal for all where there is no cascade."""
    return np.array([text.get("inner", (1, 1)) for text in texts])


def costs_at(row: Mapping[str, Any], gamma: int, counts: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Bytes read for a token with `gamma` guesses, `[...]`, in units of what a forward of the target reads, from the
    sums over some texts of a row, `counts[..., depths, 2]` and `inner[..., 2]`."""
    a_guess = row["a_guess"] * inner_rounds(inner) / inner_rounds(inner_of(row["texts"]).sum(0))
    return (1 + gamma * a_guess) / at_each_gamma(counts)[..., gamma]


def cheapest(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row at the gamma that reads the fewest bytes for a token: "gamma", "tokens" and "bytes" of a round, and "cost",
    bytes over tokens with its 95 % interval over prompts. A unit is what a forward of the target reads."""
    counts, inner = counts_of(row["texts"]), inner_of(row["texts"])
    tokens, rng = at_each_gamma(counts.sum(0)), np.random.default_rng(0)
    costs = (1 + row["a_guess"] * np.arange(len(tokens))) / tokens
    gamma = len(tokens) - 1 if row["whole"] else int(costs.argmin())
    lines = np.array([text["line"] for text in row["texts"]])
    of_prompts = [np.array([x[lines == line].sum(0) for line in np.unique(lines)]) for x in (counts, inner)]
    drawn = rng.integers(len(of_prompts[0]), size=(RESAMPLES, len(of_prompts[0])))
    ends = np.percentile(costs_at(row, gamma, *(x[drawn].sum(1) for x in of_prompts)), (2.5, 97.5))
    bytes_read = 1 + row["a_guess"] * gamma
    return {"gamma": gamma, "tokens": tokens[gamma], "bytes": bytes_read, "cost": Interval(costs[gamma], *ends)}


def cost_tables(target: str, records: Any) -> str:
    """The tables of the record of a target: bytes for a token by temperature, and by category of prompt."""
    record, _ = records[f"cost-{target}"]
    rows = {(row["way"], row["temperature"]): row for row in record["rows"]}
    drawn = sorted({temperature for _, temperature in rows})
    shown = [way for way in OWN[target] if (way, SHOWN) in rows]
    kinds = list(dict.fromkeys(text["category"] for text in record["rows"][0]["texts"]))
    costs = [f"T {temperature:g}" for temperature in drawn]
    heads = ["", "a guess reads", *costs, "gamma", "tokens/round", "1st guess", "2 guesses", "bound of 2"]
    main, by_kind = Table("", heads), Table("", ["", *kinds])
    for way in shown:
        row, best = rows[way, SHOWN], cheapest(rows[way, SHOWN])
        cells = [span(cheapest(rows[way, at])["cost"]) if (way, at) in rows else "-" for at in drawn]
        count, *siblings = row.get("siblings", [1])
        shares = [f"{value / count:.2f}" for value in siblings]
        main.add(way, f"{row['a_guess']:.3f}", *cells, str(best["gamma"]), f"{best['tokens']:.2f}", *shares)
        category = np.array([text["category"] for text in row["texts"]])
        counted = counts_of(row["texts"]), inner_of(row["texts"])
        sums = [[x[category == kind].sum(0) for x in counted] for kind in kinds]
        by_kind.add(way, *(f"{costs_at(row, best['gamma'], *of_kind):.2f}" for of_kind in sums))
    return "\n\n".join([markdown(main), f"By category, at temperature {SHOWN}:", markdown(by_kind), source(record)])


def draw_cost(record: Mapping[str, Any]) -> Figure:
    """Draw tokens over bytes of a round, a point for each way of guessing at its best gamma, with lines of equal bytes
    for a token and the frontier."""
    figure, axes = plt.subplots(figsize=(8, 5.4))
    points = {"plain decoding": {"tokens": 1.0, "bytes": 1.0, "gamma": 0}}
    points |= {row["way"]: cheapest(row) for row in record["rows"] if row["temperature"] == SHOWN}
    right, top = (1.25 * max(point[key] for point in points.values()) for key in ("bytes", "tokens"))
    for cost in (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        end = min(right, top * cost)
        axes.plot([0, end], [0, end / cost], color="#dddddd", linewidth=1, zorder=0)
        axes.text(0.97 * end, 0.97 * end / cost, f"{cost:g}", color=GREY, fontsize=8, backgroundcolor="white", zorder=0)
    frontier: list[tuple[float, float]] = []
    best, boxes = 0.0, [(x["bytes"] - 0.01 * right, x["tokens"], 0.02 * right) for x in points.values()]
    for name, point in sorted(points.items(), key=lambda item: (item[1]["bytes"], -item[1]["tokens"])):
        x, y = at = point["bytes"], point["tokens"]
        if y > best:
            best, frontier = y, [*frontier, at]
        colour = next((colour for kind, colour in COLOURS.items() if name.startswith(kind)), DARK)
        axes.plot(x, y, "o", color=colour, markersize=6)
        label = name.removesuffix("'s recipe") + f" ({point['gamma']})"
        width = 0.0075 * right * len(label)
        sides = (0.0, x + 0.012 * right), (0.02, x - 0.012 * right - width)
        nearest = sorted((abs(up) + far, up, left) for (far, left), up in product(sides, np.linspace(-0.3, 0.3, 41)))
        for _, up, left in nearest:  # The nearest place where it covers no point and no other label.
            box = left, y + up * top, width
            covers = [abs(b - box[1]) < 0.032 * top and a < left + width and left < a + w for a, b, w in boxes]
            if left > LEFT and box[1] > 0.03 * top and not any(covers):
                break
        boxes.append(box)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        line["relpos"] = (0 if box[0] > x else 1), 0.5  # from the end of the label that is nearer
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # The frontier may pass behind a label.
        axes.annotate(label, at, box[:2], color=colour, fontsize=8, va="center", arrowprops=line, bbox=white)
    axes.plot(*zip(*frontier), color=RED, linewidth=1.4, zorder=1)
    axes.set(xlim=(LEFT, right), ylim=(0, top), ylabel="tokens of a round")
    axes.set_xlabel("bytes read in a round, in units of a forward of the target")
    target = next(iter(record["models"]))
    title = f"{target}, temperature {SHOWN}, top-p {record['top_p']}; gamma, or depth, in brackets"
    axes.set_title(f"{title}\ngrey: equal bytes for a token, in forwards of the target; red: the frontier")
    return figure


def count_all(target: str) -> None:
    """Measure the rows that the record of `target` lacks, or has of other code, and write it after each."""
    file, folder = ROOT / "docs" / "records" / f"cost-{target}.json", ROOT / "models" / OFF_GRID
    if target == OFF_GRID and not folder.exists():
        write_off_grid(folder)
    record: dict[str, Any] = read_json(file) if file.exists() else {"models": {}, "rows": []}
    is_of_now, missing = Records(ROOT).is_of_now, list[str]()
    if not has_bundled_weights(record):
        raise UserError(f"{file} is of other weights of the bundled models: remove it")
    for row in record["rows"]:
        row.setdefault("processor", record["machine"]["processor"])
    for temperature in TEMPERATURES:
        for way, flags in OWN[target].items():
            key = {"way": way, "temperature": temperature}
            before = [row for row in record["rows"] if row.items() >= key.items()]
            if any(is_of_now(row["code"]) for row in before):
                continue
            try:
                inputs, models, sizes = load_way(target, flags)
                heads = find_model(MEDUSA_HEADS) if way == MEDUSA else None
            except UserError as error:  # The repository has no weights of some heads.
                missing.append(f"{way}: {error}")
                continue
            drafter, named = None, dict[str, Any]()
            if heads:  # They read hidden states of a target that is not compiled.
                drafter = MedusaDrafter.load(heads, inputs.load(inputs.dtype)["target"])
                count = sum(x.numel() for x in drafter.heads.parameters())
                sizes["draft"] = count * torch.bfloat16.itemsize / HEADS
                named = {heads.name: {"name": heads.name, "version": model_version(heads), "parameters": count}}
            row = key | {"code": code_version("cpu", "steps")} | count_way(inputs, models, sizes, temperature, drafter)
            record["rows"] = [row for row in record["rows"] if row not in before] + [row]
            folders = inputs.folders | ({"head": inputs.head} if "head" in models else {})
            named |= {f.name: model_record(f.name, model_version(f), models[role]) for role, f in folders.items()}
            about = origin([target], {}, inputs.device, {target: named[target]} | record["models"] | named)
            about |= {"program": "-m scripts.costFrontier", "dtype": inputs.dtype, "bytes": sizes["target"]}
            row["processor"] = about["machine"]["processor"]  # A count depends on it only in its rounding.
            about["machine"]["processor"] = " and ".join(dict.fromkeys(row["processor"] for row in record["rows"]))
            record |= about | {"top_p": TOP_P, "tokens": TOKENS, "context": CONTEXT}
            replace_file(file, json.dumps(record) + "\n")
            print(f"{target}, temperature {temperature}: {way}", flush=True)
    if missing:
        raise UserError("; ".join(dict.fromkeys(missing)))


@as_script("costFrontier", "The rows that were measured are in the record.")
def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser("python -m scripts.costFrontier", __doc__)
    parser.add_argument("target", choices=list(OWN), help="whose ways of guessing are counted")
    count_all(parser.parse_args(argv).target)


if __name__ == "__main__":
    sys.exit(main())
