"""Published step times and memory, to hold the planner against. Facts with their sources; nothing is computed here."""

# arXiv 2104.04473, Table 1: heads, hidden, layers, tp, pp, GPUs, global batch, TFLOP/s per GPU (with recomputation)
SC21 = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
)
# arXiv 2407.21783 (v3), Table 4, Llama 3 405B on H100: tp, cp, pp, dp, tokens of a sample, batch of a replica, TFLOP/s
# per GPU
LLAMA3 = (
    (8, 1, 16, 64, 8192, 32, 430),
    (8, 1, 16, 128, 8192, 16, 400),
    (8, 16, 16, 8, 131072, 16, 380),
)
# arXiv 2205.05198, Table 5: layers, hidden, heads, tp, pp, GPUs, global batch, micro-batch, chunks, seconds with full
# recomputation, and with selective and sequence parallelism
KORTHIKANTI = (
    (48, 6144, 64, 8, 1, 8, 4, 4, 1, 1.42, 1.10),
    (96, 12288, 96, 8, 8, 64, 64, 1, 3, 18.13, 13.75),
    (105, 20480, 128, 8, 35, 280, 280, 1, 3, 49.05, 37.83),
    (128, 25600, 160, 8, 64, 512, 512, 1, 1, 94.42, 71.49),
)
# NVIDIA-NeMo/Megatron-Bridge@00b7660, docs/performance-summary.md (25.11), eight-bit products, 8192 tokens a sample:
# GPU, model, GPUs, global batch, micro-batch, fsdp, tp, pp, cp, chunks, model TFLOP/s per GPU
NEMO = (
    ("gb300-279gb", "llama-3-8b", 8, 128, 2, 0, 1, 1, 1, 1, 1933),
    ("gb300-279gb", "llama-3-405b", 256, 1536, 1, 0, 2, 8, 2, 4, 2522),
    ("gb200-186gb", "llama-3-70b", 64, 256, 2, 1, 1, 1, 1, 1, 1937),
    ("b200-180gb", "llama-3-8b", 8, 128, 2, 0, 1, 1, 1, 1, 1576),
    ("h100-80gb", "llama-3-8b", 8, 128, 1, 1, 1, 1, 1, 1, 744),
    ("h100-80gb", "llama-3-405b", 1024, 512, 1, 0, 8, 8, 2, 8, 737),
)
# Bus bandwidth of an all-reduce among 8 A100 of a node, GB/s by bytes: VIA-Research/vTrain@f8dda84,
# trace/a100/AR_GPU8_1M_1024M_LUT (MIT)
A100_BUS = {1 << 20: 19.78, 4 << 20: 76.62, 16 << 20: 126.33, 64 << 20: 202.52, 256 << 20: 217.25, 1 << 30: 229.35}

# NVIDIA/Megatron-LM@d98e8a64dd, tests/functional_tests/test_cases/gpt/gpt3_7b_tp1_pp4_memory_speed/
# golden_values_dev_dgx_{a100,gb200,h100}.json: mem-allocated-bytes and mem-max-allocated-bytes of the last rank.
# Eight GPUs, four stages of eight chunks, distributed optimizer, global batch 8.
MEGATRON_7B = {
    "a100": (24_510_808_064, 60_489_064_448),
    "gb200": (24_540_168_192, 60_519_342_080),
    "h100": (24_808_996_864, 60_720_852_992),
}
# pytorch/torchtitan: model, GPU, tokens of a sample, FSDP ranks, tp, pp, cp, samples of a local batch, recomputation,
# loss, notes, eight-bit products, tokens/s of a GPU, reserved GiB (None: not printed), whether it ran.
# Its H100 have 94 to 96 GB of HBM2e (2.4 TB/s) and 500 W. Runs that recompute every second layer are left out: the
# planner does not model that.
TORCHTITAN = (
    # @b5bcd76c, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 6
    ("llama-3-8b", "h100-96gb", 8192, 8, 1, 1, 1, 2, "selective", "auto", "eager", False, 5762, 82.4, True),
    ("llama-3-8b", "h100-96gb", 8192, 8, 1, 1, 1, 2, "selective", "auto", "compiled, Float8", True, 8532, 76.8, True),
    ("llama-3-8b", "h100-96gb", 8192, 128, 1, 1, 1, 2, "selective", "auto", "compiled", False, 6514, 62.0, True),
    ("llama-3-8b", "h100-96gb", 32768, 8, 1, 1, 1, 1, "full", "auto", "compiled, Float8", True, 3890, 83.9, True),
    ("llama-3-8b", "h100-96gb", 131072, 2, 1, 1, 4, 1, "full", "auto", "compiled, Float8", True, 1071, 84.0, True),
    ("llama-3-70b", "h100-96gb", 8192, 32, 8, 1, 1, 16, "full", "auto", "compiled, Float8", True, 829, 71.9, True),
    ("llama-3-405b", "h100-96gb", 8192, 8, 8, 8, 1, 32, "full", "auto", "compiled, Float8", True, 100, 82.5, True),
    ("llama-3-405b", "h100-96gb", 32768, 8, 8, 8, 1, 8, "full", "auto", "compiled, Float8", True, 76, 75.3, True),
    ("llama-3-405b", "h100-96gb", 131072, 2, 8, 8, 4, 8, "full", "auto", "compiled, Float8", True, 31, 77.1, True),
    # @b5bcd76c, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, without asynchronous TP
    ("llama-3-70b", "h100-96gb", 8192, 32, 8, 1, 1, 16, "full", "auto", "2025, compiled", False, 597.3, None, True),
    (
        *("llama-3-70b", "h100-96gb", 8192, 32, 8, 1, 1, 16, "full", "auto"),
        *("2025, compiled, Float8 tensorwise", True, 809.8, None, True),
    ),
    (
        *("llama-3-70b", "h100-96gb", 8192, 32, 8, 1, 1, 16, "full", "auto"),
        *("2025, compiled, Float8 rowwise", True, 599.6, None, True),
    ),
    ("llama-3-8b", "h100-96gb", 8192, 8, 8, 1, 1, 12, "selective", "auto", "2025, compiled", False, 4378, None, True),
    (
        *("llama-3-8b", "h100-96gb", 8192, 8, 8, 1, 1, 12, "selective", "auto"),
        *("2025, compiled, Float8 tensorwise", True, 5078.1, None, True),
    ),
    (
        *("llama-3-8b", "h100-96gb", 8192, 8, 8, 1, 1, 12, "selective", "auto"),
        *("2025, compiled, Float8 rowwise", True, 3708.5, None, True),
    ),
    # @b5bcd76c, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: the loss is compiled, too
    (
        *("llama-3-8b", "h200-141gb", 8192, 32, 1, 1, 1, 2, "selective", "compiled"),
        *("loss compiled, Float8", True, 10938, 47.96, True),
    ),
    # @157a12c56, docs/performance.md (April 2024)
    ("llama-3-70b", "a100-80gb", 8192, 64, 1, 1, 1, 1, "full", "auto", "eager", False, 331, None, True),
    ("llama-2-13b", "a100-80gb", 4096, 64, 1, 1, 1, 2, "none", "auto", "eager, fused RMSNorm", False, 2162, None, True),
    ("llama-2-70b", "a100-80gb", 4096, 64, 1, 1, 1, 1, "selective", "auto", "eager", False, 355, None, True),
    # @395a52627, docs/performance.md
    ("llama-2-70b", "a100-80gb", 4096, 64, 1, 1, 1, 2, "selective", "auto", "eager", False, None, None, False),
    # @9515a140b, docs/performance.md, as corrected in 3faaa1a0d (37.1 % and 118 tokens/s became 29.0 % and 109)
    ("llama-3-405b", "h100-96gb", 8192, 16, 8, 1, 1, 2, "full", "auto", "", False, 109, None, True),
    ("llama-3-405b", "h100-96gb", 8192, 16, 8, 1, 1, 2, "full", "auto", "Float8, async TP", True, 185, None, True),
)
# NVIDIA/Megatron-LM@d98e8a64dd, tests/functional_tests/test_cases/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release and
# ..._release_sm, H100: bytes between steps of the last rank, and its two peaks
MIXTRAL = (17_703_634_944, (26_495_959_040, 27_638_417_408))
# marin-community/marin: a mixture on 64 GB200 of one NVLink domain, trained with JAX, both ways to share its experts.
# Gathered: seconds of a step and of its recomputed forwards, and MFU in percent (#8053); seconds of kernels that
# compute, and of collectives beside which none does, in the stream of products and in others (#8054, which corrects the
# 14.85 and 3.17 of #8053). Divided, with a capacity of 1.5: MFU (#7981).
MARIN_SIZES = {
    **{"layers": 48, "hidden": 6144, "heads": 48, "kv_heads": 12, "head_dim": 128, "ffn": 3072, "vocab": 128256},
    **{"seq": 4096, "experts": 128, "experts_per_token": 4},
}
MARIN_SHARED, MARIN_BATCH, MARIN_GPUS = 2, 1024, 64  # shared experts of the same width; samples of a step
MARIN_STEP, MARIN_COMPUTE, MARIN_AGAIN, MARIN_EXPOSED = 18.02, 14.53, 5.09, 2.15 + 0.91
MARIN_GATHERED, MARIN_DIVIDED = 19.41, 22.9037
