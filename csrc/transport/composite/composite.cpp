#include "transport/composite/composite.h"

#include <algorithm>
#include <array>

#include "base/checks.h"

namespace rtp {
namespace {

// A hop that arrives through one transport and leaves through the other.
class SplitTransfer : public Transfer {
 public:
  SplitTransfer(std::unique_ptr<Transfer> receiving, std::unique_ptr<Transfer> sending)
      : receiving_(std::move(receiving)), sending_(std::move(sending)) {}

  void wait_received() override { receiving_->wait_received(); }
  void wait_sent() override { sending_->wait_sent(); }
  Moment arrived() const override { return receiving_->arrived(); }
  StreamEvent event(End end) const override {
    return end == End::received ? receiving_->event(end) : sending_->event(end);
  }

 private:
  std::unique_ptr<Transfer> receiving_, sending_;
};

class Composite : public CompositeTransport {
 public:
  Composite(std::shared_ptr<Transport> inner, std::shared_ptr<Transport> outer, int rank, int per_host)
      : CompositeTransport(inner->shared_streams()),
        inner_(std::move(inner)),
        outer_(std::move(outer)),
        first_(rank / per_host * per_host),
        per_host_(per_host),
        name_(concat(inner_->name(), "+", outer_->name())) {}

  const char* name() const override { return name_.c_str(); }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    if (is_collective(hop.action)) {
      collectives_ = true;
      return outer_->post(hop);
    }
    const bool from_inside = inside(hop, hop.from), to_inside = inside(hop, hop.to);
    if (from_inside == to_inside) return post(hop, to_inside);
    Hop receiving = hop, sending = hop;
    receiving.send.clear();
    receiving.remote_receive_offsets.clear();
    receiving.to = hop.from;  // each waits for one peer
    sending.receive.clear();
    sending.remote_send_offsets.clear();
    sending.from = hop.to;
    auto arriving = post(std::move(receiving), from_inside);
    return std::make_unique<SplitTransfer>(std::move(arriving), post(std::move(sending), to_inside));
  }

  void order_hops_after(Channel channel, const StreamEvent& event) override {
    inner_->order_hops_after(channel, event);
    outer_->order_hops_after(channel, event);
  }
  void order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) override {
    level(hop, memory == HopMemory::source ? hop.to : hop.from).order_memory_after(hop, memory, event);
  }
  Moment moment(const Hop& hop) override { return level(hop, hop.from).moment(hop); }
  void delay(const Hop& hop, std::chrono::microseconds time) override { level(hop, hop.from).delay(hop, time); }

  bool has_collectives() const override { return outer_->has_collectives(); }

  int multiprocessors() const override { return inner_->multiprocessors() + outer_->multiprocessors(); }

  at::Tensor allocate(Channel channel, int64_t bytes) override { return inner_->allocate(channel, bytes); }
  void release(Channel channel, const at::Tensor& memory) override { inner_->release(channel, memory); }
  bool sends_anywhere() const override { return inner_->sends_anywhere() && outer_->sends_anywhere(); }
  bool receives_anywhere() const override { return inner_->receives_anywhere() && outer_->receives_anywhere(); }
  size_t most_tensors() const override { return std::min(inner_->most_tensors(), outer_->most_tensors()); }
  int64_t most_slots() const override { return inner_->most_slots(); }

  void abort(const std::string& reason) noexcept override {
    inner_->abort(reason);
    outer_->abort(reason);
  }
  void close() override {
    inner_->close();
    outer_->close();
  }
  void expect_no_graphs() const override {
    inner_->expect_no_graphs();
    outer_->expect_no_graphs();
  }
  void drop() noexcept override {
    inner_->drop();
    outer_->drop();
  }

  Transport& inner() const override { return *inner_; }
  int64_t bytes_between_hosts(Channel channel) const override {
    if (collectives_)
      throw RotationError(concat("transport ", name_, " does not count the bytes that collectives send between hosts"));
    return sent_[static_cast<size_t>(channel)];
  }

 private:
  bool here(int rank) const { return rank >= first_ && rank < first_ + per_host_; }

  // Returns whether the transport inside the host connects this rank to `rank` for a hop.
  bool inside(const Hop& hop, int rank) const { return here(rank) && (hop.two_level || !inner_->joint()); }
  Transport& level(const Hop& hop, int rank) const { return inside(hop, rank) ? *inner_ : *outer_; }

  std::unique_ptr<Transfer> post(Hop hop, bool inside) {
    if (inside) {
      hop.to -= first_;
      hop.from -= first_;
      return inner_->post(hop);
    }
    for (const Span& span : hop.send) {
      if (!here(hop.to)) sent_[static_cast<size_t>(hop.channel)] += static_cast<int64_t>(span.bytes);
    }
    return outer_->post(hop);
  }

  const std::shared_ptr<Transport> inner_, outer_;
  const int first_, per_host_;
  const std::string name_;
  std::array<int64_t, 2> sent_{};
  bool collectives_ = false;  // some have been posted
};

}  // namespace

std::shared_ptr<CompositeTransport> make_composite_transport(std::shared_ptr<Transport> inner,
                                                             std::shared_ptr<Transport> outer, int rank, int per_host) {
  RTP_CHECK_VALUE(per_host >= 1 && rank >= 0, "transport composite: expected per_host >= 1 and rank >= 0, got ",
                  per_host, " and ", rank);
  RTP_CHECK_VALUE(inner->streams().on_host() || &inner->streams() == &outer->streams(),
                  "transport composite: ", inner->name(), " and ", outer->name(), " must share their streams");
  return make_owned<Composite>(std::move(inner), std::move(outer), rank, per_host);
}

}  // namespace rtp
