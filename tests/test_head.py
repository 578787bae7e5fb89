"""The head: features beside the KV cache, what it computes eagerly and by kernels, its folder, and its texts."""

import copy
import json
from functools import partial

import helpers
import pytest
import softwareCuda
import torch
from conftest import refused
from helpers import rounded_copy
from outcomes import FREE
from test_specSampling import PROMPTS
from transformers import LlamaConfig

from decoding.drafter import Fixed
from decoding.lengthRules import DraftConfidence
from decoding.rows import Rows
from decoding.tree import Places, Tree
from decoding.treeRules import traversal_rule
from decoding.verification import token_rule
from engine import head as heads
from engine.cachedModel import CachedModel, Tap
from engine.compiling import compiled
from engine.cpuModel import CpuModel
from engine.cudaModel import CudaModel, layer_forward
from engine.head import CONFIG, WEIGHTS, HeadModel, HeadNetwork, load_head, save_head
from methods.cascade import CascadeDrafter
from methods.drafters import DrafterWithModel, ModelDrafter
from methods.treeSampling import TreeDrafter, advance_tree, treeSampling
from regrSampling import regrSampling
from specSampling import advance, specSampling
from utils import GREEDY, Sampling

FEW = 9  # tokens in a vocabulary, so that guesses of random models are often accepted
SHORT = [[5, 1, 2, 7], [3], [3, 3, 8, 1, 4, 0, 2, 6, 2], [5, 4]]


def network_for(target, tokens=None):
    """A random head whose guesses depend on all that it reads."""
    sizes = {"num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {name: getattr(target.model.config, name) for name in ("hidden_size", "vocab_size")}
    torch.manual_seed(3)
    network = HeadNetwork.of(LlamaConfig(**sizes, head={"layers": [1, 0, 2]}), target, tokens)
    with torch.no_grad():
        for weight in network.trained().values():
            weight.normal_(std=weight.shape[-1] ** -0.5) if weight.dim() == 2 else weight.normal_(1.0, 0.3)
    return network.to(target.dtype)


def pair(family="gpt_neox", engine="eager", vocabulary=FEW, dtype=torch.float32, tokens=None, **sizes):
    """(a target, its head)."""
    target = helpers.tiny(family, vocabulary=vocabulary, context=512, sharpness=2.0, **sizes)
    target = CachedModel(target.model.to(dtype), vocabulary, "target")
    head = HeadModel(network_for(target, tokens=tokens), target)
    if engine == "compiled":
        target = compiled(target)
        head = compiled(head, target)
        assert type(target) is type(head) is CpuModel and head.features_of is target
    assert head.reads_features and not target.reads_features
    return target, head


@pytest.fixture
def engine(request):
    """The engine that a test asks for; the kernels are built before."""
    if request.param == "compiled":
        request.getfixturevalue("kernels")
    return request.param


ENGINES = pytest.mark.parametrize("engine", ["eager", "compiled"], indirect=True)


@torch.inference_mode()
def true_features(source, text):
    """The features of a text's tokens in one forward, with one of zeros before them, `[n + 1, d]`."""
    states = source.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([torch.zeros(1, states[0].shape[-1]), source.tap(states)[0]])


@torch.inference_mode()
def by_definition(source, text, guesses):
    """The logits after the text, and after each guess but the last: the target has read all of the text but its last
    token, and the head's own last hidden states stand for what follows. One whole forward for each guess."""
    target, head = source
    features, logits = true_features(target, text[:-1]), []
    for i in range(len(guesses)):
        tokens = torch.tensor([text + guesses[:i]])
        states = head.model(tokens, features[None], output_hidden_states=True, use_cache=False)
        features = torch.cat([features, states.hidden_states[-1][0, -1:]])
        logits.append(states.logits[0, -1])
    return torch.stack(logits)


def check_rounds(source, models, tree=None, count=4, prompts=SHORT):
    """Assert that guesses are drawn from what the design says, and that after each round the features of all tokens
    that the target has read are those of one forward. source: the eager models. Returns how many guesses were
    accepted."""
    target, head = models
    close = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-3)
    leaves = [] if tree is None else [node for node in range(1, tree.size + 1) if not tree.children[node]]
    paths = [[n - 1 for n in tree.path(node)] for node in leaves] or [[0, 1, 2]]
    drafter, length, generator, seen = TreeDrafter(head), Fixed(tree or 3), torch.Generator().manual_seed(0), []
    one_round, rule = (advance_tree, traversal_rule) if tree else (advance, token_rule)
    rows = Rows(prompts, 40, [target, *drafter.models], spare=tree.size if tree else 0, generator=generator)
    drafter.begin(rows)
    length.begin(rows)
    with torch.inference_mode():
        target.first_token(rows, FREE)
        drafter.read_prompts(rows)
        for _ in range(count):
            before = copy.deepcopy(rows.texts)
            one_round(rows, target, drafter, length, FREE, rule, lambda rows, guesses, *rest: seen.append(guesses))
            for row, text in enumerate(before):
                drafts = seen[-1].drafts[row].tolist()
                for path in paths:
                    q = torch.softmax(by_definition(source, text, [drafts[i] for i in path]), -1)
                    for i, wanted in zip(path, q):
                        if tree is None or tree.ranks[i] == 0:  # The first of some siblings is drawn from q itself.
                            close(seen[-1].q[row, i], wanted)
            for row, text in enumerate(rows.texts):
                expected = true_features(source[0], text[:-1])  # Sums of numbers up to a hundred: float32 rounds them.
                close(target.features[row, : len(text)], expected, atol=max(2e-4, 5e-6 * expected.abs().max().item()))
    return sum(sum(record.accepted) for record in rows.records)


KINDS = {
    "gpt_neox": {},
    "llama": {"family": "llama"},
    "opt": {"family": "opt"},
    "few tokens": {"tokens": torch.arange(0, FEW, 2)},
    "wide": {"family": "llama", "hidden_size": 128, "intermediate_size": 300},
}


@pytest.mark.parametrize(
    "kind, engine",
    [*((kind, "compiled") for kind in KINDS), ("gpt_neox", "eager"), ("llama", "eager")],
    indirect=["engine"],
)
@pytest.mark.parametrize("tree", [None, "2/1,1/1,0"])
def test_guesses_and_features_are_those_of_the_design(kind, tree, engine):
    models = (pair(engine=engine, **KINDS[kind]) for engine in ("eager", engine))
    accepted = check_rounds(*models, Tree.of(tree) if tree else None)
    assert accepted > 5 or kind == "few tokens"  # The equalities above are worth something.


def test_any_number_of_threads_and_of_tokens_in_a_prompt(kernels, three_threads):
    prompts = [[3], torch.arange(300).remainder(FEW).tolist()]  # more tokens than are read at once
    check_rounds(*(pair(engine=engine, **KINDS["wide"]) for engine in ("eager", "compiled")), prompts=prompts, count=2)


MISTAKES = {  # {mistake: (class, its function, f(the right one) -> the wrong one)}
    "two are read": (DrafterWithModel, "unread", lambda right: lambda self, guesses: right(self, 1)),
    "shifted": (
        CachedModel,
        "features_before",
        lambda right: lambda self, slots, places: right(self, (slots - 1).clamp(min=0), places),
    ),
    "features stay": (CachedModel, "move", lambda _: lambda self, source, slots: self.cache.move(source, slots)),
    "all are overwritten": (  # by the head, those of a prompt's end and of all tokens that it reads again
        CachedModel,
        "forward",
        lambda right: lambda self, *block, keep=None: right(self, *block)[:, slice(None) if keep is None else keep],
    ),
}


def plant(monkeypatch, mistake):
    kind, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(kind, name, wrong(getattr(kind, name)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_features_is_caught(mistake, monkeypatch):
    source, models = pair(), pair()
    plant(monkeypatch, mistake)
    with pytest.raises(AssertionError):
        check_rounds(source, models, Tree.of("2/1,1/1,0") if mistake == "features stay" else None)


def test_parents_in_the_deepest_chain():
    slots, chain = torch.arange(63)[None], torch.tensor(Tree.chain(62).ancestors)
    assert Places(slots, slots, torch.tensor([0]), chain).parents[0].tolist() == [*range(-1, 62)]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_in_bfloat16_features_and_logits_are_as_near_as_rounding_allows(kernels, family):
    prompts, found = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0)), []
    for engine in "eager", "compiled":
        models = pair(family, engine, 61, torch.bfloat16)
        for model in models:
            model.reserve(2, 40)
        logits = [model.forward(prompts, torch.arange(30).expand(2, -1)) for model in models]
        found.append([*logits, models[0].features[:, :31]])
    for eagers, ours in zip(*found):
        assert ours.dtype == torch.float32 and (ours - eagers).norm() < 0.1 * eagers.norm()


def in_other_norms(self, tokens, features):
    return torch.cat([self.feature_norm(self.model.embed_tokens(tokens)), self.token_norm(features)], -1)


def of_other_layers(self, states):
    return self.fuse(torch.cat([states[0]] * len(self.layers), -1))


@pytest.mark.parametrize(
    "kind, name, wrong", [(HeadNetwork, "joined", in_other_norms), (Tap, "__call__", of_other_layers)]
)
def test_a_description_checks_taps_and_heads(kernels, kind, name, wrong, monkeypatch, capsys):
    target = helpers.tiny()
    head = HeadModel(network_for(target), target)
    monkeypatch.setattr(kind, name, wrong)
    made = compiled(target)
    if kind is HeadNetwork:
        assert type(made) is CpuModel and compiled(head, made) is head and head.features_of is made
    else:
        assert made is target
    assert "something that the kernels do not" in capsys.readouterr().err


def test_a_decoder_refuses_what_has_no_feature(kernels):
    target, head = pair(engine="compiled")
    head.reserve(2, 20)
    with pytest.raises(RuntimeError, match="the target must read"):
        head.forward(torch.tensor([[1]]), torch.tensor([[0]]))
    target.reserve(1, 10)
    for tokens, at in ([[1], [1]], [[0], [0]]), ([[1]], [[10]]):
        with pytest.raises(RuntimeError, match="feature"):
            head.forward(torch.tensor(tokens), torch.tensor(at))
    with refused("load its head before that"):
        target.keep_features(target.tap)
    eager = pair()[0]
    with refused("which has read nothing"):  # Compiled without its head.
        specSampling(SHORT, compiled(eager), ModelDrafter(HeadModel(network_for(eager), eager)), 4)


def test_a_tapped_model_that_stays_eager_has_the_features_of_all_its_layers(kernels, capsys):
    """transformers marks the layers that it records at the first time: not while some are taken out for the check."""
    texts = []
    for compiles in False, True:
        target, head = pair(layers=5)
        for layer in target.model.gpt_neox.layers:
            layer.attention.scaling *= 2
        if compiles:
            assert compiled(target) is target and "stays eager" in capsys.readouterr().err
        _, records = specSampling(SHORT, target, ModelDrafter(head), 9, sampling=GREEDY)
        texts.append([record.accepted for record in records])
    assert texts[0] == texts[1]


SAMPLERS = {
    "chains": lambda t, h: partial(specSampling, target=t, drafter=ModelDrafter(h), gamma=4),
    "while sure": lambda t, h: partial(specSampling, target=t, drafter=ModelDrafter(h), gamma=DraftConfidence(5, 0.3)),
    "trees": lambda t, h: partial(treeSampling, target=t, drafter=TreeDrafter(h), tree=Tree.of("3/2,1,0")),
}


def generators(count):
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.mark.parametrize("name, family", [("chains", "gpt_neox"), ("while sure", "llama"), ("trees", "llama")])
def test_texts_are_those_of_eager_models_and_greedy_ones_the_targets(kernels, name, family):
    """In a batch and in a queue, with a penalty and without."""
    source, models = pair(family), pair(family, "compiled")
    for sampling in GREEDY, FREE, Sampling(0.9, 0, 0.9, 1.3):
        for prompts, batch in (SHORT[:1], None), (SHORT, 3):
            how = {"max_len": 12, "sampling": sampling, "batch": batch}
            wanted, found = (
                SAMPLERS[name](*each)(prompts, generator=generators(len(prompts)), **how) for each in (source, models)
            )
            assert found[0] == wanted[0]
            assert [record.accepted for record in found[1]] == [record.accepted for record in wanted[1]]
            if sampling is GREEDY:
                assert found[0] == regrSampling(prompts, models[0], 12, GREEDY)[0]


@pytest.mark.parametrize(
    "engine, right", [("eager", True), ("compiled", True), ("compiled", False)], indirect=["engine"]
)
def test_a_text_does_not_depend_on_its_neighbours(engine, right, monkeypatch):
    """A queue's texts are the same at every batch size, but not with a planted mistake: a row leaves its features."""
    if not right:
        monkeypatch.setattr(CachedModel, "copy_row", lambda self, source, row: self.cache.copy_row(source, row))
    target, head = pair(engine=engine)

    def write(batch):
        ends = lambda text, token: token == text % 5  # noqa: E731 - rows end at different times
        options = {"max_len": 25, "sampling": FREE, "end_of_text": ends, "generator": generators(8), "batch": batch}
        return specSampling(SHORT * 2, target, ModelDrafter(head), gamma=3, **options)[0]

    assert (write(1) == write(4) == write(None)) == right


@ENGINES
@torch.inference_mode()
def test_features_are_written_where_a_head_reads_them_and_a_text_is_scored_as_it_is_read(engine):
    target, head = pair(engine=engine)
    specSampling(SHORT, target, ModelDrafter(head), 10, 2, GREEDY)
    target.features.fill_(7.0)
    wanted = regrSampling(SHORT, target, 10, GREEDY)[0]
    assert (target.features == 7).all()
    target.features[:, 0] = 0
    assert specSampling(SHORT, target, ModelDrafter(head), 10, 2, GREEDY)[0] == wanted
    assert (target.features[:, 1:3] != 7).all()
    before = target.features.clone()
    text, positions = torch.tensor([[5, 1, 2, 4, 3], [1, 4, 4, 3, 0]]), torch.arange(5).expand(2, -1)
    scored = head.score(text)
    assert torch.equal(target.features, before)  # Nothing of the texts that are decoded has changed.
    target.store.keeps = True
    for model in target, head:
        model.reserve(2, 6)
    for at in range(5):
        for model in target, head:
            logits = model.forward(text[:, at : at + 1], positions[:, at : at + 1])
        torch.testing.assert_close(logits[:, 0], scored[:, at], rtol=1e-4, atol=1e-4)
        # The target had read the token already: what the head wrote for it is overwritten.
        target.forward(text[:, at : at + 1], positions[:, at : at + 1])


@ENGINES
@torch.inference_mode()
def test_a_copy_that_scores_a_heads_guesses_writes_their_features(engine):
    """Three levels. The copy's features are near the target's, and written only where a head reads them."""
    target, head = pair("llama")
    made = rounded_copy(target, 8)
    if engine == "compiled":
        target = compiled(target)
        made, head = compiled(made, target), compiled(head, target)
        assert type(made) is type(head) is CpuModel
    three = CascadeDrafter(made, ModelDrafter(head), Fixed(2))
    wanted = regrSampling(SHORT, target, 20, GREEDY)[0]
    text, positions = torch.tensor([[5, 1, 2, 4]]), torch.arange(4)[None]
    for drafter, writes in (three, True), (ModelDrafter(made), False):
        assert specSampling(SHORT, target, drafter, 20, 4, GREEDY)[0] == wanted
        assert target.keeps_features == made.keeps_features == writes
        target.store.keeps = True
        target.forward(text, positions)
        target.store.keeps = writes
        of_target = target.features[0, 1:5].clone()
        made.forward(text, positions)
        change = (target.features[0, 1:5] - of_target).norm() / of_target.norm()
        assert (0 < change < 0.1) if writes else change == 0


@pytest.mark.parametrize("name", ["chains", "trees"])
def test_on_a_gpu_its_steps_are_captured(name):
    """Greedy texts in one cache, and plain decoding in between, which writes no features."""
    source, batches = pair(), (SHORT[:2], SHORT[2:])
    wanted = [SAMPLERS[name](*source)(prompts, max_len=9, sampling=GREEDY) for prompts in batches]
    with softwareCuda.machine(1):
        target = CachedModel(source[0].model.to("cuda"), FEW, "target")
        head = HeadModel(source[1].model.to("cuda"), target)
        target = compiled(target)
        head = compiled(head, target)
        sampler = SAMPLERS[name](target, head)
        for prompts, (right, right_records) in zip(batches, wanted):
            text, records = sampler(prompts, max_len=9, sampling=GREEDY)
            assert text == right == regrSampling(prompts, target, 9, GREEDY)[0]
            assert [record.accepted for record in records] == [record.accepted for record in right_records]
        assert head.graphs and target.graphs and not head.refused | target.refused


@torch.inference_mode()
def test_its_forward_compiles_without_breaks():
    """The hooks that transformers installs for features cannot be traced."""
    torch._dynamo.reset()  # Compilations for other tests count against its limit.
    fused = torch.compile(layer_forward, fullgraph=True, backend="eager")
    target, head = pair()
    target = CudaModel(target.model, FEW, "target", None, target.tap)
    head = CudaModel(head.model, FEW, "head", None, target)
    target.store.keeps = True
    for model in target, head:
        model.reads_filled = False  # as on a GPU
        CachedModel.reserve(model, 1, 64)
    for first, n in (0, 5), (5, 1):  # More shapes are in test_cachedModel.py.
        tokens = torch.arange(first, first + n)[None]
        for model in target, head:
            vars(model).pop("network", None)
            wanted = CachedModel.forward(model, tokens, tokens)
            model.network = lambda tokens, model=model: partial(model.by_layers, fused)
            torch.testing.assert_close(CachedModel.forward(model, tokens, tokens), wanted, rtol=1e-5, atol=1e-5)


def test_a_head_is_read_from_the_folder_it_was_written_to(tmp_path):
    target, head = pair(vocabulary=61, tokens=torch.tensor([7, 3, 60]))
    save_head(head.model, tmp_path / "a" / "head", "v1", {"steps": 5})
    loaded = load_head(tmp_path / "a" / "head", target, "v1")
    about = json.loads((tmp_path / "a" / "head" / "config.json").read_text())
    assert about["head"] == {"steps": 5, "target": "v1", "layers": [1, 0, 2], "tokens": 3} and about["vocab_size"] == 61
    assert sorted(file.name for file in (tmp_path / "a" / "head").iterdir()) == ["config.json", "model.safetensors"]
    for name, weight in head.model.trained().items():
        assert torch.equal(loaded.model.trained()[name], weight.bfloat16().float())
    assert loaded.name == "head" and loaded.vocabulary == 61 and loaded.dtype == torch.float32
    assert loaded.model.get_output_embeddings().tokens.tolist() == [7, 3, 60]
    assert loaded.model.get_input_embeddings() is target.model.get_input_embeddings()
    assert target.tap.fuse is loaded.model.fuse
    wanted = regrSampling(PROMPTS, target, 20, GREEDY)[0]
    assert specSampling(PROMPTS, target, ModelDrafter(loaded), 20, 3, GREEDY)[0] == wanted
    target, head = pair(vocabulary=61)  # One that knows all tokens has the target's whole output layer.
    save_head(head.model, tmp_path, "v1", {})
    loaded = load_head(tmp_path, target, "v1").model
    assert loaded.get_output_embeddings() is target.model.get_output_embeddings()


def edit(folder, head=None, **changes):
    about = json.loads((folder / "config.json").read_text())
    about["head"] |= head or {}
    (folder / "config.json").write_text(json.dumps(about | changes))


def put(folder, **weights):
    """Replace weights; None: the weight is lost."""
    weights = heads.load_file(folder / "model.safetensors") | weights
    heads.save_file({name: x for name, x in weights.items() if x is not None}, folder / "model.safetensors")


def cut(folder, file, size):
    (folder / file).write_bytes((folder / file).read_bytes()[:size])


BROKEN = [
    (edit, {"head": {"target": "v0"}}, "it was trained for v0, and the target is v1"),
    (edit, {"vocab_size": 60}, "60 tokens"),
    (edit, {"hidden_size": 64}, "a width of 64"),
    (edit, {"head": {"layers": [0, 1, 3]}}, "layers"),
    (edit, {"head": {"layers": [0, 1]}}, "size mismatch for fuse.weight"),
    (edit, {"num_attention_heads": 0}, "is not a head"),
    *((cut, {"file": file, "size": size}, "cannot be read") for file, size in ((CONFIG, 50), (WEIGHTS, 2000))),
    *((lambda folder, file=file: (folder / file).unlink(), {}, "cannot be read") for file in (CONFIG, WEIGHTS)),
    (lambda folder: (folder / CONFIG).write_text("{}"), {}, "cannot be read"),
    (put, {"join.weight": None}, "join.weight is missing in"),
    (put, {"tokens": None}, "does not have the tokens"),
    (put, {"tokens": torch.tensor([7, -1, 60])}, "does not have the tokens"),
    (edit, {"head": {"tokens": 2}}, "does not have the tokens"),
]


def test_a_broken_folder_and_another_target_are_refused_in_one_line(tmp_path):
    target, head = pair(vocabulary=61, tokens=torch.tensor([7, 3, 60]))
    for breaks, how, reason in BROKEN:
        save_head(head.model, tmp_path, "v1", {})
        load_head(tmp_path, target, "v1")
        breaks(tmp_path, **how)
        with refused(reason):
            load_head(tmp_path, target, "v1")
    with refused("have the dtype of"):
        HeadModel(head.model, CachedModel(target.model.bfloat16()))
