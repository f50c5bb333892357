// Registered memory and windows of the simulation.
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "device/nccl/library.h"
#include "device/nccl/symmetric_memory.h"
#include "nccl/operations.h"

namespace simulated {
namespace {

// Returns whether memory lies inside one allocation of ncclMemAlloc. Requires the mutex.
bool registrable(const void* data, size_t bytes) {
  auto found = world().registrable.upper_bound(const_cast<void*>(data));
  if (found == world().registrable.begin()) return false;
  --found;
  return static_cast<const std::byte*>(data) + bytes <=
         static_cast<const std::byte*>(found->first) + found->second.bytes;
}

// Collective. Creates the windows once every rank has called; a communicator is in progress until then.
ncclResult_t register_window(ncclComm_t comm, void* data, size_t bytes, ncclWindow_t* window, int flags) {
  called("ncclCommWindowRegister");
  const ncclResult_t usable = check_usable(comm);
  if (usable != ncclSuccess) return usable;
  std::unique_lock lock(world().mutex);
  Clique& clique = *comm->clique;
  *window = nullptr;
  const auto made = [&] {  // a blocking communicator returns once the window exists
    if (comm->blocking) wait_until(lock, [&] { return clique.wanted[comm->rank].empty() || ended(comm); });
    return under_way(comm);
  };
  if (world().controls.null_windows) return ncclSuccess;
  if (flags != NCCL_WIN_DEFAULT ||  // others set up multicast, which `ce` must not need
      reinterpret_cast<uintptr_t>(data) % NCCL_WIN_REQUIRED_ALIGNMENT != 0 || !registrable(data, bytes)) {
    return ncclInvalidArgument;
  }
  clique.registrations[comm->rank].emplace_back(data, bytes);
  clique.wanted[comm->rank].push_back(window);
  ++comm->registered;
  if (static_cast<int>(clique.wanted.size()) < clique.ranks) return made();
  for (const auto& [rank, wanted] : clique.wanted) {
    if (wanted.empty()) return made();
  }
  std::vector<std::pair<void*, size_t>> memory;
  for (auto& [rank, registrations] : clique.registrations) memory.push_back(registrations.back());
  for (auto& [rank, wanted] : clique.wanted) {
    *wanted.front() = new ncclWindow_vidmem{clique.members[rank], memory};
    wanted.clear();
  }
  world().changed.notify_all();
  return under_way(comm);
}

ncclResult_t deregister_window(ncclComm_t comm, ncclWindow_t window) {
  const std::lock_guard lock(world().mutex);
  called("ncclCommWindowDeregister");
  if (comm->last != nullptr && !comm->last->reached) mistake("a window was deregistered while work was under way");
  for (const auto& [data, bytes] : window->memory) {
    if (in_use(comm->maker, data, bytes)) mistake("a window was deregistered while copies into or out of it were due");
  }
  --comm->registered;
  std::erase(comm->clique->registrations[comm->rank], window->memory[comm->rank]);
  delete window;
  return ncclSuccess;
}

}  // namespace

void unmap_windows(ncclComm_t comm, const char* function) {
  if (comm->gone) return;
  for (const auto& [rank, registrations] : comm->clique->registrations) {
    for (const auto& [data, bytes] : registrations) {
      if (in_use(comm->maker, data, bytes)) {
        mistake(std::string(function) + " of rank " + std::to_string(comm->rank) + " unmapped a window of rank " +
                std::to_string(rank) + " (" + std::to_string(bytes) +
                " bytes) while copies into or out of it were due");
        return;
      }
    }
  }
}

namespace {

ncclResult_t revoke_all(ncclComm_t comm, int flags) {
  called("ncclCommRevoke");
  const std::lock_guard lock(world().mutex);
  if (flags != 0 || comm->gone || comm->finalizing || comm->revoked) return ncclInvalidArgument;
  comm->revoked = true;
  world().changed.notify_all();
  return under_way(comm);
}

ncclResult_t peer_pointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
  *pointer = static_cast<std::byte*>(window->memory[peer].first) + offset;
  return ncclSuccess;
}

}  // namespace
}  // namespace simulated

using namespace simulated;

extern "C" {

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  called("ncclMemAlloc");
  cudaMalloc(memory, bytes);
  const std::lock_guard lock(world().mutex);
  world().registrable[*memory] = {bytes, this_maker()};
  return ncclSuccess;
}
// The memory stays valid, as memory that peers have mapped does.
ncclResult_t ncclMemFree(void* memory) {
  called("ncclMemFree");
  const std::lock_guard lock(world().mutex);
  const auto found = world().registrable.find(memory);
  if (found != world().registrable.end()) {
    if (in_use(found->second.maker, memory, found->second.bytes)) mistake("ncclMemFree of memory that copies use");
    world().registrable.erase(found);
  }
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* data, size_t bytes, void** handle) {
  called("ncclCommRegister");
  const ncclResult_t usable = check_usable(comm);
  if (usable != ncclSuccess) return usable;
  const std::lock_guard lock(world().mutex);
  if (!registrable(data, bytes)) return ncclInvalidArgument;
  ++comm->registered;
  *handle = data;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  called("ncclCommDeregister");
  const std::lock_guard lock(world().mutex);
  if (comm->last != nullptr && !comm->last->reached) mistake("memory was deregistered while work was under way");
  --comm->registered;
  return ncclSuccess;
}

}  // extern "C"

void* rtp::find_nccl_function(const char* name) {
  static const std::map<std::string, std::pair<int, void*>> functions{
      {"ncclCommWindowRegister", {22703, reinterpret_cast<void*>(&register_window)}},
      {"ncclCommWindowDeregister", {22703, reinterpret_cast<void*>(&deregister_window)}},
      {"ncclGetPeerDevicePointer", {22902, reinterpret_cast<void*>(&peer_pointer)}},
      {"ncclCommRevoke", {22807, reinterpret_cast<void*>(&revoke_all)}},
  };
  const std::lock_guard lock(world().mutex);
  const auto found = functions.find(name);
  return found == functions.end() || world().controls.version < found->second.first ? nullptr : found->second.second;
}

at::Tensor rtp::allocate_symmetric(int64_t bytes, at::Device device) {
  void* memory = nullptr;
  ncclMemAlloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  return at::from_blob(
      memory, {std::max<int64_t>(bytes, 1)}, [](void* memory) { ncclMemFree(memory); },
      at::TensorOptions().dtype(at::kByte).device(device.type()));
}
