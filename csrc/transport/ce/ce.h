// Copy engines, no SMs: slots that every rank can address, our own copies between them, and flags for order.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <optional>
#include <string>

#include "transport/nccl/supervised.h"

namespace rtp {

enum class CeMode : uint8_t {
  push,  // the sender copies into the receiver's slot, once that is free
  pull,  // the receiver copies out of the sender's slot, once that is written
};

class CeTransport : public SupervisedTransport {
 public:
  using SupervisedTransport::SupervisedTransport;
  // How hops of a channel travel; all ranks alike, and with nothing in flight. Push until told otherwise.
  virtual void set_mode(Channel channel, CeMode mode) = 0;
  // For tests: whether no flag of this rank is raised once its hops have ended, as long as no peer is at its next pass.
  virtual bool at_rest() const = 0;
};

// Why this process cannot use the transport; nothing if it can as far as it knows alone.
std::optional<std::string> ce_refusal();

// `id`: one unique id, the same on every rank. Collective. Throws RotationError where the GPUs cannot reach each other.
std::shared_ptr<CeTransport> make_ce_transport(const RingEnd& end, const std::string& id);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
