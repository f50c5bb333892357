"""Models for forwards only in the hands of others: peft, save_pretrained, generate of encoder and decoder,
torch.compile, autocast, explain."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from hf_models import VOCABULARY, fill, inputs_of, make, make_batch
from reference import assert_same, differs
from torch import nn

import rtp_ext

TARGETS = ["q_proj", "v_proj", "down_proj"]


def logits(model: nn.Module, rank: int) -> torch.Tensor:
    return model(**inputs_of(make_batch("llama", rank, 0), torch.float32)).logits


def with_adapter(plain: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    options = {"r": 3, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(**options)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@on_ranks(2)
@torch.no_grad()
def test_adapters_and_folders(rank, cases, tmp_path):
    folder = tmp_path / "saved"
    plain = make("llama", num_hidden_layers=1).eval()
    adapted = with_adapter(plain)
    assert differs(logits(adapted, rank), logits(plain, rank), 1e-2), "control: the adapter changes the output"
    model = rtp_ext.rotate_for_inference(with_adapter(plain), timeout=60.0)
    with cases.case("forwards"):
        assert_same(logits(model, rank), logits(adapted, rank), 1e-5, "adapter")
        with model.disable_adapter():
            assert_same(logits(model, rank), logits(plain, rank), 1e-5, "without the adapter")
    for what in ("merge_adapter", "merge_and_unload"):
        with cases.case(what), pytest.raises(ValueError, match="merge of Linear: expected a plain model, got one that"):
            getattr(model, what)()
    with cases.case("unmerge"), pytest.raises(ValueError, match="unmerge of Linear: expected a plain model"):
        model.base_model.model.model.layers[0].mlp.down_proj.unmerge()
    with cases.case("refused merges change nothing"):
        assert_same(logits(model, rank), logits(adapted, rank), 1e-5, "adapter")
    with cases.case("an adapter that is added later"):
        bare = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
        config = peft.LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM")
        later = peft.get_peft_model(bare, config).eval()
        assert_same(logits(later, rank), logits(plain, rank), 1e-5, "lora_B is zero")
        with pytest.raises(ValueError, match="merge of Linear: expected a plain model, got one that"):
            later.merge_adapter()
    with cases.case("merged before"):
        merged = rtp_ext.rotate_for_inference(with_adapter(plain).merge_and_unload(), timeout=60.0)
        assert_same(logits(merged, rank), logits(adapted, rank), 1e-5, "merged")
    with cases.case("the base in blocks"):
        blocks = rtp_ext.rotate_for_inference(with_adapter(plain), weights="nf4", timeout=60.0)
        values = rtp_ext.frozen_weights(blocks)
        assert values and not [name for name in values if "lora" in name], "adapters keep their dtype"
        twin = with_adapter(plain)
        twin.load_state_dict(values, strict=False)
        assert_same(logits(blocks, rank), logits(twin, rank), 1e-5, "nf4")
        assert differs(logits(blocks, rank), logits(adapted, rank), 1e-4), "control"
        with pytest.raises(ValueError, match="unmerge of Linear: expected a plain model"):
            blocks.base_model.model.model.layers[0].mlp.down_proj.unmerge()
    with cases.case("save_pretrained"):
        from transformers import AutoModelForCausalLM

        merged.save_pretrained(folder)  # returns when rank 0 has written
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert_same(logits(loaded.eval(), rank), logits(adapted, rank), 1e-5, "a folder")


@on_ranks(3)
@torch.no_grad()
def test_generate_of_encoder_and_decoder(rank):
    import transformers as hf

    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    for tied in (True, False):
        config = hf.T5Config(dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=tied, **sizes)
        plain = fill(hf.T5ForConditionalGeneration(config).eval())
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), timeout=60.0)
        other = copy.deepcopy(plain)
        other.decoder.final_layer_norm.weight.neg_()
        for number in range(1 + rank):  # ranks generate different numbers of texts, of different lengths
            prompt = torch.arange(1, 5 + 2 * rank + number).unsqueeze(0)
            options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "num_beams": 1 + number}
            ours, theirs = (each.generate(prompt, **options) for each in (model, plain))
            assert torch.equal(ours, theirs)
            ours, theirs = (each(input_ids=prompt, labels=prompt).logits for each in (model, plain))
            assert_same(ours, theirs, 1e-5, "logits")
        assert not torch.equal(other.generate(prompt, **options), plain.generate(prompt, **options)), "control"


class Scaled(nn.Module):
    """Rotated layers with other operations between them, which a compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 5)

    def forward(self, x):
        return torch.tanh(self.last(torch.sin(self.norm(self.first(x))) * 2 + 1)) - 0.5


@on_ranks(2)
@torch.no_grad()
def test_compilers_and_autocast(rank, cases):
    plain = Scaled()
    for weights in (None, "int8"):
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), weights=weights, timeout=60.0)
        x = torch.randn(4 + rank, 12)
        for backend in ("eager",) if weights else ("eager", "inductor"):
            torch._dynamo.reset()
            with cases.case(f"{weights}, {backend}"):
                # inductor takes seconds for each graph: one for all numbers of rows but 1
                dynamic, first = (True, 2) if backend == "inductor" else (None, 1)
                compiled = torch.compile(model, backend=backend, dynamic=dynamic)
                for rows in range(first + rank, first + 3 + 2 * rank):  # ranks call it different numbers of times
                    assert_same(compiled(x[:rows]), model(x[:rows]), 1e-6, "compiled")
                assert differs(compiled(x), model(x + 0.1), 1e-3), "control"
        with cases.case(f"{weights}, fullgraph"), pytest.raises(torch._dynamo.exc.Unsupported):
            torch._dynamo.reset()
            torch.compile(model, backend="eager", fullgraph=True)(x)
        autocast = torch.autocast("cpu", torch.bfloat16)
        with cases.case(f"{weights}, autocast in inference mode"), torch.inference_mode(), autocast:
            actual, expected = model(x), plain(x)
            assert actual.dtype == expected.dtype
            assert_same(actual, expected, 2e-2, "bfloat16")
            assert differs(actual, plain(x + 1), 5e-2), "control"


@on_ranks(3)
@torch.no_grad()
def test_explain(rank):
    plain = make("llama", num_hidden_layers=1).eval()
    for transport, weights in (("shm", None), ("tcp", None), ("tcp", "nf4")):
        model = rtp_ext.rotate_for_inference(copy.deepcopy(plain), transport=transport, weights=weights, timeout=60.0)
        ring = rtp_ext.ring_of(model)
        plan = rtp_ext.explain(model)
        rows = {row.name: row for row in plan.parameters}
        assert set(rows) == {name for name, _ in plain.named_parameters()}
        cut = {name for name, row in rows.items() if row.moved == "rotated"}
        assert cut == {name for name in rows if "norm" not in name}
        held = sum(rows[name].held_bytes for name in cut)
        assert held == ring.shard_bytes and sum(row.held_bytes for row in rows.values()) == held + ring.whole_bytes
        assert plan.totals["backward_bytes"] == plan.totals["gradient_bytes"] == plan.totals["collective_bytes"] == 0
        pulled = plan.totals["forward_bytes"]
        if transport == "shm":
            assert pulled == 0 and "reads the shards of other ranks where they lie" in str(plan)
            assert plan.totals["slot_bytes"] == 0
        else:
            # the last group of blocks is stored whole, and travels without the rows that it lacks
            stored = sum(ring.exchange(held)) - held
            assert pulled <= stored and (pulled == stored or weights is not None), (pulled, stored)
            assert f"A forward of rank {rank} pulls" in str(plan) and "pulled" in str(plan)
            model(torch.arange(5).unsqueeze(0))
            slots = ring.slot_count("weight")
            assert (slots.slots, slots.bytes) == (2, plan.totals["slot_bytes"])
        names = {name for name, row in rows.items() if row.travel == "nf4"}
        assert names == (set(rtp_ext.frozen_weights(model)) if weights else set())
        assert "rotate_for_inference keeps it whole on every rank" in str(plan)
        with pytest.raises(ValueError, match="which rotate_for_inference has converted"):
            rtp_ext.fully_rotate(model)
        dist.barrier()
        ring.close()
