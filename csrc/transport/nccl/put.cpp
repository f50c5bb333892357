#include "transport/nccl/put.h"

#include <cstddef>
#include <map>

#include "device/nccl/symmetric_memory.h"
#include "device/nccl/windows.h"

namespace rtp {
namespace {

// Declarations missing from older headers: puts and signals were added in 2.29.2.
struct WaitDescription {  // ncclWaitSignalDesc_t
  int count;
  int peer;
  int signal;
  int context;
};
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
static_assert(NcclWindows::kSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(sizeof(WaitDescription) == sizeof(ncclWaitSignalDesc_t));
static_assert(offsetof(WaitDescription, count) == offsetof(ncclWaitSignalDesc_t, opCnt));
static_assert(offsetof(WaitDescription, peer) == offsetof(ncclWaitSignalDesc_t, peer));
static_assert(offsetof(WaitDescription, signal) == offsetof(ncclWaitSignalDesc_t, sigIdx));
static_assert(offsetof(WaitDescription, context) == offsetof(ncclWaitSignalDesc_t, ctx));
#endif

struct Functions : NcclWindows {
  using Put = ncclResult_t (*)(const void*, size_t, ncclDataType_t, int peer, void* window, size_t offset, int signal,
                               int context, unsigned int flags, ncclComm_t, cudaStream_t);
  using Signal = ncclResult_t (*)(int peer, int signal, int context, unsigned int flags, ncclComm_t, cudaStream_t);
  using Wait = ncclResult_t (*)(int, WaitDescription*, ncclComm_t, cudaStream_t);

  Put put = nccl_function<Put>("ncclPutSignal");
  Signal signal = nccl_function<Signal>("ncclSignal");
  Wait wait = nccl_function<Wait>("ncclWaitSignal");

  bool complete() const { return NcclWindows::complete() && put && signal && wait; }
};

class NcclPutTransport : public SupervisedTransport {
 public:
  NcclPutTransport(const RingEnd& end, const std::vector<std::string>& ids, const CommunicatorOptions& options)
      : SupervisedTransport(end, ids, options) {
    run_trial_hops();
    start();
  }

  ~NcclPutTransport() override { leak_slots_in_use(); }

  const char* name() const override { return "nccl-put"; }
  bool sends_anywhere() const override { return false; }
  bool receives_anywhere() const override { return false; }

  // Registers one window per slot. A hop addresses the neighbour's window by its own, because all ranks use the same
  // slots for the same hops.
  at::Tensor allocate(Channel channel, int64_t bytes) override {
    const DeviceScope scope(device_);
    refuse_capture();
    const at::Tensor slot = allocate_symmetric(bytes, device_);
    void* const window = communicators_.receive(
        data(channel), "transport nccl-put: registering a slot", [&](ncclComm_t comm, void** found) {
          RTP_NCCL_CHECK(functions_.enter(comm, slot.data_ptr(), static_cast<size_t>(slot.numel()), found,
                                          NcclWindows::kSymmetric));
        });
    if (window == nullptr) {
      throw NcclError("transport nccl-put: NCCL gave no window: symmetric memory is not supported between these GPUs");
    }
    windows_[slot.data_ptr()] = window;
    keep_alive(slot);
    return slot;
  }

  void release(Channel channel, const at::Tensor& slot) override {
    const auto found = windows_.find(slot.data_ptr());
    if (found == windows_.end() || !communicators_.open()) return;
    const DeviceScope scope(device_);
    refuse_capture();
    finish_uses(channel);
    void* window = found->second;
    windows_.erase(found);
    drop_slot(slot);
    communicators_.call(data(channel), "transport nccl-put: deregistering a slot",
                        [&](ncclComm_t comm) { RTP_NCCL_CHECK(functions_.leave(comm, window)); });
  }

 protected:
  // NCCL counts signals by source, and a communicator executes its calls in order. Therefore credits use a separate
  // communicator, and a put is enqueued before the wait for the arrival.
  Ends enqueue(const Hop& hop, cudaStream_t stream) override {
    const std::vector<Block> out = blocks_of(hop.send, hop.remote_receive_offsets, hop.in_whole_slot);
    const std::vector<Block> in = blocks_of(hop.receive, hop.remote_send_offsets, hop.in_whole_slot);
    const std::string what = hop.describe();
    if (!in.empty()) {  // the slot is free: all earlier uses precede in the stream
      communicators_.call(credits(hop.channel), what,
                          [&](ncclComm_t comm) { RTP_NCCL_CHECK(functions_.signal(hop.from, 0, 0, 0, comm, stream)); });
    }
    if (!out.empty()) {
      wait(credits(hop.channel), what, hop.to, 1, stream);
      const auto window = windows_.find(hop.receive_slot);
      RTP_ASSERT(hop.send_slot != nullptr && window != windows_.end(), hop.describe(), " does not use slots");
      for (const Block& block : out) {
        communicators_.call(data(hop.channel), what, [&](ncclComm_t comm) {
          RTP_NCCL_CHECK(functions_.put(block.data, block.bytes, ncclInt8, hop.to, window->second, block.there, 0, 0, 0,
                                        comm, stream));
        });
      }
    }
    if (!in.empty()) wait(data(hop.channel), what, hop.from, static_cast<int>(in.size()), stream);
    return {};
  }

  bool give_up() noexcept override {
    communicators_.leak();  // an abort would block if a signal never arrives
    return false;
  }

 private:
  static size_t data(Channel channel) { return static_cast<size_t>(channel); }
  static size_t credits(Channel channel) { return 2 + static_cast<size_t>(channel); }

  void wait(size_t communicator, const std::string& what, int peer, int signals, cudaStream_t stream) {
    WaitDescription wanted{signals, peer, 0, 0};
    communicators_.call(communicator, what,
                        [&](ncclComm_t comm) { RTP_NCCL_CHECK(functions_.wait(1, &wanted, comm, stream)); });
  }

  const Functions functions_;
  std::map<void*, void*> windows_;  // by slot
};

}  // namespace

std::optional<std::string> nccl_put_refusal() {
  if (Functions().complete()) return std::nullopt;
  return concat("NCCL ", nccl_loaded_version_name(), " has no puts and signals: expected 2.29 or newer");
}

std::shared_ptr<Transport> make_nccl_put_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                                   const CommunicatorOptions& options) {
  RTP_CHECK_VALUE(ids.size() == kNcclPutCommunicators, "transport nccl-put: expected ", kNcclPutCommunicators,
                  " unique ids, got ", ids.size());
  if (const auto refusal = nccl_put_refusal()) throw NcclError(concat("transport nccl-put: ", *refusal));
  return make_owned<NcclPutTransport>(end, ids, options);
}

}  // namespace rtp
