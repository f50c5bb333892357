"""Experts that other code has divided and dispatches tokens to, as torchtitan's ExpertParallel: their shards rotate."""

import dataclasses
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import on_ranks
from hf_models import check_parameters, fill
from logs import logged
from reference import adamw, assert_same, differs, random
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

import rtp_ext
from rtp_ext import RotationDims
from rtp_ext.nn.grouped import RotatedGroupedExperts

D, H, E, K = 6, 5, 8, 2
TOLERANCE = 1e-11
DIMS = RotationDims(ring="ring", expert="expert")
MESHES = (  # torchtitan's order of dimensions first
    (("ring", "expert"), (2, 2)),
    (("expert", "ring"), (2, 2)),
    (("ring", "expert"), (4, 1)),
    (("ring", "expert"), (1, 4)),
)


class GroupedExperts(nn.Module):
    """Experts of torchtitan's contract: rows in the order of experts and their numbers, three stacked weights."""

    def __init__(self, count=E):
        super().__init__()
        self.num_experts = count
        self.w1 = nn.Parameter(torch.empty(count, H, D, dtype=torch.float64))
        self.w2 = nn.Parameter(torch.empty(count, D, H, dtype=torch.float64))
        self.w3 = nn.Parameter(torch.empty(count, H, D, dtype=torch.float64))

    def act(self, x):
        return F.silu(x)

    def forward(self, x, num_tokens_per_expert):
        counts = [int(count) for count in num_tokens_per_expert]
        rows = []
        for expert, own in enumerate(x[: sum(counts)].split(counts)):
            rows.append((self.act(own @ self.w1[expert].t()) * (own @ self.w3[expert].t())) @ self.w2[expert].t())
        return torch.cat([*rows, x.new_zeros(len(x) - sum(counts), x.shape[1])])


class OtherExperts(GroupedExperts):
    def act(self, x):
        return F.gelu(x)


class ExpertParallel(ParallelStyle):
    """Experts in equal runs on the ranks of a mesh; hooks send rows there and back, with a row of padding."""

    def __init__(self, dim=0, hooks=True):
        super().__init__()
        self.dim, self.hooks = dim, hooks

    def _apply(self, module, mesh):
        def cut(name, part, mesh):
            for key, parameter in [*part._parameters.items()]:
                part.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(self.dim)])))

        hooks = {"input_fn": self.dispatch, "output_fn": self.combine} if self.hooks else {}
        return distribute_module(module, mesh, cut, **hooks)

    def dispatch(self, module, inputs, mesh):
        x, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            theirs = wait_tensor(all_to_all_single(counts.contiguous(), None, None, group)).view(ranks, -1)
            self.leaving, self.arriving = (each.view(ranks, -1).sum(1).int().tolist() for each in (counts, theirs))
            experts = torch.arange(theirs.shape[1]).repeat(ranks).repeat_interleave(theirs.flatten().long())
            self.order = experts.argsort(stable=True)
        rows = all_to_all_single_autograd(x, self.arriving, self.leaving, group)
        return F.pad(rows[self.order], (0, 0, 0, 1)), theirs.sum(0)

    def combine(self, module, rows, mesh):
        back = torch.empty_like(rows[:-1]).index_copy(0, self.order, rows[:-1])
        return wait_tensor(all_to_all_single_autograd(back, self.leaving, self.arriving, mesh.get_group()))


class Block(nn.Module):
    def __init__(self, experts=GroupedExperts, count=E):
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=torch.float64)
        self.router = nn.Linear(D, count, bias=False, dtype=torch.float64)
        self.experts = experts(count)
        self.shared = nn.Linear(D, D, dtype=torch.float64)
        self.outside = None  # style and mesh of a dispatch that is not in hooks

    def forward(self, x, index):
        scores = self.router(self.norm(x)).softmax(-1).gather(1, index).flatten()
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        rows, counts = x[order // index.shape[1]], torch.zeros(self.router.out_features, dtype=x.dtype)
        counts = counts.scatter_add(0, chosen, torch.ones_like(scores.detach()))  # numbers of histc
        if self.outside is None:
            rows = self.experts(rows, counts)
        else:
            style, mesh = self.outside
            rows = style.combine(None, self.experts(*style.dispatch(None, (rows, counts), mesh)), mesh)
        return x + self.shared(x).index_add(0, order // index.shape[1], rows * scores[order].unsqueeze(1))


class Model(nn.Module):
    def __init__(self, checkpointed=False, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x, index):
        for block in self.blocks:
            x = checkpoint(block, x, index, use_reentrant=False) if self.checkpointed else block(x, index)
        return x


def make(**options):
    return fill(Model(**options))


def parallel(model, mesh, style=ExpertParallel, **options):
    """The model after expert parallelism, as torchtitan applies it."""
    for block in model.blocks:
        made = style(**options)
        parallelize_module(block.experts, mesh["expert"], made)
        block.outside = None if made.hooks else (made, mesh["expert"])
    return model


def rotated(model, mesh, dims=DIMS, **options):
    return rtp_ext.fully_rotate(model, mesh=mesh, dims=dims, timeout=60, **options)


KINDS = ("usual", "empty", "crowded", "skewed")


def batch(rank, kind, dtype=torch.float64):
    tokens = 0 if kind == "empty" and rank % 2 else 2 + 3 * rank
    x = random(tokens, D, dtype=torch.float64, seed=10 * rank + KINDS.index(kind)).to(dtype)
    index = torch.rand(tokens, E, generator=torch.Generator().manual_seed(rank)).argsort(1)[:, :K]
    if kind == "crowded":  # one expert alone: most ranks get no tokens
        index = torch.full_like(index[:, :1], E - 1)
    elif kind == "skewed":
        index = index % (1 + rank)
    return x.requires_grad_(), index


def total(outputs):
    return sum((y * random(*y.shape, dtype=torch.float64, seed=7)).sum() for y in outputs)


def clipped(model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def step_together(cases, label, rank, ranks, model, plain, optimizers, kind):
    with cases.case(f"{label} {kind}"):
        batches = [batch(each, kind) for each in range(ranks)]
        outputs = [plain(*each) for each in batches]
        mine = batch(rank, kind)
        y = model(*mine)
        assert_same(y, outputs[rank], TOLERANCE, "output", 1.0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (total(outputs) / ranks).backward()
        total([y]).backward()
        assert_same(mine[0].grad, ranks * batches[rank][0].grad, TOLERANCE, "input gradient", 1.0)
        check_parameters(model, plain, lambda parameter: parameter.grad)
        if kind == "usual":  # controls
            assert differs(y, plain(batches[rank][0], (batches[rank][1] + 1) % E), 1e-3)
            w1 = [each.blocks[1].experts.w1.grad for each in (model, plain)]
            assert differs(w1[0].full_tensor(), 2 * w1[1], 1e-3)
        assert_same(clipped(model), clipped(plain), TOLERANCE, "norm")
        for optimizer in optimizers:
            optimizer.step()
        check_parameters(model, plain)


def sent(model, channel):
    return sum(ring.bytes_sent(channel) for ring in rtp_ext.ring_of(model).rings)


@on_ranks(4, timeout=300)
def test_dispatched_experts(rank, ranks, cases):
    meshes = [init_device_mesh("cpu", sizes, mesh_dim_names=names) for names, sizes in MESHES]
    ways = [(mesh, {}) for mesh in meshes]
    ways += [(meshes[1], {"hooks": False, "bundle": "recompute"}), (meshes[0], {"checkpointed": True})]
    kept = []
    for mesh, options in ways:
        label = f"{mesh.mesh_dim_names} {tuple(mesh.shape)} {options}"
        hooks, checkpointed = options.get("hooks", True), options.get("checkpointed", False)
        plain = make()
        model = parallel(make(checkpointed=checkpointed), mesh, hooks=hooks)
        model = rotated(model, mesh, bundle=options.get("bundle", True))
        assert all(isinstance(block.experts, RotatedGroupedExperts) for block in model.blocks)
        optimizers = [adamw(part.parameters(), lr=0.05) for part in (model, plain)]
        for kind in KINDS:
            step_together(cases, label, rank, ranks, model, plain, optimizers, kind)
        kept.append((model, plain))

    first, plain = kept[0]
    with cases.case("explain, and bytes by closed form"):
        plan = rtp_ext.explain(first)
        before = [sent(first, channel) for channel in ("weight", "gradient")]
        total([first(*batch(rank, "usual"))]).backward()
        totals = plan.totals
        assert sent(first, "weight") - before[0] == totals["forward_bytes"] + totals["backward_bytes"]
        assert sent(first, "gradient") - before[1] == totals["gradient_bytes"]
        row = next(row for row in plan.parameters if row.name == "blocks.0.experts.w3")
        # Each rank sends 1 of the 2 shards of its part: 2 experts of H x D numbers.
        assert (row.moved, row.placements, row.shard_sizes) == ("rotated", ("Shard(dim=0)",), (2, 2, 2, 2))
        assert row.forward_bytes == 2 * H * D * 8

    with cases.case("DCP to other meshes"):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        dcp.save(get_model_state_dict(first), checkpoint_id=folder[0])
        for model, _ in kept[1:4]:
            state = get_model_state_dict(model)
            for each in state.values():
                each.zero_()
            dcp.load(state, checkpoint_id=folder[0])
            set_model_state_dict(model, state)
            check_parameters(model, plain)
        assert len(rtp_ext.optim.matrices(first)[0]) == 2 * (3 + 2)
    for model, _ in kept:
        rtp_ext.ring_of(model).close()

    with cases.case("from the meta device, in another dtype"):
        with torch.device("meta"):
            model = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.float32)
        model = rotated(parallel(model, meshes[0]), meshes[0], mp_policy=policy).to_empty(device="cpu")
        plain = make()
        rtp_ext.init_weights(model, lambda part: part is model or copy_values(part, plain, model))
        y = model(*batch(rank, "usual"))
        assert y.dtype == torch.float32
        assert_same(y.double(), plain(*batch(rank, "usual")), 1e-5, "output")
        rtp_ext.ring_of(model).close()

    with cases.case("explain on a ring of undivided experts"):
        model, mesh = parallel(make(), meshes[2]), meshes[2]
        hidden = len(rtp_ext.optim.matrices(model)[0])
        with rtp_ext.Ring(mesh, dims=DIMS, timeout=60) as ring:
            plan = rtp_ext.explain(model.float(), mesh=ring, recipe="float8_rowwise")
            rows = {row.name: row for row in plan.parameters}
            assert rows["blocks.0.experts.w1"].moved == "rotated"
            narrow = [name for name, row in rows.items() if row.travel == "float8_rowwise"]
            assert narrow == [f"blocks.{block}.shared.weight" for block in range(2)], "routers stay wide"
            assert hidden == len(rtp_ext.optim.matrices(rtp_ext.fully_rotate(model, mesh=ring))[0]) == 10

    with cases.case("experts of other values along the ring"):
        model = parallel(make(), meshes[0])
        with torch.no_grad():
            model.blocks[1].experts.w3.to_local().add_(rank // 2)
        _, lines = logged(rotated, model, meshes[0])
        warnings = [text for level, text in lines if level == "WARNING" and "experts.w3" in text]
        assert len(warnings) == (rank == 0), lines
        rtp_ext.ring_of(model).close()
        model = parallel(make(), meshes[0])
        ignored = [*model.blocks[1].experts.parameters()]
        with torch.no_grad():
            ignored[0].to_local().add_(rank // 2)
        _, lines = logged(rotated, model, meshes[0], ignored_params=ignored)
        assert not any("experts.w1" in text for level, text in lines if level == "WARNING"), lines
        rtp_ext.ring_of(model).close()

    other_mesh = {"dims": RotationDims(ring="expert", expert="ring")}
    refused = {
        r"FSDPModule manages": {"sharded": True},
        r"\(Shard\(dim=1\),\)": {"dim": 1},
        r"a DTensor with placements \(Shard\(dim=0\),\) on a mesh \('expert',\)": other_mesh,
        r'experts that are Shard\(0\) over mesh\["ep"\]': {"dims": RotationDims(ring=("ring", "expert"))},
        r"experts that were divided so take RotationDims\(expert=": {"dims": RotationDims(ring="ring")},
        r"blocks.0.experts .*expected hooks that dispatch its tokens": {"hooks": False},
        r"over ranks \[\d, \d\]: its forward does not compute w2": {"experts": OtherExperts},
        r"a multiple of 4 experts, as many on every rank": {"count": 6},
        r"expected no expert_capacity, .* got 3": {"dims": dataclasses.replace(DIMS, expert_capacity=3)},
        r"blocks.0.experts .*all of its parameters in ignored_params, or none, got w2": {"ignored": True},
        r"over ranks .*: the option gather names it": {"gather": ["blocks.0.experts"]},
    }
    for what, given in refused.items():
        mesh = meshes[0]
        model = Model(**{key: given[key] for key in ("experts", "count") if key in given})
        parallel(model, mesh, **{key: given[key] for key in ("dim", "hooks") if key in given})
        if "sharded" in given:
            fully_shard(model.blocks[0].experts, mesh=mesh["ring"])
        options = {key: given[key] for key in ("dims", "gather") if key in given}
        if "ignored" in given:
            options["ignored_params"] = [model.blocks[0].experts.w1]
        with cases.case(f"refused: {what}"), pytest.raises(ValueError, match=what):
            rotated(model, mesh, **options)


def copy_values(part, plain, model):
    name = next(name for name, each in model.named_modules() if each is part)
    state = plain.get_submodule(name).state_dict()
    part.load_state_dict({key: value for key, value in state.items() if key in part._parameters}, strict=False)
