// A pass that was captured, and runs again in one call.
#pragma once

#include <memory>
#include <string>

#include "engine/hops/slots.h"

namespace rtp {

struct PassGraph {
  std::shared_ptr<Graph> graph;
  std::string operation;
  Hops::Counts hops;       // of one run
  int64_t generation = 0;  // of the slots that it knows

  bool idle() const { return graph->idle(); }
};

}  // namespace rtp
