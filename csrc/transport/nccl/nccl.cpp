#include "transport/nccl/nccl.h"

#include <map>

#include "device/nccl/symmetric_memory.h"

namespace rtp {
namespace {

ncclDataType_t nccl_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ncclDouble;
    case at::kFloat:
      return ncclFloat;
    case at::kHalf:
      return ncclHalf;
    case at::kBFloat16:
      return ncclBfloat16;
    default:
      throw RotationError(concat("transport nccl: NCCL cannot add gradients of dtype ", c10::toString(dtype)));
  }
}

class NcclTransport : public SupervisedTransport {
 public:
  NcclTransport(const RingEnd& end, const std::vector<std::string>& ids, const NcclOptions& options)
      : SupervisedTransport(end, ids, options.communicators),
        registered_(options.registered),
        max_ctas_(options.communicators.max_ctas) {
    run_trial_hops();
    start();
  }

  ~NcclTransport() override { leak_slots_in_use(); }

  const char* name() const override { return "nccl"; }
  int multiprocessors() const override { return max_ctas_; }
  bool joint() const override { return true; }
  bool has_collectives() const override { return true; }
  bool sends_anywhere() const override { return !registered_; }
  bool receives_anywhere() const override { return !registered_; }

  at::Tensor allocate(Channel channel, int64_t bytes) override {
    if (!registered_) return SupervisedTransport::allocate(channel, bytes);
    const DeviceScope scope(device_);
    refuse_capture();
    const at::Tensor slot = allocate_symmetric(bytes, device_);
    void* handle = nullptr;
    communicators_.call(static_cast<size_t>(channel), "transport nccl: registering a slot", [&](ncclComm_t comm) {
      RTP_NCCL_CHECK(ncclCommRegister(comm, slot.data_ptr(), static_cast<size_t>(slot.numel()), &handle));
    });
    handles_[slot.data_ptr()] = handle;
    keep_alive(slot);
    return slot;
  }

  void release(Channel channel, const at::Tensor& slot) override {
    if (!registered_) return SupervisedTransport::release(channel, slot);
    const auto found = handles_.find(slot.data_ptr());
    if (found == handles_.end() || !communicators_.open()) return;
    const DeviceScope scope(device_);
    refuse_capture();
    finish_uses(channel);
    void* handle = found->second;
    handles_.erase(found);
    drop_slot(slot);
    if (handle == nullptr) return;  // NCCL's environment disables registration
    communicators_.call(static_cast<size_t>(channel), "transport nccl: deregistering a slot",
                        [&](ncclComm_t comm) { RTP_NCCL_CHECK(ncclCommDeregister(comm, handle)); });
  }

 protected:
  Ends enqueue(const Hop& hop, cudaStream_t stream) override {
    cudaStream_t captured = streams_.capture() != 0 ? stream : nullptr;
    communicators_.call(static_cast<size_t>(hop.channel), hop.describe(), captured, [&](ncclComm_t comm) {
      NcclGroup group;
      if (is_collective(hop.action)) {
        for (size_t index = 0; index < hop.send.size(); ++index) enqueue(hop, index, comm, stream);
        group.end();
        return;
      }
      for (const Span& span : hop.send) {
        if (span.bytes > 0) RTP_NCCL_CHECK(ncclSend(span.data, span.bytes, ncclInt8, hop.to, comm, stream));
      }
      for (const Span& span : hop.receive) {
        if (span.bytes > 0) RTP_NCCL_CHECK(ncclRecv(span.data, span.bytes, ncclInt8, hop.from, comm, stream));
      }
      group.end();
    });
    return {};
  }

 private:
  // Enqueues the gather or scatter of one part, in place: its piece is where NCCL expects it in the whole.
  void enqueue(const Hop& hop, size_t index, ncclComm_t comm, cudaStream_t stream) {
    const Span &send = hop.send[index], &receive = hop.receive[index];
    if (send.bytes == 0) return;
    if (hop.action == Action::gather) {
      RTP_NCCL_CHECK(ncclAllGather(send.data, receive.data, send.bytes, ncclInt8, comm, stream));
      return;
    }
    const size_t numbers = receive.bytes / c10::elementSize(hop.dtype);
    RTP_NCCL_CHECK(ncclReduceScatter(send.data, receive.data, numbers, nccl_dtype(hop.dtype), ncclSum, comm, stream));
  }

  bool registered_;
  int max_ctas_;                    // 0: NCCL chooses
  std::map<void*, void*> handles_;  // handles of registered slots
};

}  // namespace

std::shared_ptr<Transport> make_nccl_transport(const RingEnd& end, const std::vector<std::string>& ids,
                                               const NcclOptions& options) {
  RTP_CHECK_VALUE(ids.size() == 2, "transport nccl: expected 2 unique ids, got ", ids.size());
  return make_owned<NcclTransport>(end, ids, options);
}

}  // namespace rtp
