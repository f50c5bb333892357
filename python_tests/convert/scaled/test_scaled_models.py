"""Models with adapters of the peft package, and stages of pipelines, with products in 8 bits: against the same layers
in one process."""

import peft
import pytest
import torch
from code_reference import scaled
from harness import on_ranks
from hf_models import make, make_batch
from reference import assert_same, differs, full, random
from test_recipe import TOLERANCE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from transformers import LlamaConfig, LlamaForCausalLM

import rtp_ext
from rtp_ext.recipes import RECIPES

RECIPE = "float8_rowwise"


def adapted():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        use_cache=False,
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, which would hide the base
            nn.init.normal_(parameter, std=0.1)
    return model


def outputs_of(model, rank, step):
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(7 * rank + step))
    return model(input_ids=ids, labels=ids)


def loss_of(model, rank, step):
    return outputs_of(model, rank, step).loss


@on_ranks(2, timeout=300.0)
def test_adapters(rank, ranks, cases):
    """The frozen base is in 8 bits, its adapters and the head are not; a merge changes the base."""
    model, plain = adapted(), adapted()
    wide = [path for path, _ in plain.named_modules() if "lora_" in path or path.endswith("lm_head")]
    scaled(plain, RECIPE, ranks, tuple(wide))
    model = rtp_ext.fully_rotate(model, recipe=RECIPE, timeout=60.0)
    rows = [row for row in rtp_ext.explain(model).parameters if "proj" in row.name or "head" in row.name]
    assert all((row.travel == RECIPE) != ("lora_" in row.name or "head" in row.name) for row in rows)
    executor = rtp_ext.ring_of(model).communicator.executor
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, plain)]
    for step in range(2):
        made = executor.codes()[1]
        loss_of(model, rank, step).backward()
        sum(loss_of(plain, each, step) / ranks for each in range(ranks)).backward()
        gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.requires_grad}
        with cases.case(f"step {step}"):
            assert step == 0 or executor.codes()[1] == made, "frozen weights are quantized once"
            for name, gradient in gradients.items():
                assert_same(gradient, plain.get_parameter(name).grad, 3e-2, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        wide = adapted()
        wide.load_state_dict(plain.state_dict())
        with cases.case("adapters"):
            found, expected, control = (outputs_of(each, rank, 5).logits for each in (model, plain, wide))
            # few activations become the code beside, for all of them the products in 8 bits are others
            assert (found - expected).norm() < 0.3 * (control - expected).norm(), "products in 8 bits"
        with plain.disable_adapter():
            stale = outputs_of(plain, rank, 5).logits
        for each in (model, plain):
            each.merge_adapter()
        with cases.case("merged"):
            found, expected = (outputs_of(each, rank, 5).logits for each in (model, plain))
            assert (found - expected).norm() < 0.3 * (stale - expected).norm(), "not codes of the base before"
    with cases.case("a base in 4 bits has none"), pytest.raises(ValueError, match="expected linear layers whose sizes"):
        rtp_ext.fully_rotate(adapted(), recipe=RECIPE, frozen="nf4", timeout=60.0)


WIDTH, MICRO, ROWS = 32, 4, 6


@on_ranks(2, timeout=300.0)
def test_autocast(rank, ranks, cases):
    """Of layers that travel together: their operands are joined inside the region of autocast."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    batch, losses = make_batch("llama", rank, 0), {}
    for name in (None, *RECIPES):
        options = {} if name is None else {"recipe": name}
        model = rtp_ext.fully_rotate(make("llama", **sizes), timeout=60.0, **options)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        losses[name] = loss.item()
        with cases.case(str(name)):
            assert all(parameter.grad.to_local().isfinite().all() for parameter in model.parameters())
            assert abs(losses[name] / losses[None] - 1) < 0.05, losses
            assert name is None or losses[name] != losses[None], "control: products are rounded"
        rtp_ext.ring_of(model).close()


class Part(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.last(torch.relu(self.first(self.norm(x))))


def mse(y, target):
    return (y - target).square().mean()


def tokens(place, what):
    return random(MICRO * ROWS, WIDTH, dtype=torch.float32, seed=10 * place + what)


def trained(places, steps):
    parts = nn.Sequential(*[scaled(Part(index), RECIPE, 2) for index in range(4)])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.2)
    for _ in range(steps):
        for place in range(places):
            for x, target in zip(tokens(place, 0).split(ROWS), tokens(place, 1).split(ROWS), strict=True):
                (mse(parts(x), target) / MICRO / places).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parts


@on_ranks(4, timeout=300.0)
def test_pipelines(rank, ranks, cases):
    """Zero-bubble schedules compute the gradients of inputs and of weights in two backwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ring"))
    place, mine = mesh.get_local_rank("ring"), (mesh.get_local_rank("pp"), mesh.get_local_rank("pp") + 2)
    plain = trained(2, 2)
    for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        stages = {
            index: rtp_ext.fully_rotate(Part(index), mesh=mesh["ring"], recipe=RECIPE, timeout=60.0) for index in mine
        }
        x = torch.zeros(ROWS, WIDTH).requires_grad_()
        made = [
            PipelineStage(
                stage, index, 4, torch.device("cpu"), group=mesh.get_group("pp"), input_args=(x,), output_args=(x,)
            )
            for index, stage in stages.items()
        ]
        pipeline = schedule(made, n_microbatches=MICRO, loss_fn=mse)
        optimizer = torch.optim.SGD([p for stage in stages.values() for p in stage.parameters()], lr=0.2)
        for _ in range(2):
            arguments = (tokens(place, 0),) if 0 in mine else ()
            pipeline.step(*arguments, **({"target": tokens(place, 1)} if 3 in mine else {}))
            optimizer.step()
            optimizer.zero_grad()
        wholes = {index: [full(p) for p in stage.parameters()] for index, stage in stages.items()}
        with cases.case(schedule.__name__):
            for index, found in wholes.items():
                for actual, expected, start in zip(
                    found, plain[index].parameters(), Part(index).parameters(), strict=True
                ):
                    assert_same(actual, expected, TOLERANCE, f"stage {index}")
                    assert differs(expected, start, 1e-3), "control"
