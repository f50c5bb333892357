#include "transport/c10d.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <mutex>

#include "base/checks.h"

namespace rtp {
namespace {

using Clock = std::chrono::steady_clock;
using Work = c10::intrusive_ptr<c10d::Work>;

constexpr size_t kMaxTensors = 12;  // maximum per hop

// The collectives by their names in torch before 2.14, where it has no others.
template <typename ProcessGroup>
Work gather_single(ProcessGroup& group, at::Tensor& to, at::Tensor& from) {
  if constexpr (requires { group.all_gather_single(to, from); })
    return group.all_gather_single(to, from);
  else
    return group._allgather_base(to, from);
}
template <typename ProcessGroup>
Work scatter_single(ProcessGroup& group, at::Tensor& to, at::Tensor& from) {
  if constexpr (requires { group.reduce_scatter_single(to, from); })
    return group.reduce_scatter_single(to, from);
  else
    return group._reduce_scatter_base(to, from);
}

// Throws the error for a work that failed: on this rank, if memory ran out, for example, which Gloo's collectives
// allocate, or because `peer` did not answer.
[[noreturn]] void throw_failed(const Hop& hop, int peer, Clock::duration waited, std::chrono::milliseconds timeout,
                               const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  if (own != nullptr && dynamic_cast<const c10::DistError*>(&error) == nullptr && waited < timeout) {
    throw RotationError(concat(hop.describe(), ": an error of this rank: ", own->what_without_backtrace()));
  }
  throw_timeout(hop, peer, waited, error.what());
}

// The works of one hop. The transport holds a weak reference, so that an abort reaches them.
class C10dTransfer : public Transfer {
 public:
  C10dTransfer(Hop hop, std::chrono::milliseconds timeout, bool on_host)
      : hop_(std::move(hop)), timeout_(timeout), on_host_(on_host) {}

  void add_send(Work work) { sent_.push_back(std::move(work)); }
  void add_receive(Work work) { received_.push_back(std::move(work)); }

  void wait_received() override { wait(received_, hop_.from); }
  void wait_sent() override { is_collective(hop_.action) ? wait_received() : wait(sent_, hop_.to); }

  void abort() noexcept {
    for (auto* works : {&received_, &sent_}) {
      for (const Work& work : *works) {
        try {
          work->abort();
        } catch (...) {  // the backend lacks abort: only dropping the group remains
        }
      }
    }
  }

 private:
  // Waits once with the whole timeout: a Gloo wait that times out permanently closes all pairs of its group.
  void wait(std::vector<Work>& works, int peer) {
    const auto start = Clock::now();
    for (const Work& work : works) {
      try {
        // On CUDA, a wait with a timeout would block the host; the group's own watchdog enforces the timeout.
        on_host_ ? work->wait(timeout_) : work->wait();
      } catch (const std::exception& error) {
        throw_failed(hop_, peer, Clock::now() - start, timeout_, error);
      }
    }
    works.clear();
  }

  Hop hop_;
  std::chrono::milliseconds timeout_;
  bool on_host_;
  std::vector<Work> received_;
  std::vector<Work> sent_;
};

// The executor's handle: forwards to the shared transfer, so that an abort never races with its destruction.
class TransferHandle : public Transfer {
 public:
  explicit TransferHandle(std::shared_ptr<C10dTransfer> transfer) : transfer_(std::move(transfer)) {}
  void wait_received() override { transfer_->wait_received(); }
  void wait_sent() override { transfer_->wait_sent(); }

 private:
  std::shared_ptr<C10dTransfer> transfer_;
};

// Between GPUs, hops run on streams of the process group.
class UntimedStreams : public Streams {
 public:
  Moment compute_moment() override {
    throw RotationError("transport c10d: hops between GPUs run on streams of the process group, which cannot be timed");
  }
};

std::unique_ptr<Streams> streams_of(at::Device device) {
  if (device.is_cuda()) return std::make_unique<UntimedStreams>();
  return std::make_unique<Streams>();
}

class C10dTransport : public Transport {
 public:
  C10dTransport(Group weight, Group gradient, at::Device device, std::chrono::milliseconds timeout)
      : Transport(streams_of(device)),
        groups_{std::move(weight), std::move(gradient)},
        device_(device),
        timeout_(timeout) {
    RTP_CHECK_VALUE(groups_[0]->getSize() == groups_[1]->getSize() && groups_[0]->getRank() == groups_[1]->getRank(),
                    "transport c10d: expected two groups of the same ranks, got sizes ", groups_[0]->getSize(), " and ",
                    groups_[1]->getSize());
  }

  const char* name() const override { return "c10d"; }
  size_t most_tensors() const override { return kMaxTensors; }
  bool has_collectives() const override { return true; }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    auto transfer = std::make_shared<C10dTransfer>(hop, timeout_, device_.is_cpu());
    const Group group = this->group(hop.channel);
    if (is_collective(hop.action) && device_.is_cpu()) compare(hop, group);
    // Ranks that are out of step must not match each other's messages: they time out instead.
    const int tag = static_cast<int>(hop.identity() & 0x1ffffff) * static_cast<int>(kMaxTensors);
    RTP_ASSERT(hop.send.size() <= kMaxTensors && hop.receive.size() <= kMaxTensors, hop.describe(),
               " has too many parts");
    const auto filled = [](const std::vector<Span>& spans) {
      return std::any_of(spans.begin(), spans.end(), [](const Span& span) { return span.bytes > 0; });
    };
    const bool coalesced = device_.is_cuda() && (filled(hop.send) || filled(hop.receive));
    try {
      if (coalesced) group->startCoalescing(device_.type());
      if (is_collective(hop.action)) {
        enqueue(hop, *transfer, *group);
      } else {
        enqueue(hop, *transfer, *group, tag);
      }
      if (coalesced) {
        transfer = std::make_shared<C10dTransfer>(hop, timeout_, device_.is_cpu());
        transfer->add_receive(group->endCoalescing(device_.type()));
      }
    } catch (const std::exception& error) {
      transfer->abort();
      throw_failed(hop, hop.to, Clock::duration(0), timeout_, error);
    }
    {
      const std::lock_guard lock(mutex_);
      in_flight_.remove_if([](const auto& known) { return known.expired(); });
      in_flight_.push_back(transfer);
    }
    return std::make_unique<TransferHandle>(std::move(transfer));
  }

  at::Tensor allocate(Channel, int64_t bytes) override {
    at::Tensor memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    const std::lock_guard lock(mutex_);
    slots_.remove_if([](const auto& known) { return known.expired(); });
    slots_.push_back(memory.storage().getWeakStorageImpl());
    return memory;
  }

  // Aborts the works, then drops the groups: closing their sockets notifies the neighbours.
  void abort(const std::string&) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const auto& known : in_flight_) {
      if (const auto transfer = known.lock()) transfer->abort();
    }
    in_flight_.clear();
    for (Group& group : groups_) group.reset();
  }

  void close() override {
    const std::lock_guard lock(mutex_);
    in_flight_.clear();
    for (Group& group : groups_) group.reset();
  }

 private:
  void enqueue(const Hop& hop, C10dTransfer& transfer, c10d::ProcessGroup& group, int tag) {
    for (size_t index = 0; index < hop.receive.size(); ++index) {
      if (hop.receive[index].bytes == 0) continue;
      std::vector<at::Tensor> tensors{as_tensor(hop.receive[index])};
      transfer.add_receive(group.recv(tensors, hop.from, tag + static_cast<int>(index)));
    }
    for (size_t index = 0; index < hop.send.size(); ++index) {
      if (hop.send[index].bytes == 0) continue;
      std::vector<at::Tensor> tensors{as_tensor(hop.send[index])};
      transfer.add_send(group.send(tensors, hop.to, tag + static_cast<int>(index)));
    }
  }

  // Of a gather or scatter.
  void enqueue(const Hop& hop, C10dTransfer& transfer, c10d::ProcessGroup& group) {
    for (size_t index = 0; index < hop.send.size(); ++index) {
      if (hop.send[index].bytes == 0) continue;
      at::Tensor from = as_tensor(hop.send[index]).view(hop.dtype);
      at::Tensor to = as_tensor(hop.receive[index]).view(hop.dtype);
      transfer.add_receive(hop.action == Action::gather ? gather_single(group, to, from)
                                                        : scatter_single(group, to, from));
    }
  }

  // Throws unless all ranks have come to the same gather or scatter: those of Gloo have no tag, and end the process
  // where their sizes differ.
  void compare(const Hop& hop, const Group& group) {
    const auto bytes = static_cast<int64_t>(sizeof(HopToken)), rank = static_cast<int64_t>(group->getRank());
    at::Tensor tokens = at::empty({group->getSize() * bytes}, at::kByte), own = tokens.narrow(0, rank * bytes, bytes);
    const HopToken token = HopToken::of(hop);
    std::memcpy(own.data_ptr(), &token, sizeof(HopToken));
    const auto start = Clock::now();
    try {
      gather_single(*group, tokens, own)->wait(timeout_);
    } catch (const std::exception& error) {
      throw_failed(hop, Hop::kAllRanks, Clock::now() - start, timeout_, error);
    }
    for (int peer = 0; peer < group->getSize(); ++peer) {
      HopToken other;
      std::memcpy(&other, tokens.const_data_ptr<uint8_t>() + peer * bytes, sizeof(HopToken));
      other.expect(hop, peer, "has come to");
    }
  }

  // A work keeps its tensor alive. For a slot, the tensor shares the storage: Gloo's thread may still use the memory
  // when a failed pass releases it.
  at::Tensor as_tensor(const Span& span) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
    const auto bytes = static_cast<int64_t>(span.bytes);
    c10::Storage memory = slot_of(span);
    if (!memory) return at::from_blob(span.data, {bytes}, options);
    const int64_t offset = span.data - static_cast<const std::byte*>(memory.data());
    return at::empty({0}, options).set_(std::move(memory), offset, {bytes}, {1});
  }

  // Returns the storage of the slot that contains `span`; null for memory of the caller.
  c10::Storage slot_of(const Span& span) {
    const std::lock_guard lock(mutex_);
    for (const auto& known : slots_) {
      c10::Storage memory(known.lock());
      if (!memory) continue;
      const auto* start = static_cast<const std::byte*>(memory.data());
      if (span.data >= start && span.data + span.bytes <= start + memory.nbytes()) return memory;
    }
    return {};
  }

  Group group(Channel channel) {
    const std::lock_guard lock(mutex_);
    const Group& group = groups_[static_cast<size_t>(channel)];
    if (!group) throw RotationError("transport c10d: the ring is closed");
    return group;
  }

  std::array<Group, 2> groups_;
  at::Device device_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::list<std::weak_ptr<C10dTransfer>> in_flight_;
  // storages, because wrappers may hold narrowed views of the tensors
  std::list<c10::weak_intrusive_ptr<c10::StorageImpl>> slots_;
};

}  // namespace

std::shared_ptr<Transport> make_c10d_transport(Group weight, Group gradient, at::Device device,
                                               std::chrono::milliseconds timeout) {
  return make_owned<C10dTransport>(std::move(weight), std::move(gradient), device, timeout);
}

}  // namespace rtp
