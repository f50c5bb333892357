"""Products in 8 bits with the other options of a ring and of training, against the same layers in one process."""

import torch
from code_reference import scaled
from harness import on_ranks
from pretended_hosts import pretend_hosts
from programs.workers import Workers, diloco, local_sgd, nothing
from reference import assert_same, differs, full
from selective import POLICIES, region
from test_recipe import TOLERANCE, batch, loss_of, make, train, train_plain, wide_layers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rtp_ext
from rtp_ext.outer import AllReduce, DiLoCo, LocalSGD
from rtp_ext.outer.local_training.diloco import nesterov

# Of the largest magnitude, where gradients travel in 8 bits too.
ROUNDED = 6e-2
RINGS = (
    {"transport": "shm+tcp", "route": "two-level"},
    {"transport": "c10d", "route": "gather", "collective": True},
    {"transport": "c10d", "route": "direct", "group": 2},
    {"transport": "tcp"},
    {"transport": "shm+tcp"},
    {"transport": "shm", "group": 4, "buffers": "lean"},
    {"transport": "shm", "gradient_travel": "int8", "gradient_route": "direct"},
    {"transport": "shm", "travel": "bfloat16"},  # of weights that stay wide
    {"transport": "shm", "travel": "int8"},
    {"transport": "shm", "checksum": True},
)


def compare(model, plain, rank, what, tolerance=TOLERANCE):
    """All ranks gather, and then each compares."""
    wholes = [full(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        outputs = model(batch(rank, 90))
        assert_same(outputs, plain(batch(rank, 90)), tolerance, f"{what}: outputs")
    for (name, expected), whole in zip(plain.named_parameters(), wholes, strict=True):
        assert_same(whole, expected, tolerance, f"{what}: {name}")


def fresh(model, rank, what):
    """Compares with codes of the present weights."""
    wholes = [full(parameter) for parameter in model.parameters()]
    plain = scaled(make(), "float8_rowwise", 2)
    with torch.no_grad():
        for parameter, whole in zip(plain.parameters(), wholes, strict=True):
            parameter.copy_(whole)
        assert_same(model(batch(rank, 91)), plain(batch(rank, 91)), TOLERANCE, f"{what}: codes of these weights")


@on_ranks(4, timeout=300.0)
def test_rings(rank, ranks, cases):
    for name, rings in (("float8_rowwise", RINGS), ("mxfp8", RINGS[:3])):
        plain = train_plain(scaled(make(), name, ranks, wide_layers(name, ranks)), ranks, 2)
        for options in rings:
            pretend_hosts(rank, 2 if "+" in options["transport"] else ranks)
            with cases.case(f"{name}, {options}"), rtp_ext.Ring(timeout=60.0, **options) as ring:
                model = train(rtp_ext.fully_rotate(make(), recipe=name, mesh=ring), rank, 2)
                compare(model, plain, rank, "trained", ROUNDED if "gradient_travel" in options else TOLERANCE)
    with cases.case("control: no training"):
        assert differs(scaled(make(), name, ranks)(batch(rank, 90)), plain(batch(rank, 90)), TOLERANCE)
        assert differs(make().norm.bias, plain.norm.bias, ROUNDED)


POLICIES_OF_REPLICAS = {
    "all-reduce": (AllReduce, nothing),
    "local SGD": (lambda: LocalSGD(2), local_sgd(2)),
    "DiLoCo": (lambda: DiLoCo(2), diloco(2, nesterov)),
}


@on_ranks(4, timeout=300.0)
def test_replicas(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ring"))
    dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
    for what, (policy, rule) in POLICIES_OF_REPLICAS.items():
        with cases.case(what):
            model = rtp_ext.fully_rotate(
                make(), recipe="float8_rowwise", mesh=mesh, dims=dims, outer=policy(), timeout=60.0
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            if rule is not nothing:
                rtp_ext.outer_of(model).attach(optimizer)
            alone = rule is nothing
            workers = Workers([scaled(make(), "float8_rowwise", 2) for _ in range(1 if alone else 2)], rule)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.5) for each in workers.models]
            apart = [scaled(make(), "float8_rowwise", 2)]
            for step in range(3):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                for number, (each, of_it) in enumerate(zip(workers.models, optimizers, strict=True)):
                    seen = range(ranks) if alone else range(2 * number, 2 * number + 2)
                    for other in seen:
                        (loss_of(each, other, step) / len(seen)).backward()
                    of_it.step()
                    of_it.zero_grad()
                workers.end_step()
                compare(model, workers.models[0 if alone else rank // 2], rank, f"step {step}")
                fresh(model, rank, f"step {step}")
            assert differs(apart[0](batch(rank, 90)), workers.models[0](batch(rank, 90)), ROUNDED), "control"
            rtp_ext.ring_of(model).close()


@on_ranks(2, timeout=300.0)
def test_copies_of_weights(rank, ranks, cases):
    model = rtp_ext.fully_rotate(make(), recipe="float8_rowwise", timeout=60.0)
    before = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    before = {name: value.clone() for name, value in before.items()}
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    plain = scaled(make(), "float8_rowwise", ranks)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        train(model, rank, 1, step)
        train_plain(plain, ranks, 1, step)
        averaged.update_parameters(model)
        expected.update_parameters(plain)
        with cases.case(f"moving average, step {step}"):
            compare(averaged.module, expected.module, rank, "average")
            fresh(averaged.module, rank, "average")
            assert differs(averaged(batch(rank, 90)), model(batch(rank, 90)), 2e-2) or step == 0, "control"
    with cases.case("set_model_state_dict"):
        trained = model(batch(rank, 90)).detach()
        set_model_state_dict(model, before, options=StateDictOptions(full_state_dict=True))
        compare(model, scaled(make(), "float8_rowwise", ranks), rank, "loaded")
        assert differs(model(batch(rank, 90)), trained, 2e-2), "control"
    rtp_ext.ring_of(model).close()


class Regions(nn.Module):
    """The net of other tests with a region of activation checkpointing."""

    def __init__(self, policy):
        super().__init__()
        self.net, self.policy = make(), policy

    def forward(self, x):
        return self.net.last(region(self.net.inner, self.policy, x))


@on_ranks(2, timeout=300.0)
def test_selective_checkpointing(rank, ranks, cases):
    with rtp_ext.Ring(timeout=60.0) as ring:
        plain = train_plain(scaled(make(), "float8_rowwise", ranks), ranks, 2)
        for policy in (*POLICIES, None):
            with cases.case(f"{policy}"):
                model = rtp_ext.fully_rotate(Regions(policy), recipe="float8_rowwise", mesh=ring)
                made = ring.communicator.executor.codes()[1]
                train(model, rank, 2)
                # of four layers, of which the first sends no weights in backward
                assert ring.communicator.executor.codes()[1] - made == 2 * 7, "once a step, layer and plane"
                compare(model, plain, rank, "trained")
