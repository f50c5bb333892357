"""load_safetensors: a checkpoint of the plain model, read in slices into a converted one."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from grids import few
from harness import Cases, run_ranks
from live_bytes import LiveBytes
from models import make_model
from reference import assert_same, differs, full, local
from test_convert import assert_same_model
from test_state import COPIES, IN_PLACE, MODELS, empty_rotated, make_gpt, make_tied, most_bytes, rotated, share_loss
from torch import nn

import rtp_ext

safetensors_torch = pytest.importorskip("safetensors.torch")


def save(state: dict[str, torch.Tensor], file: Path) -> Path:
    """Only one of the names of tied weights, as transformers does."""
    seen: set[int] = set()
    single = {n: t for n, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}
    safetensors_torch.save_file(single, file, metadata={"format": "pt"})
    return file


def save_in_two(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Two files and their index, beside a file that the index does not name."""
    folder.mkdir()
    names = sorted(state)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, half in halves.items():
        save({name: state[name].clone() for name in half}, folder / file)
    save({"something": torch.ones(3)}, folder / "consolidated.safetensors")
    weight_map = {name: file for file, half in halves.items() for name in half}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


class Mixed(nn.Module):
    """Fewer rows than ranks, three dimensions, a scalar, buffers of several types, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(5, 2)
        self.table = nn.Embedding(3, 2)
        self.convolution = nn.Conv1d(3, 3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def make_mixed() -> nn.Module:
    torch.manual_seed(3)
    model = Mixed()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.num_batches_tracked.fill_(9)
    return model


def _loads(rank, ranks, folder):
    cases = Cases()
    for make, variant in [*MODELS, (make_gpt, COPIES), (make_mixed, COPIES), (make_mixed, IN_PLACE)]:
        with cases.case(f"{make.__name__} {variant}"):
            plain = make()
            file = Path(folder) / f"{make.__name__}.safetensors"
            with LiveBytes() as live:
                model = empty_rotated(make, variant)
                # a slice goes from the mapped file into the parameter
                most = most_bytes(model, plain)
                live.reset_peak()
                held = live.current
                assert rtp_ext.load_safetensors(model, file) == ([], [])
                peak = live.peak
                assert_same_model(model, plain, 0.0)
                # Not `held`: a thread of gloo may have released buffers of agreements since.
                assert live.peak > live.current, "control: parameters gathered one by one"
            assert peak == held <= most, f"{peak - held} bytes while it was loaded, {held} after"
            for name, buffer in plain.named_buffers():
                ours = model.get_buffer(name)
                assert ours.dtype == buffer.dtype
                assert torch.equal(ours, buffer) or name == "angles", name
        rtp_ext.ring_of(model).close()
    cases.finish()


@pytest.mark.parametrize("ranks", few([1, 3], [1, 2, 3, 4]))
def test_loads_what_was_saved(ranks, tmp_path):
    for make in (make_tied, make_model, make_gpt, make_mixed):
        save(make().state_dict(), tmp_path / f"{make.__name__}.safetensors")
    run_ranks(_loads, ranks, str(tmp_path))


def _into_a_trained_model(rank, ranks, folder):
    """Loads into storage reserved for in_place, between steps: the next step reads the loaded values."""
    plain = make_tied()
    for variant in (COPIES, IN_PLACE):
        model = rotated(make_tied(), variant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            share_loss(model, 0, rank, ranks).backward()
            optimizer.step()
        storages = [local(parameter).data_ptr() for parameter in model.parameters()]
        assert differs(full(model.head.weight), plain.head.weight, 1e-3), "control: nothing was trained"
        rtp_ext.load_safetensors(model, Path(folder) / "tied.safetensors")
        assert storages == [local(parameter).data_ptr() for parameter in model.parameters()]
        assert model.head.weight is model.embed.weight
        assert_same_model(model, plain, 0.0)
        assert_same(share_loss(model, 1), share_loss(plain, 1), 1e-10, "loss")
        rtp_ext.ring_of(model).close()


def test_loads_into_a_trained_model(tmp_path):
    save(make_tied().state_dict(), tmp_path / "tied.safetensors")
    run_ranks(_into_a_trained_model, 3, str(tmp_path))


def _files(rank, ranks, folder):
    folder = Path(folder)
    plain = make_model()
    halves = sorted((folder / "two").glob("model-*.safetensors"))
    forms = {
        "a path": folder / "one" / "model.safetensors",
        "a name": str(folder / "one" / "model.safetensors"),
        "a list": halves,
        "names": map(str, halves),
        "an index": folder / "two" / "model.safetensors.index.json",
        "a directory with an index": folder / "two",
        "a directory with model.safetensors": str(folder / "one"),
        "a directory with other files": folder / "others",
    }
    for form, files in forms.items():
        model = empty_rotated(make_model, COPIES)
        assert rtp_ext.load_safetensors(model, files) == ([], []), form
        assert_same_model(model, plain, 0.0)
    # Converted to the parameter's dtype, from more or less precise ones.
    for dtype in (torch.bfloat16, torch.float32):
        model = empty_rotated(lambda dtype=dtype: make_model(dtype), COPIES)
        rtp_ext.load_safetensors(model, folder / "two")
        assert_same_model(model, copy.deepcopy(plain).to(dtype), 0.0)
    model = empty_rotated(make_model, COPIES)
    rtp_ext.load_safetensors(model, folder / "half.safetensors")
    assert_same_model(model, copy.deepcopy(plain).bfloat16().double(), 0.0)
    assert differs(full(model.head.weight), plain.head.weight, 1e-10), "control: nothing was rounded"


def test_files(tmp_path):
    state = make_model().state_dict()
    for name, file in (("one", "model.safetensors"), ("others", "weights.safetensors")):
        (tmp_path / name).mkdir()
        save(state, tmp_path / name / file)
    save({"something": torch.ones(3)}, tmp_path / "one" / "consolidated.safetensors")
    save_in_two(state, tmp_path / "two")
    save({name: value.bfloat16() for name, value in state.items()}, tmp_path / "half.safetensors")
    run_ranks(_files, 2, str(tmp_path))


def _refusals(rank, ranks, folder):
    cases = Cases()
    folder = Path(folder)
    model = rotated(make_tied(), COPIES)
    before = copy.deepcopy(model.state_dict())
    state = {name: value.clone() for name, value in make_tied().state_dict().items() if name != "head.weight"}

    def written(**changes) -> Path:
        """One file per rank and call. None leaves a name out."""
        changed = {**state, **{name.replace("__", "."): value for name, value in changes.items()}}
        written.count += 1
        path = folder / f"{rank}-{written.count}.safetensors"
        return save({name: value for name, value in changed.items() if value is not None}, path)

    written.count = 0
    one, row = torch.ones(1), torch.ones(1, 10)
    refused = {
        "missing": (written(norm__weight=None), "missing: norm.weight; unexpected: none"),
        "missing tied": (written(embed__weight=None), "missing: embed.weight, head.weight"),
        "unexpected": (written(extra=one), "missing: none; unexpected: extra"),
        "shape": (written(embed__weight=row), "embed.weight: expected shape (19, 10), got (1, 10)"),
        "dimensions": (written(norm__weight=row), "norm.weight: expected shape (10,), got (1, 10)"),
        "scalar": (written(temperature=one), "temperature: expected shape (), got (1,)"),
        "dtype": (written(norm__bias=torch.ones(10) * 1j), "norm.bias: expected torch.float64, got torch.complex64"),
        "no file": (folder / "none.safetensors", "none.safetensors"),
        "no list": ([], "got none"),
        "twice": ([written(), written()], "in one of the files"),
        "no safetensors": (folder / "text.safetensors", "expected a safetensors file"),
        "no index": (folder / "wrong.json", "weight_map"),
        "no JSON": (folder / "text.json", "weight_map"),
        "index of another": (folder / "other.json", "expected norm.weight in"),
        "empty directory": (folder / "empty", "expected .safetensors files"),
    }
    for name, (files, message) in refused.items():
        expected = FileNotFoundError if name == "no file" else ValueError
        with cases.case(name), pytest.raises(expected, match=re.escape(message)):
            rtp_ext.load_safetensors(model, files)
    for name, value in model.state_dict().items():
        assert torch.equal(local(value), local(before[name])), f"{name} was written to"
    with cases.case("not strict"):
        files = written(norm__weight=None, extra=one)
        assert rtp_ext.load_safetensors(model, files, strict=False) == (["norm.weight"], ["extra"])
        with pytest.raises(ValueError, match="shape"):
            rtp_ext.load_safetensors(model, written(embed__weight=row), strict=False)
    with cases.case("meta"):
        with torch.device("meta"):
            empty = make_tied()
        with pytest.raises(ValueError, match="to_empty"):
            rtp_ext.load_safetensors(rotated(empty, COPIES), written())
    with cases.case("no module"), pytest.raises(TypeError, match=r"nn\.Module"):
        rtp_ext.load_safetensors(state, written())
    cases.finish()


def test_what_does_not_fit_is_refused(tmp_path):
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "wrong.json").write_text("[]")
    save({"something": torch.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "other.json").write_text(json.dumps({"weight_map": {"norm.weight": "other.safetensors"}}))
    (tmp_path / "empty").mkdir()
    run_ranks(_refusals, 2, str(tmp_path))


def _resident() -> dict[str, int]:
    """Bytes of this process in memory, mapped files included: now, and the most since `_forget_most`."""
    status = Path("/proc/self/status").read_text()
    return {key: 1024 * int(re.search(rf"{key}:\s*(\d+)", status).group(1)) for key in ("VmRSS", "VmHWM")}


def _growth(action) -> int:
    """How far resident memory grows at most while `action` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident()["VmRSS"]
    action()
    return _resident()["VmHWM"] - before


FEATURES = 2048  # 16 MiB of weights


def _pages(rank, ranks, file):
    """Measures the reads of a file by the pages that become resident: this rank's rows and no others."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False))
    model = rotated(model, COPIES).to_empty(device="cpu")
    for parameter in model.parameters():
        local(parameter).detach().zero_()  # resident from now on
    rtp_ext.load_safetensors(rotated(nn.Sequential(nn.Linear(2, 2)), COPIES), Path(file).with_name("small.safetensors"))
    share = FEATURES * FEATURES * 4 // ranks
    slack = 3 << 20  # code that runs for the first time is mapped, too
    grown = _growth(lambda: rtp_ext.load_safetensors(model, file))
    assert grown <= share + slack, f"{grown} bytes for a share of {share}"
    assert local(model[0].weight)[0, 0].item() == rank * (FEATURES // ranks)
    whole = _growth(lambda: [tensor.sum() for tensor in safetensors_torch.load_file(file).values()])
    assert whole > share + slack, "control: the whole file"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_only_this_ranks_rows_are_read(tmp_path):
    weight = torch.arange(float(FEATURES)).unsqueeze(1).repeat(1, FEATURES)
    file = save({"0.weight": weight}, tmp_path / "large.safetensors")
    save(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "small.safetensors")
    run_ranks(_pages, 4, str(file))


def test_works_without_ranks(tmp_path, caplog):
    """A plain model, or one on an emulated ring, whose shards are plain tensors."""
    plain = make_mixed()
    file = save(plain.state_dict(), tmp_path / "model.safetensors")
    twin = Mixed()
    with caplog.at_level("INFO", logger="rtp_ext"):
        rtp_ext.load_safetensors(twin, file)
    assert "left as they are: buffers angles" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), plain.parameters(), strict=True))
    emulated = rtp_ext.fully_rotate(Mixed(), mesh=rtp_ext.Ring.emulated(2))
    with pytest.raises(ValueError, match=r"narrow\.weight: expected shape \(1, 5\), got \(2, 5\)"):
        rtp_ext.load_safetensors(emulated, file)


def test_safetensors_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"rtp-ext\[hf\]"):
        rtp_ext.load_safetensors(nn.Linear(2, 2), tmp_path / "model.safetensors")
