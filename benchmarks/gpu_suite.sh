#!/usr/bin/env bash
# Builds the extension and proves or measures one part of it on a machine with a GPU. Needs no network. The parts are
# listed in the order in which to run them.
#
#   benchmarks/gpu_suite.sh [--dry-run] host|contracts|tests|overlap|memory|kernels|train [OUT]
#
# OUT (default: $OUT, else build/gpu_suite) gets, for each part, PART.log with everything printed, PART.jsonl with results
# and PART.card.json with what they were measured on; `tests` adds JUnit files. Besides, only the repository is written
# to. Every part ends within 9 minutes: each command has a limit of its own, and the last ones get what is left.
# --dry-run prints the commands.
#
#   NCCL_LIBRARY=/path/libnccl.so.2   loaded before torch's own, so that torch and the extension share a newer one
#   PYTHON=python3                    the interpreter that has torch
#   RTP_RACE_REPETITIONS=200          of the race tests
#   ONLY="one_process several_ranks sanitizer"   which of the tests
set -uo pipefail

usage() {
  sed -n '2,15p' "$0" | sed 's/^# \{0,1\}//'
  exit 2
}

DRY=0
if [[ "${1:-}" == --dry-run ]]; then
  DRY=1
  shift
fi
PART="${1:-}"
case "$PART" in host | contracts | tests | overlap | memory | kernels | train) ;; *) usage ;; esac
OUT="${2:-${OUT:-build/gpu_suite}}"
PYTHON="${PYTHON:-python3}"
LIMIT=530 # seconds of the whole part
[[ "$PART" != contracts ]] || LIMIT=480
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
ROOT="$PWD"
((DRY)) || mkdir -p "$OUT" || exit 2
((DRY)) || OUT="$(cd "$OUT" && pwd)"
LOG="$OUT/$PART.log"
RESULTS="$OUT/$PART.jsonl"
STATUS=0
SUMMARY=()

# run SECONDS COMMAND...: at most so long, and never beyond the end of the part. Its output goes to the log, too.
run() {
  local most="$1" left status started
  shift
  if ((DRY)); then
    printf 'timeout %s' "$most"
    printf ' %q' "$@"
    printf '\n'
    return 0
  fi
  left=$((LIMIT - SECONDS))
  if ((left < 5)); then
    SUMMARY+=("not run, no time left: $*")
    STATUS=1
    return 1
  fi
  started=$SECONDS
  echo "+ $*" | tee -a "$LOG"
  timeout --kill-after=10 "$((left < most ? left : most))" "$@" 2>&1 | tee -a "$LOG"
  status=${PIPESTATUS[0]}
  SUMMARY+=("status $status, $((SECONDS - started)) s: $*")
  ((status == 0)) || STATUS=1
  return "$status"
}

# py SECONDS ARGUMENTS...: the same with Python and the NCCL that was asked for.
py() {
  local most="$1"
  shift
  run "$most" ${PRELOAD[@]+"${PRELOAD[@]}"} "$PYTHON" "$@"
}

finish() {
  if ! ((DRY)); then
    printf '%s\n' "--- $PART, $SECONDS s" "${SUMMARY[@]}" | tee -a "$LOG"
  fi
  exit "$STATUS"
}

stop() {
  echo "gpu_suite.sh: $*" | tee -a "$LOG" >&2
  exit 2
}

export PYTHONPATH="$ROOT" PYTHONUNBUFFERED=1 RTP_TEST_RECORD="$RESULTS"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" # streams that wait must not hold up others
export RTP_RACE_REPETITIONS="${RTP_RACE_REPETITIONS:-5}"
PRELOAD=()
if [[ -n "${NCCL_LIBRARY:-}" ]]; then
  [[ -r "$NCCL_LIBRARY" ]] || stop "NCCL_LIBRARY=$NCCL_LIBRARY cannot be read"
  PRELOAD=(env "LD_PRELOAD=$NCCL_LIBRARY")
fi

# --- build and say what this machine is -----------------------------------------------------------------------------

build() {
  if ! ((DRY)); then
    # cmake and ninja may be there as Python packages, whose programs lie beside the interpreter
    PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
    PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
    export PATH
    local tool module
    "$PYTHON" -c "import torch" || stop "$PYTHON has no torch; PYTHON=.venv/bin/python is what \`make build\` makes"
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
      stop "there is no GPU, or no driver for this torch: torch.cuda.is_available() is False. --dry-run prints the commands"
    for tool in cmake ninja nvcc g++; do
      command -v "$tool" >/dev/null || stop "$tool was not found, and there is no building without it"
    done
    for module in numpy setuptools; do
      "$PYTHON" -c "import $module" || stop "Python has no $module"
    done
    "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
      stop "Python.h was not found: the headers of $PYTHON are not installed"
    for module in pytest transformers cupy matplotlib; do
      "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" ||
        echo "Python has no $module: what needs it is skipped or fails" | tee -a "$LOG"
    done
  fi
  run 20 nvidia-smi
  run 300 env RTP_WITH_CUDA=1 "$PYTHON" setup.py build_ext --inplace || finish # for the GPUs of this machine
  py 60 benchmarks/gpu/card.py "$OUT/$PART.card.json" || finish
  py 60 -m rtp_ext doctor
}

# --- the parts --------------------------------------------------------------------------------------------------------

# What nobody has measured and every prediction takes: the host's time of a hop. Then push against pull over ce.
host() {
  py 120 -m pytest -q -s -rsfE --junitxml="$OUT/host.xml" python_tests/gpu/transport/test_contracts_gpu.py -k host_time
  if ((DRY)) || "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    py 200 benchmarks/gpu/hops.py --output "$RESULTS"
  else
    SUMMARY+=("not run: push against pull needs two GPUs")
  fi
}

# What the engine relies on, in the order in which a failure says most; each check says what it expects and what a failure
# means. Those that need two GPUs are skipped, and named, where there is one.
contracts() {
  py 300 -m pytest -q -s -rsfE --durations=0 --junitxml="$OUT/contracts.xml" python_tests/gpu/transport/test_contracts_gpu.py
}

tests() {
  local ranks=python_tests/gpu/transport/test_transports_gpu.py kernels=(python_tests/gpu/test_kernel*_gpu.py) tool
  local only=" ${ONLY:-one_process several_ranks sanitizer} "
  [[ -e "${kernels[0]}" ]] || kernels=(python_tests/gpu/test_linear_gpu.py -k table)
  if [[ "$only" == *" one_process "* ]]; then
    py 220 -m pytest -q -rsf --durations=8 --junitxml="$OUT/one_process.xml" python_tests/gpu --ignore="$ranks" \
      --ignore=python_tests/gpu/transport/test_contracts_gpu.py
  fi
  if [[ "$only" == *" several_ranks "* ]]; then
    py 300 -m pytest -q -rsf --durations=8 --junitxml="$OUT/several_ranks.xml" "$ranks"
  fi
  [[ "$only" == *" sanitizer "* ]] || return
  for tool in memcheck racecheck; do
    if ((DRY)) || command -v compute-sanitizer >/dev/null; then
      run 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$PYTHON" -m pytest -q -x "${kernels[@]}"
    else
      SUMMARY+=("not run: compute-sanitizer was not found ($tool)")
    fi
  done
}

# overlap BUDGET OPTIONS...
overlap() {
  local budget="$1"
  shift
  py "$((budget + 30))" benchmarks/overlap.py --device cuda --budget "$budget" --output "$RESULTS" "$@"
}

overlaps() {
  overlap 150 --link ce-local
  overlap 60 --link nccl-self:1,nccl-self:2,nccl-self:4,nccl-self:8,nccl-self:16 --shapes llama3-8b --tokens 4096 \
    --ranks 8 --directions forward,backward
  overlap 40 --link ce-local:4,sm-local --shapes llama3-8b,llama3-70b --tokens 4096 --ranks 8
  overlap 30 --link ce-local --graph --shapes llama3-8b --tokens 1024,2048,4096 --ranks 8
  overlap 25 --link pcie --shapes llama3-8b --tokens 4096,16384 --ranks 8
  overlap 25 --link nccl-self --shapes llama3-8b,llama3-70b --tokens 4096 --ranks 8
}

memory() {
  py 260 benchmarks/memory_per_rank.py --device cuda --output "$RESULTS"
  py 150 benchmarks/memory_per_rank.py --device cuda --output "$RESULTS" --layers 8 \
    --strategies rtp-fused,rtp-recompute,fsdp2,ddp,tp
  py 100 benchmarks/memory_per_rank.py --device cuda --output "$RESULTS" --checkpoint --tokens 8192 \
    --strategies rtp-fused,fsdp2
  py 60 benchmarks/memory_per_rank.py --device cuda --output "$RESULTS" --parameter-dtype bfloat16 \
    --strategies rtp-unbundled,rtp-inplace
}

kernels() {
  ((DRY)) || [[ -e benchmarks/gpu/kernels.py ]] || stop "this tree has no benchmarks/gpu/kernels.py"
  py 400 benchmarks/gpu/kernels.py --output "$RESULTS"
}

# One rank: what the machinery costs where nothing has to travel, and that the losses are those of the plain model.
train() {
  local strategy
  py 200 benchmarks/compare.py --device cuda --ranks 1 --model llama-tiny --tokens 1024,8192 \
    --strategies rtp,rtp-fused,fsdp2,ddp,single --output "$RESULTS"
  for strategy in single rtp rtp-recompute; do
    py 90 benchmarks/train_lm.py --device cuda --strategy "$strategy" --ranks 1 --steps 200 --dtype bfloat16 \
      --batch 16 --output "$RESULTS"
  done
}

build
case "$PART" in
host) host ;;
contracts) contracts ;;
tests) tests ;;
overlap) overlaps ;;
memory) memory ;;
kernels) kernels ;;
train) train ;;
esac
finish
