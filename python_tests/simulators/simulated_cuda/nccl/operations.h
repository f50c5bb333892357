// Between the files of the simulated NCCL.
#pragma once

#include "nccl/simulated_nccl.h"

namespace simulated {

// ncclSuccess where a communicator can take work; notes a mistake where it has ended or not settled.
ncclResult_t check_usable(ncclComm_t comm);

// What a call returns that has enqueued work, or whose result comes once every rank has called.
ncclResult_t under_way(ncclComm_t comm);

// Enqueues work of a communicator: after its work before, whatever stream that was on.
void enqueue_on(ncclComm_t comm, cudaStream_t stream, Work work);

// Notes a mistake where the memory of a communicator's windows is unmapped while its rank still uses it. Holds the
// mutex.
void unmap_windows(ncclComm_t comm, const char* function);

// Whether what waits on a communicator should stop waiting. Holds the mutex.
bool ended(ncclComm_t comm);

}  // namespace simulated
