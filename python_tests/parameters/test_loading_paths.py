"""The files that load_safetensors accepts: paths alone, and an index that names files of its own folder."""

import json

import pytest
import torch
from torch import nn

import rtp_ext

safetensors_torch = pytest.importorskip("safetensors.torch")


def _folder(tmp_path):
    """A checkpoint of `_model` in the folder `here`, and its twin beside it, outside."""
    weights = {"weight": torch.full((2, 3), 7.0), "bias": torch.ones(2)}
    for place in (tmp_path / "here", tmp_path / "outside"):
        place.mkdir()
        safetensors_torch.save_file(weights, place / "part.safetensors")
    return tmp_path / "here"


def _model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _index(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_a_module_with_an_attribute_named_ring(tmp_path):
    """Which is not one of ours."""
    model = _model()
    model.ring = ["of", "its own"]
    rtp_ext.load_safetensors(model, _folder(tmp_path) / "part.safetensors")
    assert model.weight.eq(7.0).all() and model.ring == ["of", "its own"]


@pytest.mark.parametrize("files", [None, 3, b"x.safetensors", [None], ["a.safetensors", 4]])
def test_files_that_are_no_paths(files):
    with pytest.raises(TypeError, match="load_safetensors: expected a path or several as files, got "):
        rtp_ext.load_safetensors(_model(), files)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "bias: expected the name of a file in .*index.json, got None"),
        (3, "bias: expected the name of a file in .*, got 3"),
        (["part.safetensors"], "bias: expected the name of a file in .*, got \\['part"),
        ({"file": "part.safetensors"}, "bias: expected the name of a file"),
        ("", "bias: expected a file in .*here, got ''"),
        (".", "bias: expected a file in .*here, got '.'"),
        ("../outside/part.safetensors", "bias: expected a file in .*here, got '../outside"),
        ("deeper/../../outside/part.safetensors", "bias: expected a file in .*here, got 'deeper"),
        ("ABSOLUTE", "bias: expected a file in .*here, got '/"),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path, file, message):
    folder = _folder(tmp_path)
    if file == "ABSOLUTE":
        file = str(tmp_path / "outside" / "part.safetensors")
    index = _index(folder, {"weight": "part.safetensors", "bias": file})
    for files in (index, folder, [index]):
        model = _model()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            rtp_ext.load_safetensors(model, files)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing is written"


@pytest.mark.parametrize("weight_map", [[["weight", "part.safetensors"]], "part.safetensors", None, 4])
def test_a_weight_map_that_is_none(tmp_path, weight_map):
    index = _index(_folder(tmp_path), weight_map)
    with pytest.raises(ValueError, match=r"expected a weight_map from names to files in .*index.json, got "):
        rtp_ext.load_safetensors(_model(), index)


def test_links_and_folders_within_are_followed(tmp_path):
    """Control, in the layout of a cache of downloads: its folders hold links to files elsewhere."""
    folder = _folder(tmp_path)
    (folder / "deeper").mkdir()
    (folder / "deeper" / "link.safetensors").symlink_to(tmp_path / "outside" / "part.safetensors")
    (folder / "part.safetensors").unlink()
    model = _model()
    rtp_ext.load_safetensors(
        model, _index(folder, dict.fromkeys(("weight", "bias"), "deeper/link.safetensors")), strict=True
    )
    assert model.weight.eq(7).all() and model.bias.eq(1).all()
