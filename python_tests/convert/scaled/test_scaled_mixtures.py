"""Mixtures of the transformers package with products in 8 bits, experts too, against the same layers in one process."""

import peft
import torch
import transformers as hf
from code_reference import scaled, scaled_experts
from harness import on_ranks
from hf_models import fill
from reference import assert_same, chunk, full

import rtp_ext
from rtp_ext.families.recognised import is_experts
from rtp_ext.recipes import recipe

EXPERTS, WIDTH, VOCABULARY = 5, 128, 41
CASES = (
    ("mixtral", "float8_rowwise"),
    ("mixtral", "float8_blockwise"),
    ("mixtral", "mxfp8_rceil"),
    ("qwen3_moe", "float8_tensorwise"),
    ("gpt_oss", "float8_rowwise"),
)


def make(family, inner=WIDTH):
    hf.logging.set_verbosity_error()
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": WIDTH // 4,
        "vocab_size": VOCABULARY,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        "use_cache": False,
    }
    if family == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=EXPERTS, **sizes))
    elif family == "qwen3_moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": inner, "norm_topk_prob": True}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**own, **sizes))
    else:
        model = hf.GptOssForCausalLM(hf.GptOssConfig(num_local_experts=EXPERTS, sliding_window=4, **sizes))
    fill(model.train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() == 3 else 1.0)
    return model


class Scaled:
    """The forward of an experts module in one process, by a recipe."""

    def __init__(self, part, name):
        self.part, self.recipe = part, recipe(name)

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        names = {"up": "gate_up_proj", "down": "down_proj"}
        names |= {"up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
        own = {key: getattr(self.part, name) for key, name in names.items() if hasattr(self.part, name)}
        inputs_first, x = getattr(self.part, "is_transposed", False), hidden_states.flatten(0, -2)
        args = (top_k_index, top_k_weights, own, self.part._apply_gate, inputs_first)
        return scaled_experts(self.recipe, x, *args).view(hidden_states.shape)


def in_one_process(model, name, ranks, wide):
    scaled(model, name, ranks, tuple(wide))
    for part in model.modules():
        if is_experts(part):
            part.forward = Scaled(part, name)
    return model


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(VOCABULARY, (2, 12 - rank), generator=generator)
    return model(ids, labels=ids)


def near(found, expected, control, what):
    """Few activations become the code beside; products in 16 or 32 bits are others everywhere."""
    error, other = ((each - expected).norm().item() for each in (found, control))
    assert error < 0.3 * other, f"{what}: error {error:.3g}, control {other:.3g}"


@on_ranks(2, timeout=300.0)
def test_training(rank, ranks, cases):
    """Two steps of two micro-batches; codes are made once in each, and explain counts them and what they send."""
    for family, name in CASES:
        with cases.case(f"{family}, {name}"):
            model = rtp_ext.fully_rotate(make(family), recipe=name, timeout=60.0)
            if family == "qwen3_moe":
                model.activation_checkpointing_enable({"use_reentrant": False})
            ring, chosen, plan = rtp_ext.ring_of(model), recipe(name), rtp_ext.explain(model)
            executor = ring.communicator.executor
            wide = [row.module for row in plan.parameters if len(row.shape) == 2 and row.travel != name]
            experts = [row for row in plan.parameters if len(row.shape) == 3]
            for row in experts:
                _, *matrix = row.shape
                own = chunk(torch.empty(EXPERTS, 0), ranks, rank).shape[0]
                assert (row.travel, row.wide) == (name, None) and len(experts) == 2
                assert row.held_bytes == 4 * own * matrix[0] * matrix[1] + chosen.memory(own, *matrix)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plain, control = in_one_process(make(family), name, ranks, wide), make(family)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, control)]
            for step in range(2):
                made = executor.codes()[1]
                for micro in range(2):
                    loss_of(model, rank, 2 * step + micro).loss.backward()
                    for each in (plain, control):
                        for other in range(ranks):
                            (loss_of(each, other, 2 * step + micro).loss / ranks).backward()
                weights = sum(row.travel == name for row in plan.parameters)
                assert executor.codes()[1] - made == weights * len(chosen.planes), "once a step, weight and plane"
                for part, gradient in ((path, full(p.grad)) for path, p in model.named_parameters()):
                    if "experts" in part:
                        near(gradient, *(each.get_parameter(part).grad for each in (plain, control)), f"d {part}")
                for each in (optimizer, *optimizers):
                    each.step()
                    each.zero_grad()
            assert executor.codes()[0] == sum(
                row.held_bytes - full(model.get_parameter(row.name)).new_empty(own_shape(row, rank)).nbytes
                for row in plan.parameters
                if row.travel == name
            )
            with torch.no_grad():
                wide = make(family)
                wide.load_state_dict(plain.state_dict())
                found, expected, other = (loss_of(each, rank, 9).logits for each in (model, plain, wide))
            near(found, expected, other, "logits")
            whole = {path: full(p) for path, p in model.named_parameters()}
            for path, parameter in plain.named_parameters():
                assert_same(whole[path], parameter, 2e-2, path)
            ring.close()

    with cases.case("experts of which one weight is in blocks"):
        model = make("mixtral")
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("experts.down_proj" not in path)
        plan = rtp_ext.explain(model, recipe="float8_rowwise", frozen="int8")
        up, down = (row for row in plan.parameters if len(row.shape) == 3)
        assert (up.travel, down.travel) == ("float32", "int8")
        assert up.wide == "the other weight of its experts is in blocks" and down.wide is None


def own_shape(row, rank):
    sizes = list(row.shape)
    sizes[row.cut] = row.shard_sizes[rank]
    return sizes


def test_experts_that_stay_wide():
    with rtp_ext.Ring.emulated(2) as ring:
        for family, inner, options, reason in (
            ("mixtral", WIDTH, {"bundle": "recompute"}, "bundle='recompute' computes hidden values of experts again"),
            ("gpt_oss", 136, {}, "mxfp8 needs outputs in multiples of 32, got 272"),
        ):
            rows = rtp_ext.explain(make(family, inner), mesh=ring, recipe="mxfp8", **options).parameters
            found = [row for row in rows if len(row.shape) == 3]
            assert len(found) == 2 and all(reason in row.wide and row.travel == "float32" for row in found), found
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        model = peft.get_peft_model(make("mixtral"), peft.LoraConfig(r=2, target_parameters=targets))
        rows = rtp_ext.explain(model, mesh=ring, recipe="mxfp8").parameters
        assert [row.wide for row in rows if len(row.shape) == 3] == ["an adapter changes its parameters"] * 2
