// Types of the simulated NCCL, shared by its functions and the tests.
#pragma once

#include <nccl.h>

#include <array>
#include <atomic>

#include "simulator.h"

namespace simulated {

// A message between two ranks; destroyed once it has been received.
struct Message {
  const void* data;
  size_t bytes;
  bool received = false;
};

// State shared by the ranks of one communicator.
struct Clique {
  int ranks = 0;
  std::map<int, ncclComm_t> members;
  int finalized = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> mail;  // from, to
  std::map<int, std::vector<std::pair<void*, size_t>>> registrations;        // by rank, in order
  std::map<int, std::vector<ncclWindow_t*>> wanted;                          // by rank: destination of its window
  // By from and to: which of the two has called, and has seen the calls of all peers of that call.
  std::map<std::pair<int, int>, std::array<bool, 4>> contacts;
};

// All communicators ever created, in the order of creation per rank.
std::vector<ncclComm_t> communicators_of(int rank);

// Makes a communicator report `code` from now on.
void inject_error(ncclComm_t comm, ncclResult_t code);

// Clears all communicators, so that the counts of the next test start from zero.
void forget_communicators();

}  // namespace simulated

// Opaque in NCCL's header. Never freed, so that use after the end is detected.
struct ncclComm {
  std::shared_ptr<simulated::Clique> clique;
  int rank = 0;
  int unsettled = 0;  // number of remaining queries that return ncclInProgress
  bool finalizing = false;
  bool aborted = false;
  bool gone = false;  // destroyed or aborted
  bool blocking = false;
  bool revoked = false;
  std::vector<std::pair<int, int>> connecting;  // contacts that the last call waits for
  std::atomic<int> graphs = 0;                  // calls that graphs hold: localPersistentRefs in NCCL
  int pending = 0;                              // work items that have not ended
  bool inside = false;                          // a thread is inside a blocking call
  ncclResult_t error = ncclSuccess;
  std::shared_ptr<simulated::Point> last;  // one communicator runs one work item at a time, on any stream
  int registered = 0;                      // calls of ncclCommRegister minus ncclCommDeregister
  simulated::Maker maker = simulated::this_maker();
};

struct ncclWindow_vidmem {
  ncclComm_t comm;
  std::vector<std::pair<void*, size_t>> memory;  // of every rank
};
