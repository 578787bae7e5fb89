"""The same commands for every family: downloaded by hub id, sharded, with vocabularies padded differently."""

import helpers
import pytest
from localHub import Repository


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_a_pair_of_any_family_is_downloaded_timed_and_scored(
    cli, flags, pair_folder, hub, tmp_path, capsys, monkeypatch, family
):
    """The draft's vocabulary is padded to 320 entries and the target's to 352, as Pythia-70m's and -12b's are to 50304
    and 50688; the tokenizer has 300."""
    monkeypatch.setattr("inputs.files.MODELS", tmp_path / "models")
    for role, vocabulary, layers in (("target", 352, 2), ("draft", 320, 1)):
        folder = tmp_path / role
        model = helpers.tiny(family, vocabulary=vocabulary, layers=layers).model
        model.save_pretrained(folder, max_shard_size=60_000 if role == "target" else "1GB")
        for file in (pair_folder / role).glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        hub.models[f"some/{family}-{role}"] = Repository({file.name: file for file in folder.iterdir()})
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) > 1
    arguments = ["--target", f"some/{family}-target", "--draft", f"some/{family}-draft", "--out", str(tmp_path)]
    assert cli.main([*flags, *arguments, "--sentences", "1"]) == 0, capsys.readouterr().err
    text = (tmp_path / "results.txt").read_text()
    assert f"target: {family}-target" in text and "not finished" not in text
