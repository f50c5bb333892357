#include "transport/checked.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "base/checks.h"
#include "base/crc32c.h"

namespace rtp {
namespace {

using Word = uint64_t;  // a checksum in transit, as a word of the slots' alignment

constexpr size_t kInFlight = 4096;  // buffered checksums per channel: far more than hops in flight

Word checksum(const std::vector<Span>& parts) {
  uint32_t sum = 0;
  for (const Span& part : parts) sum = crc32c(part.data, part.bytes, sum);
  return sum;
}

bool moves(const std::vector<Span>& parts) {
  return std::any_of(parts.begin(), parts.end(), [](const Span& part) { return part.bytes > 0; });
}

class CheckedTransfer : public Transfer {
 public:
  CheckedTransfer(std::unique_ptr<Transfer> inner, Hop hop, const Word* sum, bool flipped)
      : inner_(std::move(inner)), hop_(std::move(hop)), sum_(sum), flipped_(flipped) {}

  // Verifies once: later, the memory may have been reused.
  void wait_received() override {
    inner_->wait_received();
    if (flipped_) flip();
    const Word* const sum = std::exchange(sum_, nullptr);
    if (sum == nullptr) return;
    const Word found = checksum(hop_.receive);
    if (found == *sum) return;
    throw RotationError(concat(hop_.describe(), ": what arrived from rank ", hop_.from,
                               " of the ring is not what it sent: expected the checksum ", std::hex, *sum, ", got ",
                               found));
  }
  void wait_sent() override { inner_->wait_sent(); }
  Moment arrived() const override { return inner_->arrived(); }

 private:
  void flip() {
    flipped_ = false;
    for (const Span& part : hop_.receive) {
      if (part.bytes == 0) continue;
      // avoids the least significant bits of a number
      const size_t inside = std::min((part.bytes / 2) | 6, part.bytes - 1);
      part.data[inside] ^= std::byte{0x10};
      return;
    }
  }

  std::unique_ptr<Transfer> inner_;
  Hop hop_;
  const Word* sum_;  // the received checksum; null: none was received, or it has been verified
  bool flipped_;
};

class Checked : public CheckedTransport {
 public:
  Checked(std::shared_ptr<Transport> inner, int ranks, bool verify)
      : inner_(std::move(inner)), room_(2 * static_cast<size_t>(ranks) + 6), verify_(verify) {
    for (auto& sums : sums_) sums.resize(2 * kInFlight);
  }

  const char* name() const override { return inner_->name(); }
  bool loopback() const override { return inner_->loopback(); }
  bool sends_anywhere() const override { return inner_->sends_anywhere(); }
  bool receives_anywhere() const override { return inner_->receives_anywhere(); }
  size_t most_tensors() const override { return inner_->most_tensors() - 1; }
  int64_t most_slots() const override { return inner_->most_slots(); }

  void flip(Channel channel, int64_t number) override { flipped_[static_cast<size_t>(channel)] = number; }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    const size_t channel = static_cast<size_t>(hop.channel);
    const uint64_t number = posted_[channel]++;
    const bool receives = moves(hop.receive), flipped = receives && flipped_[channel] == received_[channel];
    received_[channel] += receives ? 1 : 0;
    if (!verify_) return std::make_unique<CheckedTransfer>(inner_->post(hop), hop, nullptr, flipped);
    Hop checked = hop;
    if (moves(hop.send)) {
      Word& sum = sums_[channel][number % kInFlight];
      sum = checksum(hop.send);
      checked.send.push_back(span(sum));
    }
    Word* arriving = nullptr;
    if (receives) {
      arriving = place(hop, number);
      checked.receive.push_back(span(*arriving));
    }
    return std::make_unique<CheckedTransfer>(inner_->post(checked), hop, arriving, flipped);
  }

  at::Tensor allocate(Channel channel, int64_t bytes) override {
    const int64_t end = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const at::Tensor memory = inner_->allocate(channel, end + static_cast<int64_t>(room_ * sizeof(Word)));
    auto* const start = static_cast<std::byte*>(memory.data_ptr());
    ends_[start] = reinterpret_cast<Word*>(start + end);
    return memory.narrow(0, 0, bytes);
  }
  void release(Channel channel, const at::Tensor& memory) override {
    ends_.erase(static_cast<std::byte*>(memory.data_ptr()));
    inner_->release(channel, memory);
  }

  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  void close() override { inner_->close(); }
  void drop() noexcept override { inner_->drop(); }

 private:
  static constexpr int64_t kAlignment = 64;

  static Span span(Word& sum) { return {reinterpret_cast<std::byte*>(&sum), sizeof(Word)}; }

  // Returns where the received checksum is stored: behind the slot if hops can arrive in slots only. Several hops may
  // be in flight to a slot that holds every shard.
  Word* place(const Hop& hop, uint64_t number) {
    if (inner_->receives_anywhere()) return &sums_[static_cast<size_t>(hop.channel)][kInFlight + number % kInFlight];
    const auto slot = ends_.find(hop.receive_slot);
    RTP_ASSERT(slot != ends_.end(), hop.describe(), " must land in a slot");
    return slot->second + number % room_;
  }

  const std::shared_ptr<Transport> inner_;
  const size_t room_;  // number of checksums behind a slot
  const bool verify_;
  std::array<std::vector<Word>, 2> sums_;  // by channel: sent checksums, then received ones
  std::map<const std::byte*, Word*> ends_;
  std::array<uint64_t, 2> posted_{};
  std::array<int64_t, 2> received_{};
  std::array<int64_t, 2> flipped_{-1, -1};
};

}  // namespace

std::shared_ptr<CheckedTransport> make_checked_transport(std::shared_ptr<Transport> inner, int ranks, bool verify) {
  RTP_CHECK_VALUE(ranks >= 1 && inner != nullptr, "transport checked: expected a transport and ranks >= 1, got ranks ",
                  ranks);
  return make_owned<Checked>(std::move(inner), ranks, verify);
}

}  // namespace rtp
