"""The device of a ring that gets a process group instead of a mesh; and the programs for new users on a faked GPU."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

import rtp_ext
from rtp_ext.ring import mesh

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ("quickstart", "diloco", "muon", "pipeline", "replicas", "resume", "tensor", "two_hosts")
CALLS = {"quickstart": "main()", "pipeline": "train(1)"}
BACKENDS = {  # what torch records for a group: the device of a ring where there is a GPU
    "cuda:nccl": "cuda",  # also that of init_process_group() on a machine with a GPU
    "cpu:gloo,cuda:nccl": "cuda",
    "cpu:gloo,cuda:gloo": "cpu",
    "cpu:nccl,cuda:gloo": "cpu",
    "cpu:gloo": "cpu",
}


@pytest.mark.parametrize("gpu", [True, False])
def test_the_backend_for_gpus_decides(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    for backends, device in BACKENDS.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None, backends=backends: backends)
        assert mesh._device_of(None) == (device if gpu else "cpu"), backends


class Reached(Exception):
    """A program has come to its conversion."""


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that a program asks for on a GPU, and notes that it asked."""

    asked = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def cpu(value):
            if not isinstance(value, (str, torch.device)) or not str(value).startswith("cuda"):
                return value
            self.asked += 1
            return torch.device("cpu")

        if function is torch.device:
            return function(*args, **(kwargs or {}))
        kwargs = {name: cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(cpu, args), **kwargs)


def _programs() -> dict[str, str]:
    readme, tutorial = ((ROOT / name).read_text() for name in ("README.md", "docs/tutorial.md"))
    (quick,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    task, train, *_ = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
    train = train.replace("from torch.nn.parallel import DistributedDataParallel", "import rtp_ext")
    train = train.replace("model = DistributedDataParallel(model)", "rtp_ext.fully_rotate(model)")
    train = train.replace("from task import count, loss_of, make", "")
    examples = {name: (ROOT / "examples" / f"{name}.py").read_text() for name in EXAMPLES}
    return {"README": quick, "tutorial": f"{task}\n{train}"} | {
        name: f"{code.partition('if __name__')[0]}\n{CALLS.get(name, 'main([])')}" for name, code in examples.items()
    }


def _on_a_faked_gpu(rank, ranks):
    """Runs the programs up to their conversions; returns the device of the ring, the chosen GPUs, and whether tensors
    were asked for on a GPU."""
    os.environ["LOCAL_RANK"] = str(rank)
    chosen: list[int] = []
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: chosen.append(device if isinstance(device, int) else device.index)
    dist.init_process_group = lambda *_, **__: None  # the ranks have a group
    dist.get_backend_config = lambda group=None: "cuda:nccl"  # of an undefined backend on a machine with a GPU
    kinds: list[str] = []
    make = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *args, **named: kinds.append(kind) or make("cpu", *args, **named)

    def reached(model, mesh=None, **_):
        raise Reached(kinds[-1] if mesh is not None else rtp_ext.ring.mesh._device_of(None))

    rtp_ext.fully_rotate = reached
    seen = {}
    for name, code in _programs().items():
        chosen.clear()
        with OnCpu() as mode:
            try:
                exec(compile(code, name, "exec"), {"__name__": name, "__file__": __file__})
            except Reached as end:
                seen[name] = (str(end), list(chosen), mode.asked > 0)
    return seen


def test_programs_choose_their_gpu():
    for rank, seen in enumerate(run_ranks(_on_a_faked_gpu, 2)):
        assert seen == dict.fromkeys(_programs(), ("cuda", [rank], True))
