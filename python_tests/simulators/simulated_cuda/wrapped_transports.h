// Wrapper transports for tests: one omits a kind of wait, one counts the CUDA calls of hops.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "simulator.h"
#include "transport/transport.h"

namespace simulated {

using namespace rtp;

// A transport that omits one kind of wait, or hides that its hops are joint, to verify that tests detect it.
class WithoutWait : public Transport {
 public:
  WithoutWait(std::shared_ptr<Transport> inner, std::string missing)
      : Transport(inner->shared_streams()), inner_(std::move(inner)), missing_(std::move(missing)) {}

  const char* name() const override { return inner_->name(); }
  std::unique_ptr<Transfer> post(const Hop& hop) override {
    return std::make_unique<Part>(inner_->post(hop), missing_);
  }
  void order_hops_after(Channel channel, const StreamEvent& event) override {
    if (missing_ != "channel") inner_->order_hops_after(channel, event);
  }
  void order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) override {
    if (missing_ != "channel") inner_->order_memory_after(hop, memory, event);
  }
  at::Tensor allocate(Channel channel, int64_t bytes) override { return inner_->allocate(channel, bytes); }
  void release(Channel channel, const at::Tensor& slot) override { inner_->release(channel, slot); }
  bool sends_anywhere() const override { return inner_->sends_anywhere(); }
  bool receives_anywhere() const override { return inner_->receives_anywhere(); }
  bool joint() const override { return missing_ != "joint" && inner_->joint(); }
  bool has_collectives() const override { return inner_->has_collectives(); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  void close() override { inner_->close(); }
  void expect_no_graphs() const override { inner_->expect_no_graphs(); }

 private:
  class Part : public Transfer {
   public:
    Part(std::unique_ptr<Transfer> inner, const std::string& missing) : inner_(std::move(inner)), missing_(missing) {}
    void wait_received() override {
      if (missing_ != "received") inner_->wait_received();
    }
    void wait_sent() override {
      if (missing_ != "sent") inner_->wait_sent();
    }
    StreamEvent event(End end) const override { return inner_->event(end); }

   private:
    std::unique_ptr<Transfer> inner_;
    std::string missing_;
  };

  std::shared_ptr<Transport> inner_;
  std::string missing_;
};

// Returns how many functions whose names start with `prefix` this thread has called.
inline int64_t calls_of(const char* prefix) {
  int64_t total = 0;
  for (const auto& [function, count] : simulated::calls()) total += function.starts_with(prefix) ? count : 0;
  return total;
}

// The calls for hops, out of all calls of a pass.
struct Tally {
  int64_t hops = 0, cuda = 0, nccl = 0;

  template <typename Action>
  auto operator()(Action&& action) {
    struct Count {
      explicit Count(Tally& tally) : tally(tally), cuda(calls_of("cu")), nccl(calls_of("nccl")) {}
      ~Count() {
        tally.cuda += calls_of("cu") - cuda;
        tally.nccl += calls_of("nccl") - nccl;
      }
      Tally& tally;
      int64_t cuda, nccl;
    };
    const Count count(*this);
    return action();
  }
};

// Runs the kernels of the host on the compute stream.
class CountedStreams : public Streams {
 public:
  explicit CountedStreams(std::shared_ptr<Transport> inner)
      : transport_(std::move(inner)), inner_(transport_->streams()) {}

  bool on_host() const override { return inner_.on_host(); }
  StreamEvent record_compute() override { return inner_.record_compute(); }
  void order_compute_after(const StreamEvent& event) override { inner_.order_compute_after(event); }
  void select_compute_stream(int lane) override { inner_.select_compute_stream(lane); }
  int multiprocessors() const override { return inner_.multiprocessors(); }
  uint64_t capture() const override { return inner_.capture(); }
  void begin_pass() override { inner_.begin_pass(); }
  void end_pass() override { inner_.end_pass(); }
  void enter() override { inner_.enter(); }
  void leave() override { inner_.leave(); }
  void on_compute(const std::function<void()>& work) override { simulated::enqueue(simulated::compute_stream(), work); }
  bool has_graphs() const override { return inner_.has_graphs(); }
  void begin_graph_stream(bool captured) override { inner_.begin_graph_stream(captured); }
  std::shared_ptr<Graph> end_graph_stream() override { return inner_.end_graph_stream(); }
  void abandon_graph_stream() noexcept override { inner_.abandon_graph_stream(); }
  bool capturing() const override { return inner_.capturing(); }
  void launch(Graph& graph) override { inner_.launch(graph); }

 private:
  std::shared_ptr<Transport> transport_;
  Streams& inner_;
};

class CountedTransport : public Transport {
 public:
  // `beside`: a counted transport of the same rank, whose streams of computes it shares; null: new ones.
  CountedTransport(std::shared_ptr<Transport> inner, const std::shared_ptr<Tally>& tally, const Transport* beside)
      : Transport(beside != nullptr ? beside->shared_streams() : std::make_shared<CountedStreams>(inner)),
        inner_(std::move(inner)),
        tally_(tally) {}

  const char* name() const override { return inner_->name(); }
  std::unique_ptr<Transfer> post(const Hop& hop) override {
    ++tally_->hops;
    return (*tally_)([&] { return std::make_unique<Counted>(inner_->post(hop), tally_); });
  }
  void order_hops_after(Channel channel, const StreamEvent& event) override {
    (*tally_)([&] { inner_->order_hops_after(channel, event); });
  }
  void order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) override {
    (*tally_)([&] { inner_->order_memory_after(hop, memory, event); });
  }
  at::Tensor allocate(Channel channel, int64_t bytes) override { return inner_->allocate(channel, bytes); }
  void release(Channel channel, const at::Tensor& slot) override { inner_->release(channel, slot); }
  bool sends_anywhere() const override { return inner_->sends_anywhere(); }
  bool receives_anywhere() const override { return inner_->receives_anywhere(); }
  bool takes_graphs() const override { return inner_->takes_graphs(); }
  bool loopback() const override { return inner_->loopback(); }
  bool joint() const override { return inner_->joint(); }
  bool has_collectives() const override { return inner_->has_collectives(); }
  void before_graph() override { inner_->before_graph(); }
  void after_graph(const std::string& operation, const StreamEvent& end) override {
    inner_->after_graph(operation, end);
  }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  void close() override { inner_->close(); }
  void expect_no_graphs() const override { inner_->expect_no_graphs(); }

 private:
  class Counted : public Transfer {
   public:
    Counted(std::unique_ptr<Transfer> inner, std::shared_ptr<Tally> tally)
        : inner_(std::move(inner)), tally_(std::move(tally)) {}
    void wait_received() override {
      (*tally_)([&] { inner_->wait_received(); });
    }
    void wait_sent() override {
      (*tally_)([&] { inner_->wait_sent(); });
    }
    StreamEvent event(End end) const override { return inner_->event(end); }

   private:
    std::unique_ptr<Transfer> inner_;
    std::shared_ptr<Tally> tally_;
  };

  std::shared_ptr<Transport> inner_;
  std::shared_ptr<Tally> tally_;
};

}  // namespace simulated
