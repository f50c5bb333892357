// Communicators, sends and receives of the simulation.
#include <algorithm>
#include <cstring>
#include <set>

#include "device/nccl/library.h"
#include "nccl/operations.h"
#include "nccl/simulated_nccl.h"

namespace simulated {
namespace {

struct Book {
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by unique id
  std::vector<ncclComm_t> comms;
  int ids = 0;
};

Book& book() {
  static auto* only = new Book;
  return *only;
}

// The sends and receives of one group, which make progress together; those of collectives among them.
struct Group {
  ncclComm_t comm;
  cudaStream_t stream;
  std::vector<std::pair<int, std::shared_ptr<Message>>> sends;     // to
  std::vector<std::pair<int, std::pair<void*, size_t>>> receives;  // from
  std::vector<Work> sums;                                          // of what has arrived
};

thread_local int depth = 0;
thread_local std::vector<Group> groups;

Group& group_of(ncclComm_t comm, cudaStream_t stream) {
  for (Group& group : groups) {
    if (group.comm == comm && group.stream == stream) return group;
  }
  groups.push_back({comm, stream, {}, {}, {}});
  return groups.back();
}

bool over(ncclComm_t comm) { return comm->aborted || comm->revoked || world().controls.released; }

void exchange(const Group& group) {
  Clique& clique = *group.comm->clique;
  const int rank = group.comm->rank;
  std::unique_lock lock(world().mutex);
  if (over(group.comm)) return;
  for (const auto& [to, message] : group.sends) clique.mail[{rank, to}].push_back(message);
  world().changed.notify_all();
  for (const auto& [from, target] : group.receives) {
    auto& mail = clique.mail[{from, rank}];
    wait_until(lock, [&] { return !mail.empty() || over(group.comm); });
    if (over(group.comm)) break;
    const auto message = mail.front();
    mail.pop_front();
    if (message->bytes != target.second) {
      mistake("a receive of another size than its send");
      message->received = true;
      continue;
    }
    lock.unlock();
    copy(target.first, message->data, message->bytes);
    lock.lock();
    message->received = true;
    world().changed.notify_all();
  }
  wait_until(lock, [&] {
    for (const auto& [to, message] : group.sends) {
      if (!message->received) return over(group.comm);
    }
    return true;
  });
  for (const auto& [to, message] : group.sends) {  // a message that was not received must not outlive its memory
    std::erase(clique.mail[{rank, to}], message);
  }
  const bool complete = !over(group.comm);
  lock.unlock();
  for (const Work& sum : group.sums) {
    if (complete) sum();
  }
}

// Returns whether all peers of the last call have called, too, and each has seen the calls of all its peers.
bool connected(ncclComm_t comm) {
  auto& contacts = comm->clique->contacts;
  const auto all = [&](size_t first) {
    return std::all_of(comm->connecting.begin(), comm->connecting.end(),
                       [&](const auto& pair) { return contacts[pair][first] && contacts[pair][first + 1]; });
  };
  if (!all(0)) return false;
  for (const auto& pair : comm->connecting) {
    bool& seen = contacts[pair][pair.first == comm->rank ? 2 : 3];
    if (!std::exchange(seen, true)) world().changed.notify_all();
  }
  return all(2);
}

// The first send or receive with a peer connects both, which takes a call of each: ncclTransportP2pSetup of NCCL, which
// ends with a message between them.
void connect(const Group& group) {
  std::unique_lock lock(world().mutex);
  ncclComm_t comm = group.comm;
  comm->connecting.clear();
  if (!world().controls.first_contact) return;
  const auto call = [&](std::pair<int, int> pair, size_t side) {
    comm->clique->contacts[pair][side] = true;
    comm->connecting.push_back(pair);
  };
  for (const auto& [to, message] : group.sends) call({comm->rank, to}, 0);
  for (const auto& [from, target] : group.receives) call({from, comm->rank}, 1);
  world().changed.notify_all();
  if (!comm->blocking) return;
  comm->inside = true;
  wait_until(lock, [&] { return connected(comm) || over(comm); });
  comm->inside = false;
}

ncclResult_t launch(Group group) {
  const ncclResult_t usable = check_usable(group.comm);
  if (usable != ncclSuccess) return usable;
  connect(group);
  const ncclResult_t status = under_way(group.comm);
  enqueue_on(group.comm, group.stream, [group = std::move(group)] { exchange(group); });
  return status;
}

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const std::function<void(Group&)>& what) {
  what(group_of(comm, stream));
  if (depth > 0) return ncclSuccess;
  Group group = std::move(groups.back());
  groups.pop_back();
  return launch(std::move(group));
}

}  // namespace

ncclResult_t check_usable(ncclComm_t comm) {
  const std::lock_guard lock(world().mutex);
  if (comm->gone || comm->finalizing) {
    mistake("a communicator was used after its end");
    return ncclInvalidArgument;
  }
  if (comm->unsettled > 0) {
    mistake("a communicator was used before it had settled");
    return ncclInvalidUsage;
  }
  if (comm->revoked) return ncclInvalidUsage;
  return comm->error;
}

ncclResult_t under_way(ncclComm_t comm) { return comm->blocking ? ncclSuccess : ncclInProgress; }

void enqueue_on(ncclComm_t comm, cudaStream_t stream, Work work) {
  thread_local std::shared_ptr<Point> latest;  // of all communicators of this rank
  std::shared_ptr<Point> before, others;
  auto done = std::make_shared<Point>();
  {
    std::unique_lock lock(world().mutex);
    if (world().controls.serial_launches) others = std::exchange(latest, done);
    if (comm->blocking && world().controls.launch_queue > 0) {  // the call returns once the queue has room for its work
      comm->inside = true;
      wait_until(lock, [&] { return comm->pending < world().controls.launch_queue || ended(comm); });
      comm->inside = false;
    }
    comm->unsettled = comm->blocking ? 0 : 2;
    if (stream->capture == nullptr) {
      before = std::exchange(comm->last, done);
      ++comm->pending;
    } else {
      ++comm->graphs;
      keep_with_graph(stream, std::shared_ptr<void>(comm, [](void* held) {
                        --static_cast<ncclComm_t>(held)->graphs;
                        world().changed.notify_all();
                      }));
    }
  }
  enqueue(stream, [=, captured = stream->capture != nullptr, work = std::move(work)] {
    {
      std::unique_lock lock(world().mutex);
      if (before != nullptr) wait_until(lock, [&] { return before->reached; });
      if (others != nullptr) wait_until(lock, [&] { return others->reached || over(comm); });
    }
    work();
    const std::lock_guard lock(world().mutex);
    done->reached = true;
    if (!captured) --comm->pending;
    world().changed.notify_all();
  });
}

bool ended(ncclComm_t comm) { return over(comm); }

std::vector<ncclComm_t> communicators_of(int rank) {
  const std::lock_guard lock(world().mutex);
  std::vector<ncclComm_t> found;
  for (ncclComm_t comm : book().comms) {
    if (comm->rank == rank) found.push_back(comm);
  }
  return found;
}

void inject_error(ncclComm_t comm, ncclResult_t code) {
  const std::lock_guard lock(world().mutex);
  comm->error = code;
}

void forget_communicators() {
  const std::lock_guard lock(world().mutex);
  book() = {};  // communicators are kept: work left by a failed test may still use them
}

}  // namespace simulated

using namespace simulated;

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "simulated error";
  }
}
ncclResult_t ncclGetVersion(int* version) {
  called("ncclGetVersion");
  const std::lock_guard lock(world().mutex);
  *version = world().controls.version;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  called("ncclGetUniqueId");
  const std::lock_guard lock(world().mutex);
  std::memset(id, 0, sizeof(*id));
  const std::string text = "clique " + std::to_string(++book().ids);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  called("ncclCommInitRankConfig");
  std::unique_lock lock(world().mutex);
  const ncclConfig_t known = NCCL_CONFIG_INITIALIZER;
  if (config->blocking < 0 || config->blocking > 1 || config->magic != known.magic || config->splitShare != 0)
    return ncclInvalidArgument;
  auto& clique = book().cliques[id.internal];
  if (clique == nullptr) clique = std::make_shared<Clique>();
  if (clique->members.count(rank) > 0) return ncclInvalidUsage;
  clique->ranks = ranks;
  *comm = new ncclComm;
  (*comm)->clique = clique;
  (*comm)->rank = rank;
  (*comm)->blocking = config->blocking == 1;
  (*comm)->unsettled = (*comm)->blocking ? 0 : 2;
  clique->members[rank] = *comm;
  book().comms.push_back(*comm);
  world().changed.notify_all();
  if ((*comm)->blocking) {
    wait_until(lock, [&] { return static_cast<int>(clique->members.size()) == clique->ranks; });
  }
  return under_way(*comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  called("ncclCommGetAsyncError");
  const std::lock_guard lock(world().mutex);
  if (comm->gone) {
    mistake("ncclCommGetAsyncError after the end of a communicator");
    return ncclInvalidArgument;
  }
  const Clique& clique = *comm->clique;
  bool waiting = static_cast<int>(clique.members.size()) < clique.ranks;
  if (comm->finalizing) waiting = clique.finalized < clique.ranks || (comm->last != nullptr && !comm->last->reached);
  if (const auto found = clique.wanted.find(comm->rank); found != clique.wanted.end())
    waiting |= !found->second.empty();
  waiting |= !connected(comm) && !over(comm);
  if (!waiting && comm->unsettled > 0) {
    --comm->unsettled;
    waiting = true;
  }
  *error = comm->error != ncclSuccess ? comm->error : (waiting ? ncclInProgress : ncclSuccess);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  called("ncclGroupStart");
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  called("ncclGroupEnd");
  if (--depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (Group& group : std::exchange(groups, {})) {
    const ncclResult_t launched = launch(std::move(group));
    if (result == ncclSuccess || result == ncclInProgress) result = launched;
  }
  return result;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  called("ncclSend");
  if (type != ncclInt8) return ncclInvalidArgument;
  return add(comm, stream,
             [&](Group& group) { group.sends.emplace_back(peer, std::make_shared<Message>(Message{data, count})); });
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  called("ncclRecv");
  if (type != ncclInt8) return ncclInvalidArgument;
  return add(comm, stream, [&](Group& group) { group.receives.emplace_back(peer, std::make_pair(data, count)); });
}

// `data` must be in place: the piece of this rank in `whole`, which has `bytes` for each.
void expect_in_place(ncclComm_t comm, const void* data, const void* whole, size_t bytes) {
  const auto* const piece = static_cast<const std::byte*>(whole) + static_cast<size_t>(comm->rank) * bytes;
  if (data != piece) mistake("a collective out of place");
}
ncclResult_t ncclAllGather(const void* data, void* whole, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  called("ncclAllGather");
  if (type != ncclInt8) return ncclInvalidArgument;
  expect_in_place(comm, data, whole, count);
  return add(comm, stream, [&](Group& group) {
    for (int peer = 0; peer < comm->clique->ranks; ++peer) {
      if (peer == comm->rank) continue;
      group.sends.emplace_back(peer, std::make_shared<Message>(Message{data, count}));
      group.receives.emplace_back(peer, std::make_pair(static_cast<std::byte*>(whole) + peer * count, count));
    }
  });
}
ncclResult_t ncclReduceScatter(const void* whole, void* data, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  called("ncclReduceScatter");
  if (type != ncclDouble || op != ncclSum) return ncclInvalidArgument;
  const size_t bytes = count * sizeof(double);
  expect_in_place(comm, data, whole, bytes);
  return add(comm, stream, [&](Group& group) {
    for (int peer = 0; peer < comm->clique->ranks; ++peer) {
      if (peer == comm->rank) continue;
      const auto* const piece = static_cast<const std::byte*>(whole) + static_cast<size_t>(peer) * bytes;
      const auto arrived = std::make_shared<std::vector<double>>(count);
      group.sends.emplace_back(peer, std::make_shared<Message>(Message{piece, bytes}));
      group.receives.emplace_back(peer, std::make_pair(static_cast<void*>(arrived->data()), bytes));
      group.sums.push_back([=] {
        for (size_t each = 0; each < count; ++each) static_cast<double*>(data)[each] += (*arrived)[each];
      });
    }
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  called("ncclCommAbort");
  std::unique_lock lock(world().mutex);
  if (comm->gone) mistake("ncclCommAbort after the end of a communicator");
  if (comm->inside) mistake("ncclCommAbort while a thread is inside a call");
  unmap_windows(comm, "ncclCommAbort");
  comm->aborted = comm->gone = true;
  world().changed.notify_all();
  wait_until(lock, [&] { return comm->graphs == 0; });
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  called("ncclCommFinalize");
  const ncclResult_t usable = check_usable(comm);
  if (usable != ncclSuccess) return usable;
  std::unique_lock lock(world().mutex);
  if (comm->graphs != 0) mistake("ncclCommFinalize of a communicator that graphs hold, which waits for them");
  if (comm->registered != 0) mistake("the end of a communicator with registered memory");
  comm->finalizing = true;
  ++comm->clique->finalized;
  world().changed.notify_all();
  if (comm->blocking) {
    wait_until(lock, [&] {
      return comm->clique->finalized == comm->clique->ranks && (comm->last == nullptr || comm->last->reached);
    });
  }
  return under_way(comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  called("ncclCommDestroy");
  const std::lock_guard lock(world().mutex);
  if (!comm->finalizing) mistake("ncclCommDestroy before ncclCommFinalize");
  unmap_windows(comm, "ncclCommDestroy");
  comm->gone = true;
  return ncclSuccess;
}

}  // extern "C"
