#!/bin/bash
# Training on one or two hosts, which may come and go: whenever ranks die, or a host joins, all ranks start again and
# continue from the last checkpoint. Run it on every host, with a folder that all of them see:
#
#     FIRST=node0 RANKS_PER_NODE=8 examples/launch/elastic.sh --folder /shared/run --steps 10000
#
# The store of the rendezvous is in the torchrun of the host FIRST: the job survives any other host.

set -euo pipefail

# A store for each start: in the shared one, ranks that start again find the addresses of dead ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# last_call_timeout: seconds for which the least number of hosts waits for more.
exec python -m torch.distributed.run --nnodes "${NODES:-1:2}" --nproc-per-node "${RANKS_PER_NODE:-1}" \
    --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint "${FIRST:-localhost}:${PORT:-29400}" \
    --rdzv-id rotate --rdzv-conf "last_call_timeout=${LAST_CALL:-30}" "$(dirname "$0")/../recover.py" "$@"
