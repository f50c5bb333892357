#!/bin/bash
#SBATCH --job-name=rotate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00

# One ring over the nodes of a SLURM job: one task on each node, a torchrun, which starts the ranks of its node.
#
#     sbatch --cpus-per-task 16 examples/launch/slurm.sh examples/quickstart.py
#     RANKS_PER_NODE=8 sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 examples/launch/slurm.sh train.py --steps 100

set -euo pipefail

# The ranks meet on the first node of the job, at a port that other jobs on the same node do not take.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT RANKS_PER_NODE="${RANKS_PER_NODE:-1}"

# Since SLURM 22.05 srun does not read --cpus-per-task of sbatch: without this line all ranks of a node share one core.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# SLURM_NODEID has its value only in the task: the single quotes keep this shell from reading it.
srun --kill-on-bad-exit bash -c 'exec python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$RANKS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' task "$@"
