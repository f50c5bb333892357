"""Experts divided over one dimension of a mesh and rotated over another, against the plain model in one process on the
batches of all ranks."""

import copy
import dataclasses
import functools
import itertools
import json
import os
import signal
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from grids import few
from harness import on_ranks
from hf_models import check_parameters, fill
from models import train
from reference import adamw, assert_same, differs, full, random
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import rtp_ext
from rtp_ext import Ring, RotationDims
from rtp_ext.functional import dispatch
from rtp_ext.nn import RotatedExperts, RotatedMoE
from rtp_ext.outer import AllReduce, LocalSGD, ZeroOuter

D, H, E = 6, 4, 12
TOLERANCE = 1e-11
DIMS = RotationDims(ring="ring", expert="expert")
# names and sizes of the dimensions of a mesh, by number of ranks
MESHES = {
    4: (
        (("expert", "ring"), (2, 2)),
        (("ring", "expert"), (2, 2)),
        (("expert", "ring"), (4, 1)),
        (("expert", "ring"), (1, 4)),
    ),
    6: ((("expert", "ring"), (2, 3)),),
    8: ((("replicas", "ring", "expert"), (2, 2, 2)),),
}


class PlainExperts(torch.nn.Module):
    """Stacked experts; each pair of a token and an expert gathers its weights."""

    def __init__(self, count=E):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(count, 2 * H, D, dtype=torch.float64))
        self.down_proj = torch.nn.Parameter(torch.empty(count, D, H, dtype=torch.float64))

    def forward(self, x, index, weights):
        count = len(self.down_proj)
        chosen, weights = index.clamp(max=count - 1), weights.where(index < count, 0)
        gate, up = torch.einsum("td,tkod->tko", x, self.gate_up_proj[chosen]).chunk(2, -1)
        y = torch.einsum("tko,tkdo->tkd", torch.nn.functional.silu(gate) * up, self.down_proj[chosen])
        return (y * weights.unsqueeze(-1)).sum(1)


def routed(rank, kind, seed=0, count=E):
    """Tokens of a rank, their experts and weights."""
    tokens = {"empty": 0 if rank % 2 else 3, "nowhere": 0}.get(kind, 2 + 3 * rank)
    x = random(tokens, D, dtype=torch.float64, seed=seed + 10 * rank)
    weights = random(tokens, 3, dtype=torch.float64, seed=seed + 10 * rank + 1)
    generator = torch.Generator().manual_seed(seed + rank)
    index = torch.rand(tokens, count, generator=generator).argsort(1)[:, :3]
    if kind == "crowded":
        index = torch.full_like(index, count // 2)  # one expert alone
    elif kind == "dropped":
        index[:, 1:], weights[:, 1:] = count, torch.nan  # no expert, whatever the weight
        index[::2, 0] = 1
    elif kind == "skewed":
        index = index % (1 + rank)  # nobody chooses most of the experts
    return x.requires_grad_(), index, weights.requires_grad_()


KINDS = ("usual", "empty", "nowhere", "crowded", "dropped", "skewed")


def total(outputs, ranks):
    return sum((y * random(*y.shape, dtype=torch.float64, seed=7)).sum() for y in outputs) / ranks


def as_meshes(ranks):
    for names, sizes in MESHES[ranks]:
        yield f"{names} {sizes}", init_device_mesh("cpu", sizes, mesh_dim_names=names)


def expected_bytes(rank, names, sizes, indices):
    """Bytes of rows that a rank sends in a forward and backward, in float64."""
    ranks, (parts, rings) = len(indices), (sizes[names.index(name)] for name in ("expert", "ring"))
    first = names[0] == "expert"
    here, place = divmod(rank, rings) if first else reversed(divmod(rank, parts))
    chosen = [(each // (E // ranks)) // rings if first else (each // (E // ranks)) % parts for each in indices]
    column = [part * rings + place if first else place * parts + part for part in range(parts) if part != here]
    leaving = int((chosen[rank] != here).sum())
    arriving = sum(int((chosen[other] == here).sum()) for other in column)
    # Numbers of rows and a digest to each rank; with a row its expert; a row and its gradient both ways.
    return 16 * (parts - 1) + 8 * leaving + 2 * D * 8 * (leaving + arriving)


UNEVEN = (4, ("expert", "ring"), (2, 2), 5), (6, ("ring", "expert"), (3, 2), 8)  # ranks, mesh, experts


@on_ranks([4, 6])
def test_of_a_layer(rank, ranks, cases):
    uneven = [(names, sizes, count) for number, names, sizes, count in UNEVEN if number == ranks]
    for names, sizes, count in [*((*mesh, E) for mesh in MESHES[ranks]), *uneven]:
        plain = fill(PlainExperts(count))
        with Ring(init_device_mesh("cpu", sizes, mesh_dim_names=names), dims=DIMS, timeout=30) as ring:
            assert (ring.experts is None) == (sizes[names.index("expert")] == 1)
            layer = RotatedExperts(count, D, H, dtype=torch.float64, ring=ring)
            state = plain.state_dict()
            rtp_ext.init_weights(layer, lambda part, state=state: part.load_state_dict(state))
            optimizers = [adamw(part.parameters(), lr=0.05) for part in (layer, plain)]
            for step, kind in enumerate(KINDS):
                with cases.case(f"{names} {sizes} {count} experts {kind}"):
                    batches = [routed(each, kind, 100 * step, count) for each in range(ranks)]
                    outputs = [plain(*batch) for batch in batches]
                    mine = [part.detach().clone().requires_grad_(part.requires_grad) for part in batches[rank]]
                    before = ring.experts and ring.experts.bytes_sent
                    y = layer(*mine)
                    assert_same(y, outputs[rank], TOLERANCE, "output", 1.0)
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    total(outputs, ranks).backward()
                    total([y], 1).backward()
                    if kind == "usual" and count == E and ring.experts:
                        expected = expected_bytes(rank, names, sizes, [index for _, index, _ in batches])
                        assert ring.experts.bytes_sent - before == expected
                    for place in (0, 2):
                        expected = batches[rank][place].grad * ranks
                        assert_same(mine[place].grad, expected, TOLERANCE, "input gradient", 1.0)
                    check_parameters(layer, plain, lambda parameter: parameter.grad)
                    if kind == "usual":  # controls: other experts, and a sum that is divided by too few
                        x, index, weights = batches[rank]
                        assert differs(y, plain(x, (index + 1) % count, weights), 1e-3)
                        assert differs(layer.down_proj.grad.full_tensor(), 2 * plain.down_proj.grad, 1e-3)
                    for optimizer in optimizers:
                        optimizer.step()
                    check_parameters(layer, plain)


def within(index, capacity, count=E):
    """The choices that experts take: all first ones, by position, then all second ones, and so on."""
    index, taken = index.clone(), [0] * (count + 1)
    for choice in range(index.shape[1]):
        for token in range(len(index)):
            expert = int(index[token, choice])
            index[token, choice] = expert if taken[expert] < capacity else count
            taken[expert] += 1
    return index


@on_ranks([4, 6])
def test_with_fixed_numbers_of_rows(rank, ranks, cases):
    """Whatever the tokens are: what is sent, and what experts compute."""
    for (names, sizes), capacity in itertools.product(MESHES[ranks][:3], (2, 40)):
        if sizes[names.index("expert")] == 1:
            continue
        plain, dims = fill(PlainExperts()), dataclasses.replace(DIMS, expert_capacity=capacity)
        parts = sizes[names.index("expert")]
        with Ring(init_device_mesh("cpu", sizes, mesh_dim_names=names), dims=dims, timeout=30) as ring:
            layer = RotatedExperts(E, D, H, dtype=torch.float64, ring=ring)
            state = plain.state_dict()
            rtp_ext.init_weights(layer, lambda part, state=state: part.load_state_dict(state))
            for step, kind in enumerate(KINDS):
                with cases.case(f"{names} {sizes} {capacity} rows {kind}"):
                    batches = [routed(each, kind, 100 * step) for each in range(ranks)]
                    outputs = [plain(x, within(index, capacity), weights) for x, index, weights in batches]
                    mine = [part.detach().clone().requires_grad_(part.requires_grad) for part in batches[rank]]
                    before = ring.experts.bytes_sent
                    y = layer(*mine)
                    assert_same(y, outputs[rank], TOLERANCE, "output", 1.0)
                    for part in (plain, layer):
                        part.zero_grad()
                    total(outputs, ranks).backward()
                    total([y], 1).backward()
                    rows = (E - E // parts + (parts - 1) * E // parts) * capacity
                    assert ring.experts.bytes_sent - before == 16 * (parts - 1) + 2 * D * 8 * rows
                    for place in (0, 2):
                        expected = batches[rank][place].grad * ranks
                        assert_same(mine[place].grad, expected, TOLERANCE, "input gradient", 1.0)
                    check_parameters(layer, plain, lambda parameter: parameter.grad)
                    if kind == "crowded" and capacity == 2 and rank:
                        assert differs(y, plain(*batches[rank]), 1e-3), "control: rows are dropped"
    with cases.case("ranks with different numbers"):
        dims = dataclasses.replace(DIMS, expert_capacity=2 + rank % 2)
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("ring", "expert"))
        ring = Ring(mesh, dims=dims, timeout=30)
        layer = RotatedExperts(E, D, H, dtype=torch.float64, ring=ring)
        with pytest.raises(ValueError, match=r"the ranks of divided experts disagree.* 2 rows.* 3 rows"):
            layer(*routed(rank, "usual"))
    with cases.case("a rank with wrong arguments, as on GPUs"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_compares_on_host", lambda _: False)
        with Ring(mesh, dims=dataclasses.replace(DIMS, expert_capacity=2), timeout=30) as ring:
            layer = RotatedExperts(E, D, H, dtype=torch.float64, ring=ring)
            x, index, weights = routed(rank, "usual")
            with pytest.raises(IndexError if rank == 1 else RuntimeError) as told:
                layer(x, index + E if rank == 1 else index, weights)
            if rank == 1:
                assert "expected an index in [0, 12]" in str(told.value)
    with cases.case("arguments"):
        for wrong in (0, 1.5, True):
            with pytest.raises(ValueError, match="expected expert_capacity to be a positive integer, got"):
                dataclasses.replace(DIMS, expert_capacity=wrong)
        alone = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("expert", "ring"))
        with pytest.raises(ValueError, match="expert_capacity=None where expert='expert' has one rank, got 3"):
            Ring(alone, dims=dataclasses.replace(DIMS, expert_capacity=3), timeout=30)
        with pytest.raises(ValueError, match="expected expert with expert_capacity, got 3 and no expert"):
            RotationDims(expert_capacity=3)


# -- models of transformers --------------------------------------------------------------------------------------------

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
VOCABULARY = 41


def make(family, **changes):
    """Small models with 12 experts a layer, the same on every rank, with distinct values, in float64."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 10,
        "moe_intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "deepseek_v3" else 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_experts_per_tok": 3,
        "num_local_experts": E,
        "use_cache": False,
        "experts_implementation": "eager",
        **changes,
    }
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    if family == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**balance, **sizes))
    elif family == "qwen3_moe":
        model = hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(num_experts=E, head_dim=4, norm_topk_prob=True, mlp_only_layers=[0], **balance, **sizes)
        )
    elif family == "gpt_oss":
        model = hf.GptOssForCausalLM(hf.GptOssConfig(head_dim=4, sliding_window=4, **balance, **sizes))
    else:
        latent = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
        routing = {"n_routed_experts": E, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(first_k_dense_replace=1, **latent, **routing, **sizes))
    model = fill(model.double().train())
    for block in list(model.modules()):  # theirs compute in float32
        for name, part in list(block.named_children()):
            if type(part).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon, dtype=torch.float64)
                norm.weight = part.weight
                setattr(block, name, norm)
    return model


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (1 + rank % 2, 8 - rank % 3), generator=generator)


def loss_of(model, rank, step):
    ids = batch(rank, step)
    return model(ids, labels=ids).loss


def mean_loss(model, ranks, step):
    return sum(loss_of(model, rank, step) for rank in range(ranks)) / ranks


def same_as(model, plain, tolerance, of=lambda parameter: parameter):
    """Compares whole parameters, or `of` applied to them. Collective."""
    theirs = dict(plain.named_parameters())
    assert list(theirs) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert_same(of(parameter).full_tensor(), of(theirs[name]), tolerance, name)


def moves(rank, model, plain, others):
    """Checks that others load what DCP has saved of a model, and close their rings; that whole tensors are streamed.
    Collective."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    for other in others:
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(other, state)
        same_as(other, plain, 0)
        rtp_ext.ring_of(other).close()
    streamed = dict(rtp_ext.stream_weights(model))
    assert all(torch.equal(streamed[name], value) for name, value in plain.state_dict().items())


@on_ranks([4, 6, 8], timeout=300)
def test_of_models(rank, ranks, cases):
    """Five steps with clipping: Mixtral on every mesh, the other families on the first of 4 ranks, in sweeps of 6."""
    for family in FAMILIES if ranks in few((4,), (4, 6)) else FAMILIES[:1]:
        plain, models = make(family), {}
        for names, sizes in MESHES[ranks] if family == FAMILIES[0] else MESHES[ranks][:1]:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            dims = dataclasses.replace(DIMS, replicate="replicas") if ranks == 8 else DIMS
            for outer in (AllReduce(), ZeroOuter()) if ranks == 8 else (None,):
                model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=dims, outer=outer, timeout=60)
                divided = [part for part in model.modules() if isinstance(part, RotatedExperts)]
                whole = sizes[names.index("expert")] == 1
                assert divided and (rtp_ext.ring_of(model).experts is None) == whole
                models[f"{names} {sizes} {family} {type(outer).__name__}"] = model
        expected = plain(batch(rank, 0)).logits
        mean_loss(plain, ranks, 0).backward()
        for name, model in models.items():
            with cases.case(name):
                assert_same(model(batch(rank, 0)).logits, expected, 1e-6, "logits")
                loss_of(model, rank, 0).backward()
                same_as(model, plain, 1e-5, lambda parameter: parameter.grad)
        norms = train(plain, lambda step, plain=plain: mean_loss(plain, ranks, step), 5, clip=0.5)
        for name, model in models.items():
            with cases.case(f"{name}, trained"):
                actual = train(model, lambda step, model=model: loss_of(model, rank, step), 5, clip=0.5)
                assert_same(torch.tensor(actual), torch.tensor(norms), 1e-5, "gradient norms")
                same_as(model, plain, 1e-5)
            rtp_ext.ring_of(model).close()


# -- differences between ranks -----------------------------------------------------------------------------------------


def wrong_index(rank, first, second, x, index, weights):
    return first(x, index + (E if rank == 3 else 0), weights)


def other_gradients(rank, first, second, x, index, weights):
    return first(x.detach() if rank == 1 else x, index, weights)


def other_layer(rank, first, second, x, index, weights):
    return (second if rank == 2 else first)(x, index, weights)


def other_order(rank, first, second, *batch):
    outputs = [scale * first(*batch).sum() for scale in (1, 2)]
    for output in reversed(outputs) if rank == 1 else outputs:
        output.backward()
    return batch[0]


def frozen_in_one_part(rank, first, second, *batch):
    return first.requires_grad_(rank > 1)(*batch)


def disagreement_in_one_part(rank, first, second, *batch):
    second.qualified_name, second.recompute = first.qualified_name, rank == 1
    return second(*batch)


DIFFERENCES = (  # and the ranks that differ
    (wrong_index, (3,)),
    (other_gradients, (1,)),
    (other_layer, (2,)),
    (other_order, (1,)),
    (frozen_in_one_part, (0, 1)),
    (disagreement_in_one_part, (0, 1)),
)


@on_ranks(4)
def test_a_difference_is_an_error_on_every_rank(rank, ranks, cases):
    _, mesh = next(as_meshes(ranks))
    for planted, others in DIFFERENCES:
        with cases.case(planted.__name__):
            ring = Ring(mesh, dims=DIMS, timeout=20)
            layers = [RotatedExperts(E, D, H, dtype=torch.float64, ring=ring) for _ in range(2)]
            for layer, name in zip(layers, ("layer.first", "layer.second"), strict=True):
                layer.qualified_name = name
            layers[0](*routed(rank, "usual")).sum().backward()
            error = None
            try:
                planted(rank, *layers, *routed(rank, "usual")).sum().backward()
            except (ValueError, TypeError, IndexError, RuntimeError) as caught:
                error = str(caught)
            errors = [None] * ranks
            dist.all_gather_object(errors, error)
            assert not ring.alive and not ring.experts.inner.alive
            for each, text in enumerate(errors):
                assert text is not None and "layer.first" in text, text
                assert each in others or any(f"rank {other}" in text for other in others), text


@on_ranks(4, lost=[3])
def test_a_lost_rank_ends_the_others(rank, ranks):
    _, mesh = next(as_meshes(ranks))
    ring = Ring(mesh, dims=DIMS, timeout=20)
    layer = RotatedExperts(E, D, H, dtype=torch.float64, ring=ring)
    layer(*routed(rank, "usual")).sum().backward()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(rtp_ext.RotationError, match="rank 3"):
        layer(*routed(rank, "usual"))
    assert not ring.alive


# -- other features ----------------------------------------------------------------------------------------------------


def rotated(plain, mesh, **options):
    return rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=DIMS, timeout=60, **options)


FULL = StateDictOptions(full_state_dict=True)


def compare_trained(model, plain):
    """Compares the gradients of trained parameters, and closes the ring."""
    found = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    assert len(found) < len(list(plain.parameters()))
    for name, parameter in found:
        assert_same(full(model.get_parameter(name).grad), parameter.grad, 1e-5, name)
    rtp_ext.ring_of(model).close()


def sent_by(ring, channel):
    return sum(each.bytes_sent(channel) for each in ring.rings)


def keeps_experts(_context, operator, *_arguments, **_keywords):
    return CheckpointPolicy.MUST_SAVE if "rtp_ext.experts" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model, kind):
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keeps_experts)
    model.activation_checkpointing_enable(options)
    return model


def adapted(model):
    import peft

    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets)).double()


@on_ranks(4, timeout=300)
def test_of_other_features(rank, ranks, cases):
    meshes = [mesh for _, mesh in as_meshes(ranks)]
    plain = make("mixtral")
    model = rotated(plain, meshes[0])
    mean_loss(plain, ranks, 0).backward()

    with cases.case("explain, and bytes by closed form"):
        planned = rtp_ext.explain(copy.deepcopy(plain), mesh=meshes[0], dims=DIMS)
        loss_of(model, rank, 0).backward()  # the first forward compares
        plan, ring = rtp_ext.explain(model), rtp_ext.ring_of(model)
        assert str(planned).replace(
            "No ring exists yet: these are the routes of ranks on one host.", ""
        ).strip() == str(plan)
        assert "experts on 2 rings of 2" in str(plan) and json.dumps(plan.to_dict())
        before = sent_by(ring, "weight"), sent_by(ring, "gradient")
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        same_as(model, plain, 1e-5, lambda parameter: parameter.grad)
        totals = plan.totals
        assert sent_by(ring, "weight") - before[0] == totals["forward_bytes"] + totals["backward_bytes"]
        assert sent_by(ring, "gradient") - before[1] == totals["gradient_bytes"]
        rows = {row.name: row for row in plan.parameters}
        up = rows["model.layers.0.mlp.experts.gate_up_proj"]
        assert up.placements == ("Shard(dim=0)",) and up.shard_sizes == (3, 3, 3, 3)
        # Each rank sends 1 of the 2 shards that its part has: half of 6 experts of 2 x 10 x 16 numbers of 8 bytes.
        assert up.forward_bytes == 3 * 20 * 16 * 8 and up.collective_bytes is None

    for kind in ("not reentrant", "reentrant", "selective"):
        with cases.case(f"checkpointing, {kind}"):
            # A reentrant checkpoint loses the gradient of the balance loss, in the plain model too.
            again, twin = (checkpointed(each, kind) for each in (rotated(plain, meshes[1]), copy.deepcopy(plain)))
            twin.zero_grad()
            mean_loss(twin, ranks, 0).backward()
            loss_of(again, rank, 0).backward()
            same_as(again, twin, 1e-5, lambda parameter: parameter.grad)
            rtp_ext.ring_of(again).close()

    with cases.case("DCP to other meshes, and whole tensors"):
        others = [rotated(make("mixtral"), mesh) for mesh in meshes[1:]]
        moves(rank, model, plain, [*others, rtp_ext.fully_rotate(make("mixtral"), timeout=60)])

    with cases.case("nn.RotatedMoE with a capacity and a balance loss"), Ring(meshes[1], dims=DIMS, timeout=60) as ring:
        layer = RotatedMoE(D, H, E, 2, 0.5, dtype=torch.float64, ring=ring)
        # Each rank's batch on a ring that does not divide experts, and so on one process (nn/test_moe.py).
        with Ring(timeout=60) as whole:
            other = RotatedMoE(D, H, E, 2, 0.5, dtype=torch.float64, ring=whole)
            set_model_state_dict(other, get_model_state_dict(layer, options=FULL), options=FULL)
            results = []
            for each in (layer, other):
                x = random(7 + rank, D, dtype=torch.float64, seed=rank)
                x[-1] = x[0]  # the same choices, for which the last token comes too late: its capacity is 1
                y = each(x.requires_grad_())
                (y.square().sum() + each.aux_loss).backward()
                results.append([y, each.aux_loss, x.grad, *(p.grad.full_tensor() for p in each.parameters())])
            assert (results[0][0] == 0).all(-1).any(), "a token that was dropped"
            for ours, theirs in zip(*results, strict=True):
                assert_same(ours, theirs, TOLERANCE, "RotatedMoE", 1.0)

    with cases.case("torch.autocast"), Ring(meshes[0], dims=DIMS, timeout=60) as ring:
        layer = RotatedExperts(E, D, H, ring=ring)
        x, index, weights = (part.detach() for part in routed(rank, "usual"))
        x = x.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, index, weights)
        y.float().sum().backward()
        twin = PlainExperts().float()
        twin.load_state_dict({name: p.full_tensor() for name, p in layer.named_parameters()})
        assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
        assert_same(y.float(), twin(x, index, weights.float()), 2e-2, "output in bfloat16")

    with cases.case("Muon"):
        optimizers = []
        for each in (model, plain):
            hidden, rest = rtp_ext.optim.matrices(each)
            optimizers.append((rtp_ext.optim.Muon(hidden, lr=0.02), adamw(rest, lr=0.01)))
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        for optimizer in (each for pair in optimizers for each in pair):
            optimizer.step()
        same_as(model, plain, 1e-4)
    rtp_ext.ring_of(model).close()

    with cases.case("adapters of experts"):
        plain = adapted(make("mixtral"))
        model = rotated(plain, meshes[0])
        loss_of(model, rank, 0).backward()
        mean_loss(plain, ranks, 0).backward()
        compare_trained(model, plain)

    with cases.case("frozen experts in blocks"):
        plain = make("mixtral", hidden_size=16, intermediate_size=16)
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_("experts" not in name)
        model = rotated(plain, meshes[0], frozen="nf4")
        values = rtp_ext.frozen_weights(model)
        assert len(values) == 4
        for name, value in values.items():
            plain.get_parameter(name).data.copy_(value)
        loss_of(model, rank, 0).backward()
        mean_loss(plain, ranks, 0).backward()
        compare_trained(model, plain)

    with cases.case("products in 8 bits"):
        # weight gradients are in 16 bits: in 8, scales of columns are those of all rows that an expert has on a rank
        plain, recipe = make("mixtral", hidden_size=32, intermediate_size=32).float(), "float8_rowwise_with_gw_hp"
        whole = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=60, recipe=recipe)
        model = rotated(plain, meshes[0], recipe=recipe)
        plan = {row.name: row for row in rtp_ext.explain(model).parameters}
        experts = [row for name, row in plan.items() if "experts" in name]
        assert {row.travel for row in experts} == {recipe} == {plan["model.layers.0.self_attn.q_proj.weight"].travel}
        inner = rtp_ext.ring_of(model).experts.inner.communicator.executor
        for _ in range(2):
            for each in (model, whole):
                loss_of(each, rank, 0).backward()
            mean_loss(plain, ranks, 0).backward()
        assert_same(model(batch(rank, 0)).logits, whole(batch(rank, 0)).logits, 1e-3, "logits")
        for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            found, expected, wide = full(parameter.grad), full(other.grad), plain.get_parameter(name).grad
            # those below depend on gradients of routers, which undivided experts have in 8 bits
            if "layers.1.mlp.experts" in name or "head" in name:
                assert_same(found, expected, 1e-3, name)
                assert differs(found, wide, 0.1), "control: wide"
            assert (found - expected).norm() < 0.25 * (found - wide).norm(), name
        codes = sum(row.held_bytes for row in experts) - sum(
            parameter.to_local().nbytes for name, parameter in model.named_parameters() if "experts" in name
        )
        assert inner.codes() == (codes, 2 * len(experts)), f"{inner.codes()} of this part, once for each plane, {codes}"
        for each in (model, whole):
            rtp_ext.ring_of(each).close()

    for what, given in {
        "in_place=True": {"in_place": True},
        "CPUOffloadPolicy": {"offload_policy": CPUOffloadPolicy()},
        "LocalSGD": {"outer": LocalSGD(2), "dims": dataclasses.replace(DIMS, ring="ring", replicate="replicas")},
        "got none in a Linear": {"module": torch.nn.Linear(4, 4)},
        "its experts cannot rotate": {"module": make("mixtral", hidden_act="mish")},
        "more than once": {"dims": ("ring", None, "ring")},
    }.items():
        options = {"module": make("mixtral"), "mesh": meshes[0], "dims": DIMS, **given}
        with cases.case(f"refused: {what}"), pytest.raises(ValueError, match=what):
            if isinstance(options["dims"], tuple):
                RotationDims(*options["dims"])
            if options["dims"] is not DIMS:
                options["mesh"] = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "expert", "ring"))
            rtp_ext.fully_rotate(**options)
