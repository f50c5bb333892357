// The NCCL of the simulation: what its functions and the tests share.
#pragma once

#include <nccl.h>

#include "simulator.h"

namespace simulated {

// What leaves one rank for another; gone once it has been received.
struct Message {
  const void* data;
  size_t bytes;
  bool received = false;
};

// What the ranks of one communicator share.
struct Clique {
  int ranks = 0;
  std::map<int, ncclComm_t> members;
  int finalized = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> mail;  // from, to
  std::map<std::pair<int, int>, int64_t> signals;                            // from, to: ever sent
  std::map<int, std::vector<std::pair<void*, size_t>>> registrations;        // by rank, in order
  std::map<int, std::vector<ncclWindow_t*>> wanted;                          // where each rank wants its window
  int multicasts = 0;  // windows that had multicast set up for them
};

// All communicators that were ever made, of a rank in the order in which it made them.
std::vector<ncclComm_t> communicators_of(int rank);

// Reports `code` on a communicator from now on.
void inject_error(ncclComm_t comm, ncclResult_t code);

// Forgets every communicator, so that the next test counts from nothing.
void forget_communicators();

}  // namespace simulated

// Opaque in NCCL's header. Never freed, so that use after the end is noticed.
struct ncclComm {
  std::shared_ptr<simulated::Clique> clique;
  int rank = 0;
  int unsettled = 0;  // times that its state will still be ncclInProgress
  bool finalizing = false;
  bool aborted = false;
  bool gone = false;  // destroyed or aborted
  bool blocking = false;
  bool revoked = false;
  int pending = 0;      // pieces of work that have not ended
  bool inside = false;  // a thread is in a call that waits
  ncclResult_t error = ncclSuccess;
  std::shared_ptr<simulated::Point> last;  // one communicator runs one piece of work at a time, whatever the stream
  std::map<int, int64_t> awaited;          // signals of each peer that waits have used up
  int registered = 0;                      // ncclCommRegister less ncclCommDeregister
  simulated::Maker maker = simulated::this_maker();
};

struct ncclWindow_vidmem {
  ncclComm_t comm;
  std::vector<std::pair<void*, size_t>> memory;  // of every rank
};
