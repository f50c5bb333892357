"""LoRA of parameters themselves (peft's target_parameters), such as the stacked weights of experts: each rank adds its
part of the adapter to its shard, and the sum rotates."""

import copy

import torch
from harness import on_ranks
from hf_models import make, make_batch
from reference import assert_same, differs, full
from torch import nn

import rtp_ext
from rtp_ext.nn import RotatedExperts

LIMIT = 1e-4  # the norms of transformers compute in float32
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# name: targets, and whether the adapter joins before the conversion, after it, or both are tried
TARGETS = {
    "experts": (EXPERTS, (False, True)),
    "a gathered router": (["mlp.gate.weight"], (False,)),
    "a linear layer": (["self_attn.k_proj.weight"], (True,)),
}


def _adapt(model: nn.Module, targets: list[str], values: bool = True) -> nn.Module:
    import peft

    torch.manual_seed(1)
    options = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "init_lora_weights": not values}
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], target_parameters=targets, **options))
    return model.double()


def _plain() -> nn.Module:
    return make("mixtral", torch.float64, use_cache=False)


def _train(model, losses):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        loss = losses(model, step)
        loss.backward()
        found.append(loss.detach())
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found, gradients


@on_ranks(3, timeout=240.0)
def test_adapters_of_parameters(rank, ranks, ring, cases):
    for name, (targets, times) in TARGETS.items():
        for late in times:
            with cases.case(f"{name}, {'after' if late else 'before'} the conversion"):
                plain = _adapt(_plain(), targets)
                base = rtp_ext.fully_rotate(_plain() if late else _adapt(_plain(), targets), mesh=ring)
                model = _adapt(base, targets) if late else base
                for key, parameter in plain.named_parameters():
                    assert_same(full(model.get_parameter(key)), parameter, 0.0, key)
                rotating = [part for part in model.modules() if isinstance(part, RotatedExperts)]
                assert len(rotating) == 2, "experts rotate"
                _, gradients = _train(model, lambda m, step: m(**make_batch("mixtral", rank, step)).loss)
                _, expected = _train(
                    plain,
                    lambda m, step: sum(m(**make_batch("mixtral", r, step)).loss for r in range(ranks)) / ranks,
                )
                assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
                assert any("lora_B" in key for key in gradients)
                for key, gradient in expected.items():
                    assert_same(gradients[key], gradient, LIMIT, key)
                    assert differs(gradient * ranks, gradient, 10 * LIMIT), f"control: a wrong mean of {key}"
                batch = make_batch("mixtral", rank, 9)
                with torch.no_grad():
                    after = plain(**batch).logits
                    assert_same(model(**batch).logits, after, LIMIT, "logits")
                    with plain.disable_adapter(), model.disable_adapter():
                        assert_same(model(**batch).logits, plain(**batch).logits, LIMIT, "logits of the base model")
                        assert differs(plain(**batch).logits, after, 10 * LIMIT), "control"
                    model.merge_adapter()
                    assert_same(model(**batch).logits, after, LIMIT, "logits of the merged model")
    with cases.case("for inference the adapted parameters stay whole"):
        plain = _adapt(_plain(), EXPERTS).eval()
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=30.0)
        batch = make_batch("mixtral", rank, 0)
        with torch.no_grad():
            assert_same(model(**batch).logits, plain(**batch).logits, LIMIT, "logits")
        rtp_ext.ring_of(model).close()
