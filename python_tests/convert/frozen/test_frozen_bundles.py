"""Experts, MLPs and vocabulary heads whose frozen weights are in blocks, against one process that computes with the
same values: outputs, input gradients, bytes on the wire and at rest, and the weights that stay wide."""

import copy

import peft
import pytest
import torch
from grids import few
from harness import on_ranks
from pretended_hosts import pretend_hosts
from reference import assert_same, differs, full, local
from torch import nn
from transformers import GptOssConfig, LlamaConfig, MixtralConfig, MixtralForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import rtp_ext
from rtp_ext.functional import rotated_linear_cross_entropy
from rtp_ext.parameters.frozen import FORMATS
from rtp_ext.parameters.sharding import frozen_of

BYTES = {"nf4": 36 / 64, "mxfp4": 17 / 32, "int8": 132 / 128}
RINGS = {1: {}, 2: {"transport": "shm", "checksum": True}, 3: {"transport": "tcp"}, 4: {"transport": "c10d"}}
TOLERANCE = 1e-6  # float32: sums over owners in another order
TOKENS = 12


class Experts(nn.Module):
    """Experts with a fixed choice of two for each token."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.experts, self.count = experts, count
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator).requires_grad_(False)

    def forward(self, x):
        choice = torch.arange(2 * len(x)).view(-1, 2) * 3 % self.count
        weights = torch.linspace(0.1, 0.9, 2 * len(x)).view(-1, 2)
        return self.experts(x, choice, weights)


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = LlamaMLP(
            LlamaConfig(hidden_size=features, intermediate_size=hidden, num_attention_heads=1)
        ).requires_grad_(False)

    def forward(self, x):
        return self.mlp(x)


def _mixtral(features: int = 32, hidden: int = 24, experts: int = 5) -> nn.Module:
    config = MixtralConfig(hidden_size=features, intermediate_size=hidden, num_local_experts=experts)
    return Experts(MixtralExperts(config), experts)


def _gpt_oss() -> nn.Module:
    return Experts(GptOssExperts(GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=3)), 3)


MODELS = {  # with the number of weights in blocks
    "experts": (_mixtral, 32, 2),
    "experts with biases, transposed": (_gpt_oss, 32, 2),
    "fewer experts than ranks": (lambda: _mixtral(experts=2), 32, 2),
    "mlp": (lambda: MLP(24, 384), 24, 3),
    "mlp of one block": (lambda: MLP(40, 128), 40, 3),
    "mlp with other blocks": (lambda: MLP(64, 80), 64, 3),
}


def _passes(model, x, dy):
    mine = x.clone().requires_grad_()
    y = model(mine)
    y.backward(dy)
    return y.detach(), mine.grad


def _one(cases, ring, rank, what, format, bundle=True):
    make, features, count = MODELS[what]
    plain, model = make(), rtp_ext.fully_rotate(make(), mesh=ring, frozen=format, bundle=bundle)
    values = rtp_ext.frozen_weights(model)
    rounded = copy.deepcopy(plain)
    for name, value in values.items():
        rounded.get_parameter(name).copy_(value)
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(TOKENS, features, generator=generator) for _ in range(2))
    _passes(model, x, dy)
    sent = ring.bytes_sent("weight")
    results, expected = _passes(model, x, dy), _passes(rounded, x, dy)
    sent = ring.bytes_sent("weight") - sent
    plan = rtp_ext.explain(model)
    bundles = {bundle.kind for bundle in plan.bundles}
    with cases.case(f"{what} {format}"):
        assert len(values) == count
        for name, value in values.items():
            weight = frozen_of(model.get_parameter(name))
            whole = weight.encode(plain.get_parameter(name), weight.packed_shape[weight.dim])
            assert torch.equal(value, weight.decode(whole)), "the blocks of the whole weight"
        for mine, theirs, wide in zip(results, expected, _passes(plain, x, dy), strict=True):
            assert_same(mine, theirs, TOLERANCE, "output and input gradient")
            assert differs(mine, wide, 100 * TOLERANCE), "control: values that are not rounded"
        assert sent == plan.totals["forward_bytes"] + plan.totals["backward_bytes"]
        assert plan == rtp_ext.explain(make(), mesh=ring, frozen=format, bundle=bundle)
        numbers = sum(value.numel() for value in values.values())
        others = sum(p.numel() for p in plain.parameters()) - numbers
        at_home = sum(local(model.get_parameter(name)).numel() for name in values)
        assert at_home == sum(row.held_bytes for row in plan.parameters if row.travel == format)
        if "other" not in what:  # whole blocks
            gathered = torch.tensor(float(at_home))
            if ring.size > 1:
                torch.distributed.all_reduce(gathered)
            assert gathered.item() == BYTES[format] * numbers
            passes = torch.tensor(float(sent))
            if ring.size > 1:
                torch.distributed.all_reduce(passes)
            closed = 2 * (ring.size - 1) * (BYTES[format] * numbers + 4 * others)
            assert abs(passes.item() - closed) <= 0.02 * closed, (passes, closed)
        assert ("mlp" in bundles) == (what == "mlp" or (what == "mlp of one block"))
    if "other" not in what and format != "int8":
        weights = [model.get_parameter(name) for name in values]
        _swap_codes(weights)
        packed_wrongly = _passes(model, x, dy)
        _swap_codes(weights)
        with cases.case(f"{what} {format}: the two codes of a byte swapped"):
            for mine, theirs in zip(packed_wrongly, expected, strict=True):
                assert differs(mine, theirs, 1000 * TOLERANCE), "control"
    if what == "mlp" and format != "mxfp4":
        hook = model.mlp.gate_proj.register_forward_hook(lambda *_: None)  # layer by layer
        changed = _passes(model, x, dy)
        hook.remove()
        with cases.case(f"{what} {format}: changed later"):
            for mine, theirs in zip(changed, expected, strict=True):
                assert_same(mine, theirs, TOLERANCE, "layer by layer")


def _swap_codes(weights):
    for weight in weights:
        size = frozen_of(weight).block[1]
        blocks = local(weight).view(-1, size)
        codes = blocks[:, : frozen_of(weight).block[0] // 2]
        codes.copy_(codes << 4 | codes >> 4)


@on_ranks(few([2, 3], [1, 2, 3, 4]))
def test_experts_and_mlps(rank, ranks, cases):
    with rtp_ext.Ring(timeout=60.0, **RINGS[ranks]) as ring:
        for place, what in enumerate(MODELS):
            for format in few(FORMATS[(place + ranks) % 3 :][:1], FORMATS):
                _one(cases, ring, rank, what, format, "recompute" if ranks == 2 else True)
        with cases.case("what stays wide"):
            model = nn.ModuleList([_mixtral(6, 5), MLP(64, 64)])
            plan = rtp_ext.explain(rtp_ext.fully_rotate(model, mesh=ring, frozen="nf4"))
            wide = {row.name: row.wide for row in plan.parameters if row.wide is not None}
            assert set(wide) == {"0.experts.gate_up_proj", "0.experts.down_proj"}
            assert wide["0.experts.down_proj"] == "an expert of 30 numbers does not fill whole blocks of nf4"
            assert {row.name for row in plan.parameters if row.travel == "nf4"} == {
                f"1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
            }
    if ranks == 4:
        torch.distributed.barrier()
        pretend_hosts(rank, 2)
        with rtp_ext.Ring(route="two-level", timeout=60.0) as ring:
            for what in ("experts", "mlp"):
                _one(cases, ring, rank, what, "nf4")


@on_ranks(3, transport="shm", ring_timeout=60.0)
def test_trained_biases(rank, ranks, ring, cases):
    """Trained biases travel with frozen weights in blocks, and their gradients come back."""
    mlp = nn.Sequential(nn.Linear(24, 192, bias=False), nn.GELU(), nn.Linear(192, 24)).requires_grad_(False)
    for what, plain, features, bundles in (("experts", _gpt_oss(), 32, set()), ("mlp", mlp, 24, {"mlp"})):
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_("bias" in name)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, frozen="nf4")
        for name, value in rtp_ext.frozen_weights(model).items():
            plain.get_parameter(name).data.copy_(value)
        batches = [torch.randn(TOKENS, features, generator=torch.Generator().manual_seed(n)) for n in range(ranks)]
        y, wanted = model(batches[rank]), [plain(x) for x in batches]
        y.square().sum().backward()
        (sum(each.square().sum() for each in wanted) / ranks).backward()
        with cases.case(what):
            assert {bundle.kind for bundle in rtp_ext.explain(model).bundles} == bundles
            assert_same(y, wanted[rank], TOLERANCE, "output")
            trained = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
            assert len(trained) == (2 if what == "experts" else 1)
            for name, gradient in trained.items():
                assert_same(full(model.get_parameter(name).grad), gradient, 2 * TOLERANCE, name)
    for features in (64, 48):
        head = nn.Linear(features, 99)
        head.weight.requires_grad_(False)
        model = rtp_ext.fully_rotate(nn.Sequential(copy.deepcopy(head)), mesh=ring, frozen="nf4")
        head.weight.data.copy_(rtp_ext.frozen_weights(model)["0.weight"])
        batches = [torch.randn(TOKENS, features, generator=torch.Generator().manual_seed(n)) for n in range(ranks)]
        targets = torch.arange(TOKENS) * 8
        arguments = batches[rank], model[0].weight, targets, model[0].bias
        if features == 48:  # groups of 4 rows, between which the bias is not cut
            with (
                cases.case("a head"),
                pytest.raises(ValueError, match=r"rows that fill whole blocks .* got rows of 48"),
            ):
                rotated_linear_cross_entropy(*arguments, ring=ring)
            continue
        loss = rotated_linear_cross_entropy(*arguments, ring=ring)
        loss.backward()
        wanted = [nn.functional.cross_entropy(head(x), targets) for x in batches]
        (sum(wanted) / ranks).backward()
        with cases.case("a head"):
            assert abs(loss.item() - wanted[rank].item()) <= TOLERANCE * loss.item()
            assert_same(full(model[0].bias.grad), head.bias.grad, 2 * TOLERANCE, "bias")


def _language_model(tied: bool = False, features: int = 64) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=99,
        hidden_size=features,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(MixtralForCausalLM(config), adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _loss(model, rank, **options):
    ids = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(rank))
    return model(input_ids=ids, labels=ids, **options).loss


@on_ranks(few([3], [1, 2, 3, 4]), timeout=40.0)
def test_language_models(rank, ranks, cases):
    for features, format in ((64, "nf4"), (48, "nf4"), (64, "mxfp4"))[: 3 if ranks == 3 else 2]:
        plain = _language_model(features=features)
        model = rtp_ext.fully_rotate(
            _language_model(features=features), frozen=format, loss_head="fused", transport="shm"
        )
        values, rounded = rtp_ext.frozen_weights(model), copy.deepcopy(plain)
        with torch.no_grad():
            for name, value in values.items():
                rounded.get_parameter(name).copy_(value)
        ring = rtp_ext.ring_of(model)
        _loss(model, rank).backward()
        model.zero_grad()
        before = ring.bytes_sent("weight")
        loss = _loss(model, rank)
        loss.backward()
        sent = ring.bytes_sent("weight") - before
        losses = [_loss(rounded, each) for each in range(ranks)]
        (sum(losses) / ranks).backward()
        (sum(_loss(plain, each) for each in range(ranks)) / ranks).backward()
        ids = torch.arange(12).view(2, 6)
        logits, head = model(input_ids=ids).logits, model.base_model.model.lm_head
        with torch.no_grad():
            hidden = model.base_model.model.model(input_ids=ids).last_hidden_state
        plan = rtp_ext.explain(model)
        with cases.case(f"{format} of {features}"):
            name = next(name for name in values if "lm_head" in name)
            assert len(values) == 7 and all(p.dtype == torch.uint8 for p in [head.weight])
            rows = [n for n in frozen_of(head.weight).shard_rows(ranks) if n]
            parts = [nn.functional.linear(hidden, part) for part in values[name].split(rows)]
            assert torch.equal(logits, torch.cat(parts, -1)), "the GEMMs of shards in one process"
            assert abs(loss.item() - losses[rank].item()) <= TOLERANCE * loss.item()
            assert sent <= plan.totals["forward_bytes"] + plan.totals["backward_bytes"]
            gradients = {name: p.grad for name, p in rounded.named_parameters() if p.requires_grad}
            largest, wrong = max(g.abs().max().item() for g in gradients.values()), 0
            for name, gradient in gradients.items():
                assert_same(full(model.get_parameter(name).grad), gradient, TOLERANCE, name, largest)
                wrong += differs(plain.get_parameter(name).grad, gradient, 100 * TOLERANCE)
            assert wrong > len(gradients) / 2, "control: a base that is not rounded"
            assert plan == rtp_ext.explain(
                _language_model(features=features), frozen=format, loss_head="fused", mesh=ring
            )
        ring.close()
    for what, options, reason in (
        ("tied", {"loss_head": "fused"}, "it is shared with another module"),
        ("not fused", {}, "it is the vocabulary head, which errors of a few bits would harm most"),
    ):
        plan = rtp_ext.explain(_language_model(what == "tied"), frozen="nf4", ranks=ranks, device="cpu", **options)
        with cases.case(what):
            wide = {row.name.split(".")[-2]: row.wide for row in plan.parameters if row.wide is not None}
            assert wide["lm_head"] == reason
