// Shared by the files of the simulated NCCL.
#pragma once

#include "nccl/simulated_nccl.h"

namespace simulated {

// Returns ncclSuccess if a communicator accepts work; reports a mistake if it has ended or is still in progress.
ncclResult_t check_usable(ncclComm_t comm);

// The result of a call that has enqueued work, or whose result needs calls of all ranks.
ncclResult_t under_way(ncclComm_t comm);

// Enqueues work of a communicator after its earlier work, on any stream.
void enqueue_on(ncclComm_t comm, cudaStream_t stream, Work work);

// Reports a mistake if the memory of a communicator's windows is unmapped while its rank still uses it. Requires the
// mutex.
void unmap_windows(ncclComm_t comm, const char* function);

// Returns whether waits on a communicator must end. Requires the mutex.
bool ended(ncclComm_t comm);

}  // namespace simulated
