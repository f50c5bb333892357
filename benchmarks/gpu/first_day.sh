#!/usr/bin/env bash
# The first minutes on a machine with GPUs, by the value of what is learned. Needs no network. A failing step stops
# nothing, and OUT is complete up to any moment.
#
#   benchmarks/gpu/first_day.sh [--dry-run] main|more|ranks [OUT]        OUT: default $OUT, else build/first_day
#
#   main    one GPU, at most 530 s                                                                        seconds
#     setup     import of the prebuilt extension, else a build of it (200 s more, off the end); card            25
#     ranks     2 ranks on this GPU over ce and nccl, one test at a time: rotate, train, prefetch, a lost one   95
#     sums      float32 sums with beta = 1 against beta = 0                                                     10
#     groups    a step of a rank of 8 with 1, 2 and 8 shards per product, against plain torch: 4 blocks of 8B   30
#     together  side by side, since nothing is timed                                                            80
#       tests       kernels, products, linear, MLP, embedding, head, experts, routes, streams, CUDA graphs, links, CuPy
#       memcheck, racecheck, memcheck_layer     compute-sanitizer: 3 random cases of each kernel; a layer and an MLP
#       memory      peak of one rank of 8 with Llama-3-8B: rtp-fused, rtp, fsdp2
#       doctor      the transports of this machine
#     alone     hops while all SMs are taken; traces; delays; a broken GPU                                      49
#     host      host time of a hop, a pass, a graph over 3 links                                                20
#     overlap   E_hide, roofline, T_gR / T_g1: 8B and 70B, 8192 and 2048 tokens, R = 8                          65
#     emulated_step     the step with graphs, with other links and strategies                                   30
#     graphs    the step with graphs and 1, 2 and 8 shards per product                                          32
#     kernels   each kernel of this package against the rate of a copy; products8: products in 8 bits           22
#     train_single, train_rtp-fused     one rank against plain torch, and against fsdp2: a block of 8B          65
#     summary   each figure beside its prediction: benchmarks/gpu/summary.py                                     6
#   more    one GPU, at most 270 s: host time of a hop with 2 ranks; calls of the host; 4 ranks; random hops; graphs of
#           both channels; a rank lost under 30 layers; memory of the other strategies; NCCL's CTAs 1 to 16; R = 2 and 4;
#           replays; losses of train_lm
#   ranks   all GPUs of a machine with several, at most 515 s: contracts and transports between GPUs; hops, push against
#           pull; overlap of a real ring; training against fsdp2
#
# The seconds of the steps add up to the limit of a mode. Each step ends by the sum of its seconds and of those before it,
# so that what earlier steps leave is its own, and what it needs more is not taken from later ones.
#
# .gpukit (kit/prepare.sh makes it) has the extension, NCCL 2.30.7 for several ranks on one GPU, and the commit. OUT gets
# results.jsonl, facts.jsonl, card.json, steps.tsv and logs.tar.gz as they come; at the end summary.txt and tests.jsonl.
# After a run that was killed, unpack the logs: benchmarks/gpu/summary.py OUT OUT/logs.
#
#   ONLY='overlap|host'   steps with these names (a pattern), and the setup
#   KIT=.gpukit           another folder of kit/prepare.sh
#   NCCL_LIBRARY=/path/libnccl.so.2   a newer NCCL for the steps with ranks, in place of that of .gpukit
#   PYTHON=python3        the interpreter that has torch
#   SCALE=1               of all seconds, for a slow machine
set -uo pipefail

DRY=0
[[ "${1:-}" != --dry-run ]] || { DRY=1 && shift; }
MODE="${1:-}"
case "$MODE" in
main) LIMIT=530 ;;
more) LIMIT=270 ;;
ranks) LIMIT=515 ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
SCALE="${SCALE:-1}"
[[ "$SCALE" =~ ^[0-9]+$ ]] || { echo "first_day.sh: expected a whole number as SCALE, got $SCALE" >&2 && exit 2; }
LIMIT=$((LIMIT * SCALE))
OUT="${2:-${OUT:-build/first_day}}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT" || exit 2
KIT="${KIT:-$ROOT/.gpukit}"
PYTHON="${PYTHON:-python3}"
WORKERS="${WORKERS:-8}" # tests side by side; those of several ranks take turns on a GPU without MPS, and run alone
SHAPES="${SHAPES:-llama3-8b,llama3-70b}" ONE_SHAPE="${ONE_SHAPE:-llama3-8b}" TOKENS="${TOKENS:-8192,2048}"
SECONDS_EACH="${SECONDS_EACH:-0.15}" MEMORY_OPTIONS="${MEMORY_OPTIONS:---model llama3-8b}"
KERNEL_OPTIONS="${KERNEL_OPTIONS:---check 10 --repeats 20}" SUM_OPTIONS="${SUM_OPTIONS:-}" STEP_OPTIONS="${STEP_OPTIONS:-}"
PRODUCT_OPTIONS="${PRODUCT_OPTIONS:---seconds 0.02}" CALL_OPTIONS="${CALL_OPTIONS:-}"
TRAIN_OPTIONS="${TRAIN_OPTIONS:---model llama-8b-block --tokens 8192 --dtype bfloat16 --steps 6 --warmup 2}"
LM_OPTIONS="${LM_OPTIONS:---steps 100 --batch 16}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export RTP_RACE_REPETITIONS="${RTP_RACE_REPETITIONS:-5}" RTP_CONTRACT_SECONDS="${RTP_CONTRACT_SECONDS:-8}"
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
PATH="$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
ulimit -c 0

WORK=/nonexistent HOLDER='' PLAN=0 PRELOAD=() TIMEOUT=() SPREAD=(-n "$WORKERS" --dist worksteal --max-worker-restart=12)
if ((!DRY)); then
  mkdir -p "$OUT" || exit 2
  OUT="$(cd "$OUT" && pwd)"
  WORK="$(mktemp -d)"
  mkdir -p "$WORK/logs" "$WORK/running"
  : >"$OUT/steps.tsv"
  export RTP_TEST_RECORD="$OUT/facts.jsonl"
fi
LOGS="$WORK/logs" RESULTS="$OUT/results.jsonl"

share() { # SECONDS: how much longer the next steps may take in all; what is late already is taken from the last ones
  PLAN=$(((PLAN > SECONDS ? PLAN : SECONDS) + $1 * SCALE))
  ((!DRY)) || echo "share $1"
}

step() { # NAME COMMAND...: its output goes to LOGS/NAME.log
  local name="$1" left status started=$SECONDS end=$((PLAN < LIMIT ? PLAN : LIMIT))
  shift
  [[ -z "${ONLY:-}" || "$name" =~ ^(warm|import|import_again|build|card)$ || "$name" =~ $ONLY ]] || return 0
  left=$((end - SECONDS))
  if ((DRY)); then
    printf 'step %s%s\n' "$name" "$(printf ' %q' "$@")" # at once: others print beside it
    return 0
  fi
  if ((left < 3)); then
    printf '%s\tno time\t0\t%s\n' "$name" "$left" >>"$OUT/steps.tsv"
    return 1
  fi
  echo "+ $*" >"$LOGS/$name.log"
  timeout --kill-after=5 "$left" "$@" >>"$LOGS/$name.log" 2>&1 & # a trap waits for no other process than this one
  echo "$!" >"$WORK/running/$name"
  wait "$!"
  status=$?
  rm "$WORK/running/$name"
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - started))" "$left" >>"$OUT/steps.tsv"
  echo "[$SECONDS s] $name: status $status after $((SECONDS - started)) of at most $left s"
  ((status == 0)) || tail -n 6 "$LOGS/$name.log" | cut -c1-300
  return "$status"
}

py() { # NAME ARGUMENTS...: the same with Python, and the newer NCCL if PRELOAD names it
  local name="$1"
  shift
  step "$name" ${PRELOAD[@]+"${PRELOAD[@]}"} "$PYTHON" "$@"
}

tested() { # NAME PYTEST-ARGUMENTS...: results stand in the log as they come
  local name="$1"
  shift
  py "$name" -m pytest -v -rfEs --tb=short --durations=6 --continue-on-collection-errors -p no:cacheprovider ${SPREAD[@]+"${SPREAD[@]}"} \
    ${TIMEOUT[@]+"${TIMEOUT[@]}"} --junitxml="$LOGS/$name.xml" "$@"
}

keep() { # the logs so far, into OUT, where the benchmarks write their results themselves
  ((!DRY)) || return 0
  tar -C "$WORK" -czf "$OUT/logs.tar.gz.new" logs 2>/dev/null && mv "$OUT/logs.tar.gz.new" "$OUT/logs.tar.gz"
}

settled() { # waits for the steps that run side by side, and keeps what they found
  local pid
  for pid in $(jobs -p); do [[ "$pid" == "$HOLDER" ]] || { wait "$pid"; keep; }; done
}

finish() { # STATUS
  keep
  ((DRY)) || timeout 60 "$PYTHON" benchmarks/gpu/summary.py "$OUT" "$LOGS" 2>&1 | tee "$OUT/summary.txt"
  [[ -z "$HOLDER" ]] || kill "$HOLDER" 2>/dev/null
  ((DRY)) || rm -rf "$WORK"
  exit "$1"
}
stopped() { # ends the steps that run, which have process groups of their own
  local each
  for each in "$WORK"/running/*; do [[ ! -e "$each" ]] || kill "$(cat "$each")" 2>/dev/null; done
  finish 143
}
trap stopped TERM INT

# --- setup: what is here ------------------------------------------------------------------------------------------------

machine() {
  uname -a
  nproc
  free -g | head -2
  timeout 20 nvidia-smi
  timeout 20 nvidia-smi topo -m
  timeout 20 "$PYTHON" -m pip list 2>/dev/null | grep -i -E '^(torch|triton|numpy|pytest|nvidia-nccl|nvidia-cublas|transformers|cupy)'
  command -v nvcc cmake ninja g++ compute-sanitizer nvidia-cuda-mps-control
}

prebuilt() { # the kit's files, where they fit this tree and this Python
  local own="$WORK/libnccl.so.2"
  [[ -d "$KIT" ]] || return 0
  cp --remove-destination "$KIT"/_[CR].*.so rtp_ext/
  RTP_COMMIT="$(cat "$KIT/commit")"
  if ! sha256sum --check --status "$KIT/files.sha256" 2>/dev/null; then
    RTP_COMMIT="${RTP_COMMIT%-dirty}-dirty"
    echo "first_day.sh: $KIT was made for other sources, those of $RTP_COMMIT" | tee "$LOGS/kit.log"
  fi
  export RTP_COMMIT
  if [[ -e "$KIT/libnccl.so.2.gz" ]]; then
    gzip -dc "$KIT/libnccl.so.2.gz" >"$own" &
    NCCL_LIBRARY="${NCCL_LIBRARY:-$own}"
  fi
}

setup() {
  share 25
  if ((!DRY)); then
    machine >"$LOGS/machine.log" 2>&1 &
    prebuilt
    "$PYTHON" -c 'import xdist' 2>/dev/null || SPREAD=()
    "$PYTHON" -c 'import pytest_timeout' 2>/dev/null && TIMEOUT=(--timeout=80 --timeout-method=thread)
  fi
  py warm -c 'import torch; print(torch.__version__, torch.zeros(1, device="cuda"))' # a cold disk, a cold GPU
  if ((!DRY)); then # where no process has a context the driver starts anew for each one: this one keeps it
    "$PYTHON" -c "import time, torch; torch.zeros(1, device='cuda'); time.sleep($LIMIT)" >/dev/null 2>&1 &
    HOLDER=$!
  fi
  local works='from rtp_ext import _native; assert _native.with_cuda; print(_native._C.__file__, _native.nccl_versions())'
  if ! py import -c "$works"; then
    share 200
    if ! py import_again -c "$works"; then # the first one may only have been slow, on a cold disk
      PATH="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
      step build env RTP_WITH_CUDA=1 "$PYTHON" setup.py build_ext --inplace || finish 1
    fi
  fi
  py card benchmarks/gpu/card.py "$OUT/card.json"
  settled
}

newer_nccl() { [[ -z "${NCCL_LIBRARY:-}" ]] || PRELOAD=(env "LD_PRELOAD=$NCCL_LIBRARY"); }

TESTS=python_tests/gpu
C=$TESTS/transport/test_contracts_gpu.py
R=$TESTS/transport/test_transports_gpu.py
OVERLAP=(benchmarks/overlap.py --device cuda --output "$RESULTS")
SWEEP=("$PYTHON" python_tests/kernels/kernel_sweep.py --runner cuda --cases 3)

sanitized() { # NAME TOOL COMMAND...
  local name="$1" tool="$2"
  shift 2
  if ((!DRY)) && ! command -v compute-sanitizer >/dev/null; then
    [[ -n "${ONLY:-}" ]] || printf '%s\tmissing\t0\t0\n' "$name" >>"$OUT/steps.tsv"
    return 0
  fi
  step "$name" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 "$@"
}

alone() { # NAME ARGUMENTS...: tests one after the other
  local SPREAD=()
  tested "$@"
}

# --- the modes ----------------------------------------------------------------------------------------------------------

first() {
  share 95
  newer_nccl
  alone ranks "$R::test_rotates[2-ce]" "$R::test_trains_like_the_plain_model[2-ce]" \
    "$R::test_trains_like_the_plain_model[2-nccl]" "$C::test_prefetch_with_unequal_tokens" \
    "$TESTS/transport/test_ce_gpu.py::test_slots_are_counted_and_given_back" "$C::test_cold_start_with_lazy_loading" \
    "$R::test_a_killed_neighbour_is_a_timeout" "$R::test_rotates[2-nccl]" "$C::test_windows_without_multicast" \
    "$R::test_rotates[2-c10d]"
  PRELOAD=()
  keep
  share 10
  # shellcheck disable=SC2086
  py sums benchmarks/gpu/sums.py --output "$RESULTS" $SUM_OPTIONS
  share 30
  # shellcheck disable=SC2086
  py groups benchmarks/gpu/emulated_step.py --cases groups --output "$RESULTS" --budget 24 $STEP_OPTIONS
  keep
  share 80
  py doctor -m rtp_ext doctor &
  tested tests $TESTS/test_kernels_gpu.py $TESTS/test_codes_gpu.py $TESTS/test_linear_gpu.py $TESTS/test_bundles_gpu.py \
    $TESTS/test_routes_gpu.py $TESTS/test_capture_gpu.py $TESTS/test_cupy_gpu.py $TESTS/transport/test_ce_gpu.py \
    -k 'not more_elements and not collectives_by_cupy and not given_back' &
  { sanitized memcheck memcheck "${SWEEP[@]}"; sanitized racecheck racecheck "${SWEEP[@]}"; } &
  sanitized memcheck_layer memcheck "$PYTHON" -m pytest -q -x -p no:cacheprovider \
    "$TESTS/test_linear_gpu.py::test_emulated_ring_is_a_layer_of_repeated_shards[3-0-False]" \
    "$TESTS/test_bundles_gpu.py::test_mlp[2-torch.bfloat16-False]" &
  # shellcheck disable=SC2086 # options are words
  py memory benchmarks/memory_per_rank.py --device cuda --output "$RESULTS" --strategies rtp-fused,rtp,fsdp2 $MEMORY_OPTIONS &
  settled

  share 49
  alone alone $TESTS/test_blocked_sm_gpu.py $TESTS/test_trace_gpu.py $TESTS/test_delays_gpu.py \
    $TESTS/test_kernels_gpu.py $TESTS/test_errors_gpu.py -k 'blocked or trace or delays or errors or more_elements'
  keep

  share 20
  py host benchmarks/gpu/host_times.py --output "$RESULTS" --links ce-local,ce-local:4,nccl-self
  keep

  share 65
  py overlap "${OVERLAP[@]}" --ranks 8 --link ce-local:4,ce-local,sm-local,nccl-self:8 --shapes "$SHAPES" --tokens "$TOKENS" \
    --seconds "$SECONDS_EACH" --budget 58
  keep
  share 30
  # shellcheck disable=SC2086
  py emulated_step benchmarks/gpu/emulated_step.py --output "$RESULTS" --budget 24 $STEP_OPTIONS
  share 32
  # shellcheck disable=SC2086
  py graphs benchmarks/gpu/emulated_step.py --cases graphs --output "$RESULTS" --budget 27 $STEP_OPTIONS
  keep

  share 22
  # shellcheck disable=SC2086
  py kernels benchmarks/gpu/kernels.py --output "$RESULTS" $KERNEL_OPTIONS
  # shellcheck disable=SC2086
  py products8 benchmarks/gpu/products8.py --output "$RESULTS" $PRODUCT_OPTIONS
  keep
  local strategies
  for strategies in single,rtp rtp-fused,fsdp2; do # the first two decide
    share 33
    # shellcheck disable=SC2086
    OMP_NUM_THREADS="${OMP_NUM_THREADS_TRAIN:-16}" py "train_${strategies%,*}" benchmarks/compare.py --device cuda \
      --ranks 1 --strategies "$strategies" --no-memory --output "$RESULTS" $TRAIN_OPTIONS
    keep
  done
}

second() {
  share 35
  newer_nccl
  alone ranks_host "$C::test_host_time_of_a_hop"
  keep
  share 87
  # shellcheck disable=SC2086
  py memory_more benchmarks/memory_per_rank.py --device cuda --output "$RESULTS" \
    --strategies rtp-recompute,rtp-inplace,ddp,tp $MEMORY_OPTIONS &
  alone ranks_more "$C::test_random_hops_of_ce" "$C::test_graphs_with_both_channels" \
    "$C::test_a_rank_is_lost_with_30_layers_queued" "$R::test_rotates[4-ce]" "$R::test_trains_like_the_plain_model[4-ce]" \
    "$R::test_rotates[4-nccl]" "$TESTS/test_cupy_gpu.py::test_collectives_by_cupy" &
  settled
  PRELOAD=()
  # shellcheck disable=SC2086
  py host_calls benchmarks/gpu/host_calls.py --output "$RESULTS" --budget 28 $CALL_OPTIONS
  keep
  share 35
  py overlap_ctas "${OVERLAP[@]}" --ranks 8 --shapes "$ONE_SHAPE" --tokens "${TOKENS%%,*}" --directions forward,backward \
    --link nccl-self:1,nccl-self:2,nccl-self:4,nccl-self:8,nccl-self:16 --seconds 0.1 --budget 28 --again
  share 30
  py overlap_rings "${OVERLAP[@]}" --ranks 2,4 --shapes "$ONE_SHAPE" --tokens "$TOKENS" --link ce-local:4 \
    --directions forward,backward --seconds 0.1 --budget 24
  share 18
  py overlap_graph "${OVERLAP[@]}" --ranks 8 --link sm-local --graph --shapes "$ONE_SHAPE" --tokens "${TOKENS##*,}" \
    --directions forward,backward --seconds "$SECONDS_EACH" --budget 12
  keep
  for strategy in single rtp; do
    share 17
    # shellcheck disable=SC2086
    py "train_lm_$strategy" benchmarks/train_lm.py --device cuda --strategy "$strategy" --ranks 1 --dtype bfloat16 \
      --output "$RESULTS" $LM_OPTIONS
  done
}

several() {
  local gpus="${GPUS:-}"
  [[ -n "$gpus" ]] || gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
  if ((gpus < 2)); then
    echo "first_day.sh: ranks needs at least 2 GPUs, this machine has $gpus" >&2
    finish 2
  fi
  share 120
  alone contracts $C
  keep
  share 90
  alone transports $R
  keep
  share 60
  py hops benchmarks/gpu/hops.py --ranks "$gpus" --output "$RESULTS"
  keep
  share 124
  py overlap_real "${OVERLAP[@]}" --ring real --ranks "$gpus" --shapes "$SHAPES" --tokens "$TOKENS" \
    --seconds "$SECONDS_EACH" --budget 110
  keep
  for strategy in rtp fsdp2; do
    share 45
    # shellcheck disable=SC2086
    py "train_lm_$strategy" benchmarks/train_lm.py --device cuda --strategy "$strategy" --ranks "$gpus" --dtype bfloat16 \
      --output "$RESULTS" $LM_OPTIONS
  done
}

setup
case "$MODE" in main) first ;; more) second ;; ranks) several ;; esac
finish 0
