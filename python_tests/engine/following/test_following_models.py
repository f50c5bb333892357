"""The kernel that follows the hops under whole models that fully_rotate has converted: rings over `ce` in the
simulation, a thread for each rank, trained beside the plain model in one process.

Rings of threads have no process groups, so that norms stay whole on every rank, with the gradient of its own batch; the
ranks average those themselves. How they are gathered elsewhere is no pass, and no kernel's business.
"""

import copy
import threading

import pytest
import torch
from reference import chunk, local, random
from simulated_cuda import one_of_ranks, run_threads, skip_without_headers, values
from test_transport_ce import MODES, TIMEOUT
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext import Ring, _native

skip_without_headers()

BF16, WIDTH, VOCABULARY, TOKENS = torch.bfloat16, 48, 96, 5
STEPS, LR = 2, 0.3
# Of the norm of what is expected, for a dozen roundings to bfloat16 on the way; what moves in a step is far above it.
NEAR = 0.05
FOLLOWED, MAKES_WGRADS = "", "it makes weight gradients between its products"


class Model(nn.Module):
    """A table, a block of torch's own, a frozen layer, two layers that are computed again in backward, a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.block(self.table(ids))
        x = x + self.frozen(x)
        x = x + checkpoint(lambda x: self.second(nn.functional.gelu(self.first(x))), x, use_reentrant=False)
        return self.head(self.norm(x))


def plain_model():
    model = Model()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            value = random(*parameter.shape, dtype=torch.float32, seed=10 + number) * WIDTH**-0.5
            parameter.copy_(value + 1 if "norm" in name and name.endswith("weight") else value)
    return model


def batch(rank, step):
    drawn = torch.randint(VOCABULARY, (2, 2, TOKENS), generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn[0], drawn[1].flatten()


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets)


def descend(parameters):
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
                parameter.grad = None


def reference(ranks):
    """Logits of every rank in every step, and the gradients and the parameters of every step."""
    model, logits, gradients, parameters = plain_model(), [], [], []
    for step in range(STEPS):
        made = [model(batch(rank, step)[0]) for rank in range(ranks)]
        (sum(loss_of(each, batch(rank, step)[1]) for rank, each in enumerate(made)) / ranks).backward()
        logits.append([each.detach() for each in made])
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        descend(model.parameters())
        parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return logits, gradients, parameters


def near(found, expected, what, other=None, whole=None):
    """`other`: what is wrong, for a control. `whole`: what `expected` is a part of, which may be 0, as is the gradient
    of a bias of attention's keys."""
    error, size = (found.float() - expected).norm(), (expected if whole is None else whole).norm()
    assert size > 0 and error <= NEAR * size, f"{what}: {error:.5f} of {size:.5f}"
    if other is not None and expected.norm() > 4 * NEAR * size:
        assert (found.float() - other).norm() > NEAR * size, f"{what}: control: another step's would do"


def shard(whole, mine, ranks, rank):
    """The part of a whole tensor that is this rank's, by the shape of what it holds."""
    if mine.shape == whole.shape:
        return whole
    return chunk(whole, ranks, rank, 0 if mine.shape[1:] == whole.shape[1:] else 1)


def work(rank, sim, ranks, id_, mode, here, barrier, told, expected):
    here.transport = sim.ce(id_, rank, ranks, TIMEOUT, None)
    sim.set_ce_modes(here.transport, *MODES[mode])
    ring = Ring.emulated(ranks, rank=rank)
    with one_of_ranks(sim, rank, ring._executor, barrier=barrier):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain_model()), mesh=ring, mp_policy=policy)
        ring._executor.set_follows(True)
        before = sim.calls().get("cudaLaunchKernel", 0)
        logits, gradients, parameters = expected
        for step in range(STEPS):
            what = f"step {step}, rank {rank} of {ranks}"
            ids, targets = batch(rank, step)
            made = model(ids)
            near(made.detach(), logits[step][rank], f"{what}: logits", logits[step - 1][rank])
            loss_of(made, targets).backward()
            told[rank] = {name: p.grad for name, p in model.named_parameters() if "norm" in name}
            barrier.wait(60)
            whole = {name: sum(each[name] for each in told) / ranks for name in told[rank]}
            barrier.wait(60)
            for name, parameter in model.named_parameters():
                if name in whole:
                    parameter.grad.copy_(whole[name])
                if parameter.grad is not None:
                    mine = local(parameter.grad)
                    right, other = (shard(gradients[each][name], mine, ranks, rank) for each in (step, step - 1))
                    near(mine, right, f"{what}: gradient of {name}", other, gradients[step][name])
            assert {name for name, p in model.named_parameters() if p.grad is not None} == gradients[step].keys()
            descend(model.parameters())
        for name, parameter in model.named_parameters():
            right = shard(parameters[-1][name], local(parameter), ranks, rank)
            near(local(parameter.detach()), right, f"{name} after {STEPS} steps")
        passes = ring.persistent_gemms()
        forwards = {name: why for name, why in passes.items() if name.endswith("forward")}
        assert len(forwards) >= 5 and set(forwards.values()) == {FOLLOWED}, passes
        followed = {name for name, why in passes.items() if name.endswith("backward") and why == FOLLOWED}
        assert len(followed) == 1 and "frozen" in followed.pop() and set(passes.values()) == {FOLLOWED, MAKES_WGRADS}
        assert sim.calls()["cudaLaunchKernel"] - before >= STEPS * (len(forwards) + 1)
        ring.close()


@pytest.mark.parametrize(("ranks", "mode"), [(2, "push"), (3, "pull")])
def test_training(sim, monkeypatch, ranks, mode):
    here, told = threading.local(), [None] * ranks
    monkeypatch.setattr(_native, "emulated_transport", lambda *_: here.transport)
    arguments = (sim, ranks, sim.unique_id(), mode, here, threading.Barrier(ranks), told, reference(ranks))
    values(run_threads(work, ranks, *arguments, timeout=200.0))
