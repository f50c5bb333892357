#!/usr/bin/env bash
# first_day.sh without a GPU: on the fake one of python_tests/simulators/fake_gpu, with small shapes. It shows that every
# step starts, and that options, files and shapes fit together; nothing of a GPU. Needs an extension built with CUDA.
#
#   benchmarks/gpu/rehearse.sh main|more [OUT]      status 1 where a step fails
#
# What a fake cannot do are tests marked real_gpu, which are skipped.
#
#   ONLY='overlap|host'   as of first_day.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
MODE="${1:?main or more}" OUT="${2:-build/rehearsal-$1}"
FAKE="$PWD/python_tests/simulators/fake_gpu"

export FAKE_GPU=1 PYTHON="${PYTHON:-python3}" PATH="$FAKE/bin:$PATH" PYTHONPATH="$FAKE${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 OMP_NUM_THREADS_TRAIN=1 WORKERS="${WORKERS:-2}" SCALE="${SCALE:-6}"
export RTP_CONTRACT_SECONDS=1 RTP_RACE_REPETITIONS=1
export SHAPES=cpu-tiny ONE_SHAPE=cpu-tiny TOKENS=64,16 SECONDS_EACH=0.01
export STEP_OPTIONS="--size tiny --tokens 64 --steps 2" MEMORY_OPTIONS="--model tiny --tokens 256"
export TRAIN_OPTIONS="--model llama-small --tokens 256 --steps 2 --warmup 1" LM_OPTIONS="--steps 4 --batch 2"
export KERNEL_OPTIONS="--check 0 --kernels gather_rows" SUM_OPTIONS="--shape 64,48 --depths 16 --seconds 0.01"
export PRODUCT_OPTIONS="--tokens 16 --shapes 1 --seconds 0.001 --iterations 1" CALL_OPTIONS="--size tiny --tokens 64"

export KIT=/nonexistent # the extension of this tree

FAILED=0
nice bash benchmarks/gpu/first_day.sh "$MODE" "$OUT" || FAILED=1
[[ "$MODE" == main ]] && LAST=train_rtp-fused || LAST=train_lm_rtp
[[ -n "${ONLY:-}" ]] || grep -q "^$LAST"$'\t' "$OUT/steps.tsv" || {
  echo "rehearse.sh: first_day.sh $MODE ended before $LAST" >&2
  FAILED=1
}
while IFS=$'\t' read -r name status _; do
  [[ "$status" != 0 ]] || continue
  echo "rehearse.sh: $name failed (status $status); see $OUT/logs.tar.gz" >&2
  FAILED=1
done <"$OUT/steps.tsv"
exit "$FAILED"
