"""The programs of docs/frameworks.md run as printed, and train as the frameworks do without rotation."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compatibility.framework_runs import as_torchrun
from compatibility.frameworks import missing
from harness import on_ranks, run_ranks
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "frameworks.md").read_text(), re.DOTALL)
OPTION = ', rotate={"bundle": "recompute"}'


def program(word: str) -> str:
    (found,) = (code for code in PROGRAMS if f"import {word}\n" in code)
    return found


def task() -> dict:
    """What the programs expect of their reader. Each token follows the one before."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model = nn.Sequential(nn.Embedding(64, 32), block, nn.LayerNorm(32), nn.Linear(32, 64))
    starts = torch.randint(64, (128, 1), generator=torch.Generator().manual_seed(1))
    return {"model": model, "data": (starts + torch.arange(9)) % 64}


def watched(code: str) -> tuple[list[float], dict]:
    """Runs a program. Returns its losses, by batch, and its names."""
    names, losses, loss_of = task(), [], nn.functional.cross_entropy

    def watching(*arguments, **keywords):
        loss = loss_of(*arguments, **keywords)
        losses.append(loss.item())
        return loss

    nn.functional.cross_entropy = watching
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "program", "exec"), names)
    finally:
        nn.functional.cross_entropy = loss_of
    return losses, names


def compare(code: str, plain: str) -> dict:
    """Runs a program and its plain form, which must differ in their text and not in their losses."""
    assert code != plain and "rtp_ext" not in plain
    expected, _ = watched(plain)
    losses, names = watched(code)
    assert len(losses) == len(expected) == 2 * 128 // 8 // 2, "batches of this rank in two epochs"
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.8 * losses[0], "control: losses change"
    return names


@on_ranks(2, timeout=120.0)
def test_accelerate(rank, ranks, tmp_path):
    folder = str(tmp_path)
    as_torchrun(rank, ranks)
    os.chdir(folder)
    code = program("RotationAccelerator")
    assert OPTION in code
    plain = code.replace("from rtp_ext.integrations import RotationAccelerator", "from accelerate import Accelerator")
    names = compare(code, plain.replace("RotationAccelerator(", "Accelerator(").replace(OPTION, ""))
    names["accelerator"].wait_for_everyone()
    copy, model = task()["model"], names["model"]
    copy.load_state_dict(torch.load("model.pt"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), copy.get_parameter(name)), name
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    names["accelerator"].load_state("checkpoints/0")
    changed = [
        name for name, parameter in model.named_parameters() if not torch.equal(parameter.full_tensor(), before[name])
    ]
    assert len(changed) == len(before), "the weights after the first epoch"


def _lightning(rank, ranks, folder):
    as_torchrun(rank, ranks)
    os.chdir(folder)
    code = program("RotationStrategy").replace("devices=2", 'devices=2, accelerator="cpu", enable_progress_bar=False')
    plain = code.replace("from rtp_ext.integrations import", "from lightning.pytorch.strategies import")
    plain = plain.replace("import RotationStrategy", "import DDPStrategy")
    compare(code, re.sub(r"RotationStrategy\(.*\)", 'DDPStrategy(process_group_backend="gloo")', plain))
    assert any(Path("last.ckpt").glob("*.distcp")), "each rank has written its shards"


def test_lightning(tmp_path):
    if missing(["lightning"]):
        pytest.skip("lightning is not installed: make frameworks")
    run_ranks(_lightning, 2, str(tmp_path), timeout=300.0)


def steps_of(folder: Path, module: str, dump: str) -> dict[int, tuple[str, str]]:
    """Runs torchtitan's train.py. Returns loss and norm, as printed, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks/compatibility/titan_train.py"), "--module", module]
    command += ["--config", "llama3_debugmodel", "--dump_folder", dump, "--hf_assets_path", "tokenizer"]
    command += ["--dataloader.dataset_path", "data", "--validator.no-enable", "--debug.seed", "3"]
    command += ["--training.steps", "4", "--training.seq_len", "64", "--training.local_batch_size", "2"]
    command += ["--training.mixed_precision_param", "float32", "--checkpoint.enable", "--checkpoint.interval", "2"]
    # torchtitan's process finds the module in its folder, as with -m
    paths = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"step: +(\d+) +loss: +(\S+) +grad_norm: +(\S+)", text)
    return {int(step): (loss, norm) for step, loss, norm in found}


def write_texts(folder: Path) -> None:
    """Writes texts and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = ["shards", "of", "a", "ring", "visit", "every", "rank", "and", "products", "hide", "their", "hops", "there"]
    texts = [" ".join(words[(place * number) % len(words)] for place in range(60)) for number in range(1, 400)]
    for name in ("data", "tokenizer"):
        (folder / name).mkdir()
    (folder / "data" / "texts.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")


IN_8_BITS = """import dataclasses
import rtp_ext
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.llama3 import config_registry

def parallelize(model, **options):
    model = rtp_ext.integrations.parallelize(model, **options)
    rows = rtp_ext.explain(model).parameters
    found = {row.travel for row in rows if row.module_class == "Float8Linear"}
    assert found == {"float8_tensorwise"} and {row.moved for row in rows if row.travel in found} == {"rotated"}, rows
    return model

def llama3_debugmodel():
    config = config_registry.llama3_debugmodel()
    converter = Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"])
    spec = config_registry.model_registry("debugmodel", converters=[converter])
    config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    return config
"""


def test_torchtitan_in_8_bits(tmp_path):
    """The layers of torchtitan's converter rotate with their recipe; without a GPU it has one, of one scale a shard."""
    if missing(["torchtitan", "torchao"]):
        pytest.skip("torchtitan and torchao are not installed")
    write_texts(tmp_path)
    (tmp_path / "rotated.py").write_text(IN_8_BITS)
    losses = steps_of(tmp_path, "rotated", "whole")
    assert sorted(losses) == [1, 2, 3, 4] and float(losses[4][0]) < float(losses[1][0]) - 0.1, losses


def test_torchtitan(tmp_path):
    if missing(["torchtitan"]):
        pytest.skip("torchtitan is not installed: make frameworks")
    write_texts(tmp_path)
    (tmp_path / "rotated.py").write_text(program("parallelize"))
    whole = steps_of(tmp_path, "rotated", "whole")
    assert sorted(whole) == [1, 2, 3, 4] and float(whole[4][0]) < float(whole[1][0]) - 0.1, whole
    # from one checkpoint, since torchtitan draws other initial values on DTensors than on plain tensors
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "sharded/checkpoint/step-2")
    sharded = steps_of(tmp_path, "llama3", "sharded")
    assert sharded == {step: whole[step] for step in (3, 4)}, f"{sharded}, expected {whole}"
