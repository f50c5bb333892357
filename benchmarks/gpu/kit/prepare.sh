#!/usr/bin/env bash
# Makes .gpukit: what benchmarks/gpu/first_day.sh needs on a machine with GPUs that has no network and little time.
#
#   benchmarks/gpu/kit/prepare.sh      in a checkout, on a machine with network and nvcc, but no GPU; minutes
#
# .gpukit (which git ignores) holds the extension for the torch and the GPU there; a newer NCCL than torch's, with the code
# of this GPU alone; the commit and the checksums of its files. Carry it beside the tree. Run this again after a commit: it
# compiles what has changed.
#
#   TORCH=torch==2.11.0         as on the machine with GPUs
#   PYTHON=python3.12           of the minor version there
#   ARCHITECTURE=90             the compute capability there
#   NCCL=nvidia-nccl-cu13==2.30.7
#   VENV=.gpukit-venv           an environment with this Python and torch; made where it is missing
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$HERE/../../.."
KIT=.gpukit ARCHITECTURE="${ARCHITECTURE:-90}" VENV="${VENV:-.gpukit-venv}"
mkdir -p "$KIT"
if [[ ! -x "$VENV/bin/python" ]]; then
  "${PYTHON:-python3.12}" -m venv "$VENV"
  "$VENV/bin/pip" install -q "${TORCH:-torch==2.11.0}" numpy "setuptools>=77" wheel cmake ninja
fi
RTP_WITH_CUDA=1 RTP_CUDA_ARCHITECTURES="$ARCHITECTURE-real" "$VENV/bin/python" setup.py build_ext --build-lib "$KIT/built"
rm -f "$KIT"/_[CR].*.so # of another Python
mv -f "$KIT"/built/rtp_ext/_[CR].*.so "$KIT/"
rm -rf "$KIT/built"
strip "$KIT"/_[CR].*.so
if [[ ! -e "$KIT/libnccl.so.2.gz" ]]; then
  "$VENV/bin/pip" install -q --no-deps --target "$KIT/nccl" "${NCCL:-nvidia-nccl-cu13==2.30.7}"
  "$VENV/bin/python" "$HERE/prune_fatbin.py" "$KIT/nccl/nvidia/nccl/lib/libnccl.so.2" "$KIT/libnccl.so.2" --keep "$ARCHITECTURE"
  strip --strip-debug "$KIT/libnccl.so.2"
  gzip -6 -f "$KIT/libnccl.so.2"
  rm -rf "$KIT/nccl"
fi
printf '%s\n' '#!/usr/bin/env bash' 'exec bash "$(dirname "${BASH_SOURCE[0]}")/../benchmarks/gpu/first_day.sh" "$@"' >"$KIT/first_day.sh"
git describe --always --abbrev=12 --dirty --exclude '*' >"$KIT/commit"
git ls-files -z -- csrc rtp_ext benchmarks python_tests ':!benchmarks/results' | xargs -0 sha256sum >"$KIT/files.sha256"
size=$(($(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb | tail -1 | cut -f1) + $(du -sb "$KIT" | cut -f1)))
echo "$KIT of commit $(cat "$KIT/commit"); the tree and $KIT: $((size >> 20)) MiB. There: bash $KIT/first_day.sh main"
