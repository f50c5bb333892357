"""The examples, each on ranks of the harness; some have files of their own."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from harness import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "examples"
LINES = 100
# two plant the failures that they show, one is for models and texts of its user
LONGER = {"recover.py": 160, "replace_ring.py": 200, "finetune.py": 180}


def _call(rank, ranks, name, arguments):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in names.items()}, MASTER_ADDR="localhost")
    spec = importlib.util.spec_from_file_location(f"{name}_example", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, module.main(*arguments)


def _quickstart(rank, ranks):
    return _call(rank, ranks, "quickstart", [])[1]


def test_quickstart():
    for loss, kept in run_ranks(_quickstart, 2):
        whole = 256 * 64 + 2 * 64 + 64 * 256 + 256 + 256 * 256 + 256
        assert loss < 0.9 * torch.tensor(256.0).log() and kept == whole // 2


def _resume(rank, ranks, folder):
    return _call(rank, ranks, "resume", [["--folder", f"{folder}/checkpoint", "--steps", "6"]])[1]


def test_resume_goes_on_with_other_ranks(tmp_path):
    runs = [run_ranks(_resume, ranks, str(tmp_path))[0] for ranks in (2, 3)]
    assert [start for start, _ in runs] == [0, 6]
    (alone,) = run_ranks(_one_run, 1, str(tmp_path))
    together = runs[0][1] + runs[1][1]
    assert torch.allclose(torch.tensor(together), torch.tensor(alone), rtol=1e-4), f"{together}, expected {alone}"
    assert alone[-1] < 0.9 * alone[0]


def _one_run(rank, ranks, folder):
    arguments = ["--folder", f"{folder}/other", "--steps", "12"]
    return _call(rank, ranks, "resume", [arguments])[1][1]


def _several_recipes(rank, ranks):
    """Losses are those of bfloat16, and weights of linear layers take half the bytes."""
    return _call(rank, ranks, "float8", [["--steps", "25"]])[1]


def test_float8():
    for found in run_ranks(_several_recipes, 2):
        loss, sent = found.pop("bfloat16")
        assert loss < 3.0 and len(found) == 3
        for name, (other, bytes_sent) in found.items():
            assert abs(other - loss) < 0.05 and 0.5 < bytes_sent / sent < 0.62, (name, other, loss, bytes_sent / sent)


def _several(rank, ranks, folder):
    """Runs the examples that need at most two ranks, in one start."""
    meta, (loss, kept) = _call(rank, ranks, "safetensors_on_meta", [[]])
    os.makedirs(f"{folder}/plain", exist_ok=True)
    if rank == 0:
        meta.write_small_model(f"{folder}/plain")
    torch.distributed.barrier()
    plain = meta.AutoModelForCausalLM.from_pretrained(f"{folder}/plain")
    ids = (torch.arange(64).view(2, 32) + rank) % 256
    expected = plain(input_ids=ids, labels=ids).loss.item()
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    assert abs(loss - expected) < 1e-4 and kept < 0.55 * whole, f"{loss}, expected {expected}; {kept} of {whole}"
    _, (losses, ring) = _call(rank, ranks, "two_hosts", [["--steps", "10", "--tokens", "64"]])
    assert losses[-1] < 0.8 * losses[0] and ring.hosts == 1
    text = f"{folder}/text"
    Path(text).write_bytes(b"hops hide under products; " * 200)
    arguments = ["--text", text, "--steps", "15", "--output", f"{folder}/trainer", "--hidden", "32"]
    _, (losses, share) = _call(rank, ranks, "trainer", [arguments])
    assert losses[-1] < 0.9 * losses[0] and 0.49 < share < 0.55, f"{losses} {share}"
    for frozen in ("none", "nf4"):
        arguments = ["--steps", "14", "--output", f"{folder}/{frozen}", "--frozen", frozen]
        _, (losses, saved) = _call(rank, ranks, "qlora", [arguments])
        assert losses[-1] < losses[0] - 0.1, losses
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in saved.iterdir()}
    _, (again, _) = _call(rank, ranks, "qlora", [[*arguments, "--resume", f"{saved}/checkpoint-7"]])
    assert again == losses and losses[7] != losses[6], "those before come from the checkpoint"


def test_several(tmp_path):
    pytest.importorskip("peft")
    run_ranks(_several, 2, str(tmp_path), timeout=240.0)


def _muon(rank, ranks):
    return _call(rank, ranks, "muon", [["--text", str(FOLDER.parent / "LICENSE"), "--steps", "40"]])[1]


def test_muon_beats_adamw_at_equal_steps():
    for muon, adamw, sent in run_ranks(_muon, 2):
        assert muon < adamw - 0.05, f"loss {muon} with Muon, {adamw} with AdamW alone"
        assert sent > 0


def _moe(rank, ranks):
    return [_call(rank, ranks, "moe", [["--expert", str(each), "--steps", "12"]])[1] for each in (1, 2, 4)]


def test_moe_sends_other_bytes_and_learns_the_same():
    pytest.importorskip("transformers")
    for whole, both, divided in run_ranks(_moe, 4):
        for losses, _, _ in (both, divided):
            assert torch.allclose(torch.tensor(losses), torch.tensor(whole[0]), rtol=1e-3)
        assert whole[0][-1] < 0.9 * whole[0][0], whole[0]
        assert whole[1] == 0 < both[1] < divided[1], "tokens"
        experts = 4 * 3 * 2 * 8 * 3 * 64 * 128 // 4  # of a shard: 2 layers; hops of forward, backward, and gradients
        assert whole[2] - both[2] == 2 * experts and whole[2] - divided[2] == 3 * experts, "1 and 3 hops fewer"


def test_they_are_short_and_named_where_a_reader_looks():
    which = (FOLDER.parent / "docs" / "which.md").read_text()
    examples = sorted(FOLDER.rglob("*.py"))
    assert len(examples) >= 10
    assert [file.name for file in examples if len(file.read_text().splitlines()) >= LONGER.get(file.name, LINES)] == []
    assert [file.name for file in examples if f"`examples/{file.relative_to(FOLDER)}`" not in which] == []
