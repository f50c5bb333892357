#!/bin/bash
# One rank, from one process of Open MPI: its variables under the names that torch reads. No hop goes through MPI.
#
#     mpirun -np 4 --host node0:2,node1:2 --bind-to none -x MASTER_ADDR=node0 examples/launch/mpirun.sh \
#         examples/quickstart.py
#
# --bind-to none: mpirun binds each process to one core or socket, and with it the threads that send and receive hops.
# Do not place ranks by `--map-by node`: the ranks of one host have to be neighbours.

set -euo pipefail

export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-29500}
exec python "$@"
