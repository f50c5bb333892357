"""What the source of a forward says of layers with one input and of heads with their loss; models of families that no
list names, converted and trained as in one process."""

import copy

import torch
from harness import on_ranks
from hf_models import fill
from reference import assert_same, differs, full
from torch import nn

import rtp_ext
from rtp_ext.families.sources import called_with_one_input, loss_follows_head
from rtp_ext.nn import RotatedEmbedding, RotatedExperts


class Together(nn.Module):
    def forward(self, x, mask=None, other=None):
        q = self.norm(self.q(x).view(2, -1))
        k, v = self.k(x), self.v(x)
        a = self.a(other)
        other = other + 1
        b = self.b(other)
        if mask is not None:
            c = self.c(mask) * self.d(mask)
            return c + self.twice(x)
        x = x if mask is None else self.e(x)
        return self.twice(x) + self.f(x, mask) + self.g(x) + self.h(x) + a + b + k + v + q


class Apart(nn.Module):
    def forward(self, x, y):
        a, b = self.a(x), self.b(y)
        c = self.c(x) if y is None else self.d(x)
        return [self.e(each) for each in x] + [a, b, c, self.a.weight]


def test_layers_with_one_input():
    assert set(called_with_one_input(Together)) == {("q", "k", "v"), ("c", "d"), ("g", "h")}
    assert called_with_one_input(Apart) == () and called_with_one_input(nn.Linear) == ()


class Usual(nn.Module):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids)
        logits = self.lm_head(hidden[:, -3:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=3, **kwargs)
        return dict(loss=loss, logits=logits)


class Capped(nn.Module):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input_ids)
        logits = torch.tanh(logits)
        return dict(loss=self.loss_function(logits, labels, 3), logits=logits)


class Shifted(nn.Module):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input_ids)
        labels = labels[:, 1:]
        return dict(loss=self.loss_function(logits, labels, 3), logits=logits)


class ReadsLogits(nn.Module):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input_ids)
        return dict(loss=self.loss_function(logits, labels, 3) + logits.mean(), logits=logits)


class TwoHeads(nn.Module):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input_ids)
        return dict(loss=self.loss_function(logits, labels, 3), logits=logits, more=self.lm_head(input_ids))


class Widened(nn.Module):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input_ids)
        return dict(loss=self.loss_function(logits.float(), labels, 3), logits=logits)


def test_heads_with_the_usual_loss():
    assert loss_follows_head(Usual)
    assert not any(map(loss_follows_head, (Capped, Shifted, ReadsLogits, TwoHeads, Widened, Together)))


_SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}


def _models():
    """Yields name, model, whether head and loss can be one, and the parts that have to rotate together."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "first_k_dense_replace": 1}
    moe |= {"n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
    moe |= {"v_head_dim": 6, "qk_nope_head_dim": 6, "n_shared_experts": 1, "experts_implementation": "eager"}
    heads = {**_HEADS, "num_key_value_heads": 4}
    yield "DeepSeek-V3", hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_SIZES, **heads, **moe)), True
    config = hf.Gemma3TextConfig(**_SIZES, **_HEADS, head_dim=8, sliding_window=4, pad_token_id=0)
    yield "Gemma 3", hf.Gemma3ForCausalLM(config), False
    yield "OLMo 2", hf.Olmo2ForCausalLM(hf.Olmo2Config(**_SIZES, **_HEADS, pad_token_id=0)), True


def _batch(rank):
    ids = torch.randint(1, 37, (2, 8 - rank), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids.clone()}


@on_ranks(3, timeout=240.0)
def test_families_that_no_list_names(rank, ranks, ring, cases):
    for name, plain, fuses in _models():
        plain = fill(plain.double().train())
        expected = [plain(**_batch(other)).loss for other in range(ranks)]
        sum(expected).div(ranks).backward()
        for fused in (False, True)[: 1 + fuses]:
            with cases.case(f"{name}, fused {fused}"):
                options = {"loss_head": "fused"} if fused else {}
                model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=ring, **options)
                model.zero_grad()
                plan = rtp_ext.explain(model)
                gathered = [row for row in plan.parameters if row.moved != "rotated"]
                assert all(len(row.shape) == 1 or "gate.weight" in row.name for row in gathered), gathered
                kinds = {type(part) for part in model.modules()}
                assert (name == "DeepSeek-V3") == any(issubclass(kind, RotatedExperts) for kind in kinds)
                assert any(issubclass(kind, RotatedEmbedding) for kind in kinds)
                together = {bundle.paths for bundle in plan.bundles}
                assert ("gate_proj", "up_proj", "down_proj") in together
                assert name == "DeepSeek-V3" or ("q_proj", "k_proj", "v_proj") in together
                output = model(**_batch(rank))
                assert ("logits" in output) != fused
                assert_same(output.loss, expected[rank].detach(), 1e-6, "loss")  # transformers computes it in float32
                output.loss.backward()
                for key, parameter in plain.named_parameters():
                    if parameter.grad is not None:  # the router's choice has none
                        gradient = full(model.get_parameter(key).grad)
                        assert_same(gradient, parameter.grad, 1e-5, key)
                        assert differs(gradient * ranks, parameter.grad, 1e-5), f"control: a wrong mean of {key}"
