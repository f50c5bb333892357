// A pass that was captured as a CUDA graph and is replayed by one call.
#pragma once

#include <memory>
#include <string>

#include "engine/hops/slots.h"

namespace rtp {

struct PassGraph {
  std::shared_ptr<Graph> graph;
  std::string operation;
  Hops::Counts hops;       // hops of one replay
  int64_t generation = 0;  // generation of the slots that the graph uses

  bool idle() const { return graph->idle(); }
};

}  // namespace rtp
