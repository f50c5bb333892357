"""generate of converted models on ranks whose generations end at different times: the tokens of the plain model."""

import copy
import time

import pytest
import torch
from harness import on_ranks
from hf_models import VOCABULARY, check_trained, exact, refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rtp_ext
from rtp_ext.outer import ZeroOuter
from rtp_ext.ring import Ring

FREE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt_of(rank, seed=0, rows=None, length=None):
    """Ranks differ in rows and length."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shape = (rows or 1 + rank % 3, length or 4 + 2 * (rank % 3))
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def both(kind, timeout=30.0, **changes):
    plain = exact(kind, use_cache=True, **changes).eval()
    return rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=timeout), plain


def tokens_of(output):
    return output if isinstance(output, torch.Tensor) else output.sequences


def check(model, plain, prompt, **options):
    """Both models generate. Returns the result of the converted model."""
    options = {**FREE, **options}
    ours, theirs = model.generate(prompt, **options), plain.generate(prompt, **options)
    assert torch.equal(tokens_of(ours), tokens_of(theirs)), f"{options}: {tokens_of(ours)} {tokens_of(theirs)}"
    return ours


def steps_of(rank, few=2, many=9):
    """So many new tokens: few on the first rank, many on the last."""
    return (few, many, many - 3)[rank % 3]


class StopsAt:
    """A stopping criterion."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, _scores):
        return torch.full((len(ids),), ids.shape[1] >= self.length)


class Counted:
    """A streamer."""

    def __init__(self):
        self.put_in, self.ended = [], 0

    def put(self, value):
        self.put_in.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@on_ranks([2], timeout=200.0)
def test_tokens_of_the_plain_model(rank, ranks, cases):
    from transformers import StoppingCriteriaList

    for kind in ("llama", "gpt2"):
        model, plain = both(kind)
        prompt, many = prompt_of(rank), {"max_new_tokens": steps_of(rank)}
        with cases.case(f"{kind}: ranks that stop at different lengths"):
            for cached in (True, False):
                check(model, plain, prompt, **many, use_cache=cached)
            ours, other = model.generate(prompt, **FREE, **many), plain.generate(prompt.flip(1), **FREE, **many)
            with refused("another prompt has the same tokens"):
                assert torch.equal(ours[:, prompt.shape[1] :], other[:, prompt.shape[1] :])
        with cases.case(f"{kind}: a token ends them"):
            free = plain.generate(prompt, **FREE, max_new_tokens=11)
            end = free[:, prompt.shape[1] + 1 + 3 * rank].tolist()
            ours = check(model, plain, prompt, max_new_tokens=11, eos_token_id=end)
            assert ours.shape[1] < free.shape[1], "control: it ends early"
        with cases.case(f"{kind}: whatever synced_gpus says"):
            for synced in (None, False, True):
                check(model, plain, prompt, **many, synced_gpus=synced)
        with cases.case(f"{kind}: sampling, and where it leaves the generator of random numbers"):
            drawn = []
            for each in (model, plain):
                torch.manual_seed(rank)
                tokens = each.generate(prompt, **{**FREE, "do_sample": True}, **many, temperature=5.0)
                drawn.append((tokens.tolist(), torch.rand(1).item()))
            assert drawn[0] == drawn[1], drawn
        with cases.case(f"{kind}: beams"):
            check(model, plain, prompt, **many, num_beams=3, num_return_sequences=2, eos_token_id=5)
        with cases.case(f"{kind}: a static cache, full where a rank stops"):
            check(model, plain, prompt, **many, cache_implementation="static")
        with cases.case(f"{kind}: what else is returned"):
            named = {"return_dict_in_generate": True, "output_scores": True, **many}
            ours, theirs = model.generate(prompt, **FREE, **named), plain.generate(prompt, **FREE, **named)
            assert len(ours.scores) == len(theirs.scores) == steps_of(rank)
            length = prompt.shape[1] + steps_of(rank) - 1
            assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == length
            for mine, known in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
                torch.testing.assert_close(mine.keys, known.keys, rtol=1e-5, atol=1e-6)
        with cases.case(f"{kind}: a stopping criterion of one rank, a streamer of the other"):
            streamer = Counted()
            more = {"streamer": streamer} if rank == 0 else {}
            stops = StoppingCriteriaList([StopsAt(prompt.shape[1] + 4 if rank == 1 else 99)])
            ours = check(model, plain, prompt, max_new_tokens=8, stopping_criteria=stops, **more)
            assert ours.shape[1] - prompt.shape[1] == (4 if rank == 1 else 8)
            expected = 2 * plain.generate(prompt[:1], **FREE, max_new_tokens=8).shape[1] if rank == 0 else 0
            assert streamer.ended == (2 if rank == 0 else 0) and sum(map(len, streamer.put_in)) == expected
        with cases.case(f"{kind}: prompts in chunks, of which ranks have different numbers"):
            long = prompt_of(rank, length=4 + 9 * rank)
            check(model, plain, long, **many, prefill_chunk_size=3)
        with cases.case(f"{kind}: no more positions on one rank"):
            if kind == "gpt2":  # 32 positions
                check(model, plain, prompt_of(rank, length=30 - 26 * rank), max_new_tokens=2 + 18 * rank)
        with cases.case(f"{kind}: drafts"):
            assistant = exact(
                kind, use_cache=True, **{"llama": {"num_hidden_layers": 1}}.get(kind, {"n_layer": 1})
            ).eval()
            one = prompt_of(rank, rows=1)
            check(model, plain, one, **many, assistant_model=assistant)
            check(model, plain, one.repeat(1, 2), **many, prompt_lookup_num_tokens=3)
        with cases.case(f"{kind}: in inference mode, in training mode, of a copy"):
            with torch.inference_mode():
                check(model, plain, prompt, **many)
            check(model.train(), plain.train(), prompt, **many)
            check(copy.deepcopy(model).eval(), plain, prompt, **many)
        with cases.case(f"{kind}: a loop of one's own"):
            check(model, plain, prompt, custom_generate=own_loop, max_new_tokens=steps_of(rank))
        with cases.case(f"{kind}: goes on to train"):
            check_trained(model, plain.train(), kind, rank, ranks)
        rtp_ext.ring_of(model).close()


def own_loop(model, input_ids, generation_config, **_):
    for _ in range(generation_config.max_new_tokens):
        logits = model(input_ids=input_ids, use_cache=False).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
    return input_ids


@on_ranks(2, timeout=120.0)
def test_models_with_an_encoder(rank, cases):
    """Models whose generate() calls their encoder separately."""
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 1}
    heads = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    bart = {**sizes, **heads, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 40}
    made = {
        "T5": (hf.T5ForConditionalGeneration, hf.T5Config(**sizes, d_kv=6, d_ff=37, num_layers=2, num_heads=4)),
        "Bart": (hf.BartForConditionalGeneration, hf.BartConfig(**bart, forced_eos_token_id=None)),
    }
    for name, (cls, config) in made.items():
        torch.manual_seed(0)
        plain = cls(config).eval()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
        for beams in (1, 2):
            with cases.case(f"{name}, {beams} beams"):
                check(model, plain, prompt_of(rank), max_new_tokens=steps_of(rank), num_beams=beams)
        with cases.case(f"{name}: a rank fails before its encoder"):
            fails(model, rank, "ValueError", {} if rank == 0 else {"not_an_argument": 1})
        with cases.case(f"{name}: afterwards"):
            check(model, plain, prompt_of(rank, 1), max_new_tokens=steps_of(rank, 7, 3))
        rtp_ext.ring_of(model).close()


def fails(model, rank, kind, options):
    """Rank 1 fails, and the others with it, at once."""
    start = time.monotonic()
    match = rf"failed on rank 1: {kind}" if rank != 1 else None
    with pytest.raises(RuntimeError if rank != 1 else Exception, match=match) as caught:
        model.generate(prompt_of(rank), **FREE, max_new_tokens=8, **options)
    assert type(caught.value).__name__ == ("RuntimeError" if rank != 1 else kind), caught.value
    assert time.monotonic() - start < 10.0, "in time"


class Failing:
    def __init__(self, steps):
        self.left = steps

    def __call__(self, _ids, scores):
        self.left -= 1
        if self.left == 0:
            raise KeyError("what a grammar lacks")
        return scores


@on_ranks(2, timeout=120.0)
def test_failures_reach_all_ranks(rank, cases):
    model, plain = both("llama")
    prompt = prompt_of(rank)
    for steps in (1, 4):
        with cases.case(f"a logits processor that fails at step {steps}"):
            fails(model, rank, "KeyError", {"logits_processor": [Failing(steps)] if rank == 1 else []})
        with cases.case(f"a generation after that, {steps}"):
            check(model, plain, prompt, max_new_tokens=steps_of(rank))
    with cases.case("a rank that has finished when another fails"):
        with pytest.raises((RuntimeError, KeyError), match=r"what a grammar lacks"):
            processors = [Failing(5)] if rank == 1 else []
            model.generate(prompt, **FREE, max_new_tokens=2 + 6 * rank, logits_processor=processors)
        check(model, plain, prompt, max_new_tokens=steps_of(rank))
    with cases.case("refused"):
        elsewhere = rtp_ext.fully_rotate(copy.deepcopy(plain), timeout=30.0)
        for options, match in (
            ({"assistant_early_exit": 1}, "assistant_early_exit=1 drafts tokens"),
            ({"cache_implementation": "paged"}, "continuous batching of LlamaForCausalLM"),
            (
                {"assistant_model": rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=rtp_ext.ring_of(model))},
                "one converted model to generate",
            ),
            ({"assistant_model": elsewhere}, "one converted model to generate"),
        ):
            with pytest.raises(ValueError, match=match):
                model.generate(prompt_of(rank, rows=1), **FREE, max_new_tokens=3, **options)
        check(model, plain, prompt, max_new_tokens=steps_of(rank))
    with cases.case("other inputs"):
        inputs = {"input_ids": prompt}
        if rank == 1:
            inputs = {"inputs_embeds": plain.get_input_embeddings()(prompt)}
        ours, theirs = (m.generate(**inputs, **FREE, max_new_tokens=4 - rank) for m in (model, plain))
        assert torch.equal(ours, theirs), f"{ours} {theirs}"
        embedded = plain.get_input_embeddings()(prompt)
        ours, theirs = (m.generate(inputs_embeds=embedded, **FREE, max_new_tokens=1 + 4 * rank) for m in (model, plain))
        assert torch.equal(ours, theirs), f"{ours} {theirs}"
    with cases.case("a rank that does something else"):
        if rank == 0:
            with pytest.raises(ValueError, match="expected every rank of the ring to call generate, got one"):
                model.generate(prompt, **FREE, max_new_tokens=3)
        else:
            rtp_ext.ring_of(model).exchange("the name of a layer")
    rtp_ext.ring_of(model).close()
    with cases.case("a rank that generates alone"):
        alone, _ = both("llama", timeout=1.0)
        if rank == 0:
            with pytest.raises(rtp_ext.RingTimeout, match="LlamaForCausalLM, which every rank of the ring has to call"):
                alone.generate(prompt, **FREE, max_new_tokens=3)
        torch.distributed.barrier()


@on_ranks(2, timeout=120.0)
def test_parts_and_adapters(rank, cases):
    many = {"max_new_tokens": steps_of(rank)}
    with cases.case("blocks first, then the model"):
        model, plain = exact("llama", use_cache=True).eval(), exact("llama", use_cache=True).eval()
        ring = Ring(timeout=30.0)
        for block in model.model.layers:
            rtp_ext.fully_rotate(block, mesh=ring)
        rtp_ext.fully_rotate(model)
        check(model, plain, prompt_of(rank), **many)
        ring.close()
    with cases.case("a part alone, in a plain model"):
        model = exact("llama", use_cache=True).eval()
        rtp_ext.fully_rotate(model.model, timeout=30.0)
        check(model, plain, prompt_of(rank), **many)
        rtp_ext.ring_of(model.model).close()
    with cases.case("adapters"):
        peft = pytest.importorskip("peft")
        for first in (True, False):
            config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            base = exact("llama", use_cache=True).eval()
            known = copy.deepcopy(base)
            torch.manual_seed(1)
            known = peft.get_peft_model(known, config).eval()
            if first:
                rtp_ext.fully_rotate(base, timeout=30.0)
                ring = rtp_ext.ring_of(base)
            torch.manual_seed(1)
            model = peft.get_peft_model(base, config).eval()
            if not first:
                ring = rtp_ext.ring_of(rtp_ext.fully_rotate(model, timeout=30.0))
            prompt = prompt_of(rank)
            ours, theirs = (m.generate(input_ids=prompt, **FREE, **many) for m in (model, known))
            assert torch.equal(ours, theirs), f"converted first: {first}: {ours} {theirs}"
            with known.disable_adapter(), refused("adapters change nothing"):
                assert torch.equal(ours, known.generate(input_ids=prompt, **FREE, **many))
            ring.close()


@on_ranks(4, timeout=200.0)
def test_rings_and_replicas(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "ring"))
    plain = exact("llama", use_cache=True).eval()
    for policy in (None, ZeroOuter()):
        dims = rtp_ext.RotationDims(ring="ring", replicate="replicas")
        model = rtp_ext.fully_rotate(copy.deepcopy(plain), mesh=mesh, dims=dims, outer=policy, timeout=30.0)
        with cases.case(f"every rank at its own length, {policy}"):
            check(model, plain, prompt_of(rank), max_new_tokens=(2, 9, 5, 1)[rank])
        with cases.case(f"a failure, {policy}"):
            mine = [Failing(3)] if rank == 3 else []
            together = rank >= 2 or policy is not None
            options = {**FREE, "max_new_tokens": 6, "logits_processor": mine}
            if together:
                with pytest.raises((RuntimeError, KeyError), match="what a grammar lacks"):
                    model.generate(prompt_of(rank), **options)
            else:
                check(model, plain, prompt_of(rank), max_new_tokens=6)
        if policy is None:
            with cases.case("one ring alone: its forwards wait for no other"):
                if rank < 2:
                    check(model, plain, prompt_of(rank), max_new_tokens=steps_of(rank))
        with cases.case(f"goes on to train, {policy}"):
            check_trained(model.train(), copy.deepcopy(plain).train(), "llama", rank, ranks, steps=1)
        rtp_ext.ring_of(model).close()


@on_ranks(4, timeout=120.0)
def test_tensor_parallelism(rank, ranks, cases):
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("ring", "tp"))
    plain = exact("llama", use_cache=True).eval()
    model = copy.deepcopy(plain)
    for block in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    rtp_ext.fully_rotate(model, mesh=mesh, dims=rtp_ext.RotationDims(ring="ring"), timeout=30.0)
    place = rank // 2  # ranks of tensor parallelism have the same batch
    with cases.case("ranks that stop at different lengths"):
        check(model, plain, prompt_of(place), max_new_tokens=steps_of(place))
    match = "expected ranks of tensor parallelism to generate the same tokens"
    with cases.case("ranks of tensor parallelism that do"), pytest.raises(ValueError, match=match):
        model.generate(prompt_of(place), **FREE, max_new_tokens=3 + rank % 2)
    with cases.case("a failure"):
        with pytest.raises((RuntimeError, KeyError), match="what a grammar lacks"):
            processors = [Failing(2)] if rank == 3 else []
            model.generate(prompt_of(place), **FREE, max_new_tokens=6, logits_processor=processors)
        check(model, plain, prompt_of(place), max_new_tokens=steps_of(place))
    rtp_ext.ring_of(model).close()


@on_ranks(1)
def test_one_rank_asks_nobody(rank):
    asked = []
    model, plain = both("llama")
    check(model, plain, prompt_of(rank), max_new_tokens=1)
    ring = rtp_ext.ring_of(model)
    ring.exchange = lambda value: asked.append(value) or [value]
    check(model, plain, prompt_of(rank), max_new_tokens=5)
    assert asked == [], "one rank asks nobody"
    ring.close()
