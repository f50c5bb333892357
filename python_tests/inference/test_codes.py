"""Models for forwards only whose weights are codes of 8 bits: outputs are those of a training model with the recipe,
bytes are those of codes and scales, and new values are quantized again."""

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from code_reference import dequantized, scaled
from grids import few
from harness import on_ranks
from hf_models import fill, inputs_of, make, make_batch
from logs import logged
from reference import assert_same, chunk, differs, full, random
from torch import nn

import rtp_ext
from rtp_ext.nn import RotatedExperts
from rtp_ext.parameters.coded import CodedWeight
from rtp_ext.recipes import RECIPES, quantize, recipe

DTYPES = (torch.float32, torch.bfloat16)
NAMES = [name for name, each in RECIPES.items() if not each.forward.whole]


def layers(name, ranks, dtype=torch.float32):
    """A model of layers of odd sizes where the recipe takes them, one with a bias, and one that it does not take."""
    torch.manual_seed(0)
    align = recipe(name).align
    inputs, outputs = (43, 7 * ranks - 2) if align == 1 else (ranks * align, 2 * ranks * align)
    last = [] if align == 1 else [nn.Linear(inputs, 10)]
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU(), nn.Linear(outputs, inputs, bias=False), *last).to(dtype)


def tokens(rank, model, dtype):
    return random(5 + rank, model[0].in_features, dtype=dtype, seed=rank)


def in_codes(model):
    return [name for name, each in model.named_parameters() if each.dtype == torch.uint8]


def check_recipe(rank, ranks, name, dtype, transport):
    plain = layers(name, ranks, dtype)
    training = rtp_ext.fully_rotate(copy.deepcopy(plain), recipe=name, timeout=60.0)
    model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, weights=name, timeout=60.0)
    ring = rtp_ext.ring_of(model)
    assert in_codes(model) == ["0.weight", "2.weight"], "layers that the recipe does not take stay wide"
    x = tokens(rank, plain, dtype)
    before = ring.pulled_bytes
    with torch.no_grad():
        y, expected = model(x), training(x)
    assert torch.equal(y, expected), "bitwise those of training"
    assert_same(y.float(), scaled(copy.deepcopy(plain), name, ranks, ("3",))(x).float(), 2e-2, "in one process")
    assert differs(y.float(), plain(x).float(), 1e-3), "control: products in 8 bits"
    plan = rtp_ext.explain(model)
    told = sum(each.forward_bytes for each in plan.parameters)
    assert ring.pulled_bytes - before == (told if transport == "tcp" else 0)
    assert ring.shard_bytes == sum(each.held_bytes for each in plan.parameters)

    optimizer = torch.optim.SGD(training.parameters(), lr=0.3)
    training(x).float().square().mean().backward()
    optimizer.step()
    ring.exchange("every rank has ended its forwards")
    assert rtp_ext.update_weights(model, training) == len([*plain.parameters()])
    with torch.no_grad():
        new = model(x)
        assert torch.equal(new, training(x)), "new values are quantized again"
        assert differs(y.float(), new.float(), 1e-3), "control: stale codes"
    wholes = {key: full(each) for key, each in training.state_dict().items()}
    found = rtp_ext.frozen_weights(model)
    assert [*found] == in_codes(model)
    for key, value in found.items():
        shards = (dequantized(quantize(recipe(name).forward, chunk(wholes[key], ranks, each))) for each in range(ranks))
        assert torch.equal(value, torch.cat([*shards]).to(dtype)), key
    streamed = dict(rtp_ext.stream_weights(model))
    assert all(torch.equal(streamed[key], value) for key, value in found.items())
    mine = {each.name: each.tensor for each in rtp_ext.local_shards(model)}
    assert all(torch.equal(mine[key], chunk(value, ranks, rank)) for key, value in found.items())
    ring.exchange("no rank reads any more")
    model.load_state_dict(plain.state_dict())
    ring.exchange("all have loaded")
    with torch.no_grad():
        assert torch.equal(model(x), y), "a whole weight is quantized as it is loaded"
    ring.exchange("no rank pulls any more")
    ring.close()
    rtp_ext.ring_of(training).close()


ENOUGH = [(1, "shm"), (2, "tcp"), (3, "shm")]
EVERY = [(ranks, transport) for ranks in (1, 2, 3, 4) for transport in ("shm", "tcp")]


@on_ranks()
@pytest.mark.parametrize(("ranks", "transport"), few(ENOUGH, EVERY))
def test_outputs_bytes_and_updates(rank, ranks, cases, transport):
    for name in NAMES:
        for dtype in DTYPES if name == "float8_rowwise" else DTYPES[:1]:
            with cases.case(f"{name}, {dtype}"):
                check_recipe(rank, ranks, name, dtype, transport)


@on_ranks(3)
def test_bytes_are_the_closed_form(rank, ranks, cases):
    """Within 2 % of a byte a weight, 1.031 with exponents of 32; a quarter of what float32 takes."""
    width = 1152
    for name in NAMES:
        with cases.case(name):
            plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
            model = rtp_ext.rotate_for_inference(plain, transport="tcp", weights=name, timeout=60.0)
            ring = rtp_ext.ring_of(model)
            model(torch.ones(2, width))
            closed = 2 * width * width * (1 + 1 / 32 * recipe(name).forward.exponents)
            ring.exchange("every rank has pulled")
            assert abs(ring.pulled_bytes / (closed * (ranks - 1) / ranks) - 1) < 0.02
            assert abs(ring.shard_bytes / (closed / ranks) - 1) < 0.02
            assert ring.slot_count("weight").peak_bytes <= 2 * 1.02 * closed / 2 / ranks
            ring.close()


@on_ranks(2)
@torch.no_grad()
def test_models_of_transformers(rank, ranks, cases):
    """q, k and v, and gate and up, are one product; generate needs no rank but the owners of shards."""
    for family, name in (("llama", "float8_rowwise"), ("mixtral", "float8_tensorwise"), ("mixtral", "float8_rowwise")):
        with cases.case(f"{family}, {name}"):
            plain = make(family, num_hidden_layers=1).eval()
            batch = inputs_of(make_batch(family, rank, 0), torch.float32)
            training = rtp_ext.fully_rotate(copy.deepcopy(plain), recipe=name, timeout=60.0).eval()
            expected = training(**batch).logits
            model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport="tcp", weights=name, timeout=60.0)
            assert torch.equal(model(**batch).logits, expected)
            assert "lm_head.weight" not in in_codes(model)
            assert (family == "llama") == ("model.layers.0.mlp.gate_proj.weight" in in_codes(model))
            assert (family == "mixtral") == ("model.layers.0.mlp.experts.down_proj" in in_codes(model))
            if family == "llama":
                prompt = torch.arange(3 + rank)[None]
                options = {"max_new_tokens": 4 + 3 * rank, "do_sample": False, "pad_token_id": 0}
                wide = scaled(copy.deepcopy(plain), name, ranks, ("lm_head",))
                made = model.generate(prompt, **options)
                assert torch.equal(made, wide.generate(prompt, **options)), "of other lengths on each rank"
            dist.barrier()
            rtp_ext.ring_of(model).close()
            rtp_ext.ring_of(training).close()


@on_ranks(2)
@torch.no_grad()
def test_experts_of_both_layouts(rank, ranks, cases, ring):
    """Experts that no token chose are not pulled."""
    sizes = {"hidden_size": 24, "intermediate_size": 12, "num_hidden_layers": 1, "num_local_experts": 4}
    configs = {"mixtral": hf.MixtralConfig(**sizes), "gpt_oss": hf.GptOssConfig(**sizes)}
    kinds = {"mixtral": hf.models.mixtral.modeling_mixtral.MixtralExperts}
    kinds["gpt_oss"] = hf.models.gpt_oss.modeling_gpt_oss.GptOssExperts
    for family, config in configs.items():
        with cases.case(family):
            config._experts_implementation = "eager"
            plain = fill(kinds[family](config)).eval()
            training = RotatedExperts.from_module(plain, ring, recipe="float8_rowwise")
            model = rtp_ext.rotate_for_inference(plain, transport="tcp", weights="float8_rowwise", timeout=60.0)
            own = rtp_ext.ring_of(model)
            x = random(6, 24, dtype=torch.float32, seed=rank)
            index = torch.tensor([[0, 1], [1, 3]])[torch.arange(6) % 2]
            weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(rank))
            assert torch.equal(model(x, index, weights), training(x, index, weights))
            before = own.pulled_bytes
            model(x, torch.full_like(index, 2 * rank), weights)
            assert own.pulled_bytes == before > 0, "the tokens chose experts of this rank alone"
            own.exchange("no rank pulls any more")
            own.close()


def test_layouts():
    """Rows of every rank hold what the whole has; shapes tell layouts apart, those for GPUs too."""
    for shape in ((256, 512), (3, 128, 256)):
        values = random(*shape, dtype=torch.float32, seed=1)
        seen = set()
        for name in RECIPES:
            for gpu, inputs_first in ((False, False), (True, False), (False, len(shape) > 2)):
                weight = CodedWeight(name, shape, torch.float32, ranks=2, gpu=gpu, inputs_first=inputs_first)
                whole = weight.encode(values, 2)
                assert whole.shape == weight.packed_shape
                seen.add((weight.packed_shape, recipe(name).forward.block, gpu))
                decoded = weight.decode(whole)
                for rank, shard in enumerate(values.tensor_split([weight.shard_rows(2)[0]])):
                    part = weight.encode(shard, 1)
                    assert torch.equal(part, whole[rank : rank + 1])
                    first, end = weight.rows_of(rank, 1)
                    assert torch.equal(weight.decode_part(part, end - first), decoded[first:end])
                    both = shard, decoded[first:end]
                    for matrix, found in zip(*(each if len(shape) > 2 else each[None] for each in both), strict=True):
                        turned = matrix.t().contiguous() if inputs_first else matrix
                        wanted = dequantized(quantize(recipe(name).forward, turned))
                        assert torch.equal(found, wanted.t() if inputs_first else wanted), f"{name}, {gpu}"
                assert weight.encode(values.to("meta"), 2).is_meta
        assert len({shape for shape, _, _ in seen}) == len(seen), seen


@on_ranks(2)
def test_refusals(rank, ranks):
    wide = nn.Sequential(nn.Linear(30, 20))
    with pytest.raises(
        ValueError, match=r"expected weights None, .*, 'float8_rowwise', .*got 'float8_tensorwise_whole'"
    ):
        rtp_ext.rotate_for_inference(wide, weights="float8_tensorwise_whole", timeout=60.0)
    with pytest.raises(ValueError, match="weights='mxfp8' expected weights of linear layers, got none in a Sequential"):
        rtp_ext.rotate_for_inference(wide, weights="mxfp8", timeout=60.0)
    with pytest.raises(ValueError, match="expected a compute dtype of 16 or 32 bits, got float64"):
        rtp_ext.rotate_for_inference(copy.deepcopy(wide).double(), weights="float8_rowwise", timeout=60.0)
    assert type(wide[0]) is nn.Linear and wide[0].weight.dtype == torch.float32, "a refused model does not change"
    names = ("float8_rowwise", "float8_tensorwise")
    with pytest.raises(ValueError, match=f"{names[0]}.*{names[1]}"):
        rtp_ext.rotate_for_inference(copy.deepcopy(wide), weights=names[rank], timeout=60.0)
    convert = rtp_ext.rotate_for_inference
    model, lines = logged(convert, layers("mxfp8", ranks), weights="mxfp8", timeout=60.0)
    assert any("mxfp8 needs outputs in multiples of 32, got 10" in line for _, line in lines)
    reasons = {each.name: each.wide for each in rtp_ext.explain(model).parameters}
    assert reasons["0.weight"] is None
    x = torch.ones(2, 64, requires_grad=True)
    with pytest.raises(ValueError, match="fully_rotate"):
        model(x).sum().backward()
    rtp_ext.ring_of(model).close()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package torchao")
@on_ranks(2)
def test_layers_of_torchao(rank, ranks):
    """Are stored as codes of their recipe without being asked."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    config = Float8LinearConfig.from_recipe_name("rowwise")
    theirs = convert_to_float8_training(copy.deepcopy(plain), config=config)
    model = rtp_ext.rotate_for_inference(theirs, timeout=60.0)
    asked = rtp_ext.rotate_for_inference(copy.deepcopy(plain), weights="float8_rowwise", timeout=60.0)
    assert in_codes(model) == in_codes(asked) == ["0.weight", "2.weight"]
    x = random(5 + rank, 64, dtype=torch.float32, seed=rank)
    with torch.no_grad():
        assert torch.equal(model(x), asked(x))
    for each in (model, asked):
        rtp_ext.ring_of(each).exchange("no rank reads any more")
        rtp_ext.ring_of(each).close()
