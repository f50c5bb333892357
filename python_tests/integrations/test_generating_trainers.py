"""Trainers of the transformers package that evaluate by what their model generates."""

import copy

import torch
from harness import on_ranks
from hf_models import VOCABULARY, refused
from trainer_cases import as_torchrun

import rtp_ext

LONGEST = 9


def translator():
    """A small T5 whose sequences end soon, at different lengths."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
        model.generation_config.update(
            eos_token_id=[1, *range(40, VOCABULARY)], max_new_tokens=LONGEST, max_length=None
        )
    return model.eval()


def _pairs(count):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (count, 2, 6), generator=generator)
    return [{"input_ids": source, "labels": target} for source, target in ids]


@on_ranks(2, timeout=120.0)
def test_predictions_of_different_lengths(rank, ranks, tmp_path):
    folder = str(tmp_path)
    as_torchrun(rank, ranks)
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from rtp_ext.integrations import RotationTrainer

    class RotationSeq2SeqTrainer(RotationTrainer, Seq2SeqTrainer):
        pass

    model = translator()
    data = _pairs(7)
    found = []
    for cls in (Seq2SeqTrainer, RotationSeq2SeqTrainer):
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=1,
            predict_with_generate=True,
            generation_num_beams=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = cls(model=copy.deepcopy(model), args=arguments)
        found.append(trainer.predict(data))
    rtp_ext.ring_of(trainer.model).close()
    plain, rotated = found
    assert plain.predictions.tolist() == rotated.predictions.tolist(), f"{plain.predictions} {rotated.predictions}"
    assert abs(plain.metrics["test_loss"] - rotated.metrics["test_loss"]) < 1e-4 * plain.metrics["test_loss"]
    with refused("the order of predictions"):
        assert plain.predictions.tolist() == rotated.predictions[::-1].tolist()
    lengths = (plain.predictions[:, 1:] > 0).sum(1)
    assert any(lengths[0:6:2] != lengths[1:6:2]), f"control: ranks end at different lengths, {lengths}"
