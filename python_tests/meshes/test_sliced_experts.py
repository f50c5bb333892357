"""Divided experts of which there are fewer than ranks, cut along their hidden features, against the plain module in one
process on the batches of all ranks."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hf_models import check_parameters, fill
from models import train
from reference import adamw, assert_same, differs, random
from test_divided_experts import (
    DIFFERENCES,
    DIMS,
    TOLERANCE,
    adapted,
    checkpointed,
    compare_trained,
    loss_of,
    make,
    mean_loss,
    moves,
    same_as,
    sent_by,
    total,
    within,
)
from torch.distributed.device_mesh import init_device_mesh

import rtp_ext
from rtp_ext import Ring
from rtp_ext.nn import RotatedExperts
from rtp_ext.outer import ZeroOuter
from rtp_ext.ring.expert_ring import whole_experts

D = 6
# kind, mesh, sizes, experts, hidden features, capacity
LAYERS = {
    4: (
        ("mixtral", ("ring", "expert"), (2, 2), 3, 5, None),
        ("mixtral", ("expert", "ring"), (2, 2), 1, 7, None),
        ("gpt_oss", ("ring", "expert"), (2, 2), 5, 3, None),
        ("mixtral", ("expert", "ring"), (4, 1), 3, 2, None),
    ),
    6: (
        ("mixtral", ("ring", "expert"), (3, 2), 2, 7, None),
        ("gpt_oss", ("ring", "expert"), (3, 2), 2, 5, None),
        ("plain", ("expert", "ring"), (2, 3), 2, 4, None),
        ("mixtral", ("expert", "ring"), (2, 3), 3, 7, 2),
    ),
}


class Plain(torch.nn.Module):
    """Stacked experts in three layouts: gate over up, GPT-OSS's, and without a gate, with biases."""

    def __init__(self, kind, count, hidden):
        super().__init__()
        self.kind, self.clamp = kind, (1.702, 7.0)
        up, shapes = "up_proj" if kind == "plain" else "gate_up_proj", {}
        rows = hidden if kind == "plain" else 2 * hidden
        shapes[up] = (count, D, rows) if kind == "gpt_oss" else (count, rows, D)
        shapes[f"{up}_bias"] = (count, rows)
        shapes["down_proj"] = (count, hidden, D) if kind == "gpt_oss" else (count, D, hidden)
        shapes["down_proj_bias"] = (count, D)
        for name, shape in shapes.items():
            if kind != "mixtral" or not name.endswith("bias"):
                self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=torch.float64)))

    def forward(self, x, index, weights):
        up, down = (next(p for n, p in self.named_parameters() if n in names) for names in (UPS, ("down_proj",)))
        count, biases = len(down), {n.split("_")[0]: p for n, p in self.named_parameters() if n.endswith("bias")}
        if self.kind == "gpt_oss":
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        chosen, weights = index.clamp(max=count - 1), weights.where(index < count, 0)
        values = torch.einsum("td,tkod->tko", x, up[chosen])
        if biases:
            values = values + next(biases[key] for key in ("gate", "up") if key in biases)[chosen]
        if self.kind == "plain":
            hidden = torch.nn.functional.silu(values)
        elif self.kind == "mixtral":
            gate, up = values.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
        else:
            gate, up = values[..., ::2].clamp(max=self.clamp[1]), values[..., 1::2].clamp(-self.clamp[1], self.clamp[1])
            hidden = (up + 1) * gate * torch.sigmoid(self.clamp[0] * gate)
        y = torch.einsum("tko,tkdo->tkd", hidden, down[chosen])
        if biases:
            y = y + biases["down"][chosen]
        return (y * weights.unsqueeze(-1)).sum(1)


UPS = ("gate_up_proj", "up_proj")


def rotated(plain, ring, count, hidden):
    """The same parameters on a ring."""
    activation = "silu" if plain.kind == "plain" else "swiglu"
    options = {"activation": activation, "bias": plain.kind != "mixtral", "dtype": torch.float64}
    layer = RotatedExperts(count, D, hidden, ring=ring, **options)
    if plain.kind == "gpt_oss":
        import transformers as hf
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = hf.GptOssConfig(hidden_size=D, intermediate_size=hidden, num_local_experts=count)
        layer = RotatedExperts.from_module(GptOssExperts(config).double(), ring)
    state = plain.state_dict()
    rtp_ext.init_weights(layer, lambda part: part.load_state_dict(state))
    return layer


def routed(rank, seed, count, kind="usual"):
    """Tokens of a rank, none on rank 1, their experts, of which one may be none, and weights."""
    tokens = 0 if rank == 1 or kind == "nowhere" else 3 + rank
    x, weights = (random(tokens, size, dtype=torch.float64, seed=seed + 10 * rank + size) for size in (D, 2))
    index = torch.randint(count + 1, (tokens, 2), generator=torch.Generator().manual_seed(seed + rank))
    if kind == "crowded":
        index.fill_(count // 2)  # one expert alone
    return x.requires_grad_(), index, weights.requires_grad_()


@on_ranks([4, 6])
def test_of_a_layer(rank, ranks, cases):
    for kind, names, sizes, count, hidden, capacity in LAYERS[ranks]:
        plain = fill(Plain(kind, count, hidden))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        with (
            cases.case(f"{kind} {names} {sizes} {count} experts of {hidden}"),
            Ring(mesh, dims=dataclasses.replace(DIMS, expert_capacity=capacity), timeout=30) as ring,
        ):
            assert not whole_experts(count, ring.experts.places)
            layer = rotated(plain, ring, count, hidden)
            first = next(layer.parameters())
            held = -(-first.shape[2 if kind == "gpt_oss" else 1] // ranks)
            assert first.to_local().numel() <= held * count * D, "hidden features of every expert on every rank"
            optimizers = [adamw(part.parameters(), lr=0.05) for part in (layer, plain)]
            for step, chosen in enumerate(("usual", "crowded", "nowhere")):
                batches = [routed(each, 100 * step, count, chosen) for each in range(ranks)]
                outputs = [
                    plain(x, index if capacity is None else within(index, capacity, count), weights)
                    for x, index, weights in batches
                ]
                mine = [part.detach().clone().requires_grad_(part.requires_grad) for part in batches[rank]]
                y = layer(*mine)
                assert_same(y, outputs[rank], TOLERANCE, "output", 1.0)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                total(outputs, ranks).backward()
                loss = total([y], 1)
                if step == 0:
                    (alone,) = torch.autograd.grad(loss, [layer.down_proj], retain_graph=True)
                    assert_same(alone.full_tensor(), plain.down_proj.grad, TOLERANCE, "one gradient alone", 1.0)
                loss.backward()
                for place in (0, 2):
                    assert_same(mine[place].grad, batches[rank][place].grad * ranks, TOLERANCE, "input gradient", 1.0)
                check_parameters(layer, plain, lambda parameter: parameter.grad)
                if step == 0:  # controls: hidden features that belong to others, and a sum that is divided by too few
                    moved = copy.deepcopy(plain)
                    moved.down_proj.data = plain.down_proj.data.roll(1, 1 if kind == "gpt_oss" else 2)
                    if rank != 1:
                        assert differs(y, moved(*batches[rank]), 1e-3)
                    assert differs(layer.down_proj.grad.full_tensor(), 2 * plain.down_proj.grad, 1e-3)
                for optimizer in optimizers:
                    optimizer.step()
                check_parameters(layer, plain)


def frozen_across(rank, first, second, *batch):
    return first.requires_grad_(rank % 2 == 0)(*batch)


@on_ranks(4)
def test_a_difference_is_an_error_on_every_rank(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "ring"))
    for planted, others in (*DIFFERENCES, (frozen_across, (1, 3))):
        with cases.case(planted.__name__):
            ring = Ring(mesh, dims=DIMS, timeout=20)
            layers = [rotated(fill(Plain("mixtral", 3, 5)), ring, 3, 5) for _ in range(2)]
            for layer, name in zip(layers, ("layer.first", "layer.second"), strict=True):
                layer.qualified_name = name
            layers[0](*routed(rank, 0, 3)).sum().backward()
            text = None
            try:
                planted(rank, *layers, *routed(rank, 0, 3)).sum().backward()
            except (ValueError, TypeError, IndexError, RuntimeError) as caught:
                text = str(caught)
            texts = [None] * ranks
            dist.all_gather_object(texts, text)
            assert not ring.alive and not ring.experts.inner.alive
            for each, text in enumerate(texts):
                assert text is not None and "layer.first" in text, text
                assert each in others or any(f"rank {other}" in text for other in others), text


def slice_bytes(ring, hidden, count=3):
    """Bytes of float64 that this rank sends and receives of the slices of a gated layer without biases."""

    def chunk(whole, parts, place):
        size = -(-whole // parts)
        return range(min(place * size, whole), min((place + 1) * size, whole))

    places, sent = ring.experts.places, [0, 0]
    for here, there in ((h, t) for h in range(ring.size) for t in range(ring.size) if h != t and ring.rank in (h, t)):
        part, number = places[there]
        experts, wanted = len(chunk(count, ring.experts.size, part)), chunk(hidden, ring.experts.inner.size, number)
        both = {*wanted, *(hidden + feature for feature in wanted)}
        rows = len(both.intersection(chunk(2 * hidden, ring.size, here)))
        rows += len({*wanted}.intersection(chunk(hidden, ring.size, here)))
        sent[ring.rank == there] += 8 * experts * rows * 16
    return sum(sent)


@on_ranks(4, timeout=300)
def test_of_models(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "expert"))
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 7}
    for family in ("mixtral", "gpt_oss"):
        plain = make(family, **sizes)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=DIMS, timeout=60)
        with cases.case(f"{family}: three steps with clipping"):
            norms = train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 3, clip=0.5)
            actual = train(model, lambda step, model=model: loss_of(model, rank, step), 3, clip=0.5)
            assert_same(torch.tensor(actual), torch.tensor(norms), 1e-5, "gradient norms")
            same_as(model, plain, 1e-5)
        if family == "gpt_oss":
            rtp_ext.ring_of(model).close()
    plain = make("mixtral", **sizes)
    model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=DIMS, timeout=60)
    with cases.case("explain, and bytes by closed form"):
        planned = rtp_ext.explain(copy.deepcopy(plain), mesh=mesh, dims=DIMS)
        mean_loss(plain, ranks, 0).backward()
        loss_of(model, rank, 0).backward()
        plan, ring = rtp_ext.explain(model), rtp_ext.ring_of(model)
        assert planned.totals == plan.totals
        before = sent_by(ring, "weight"), sent_by(ring, "gradient"), ring.experts.slice_bytes_sent
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        same_as(model, plain, 1e-5, lambda parameter: parameter.grad)
        totals = plan.totals
        assert sent_by(ring, "weight") - before[0] == totals["forward_bytes"] + totals["backward_bytes"]
        assert sent_by(ring, "gradient") - before[1] == totals["gradient_bytes"]
        assert ring.experts.slice_bytes_sent - before[2] == 2 * slice_bytes(ring, 7)  # of two layers
        up = {row.name: row for row in plan.parameters}["model.layers.0.mlp.experts.gate_up_proj"]
        assert up.placements == ("Shard(dim=1)",) and up.shard_sizes == (4, 4, 4, 2)
        assert up.forward_bytes == 2 * 8 * 16 * 8, "a slice of two experts, of 4 of 7 hidden features"
    with cases.case("checkpointing"):
        again, twin = (checkpointed(copy.deepcopy(each), "not reentrant") for each in (plain, plain))
        again = rtp_ext.fully_rotate(again, mesh=mesh, dims=DIMS, timeout=60)
        twin.zero_grad()
        mean_loss(twin, ranks, 0).backward()
        loss_of(again, rank, 0).backward()
        same_as(again, twin, 1e-5, lambda parameter: parameter.grad)
        rtp_ext.ring_of(again).close()
    with cases.case("DCP to another mesh, and whole tensors"):
        moves(rank, model, plain, [rtp_ext.fully_rotate(make("mixtral", **sizes), timeout=60)])
    with cases.case("Muon"):
        optimizers = []
        for each in (model, plain):
            hidden, rest = rtp_ext.optim.matrices(each)
            optimizers.append((rtp_ext.optim.Muon(hidden, lr=0.02), adamw(rest, lr=0.01)))
        for optimizer in (each for pair in optimizers for each in pair):
            optimizer.step()
        same_as(model, plain, 1e-4)
    rtp_ext.ring_of(model).close()
    with cases.case("adapters of experts"):
        plain = adapted(make("mixtral", **sizes))
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=DIMS, timeout=60)
        loss_of(model, rank, 0).backward()
        mean_loss(plain, ranks, 0).backward()
        compare_trained(model, plain)
    with cases.case("replicas with ZeroOuter"):
        plain = make("mixtral", **{**sizes, "num_local_experts": 1, "num_experts_per_tok": 1})
        replicas = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "ring", "expert"))
        dims = dataclasses.replace(DIMS, replicate="replicas")
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=replicas, dims=dims, outer=ZeroOuter(), timeout=60)
        train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 2, clip=0.5)
        train(model, lambda step, model=model: loss_of(model, rank, step), 2, clip=0.5)
        same_as(model, plain, 1e-5)
        rtp_ext.ring_of(model).close()
    with cases.case("what is in blocks or in 8 bits elsewhere stays wide"):
        wide = make("mixtral", **{**sizes, "hidden_size": 32, "intermediate_size": 32}).float()
        for name, parameter in wide.named_parameters():
            parameter.requires_grad_("experts" not in name and "q_proj" not in name)
        for options in ({"frozen": "nf4"}, {"recipe": "float8_rowwise"}):
            plan = rtp_ext.explain(wide, mesh=mesh, dims=DIMS, **options)
            rows = [row for row in plan.parameters if "experts" in row.name]
            assert rows and all(row.travel == "float32" and "cut along their hidden" in row.wide for row in rows)
    with cases.case("biases of another dtype"), Ring(mesh, dims=DIMS, timeout=60) as ring:
        plain = fill(Plain("plain", 3, 5))
        layer = rotated(plain, ring, 3, 5)
        for name in ("up_proj", "down_proj"):
            layer.register_parameter(name, torch.nn.Parameter(layer.get_parameter(name).detach().float()))
        x, index, weights = (each.detach() for each in routed(rank, 0, 3))
        y = layer(x.float(), index, weights)
        y.sum().backward()
        assert_same(y, plain(x, index, weights).float(), 1e-5, "output", 1.0)
        assert [layer.get_parameter(name).grad.dtype for name in ("up_proj", "up_proj_bias")] == [y.dtype, x.dtype]
    message = r"expected a whole down weight of shape \(3, 6, 5\), got \(3, 6, 6\)"
    with cases.case("refused: sizes with equal slices"), Ring(mesh, dims=DIMS, timeout=60) as ring:
        layer, other = (RotatedExperts(3, D, hidden, ring=ring, dtype=torch.float64) for hidden in (5, 6))
        layer.register_parameter("down_proj", other.down_proj)
        with pytest.raises(ValueError, match=message):
            layer(*routed(rank, 0, 3))
    message = "RotatedExperts: 3 experts, which 2 parts have cut along their hidden features, cannot be combined with"
    with (
        cases.case("refused: products in 8 bits of a layer"),
        Ring(mesh, dims=DIMS, timeout=60) as ring,
        pytest.raises(ValueError, match=message),
    ):
        RotatedExperts(3, D, 8, recipe="float8_rowwise", ring=ring)
