// A transport on copy engines, without SMs: slots that every rank can access, copies between them, and flags that order
// the copies.
#pragma once

#ifdef RTP_WITH_CUDA

#include <memory>
#include <optional>
#include <string>

#include "transport/nccl/supervised.h"

namespace rtp {

enum class CeMode : uint8_t {
  push,  // the sender copies into the receiver's slot once the slot is free
  pull,  // the receiver copies from the sender's slot once the data is written
};

class CeTransport : public SupervisedTransport {
 public:
  using SupervisedTransport::SupervisedTransport;
  // Sets how hops of a channel travel; same on all ranks, with no hop in flight. Default: push.
  virtual void set_mode(Channel channel, CeMode mode) = 0;
  // For tests: returns whether all flags of this rank are 0 after its hops have ended, provided that no peer has
  // started its next pass.
  virtual bool at_rest() const = 0;
  // For tests: returns the number of flags of this rank that are 1 now.
  virtual int64_t raised() const = 0;
};

// Returns why this process cannot use the transport; nothing if no local reason is known.
std::optional<std::string> ce_refusal();

// `id`: one unique id, equal on all ranks. Collective. Throws RotationError if the GPUs cannot access each other's
// memory.
std::shared_ptr<CeTransport> make_ce_transport(const RingEnd& end, const std::string& id);

}  // namespace rtp

#endif  // RTP_WITH_CUDA
