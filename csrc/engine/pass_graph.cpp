#include "engine/pass_graph.h"

#include "base/checks.h"
#include "engine/executor.h"

namespace rtp {

void Executor::fix_slots() {
  RTP_CHECK_VALUE(takes_graphs(), "expected a transport whose passes can be graphs, got ", transport_->name());
  drain();
  pool_.fix_order();
}

void Executor::begin_graph_stream(bool captured) {
  counts_before_graph_ = hops_.counts();
  streams().begin_graph_stream(captured);
}

std::shared_ptr<PassGraph> Executor::end_graph_stream(const std::string& operation) {
  std::shared_ptr<PassGraph> made;
  or_fail([&] {
    const std::shared_ptr<Graph> graph = streams().end_graph_stream();
    if (graph == nullptr) return;
    Hops::Counts pass = hops_.counts();
    for (size_t kind = 0; kind < pass.hops.size(); ++kind) {
      pass.hops[kind] -= counts_before_graph_.hops[kind];
      pass.bytes[kind] -= counts_before_graph_.bytes[kind];
    }
    hops_.add(pass, -1);  // the captured pass has not run yet
    made = std::make_shared<PassGraph>(PassGraph{graph, operation, pass, pool_.generation()});
  });
  return made;
}

void Executor::abandon_graph_stream() noexcept { streams().abandon_graph_stream(); }

void Executor::replay(const PassGraph& pass) {
  check_alive(pass.operation);
  RTP_ASSERT(pass.generation == pool_.generation(), "a graph of slots that are gone");
  or_fail([&] {
    const StreamsScope scope(streams());
    transport_->before_graph();
    const PassHandle begun = sink_.begin_graph(pass.operation + ", as a graph");
    streams().launch(*pass.graph);
    transport_->after_graph(pass.operation, streams().record_compute());
    sink_.end(begun);
    hops_.add(pass.hops, 1);
  });
}

}  // namespace rtp
