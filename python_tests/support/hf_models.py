"""Small models of the transformers package with random weights, and batches for them: sizes that divide badly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from models import train
from reference import adamw, assert_same, own_part, random
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtp_ext

VOCABULARY, LABELS, LENGTH = 53, 7, 9
_TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CAUSAL = ("llama", "qwen2", "qwen3", "mixtral", "gpt2")
FAMILIES = (*CAUSAL, "bert", "vit")


def make(family: str, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """Builds the same model on every rank, with different values in all parameters; `changes` go to its config."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    grouped = {**_TEXT, "num_key_value_heads": 2, **changes}
    if family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    elif family == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(tie_word_embeddings=True, **grouped))
    elif family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=6, **grouped))
    elif family == "mixtral":
        # "eager": torch's grouped GEMM, the default, needs rows of multiples of 16 bytes
        options = {"num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True}
        model = hf.MixtralForCausalLM(
            hf.MixtralConfig(router_aux_loss_coef=0.5, experts_implementation="eager", **options, **grouped)
        )
    elif family == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 37, "vocab_size": VOCABULARY, "n_positions": 32}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=1, eos_token_id=2, **{**sizes, **dropouts, **changes}))
    elif family == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**{**_TEXT, **_NO_DROPOUT, **changes}))
    elif family == "vit":
        sizes = {key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        images = {"intermediate_size": 37, "image_size": 8, "patch_size": 4, "num_labels": LABELS}
        model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, **images, **_NO_DROPOUT, **changes))
    else:
        raise ValueError(f"expected one of {FAMILIES}, got {family}")
    return fill(model.to(dtype).train())


def fill(model: nn.Module) -> nn.Module:
    """Gives every parameter distinct values, large enough to affect the results: norms around 1, biases not 0."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            values = random(*parameter.shape, dtype=parameter.dtype, seed=2000 + number)
            norm = "norm" in name.lower() or ".ln_" in name
            parameter.copy_(0.3 * values + (1.0 if norm and name.endswith("weight") else 0.0))
    return model


def make_batch(family: str, rank: int, step: int) -> dict[str, Tensor]:
    """One rank's batch of one step. Ranks differ in rows, length and number of labels; the second row is padded."""
    generator = torch.Generator().manual_seed(10_000 * rank + step)
    if family == "vit":
        rows = 3 - rank % 2
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(LABELS, (rows,), generator=generator)}
    ids = torch.randint(VOCABULARY, (2 + rank % 2, LENGTH - rank), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels = ids.clone() if family in CAUSAL else torch.randint(VOCABULARY, ids.shape, generator=generator)
    labels[mask == 0] = -100
    labels[0, : rank + 1] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def inputs_of(batch: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A batch without labels, its floating-point tensors in `dtype`."""
    kept = {key: value for key, value in batch.items() if key != "labels"}
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in kept.items()}


def close_ring(model: nn.Module) -> None:
    rtp_ext.ring_of(model).close()


class Classifier(nn.Module):
    """torch's transformer encoder between an embedding, a stray parameter and a linear head."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        width, hidden = 24, 37
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, hidden, dropout, activation="gelu", batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, LABELS)
        self.batch_first = batch_first

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position[: input_ids.shape[1]]
        x = x if self.batch_first else x.transpose(0, 1).contiguous()
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.head(x[:, 0] if self.batch_first else x[0])


def exact(kind: str, dtype: torch.dtype = torch.float64, **changes) -> nn.Module:
    """Returns a family's model, "tied" (a Llama) or "encoder" (a Classifier), that computes entirely in `dtype`:
    torch's RMSNorm replaces that of transformers, which is always in float32."""
    if kind == "encoder":
        return fill(Classifier(**changes).to(dtype))
    if kind == "tied":
        kind, changes = "llama", {"tie_word_embeddings": True, **changes}
    if kind in CAUSAL:
        changes = {"use_cache": False, **changes}
    model = make(kind, dtype, **changes)
    for block in list(model.modules()):
        for name, part in list(block.named_children()):
            if type(part).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon, dtype=dtype)
                norm.weight = part.weight
                setattr(block, name, norm)
    return model


def logits_of(model: nn.Module, kind: str, rank: int, step: int) -> Tensor:
    output = model(**inputs_of(make_batch("gpt2", rank, step)))
    return output if kind == "encoder" else output.logits


def batch_loss(model: nn.Module, kind: str, rank: int, step: int) -> Tensor:
    """The loss of a rank's batch in the dtype of the logits (transformers computes it in float32)."""
    logits, labels = logits_of(model, kind, rank, step), make_batch("gpt2", rank, step)["labels"]
    if kind == "encoder":
        return nn.functional.cross_entropy(logits, labels[:, 3] % LABELS)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def mean_loss(model: nn.Module, kind: str, ranks: int, step: int) -> Tensor:
    """The loss that the plain model minimises when `ranks` ranks average their gradients."""
    return sum(batch_loss(model, kind, rank, step) for rank in range(ranks)) / ranks


def blocks_of(model: nn.Module, kind: str) -> nn.ModuleList:
    paths = {"gpt2": "transformer.h", "encoder": "encoder.layers", "bert": "bert.encoder.layer"}
    return model.get_submodule(paths.get(kind, "model.layers"))


TOLERANCE = 1e-9  # float64, through AdamW
SHM, C10D, IN_PLACE = (False, "shm"), (False, "c10d"), (True, "c10d")


def rotated(model: nn.Module, variant: tuple[bool, str], **options) -> nn.Module:
    in_place, transport = variant
    return rtp_ext.fully_rotate(model, in_place=in_place, transport=transport, timeout=30.0, **options)


def pair(kind: str, variant: tuple[bool, str], **changes) -> tuple[nn.Module, nn.Module]:
    """The converted and the plain model."""
    plain = exact(kind, **changes)
    return rotated(copy.deepcopy(plain), variant), plain


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """A control: the comparison inside must fail."""
    try:
        yield
    except AssertionError:
        return
    raise AssertionError(f"control: {what}, and nobody noticed")


def check_trained(model, plain, kind, rank, ranks, steps=2, first=50):
    """Trains both models further and compares them: earlier actions must have left no trace.

    Each rank computes its own batch with the plain model, and the gradients are averaged as in `mean_loss`.
    """
    train(model, lambda step: batch_loss(model, kind, rank, first + step), steps)
    averaged = adamw([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    averaged.register_step_pre_hook(lambda *_: average_gradients(plain, ranks))
    train(plain, lambda step: batch_loss(plain, kind, rank, first + step), steps, optimizer=averaged)
    check_parameters(model, plain)


def average_gradients(model: nn.Module, ranks: int) -> None:
    """Trains a plain model. Collective."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, (flat / ranks).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def check_logits(model, plain, kind, rank, step=90):
    with torch.no_grad():
        assert_same(logits_of(model, kind, rank, step), logits_of(plain, kind, rank, step), TOLERANCE, "logits")


def check_gradients(model, plain):
    check_parameters(model, plain, lambda parameter: parameter.grad)


def check_parameters(model, plain, of=lambda parameter: parameter):
    """Compares every parameter, or `of` applied to it. Each rank compares its part; all ranks raise if one differs."""
    ours = {name: of(parameter) for name, parameter in model.named_parameters()}
    theirs = {name: of(parameter) for name, parameter in plain.named_parameters()}
    assert list(ours) == list(theirs)
    difference = None
    try:
        for name, expected in theirs.items():
            check_held(ours[name], expected, name)
    except AssertionError as error:
        difference = error
    differing = torch.tensor(0.0 if difference is None else 1.0)
    dist.all_reduce(differing)  # ranks that differ stay in step
    if difference is not None:
        raise difference
    assert differing == 0, "another rank's part of the parameters differs"


def check_held(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    if actual is None or expected is None or not isinstance(actual, DTensor):
        assert_same(actual, expected, TOLERANCE, what)
        return
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    scale = expected.detach().abs().max().item()
    assert_same(actual.to_local(), own_part(actual, expected), TOLERANCE, what, scale)


def run_cases(rank, ranks, cases):
    """Cases: functions of rank, ranks, kind, variant, each with the kinds and variants to call it with."""
    for behaviour, choices in cases:
        for kind, variant in choices:
            try:
                behaviour(rank, ranks, kind, variant)
            except Exception as error:
                where = f"{behaviour.__name__} of {kind}, in_place={variant[0]} transport={variant[1]}"
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
