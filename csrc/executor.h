// Runs any schedule. Every event and wait is derived here from who last read and wrote each buffer; operations never
// synchronise by hand.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "schedule.h"
#include "transport.h"

namespace rtp {

// One tensor of a bundle: its dtype and its shape for every owner.
struct Part {
  at::ScalarType dtype;
  std::vector<std::vector<int64_t>> shapes;

  int64_t elements(int owner) const;
  int64_t bytes(int owner) const;
};

// Tensors that travel together, and this rank's own ones.
struct Cargo {
  std::vector<Part> parts;
  std::vector<at::Tensor> home;

  int64_t offset(int owner, size_t part) const;  // of a part inside a slot, in bytes
  int64_t slot_bytes() const;                    // of a slot that any owner's shard fits into
};

// Slots of one ring, shared by all its layers. Counts what it holds and what was ever leased at once.
class SlotPool {
 public:
  explicit SlotPool(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  at::Tensor lease(Channel channel, int64_t bytes);
  void give_back(Channel channel, at::Tensor slot);
  void clear();

  struct Count {
    int64_t slots = 0;        // slots that exist
    int64_t bytes = 0;        // bytes of the slots that exist
    int64_t peak_slots = 0;   // most slots leased at once
    int64_t peak_bytes = 0;   // most bytes that existed at once
    int64_t allocations = 0;  // slots ever allocated
  };
  Count count(Channel channel) const { return counts_[static_cast<size_t>(channel)]; }
  void reset_peak();

 private:
  std::shared_ptr<Transport> transport_;
  std::array<std::vector<at::Tensor>, 2> free_;
  std::array<int64_t, 2> leased_{};
  std::array<Count, 2> counts_;
};

// What one ring needs to run schedules: the transport, the pool, and whether it is still alive.
class Executor {
 public:
  Executor(std::shared_ptr<Transport> transport, int rank, int ranks, at::Device device);
  ~Executor();

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  at::Device device() const { return device_; }
  Transport& transport() { return *transport_; }
  SlotPool& pool() { return pool_; }

  // Throws RotationError when the ring was closed or has failed.
  void check_alive(const std::string& operation) const;
  bool alive() const { return end_.empty(); }
  // Marks the ring dead and aborts its transport.
  void fail(const std::string& reason) noexcept;
  void close();

  int64_t hops(Channel channel) const { return hops_[static_cast<size_t>(channel)]; }
  int64_t bytes_sent(Channel channel) const { return bytes_[static_cast<size_t>(channel)]; }

 private:
  friend class Execution;

  std::shared_ptr<Transport> transport_;
  int rank_;
  int ranks_;
  at::Device device_;
  SlotPool pool_;
  std::string end_;  // why the ring is no longer usable; empty while it is
  Mark last_;        // the end of the newest execution on the compute lane
  std::array<int64_t, 2> hops_{};
  std::array<int64_t, 2> bytes_{};
};

// One pass of one operation.
//
//   Execution pass(executor, schedule, weight, gradient, "linear forward");
//   while (const Step* step = pass.next()) { ... compute with pass.weight(), pass.gradient_out() ... }
//
// The views are valid until the next call of next(). Whatever happens, the remaining hops run, so that neighbours are
// served and weights that travel in place come home.
class Execution {
 public:
  //
  // Weights whose home dtype differs from their part's, or that the transport cannot send from where they are, are
  // copied once, into one more slot, before they travel.
  Execution(Executor& executor, Schedule schedule, std::optional<Cargo> weight, std::optional<Cargo> gradient,
            std::string operation);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution();

  // Runs up to the next compute and orders it after what it reads and overwrites. Null at the end.
  const Step* next();
  // Runs the remaining hops without computing; gradients that lack this rank's part become NaN on their way home.
  // Does nothing after the end.
  void finish();

  std::vector<at::Tensor> weight() const;
  std::vector<at::Tensor> gradient_in() const;  // empty where the sum starts from zero
  std::vector<at::Tensor> gradient_out() const;

 private:
  // Who has touched a buffer since it was last overwritten.
  struct State {
    std::shared_ptr<Transfer> arrived;                 // the hop that wrote it, if a hop did
    Mark written;                                      // the compute that wrote it, if a compute did
    std::vector<std::shared_ptr<Transfer>> departing;  // hops that send from it
    std::vector<Mark> read;                            // computes that read it
  };

  const Cargo& cargo(Channel channel) const;
  State& state(Buffer buffer);
  void lease_slots();
  void return_slots();
  void stage_home();
  at::Tensor slot_view(const at::Tensor& slot, const Cargo& cargo, int owner, size_t part) const;
  at::Tensor view(Buffer buffer, int owner, size_t part) const;
  std::vector<at::Tensor> views(Buffer buffer, int owner) const;
  std::vector<Span> spans(Buffer buffer, int owner) const;
  std::byte* slot_of(Buffer buffer) const;  // where its slot starts; null for a home tensor that stayed where it is

  void before_compute(const Step& step);
  void after_compute(const Step& step);
  void hop(const Step& step);
  void copy_or_add(const Step& step);
  void end();
  template <typename Action>
  auto guarded(Action&& action);

  Executor& executor_;
  Schedule schedule_;
  std::optional<Cargo> weight_;
  std::optional<Cargo> gradient_;
  std::string operation_;
  std::array<std::vector<at::Tensor>, 2> slots_;
  at::Tensor staged_;  // the slot that holds a copy of the home tensors, where one travels
  std::map<std::pair<Channel, int>, State> states_;
  size_t position_ = 0;
  const Step* current_ = nullptr;  // the compute that the caller is at
  bool ended_ = false;
  std::array<int, 2> hop_index_{};
};

}  // namespace rtp
