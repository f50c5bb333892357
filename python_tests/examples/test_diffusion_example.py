"""examples/inference/diffusion.py: the latents are those of the plain model. Skipped without the diffusers package."""

import importlib.util
from pathlib import Path

import pytest
from harness import Cases, run_ranks
from reference import assert_same, differs

import rtp_ext

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/inference/diffusion.py"


def _samples(rank, ranks):
    spec = importlib.util.spec_from_file_location("diffusion_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases, plain = Cases(), module.make_model()
    own = {"steps": 4 + 2 * rank, "side": 16 + 8 * rank, "seed": rank}
    expected = module.sample(plain, **own)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    for transport in ("shm", "tcp"):
        with cases.case(transport):
            latents, kept = module.main(["--transport", transport])
            assert latents.shape == (2, module.CHANNELS, own["side"], own["side"])
            assert_same(latents, expected, 1e-4, "latents")
            assert differs(latents, module.sample(plain, **(own | {"steps": 3})), 0.2), "control: other steps"
            assert kept < 0.55 * whole, f"{kept} of {whole} bytes"
    with cases.case("int8"):
        _, kept = module.main(["--weights", "int8"])
        assert kept < 0.2 * whole, f"{kept} of {whole} bytes"
        model = rtp_ext.rotate_for_inference(module.make_model(), weights="int8", timeout=60.0)
        plain.load_state_dict(rtp_ext.frozen_weights(model), strict=False)
        assert_same(module.sample(model, **own), module.sample(plain, **own), 1e-4, "the values of the blocks")
    cases.finish()
    return expected.abs().mean().item()


def test_it_samples_what_the_plain_model_does():
    pytest.importorskip("diffusers", reason="needs the diffusers package", exc_type=ImportError)
    assert all(0.1 < mean < 100 for mean in run_ranks(_samples, 2)), "latents are numbers"
