#include "transport/emulated/wire.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/checks.h"

namespace rtp {

Wire::Rate Wire::rate_of(const std::string& link) {
  constexpr std::string_view kName = "wire:";
  Rate rate{0, 0};
  const char* const end = link.data() + link.size();
  auto read = std::from_chars_result{link.data(), std::errc::invalid_argument};
  if (link.starts_with(kName)) read = std::from_chars(link.data() + kName.size(), end, rate.bytes_per_second);
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == ':') {
    read = std::from_chars(read.ptr + 1, end, rate.seconds_per_message);
  }
  RTP_CHECK_VALUE(
      read.ec == std::errc() && read.ptr == end && rate.bytes_per_second > 0 && rate.seconds_per_message >= 0,
      "Ring.emulated: expected on a CPU no link or wire:BYTES_PER_SECOND[:SECONDS_PER_MESSAGE], got ", link);
  return rate;
}

Wire::~Wire() {
  close();
  thread_.join();
}

std::shared_ptr<Wire::Message> Wire::send(std::vector<Piece> pieces) {
  auto message = std::make_shared<Message>();
  double bytes = 0;
  for (const Piece& piece : pieces) bytes += static_cast<double>(piece.bytes);
  const std::chrono::duration<double> takes(rate_.seconds_per_message + bytes / rate_.bytes_per_second);
  message->takes = std::chrono::duration_cast<HostClock::duration>(takes);
  message->pieces = std::move(pieces);
  message->arrived = HostClock::now() + message->takes;  // unless others are before it
  const std::lock_guard lock(mutex_);
  waiting_.push_back(message);
  changed_.notify_all();
  return message;
}

void Wire::wait(Message& message) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return message.done || closed_; });
  if (!message.done) throw RotationError("transport emulated: the ring was closed while a hop was on its way");
}

Moment Wire::arrived(const Message& message) {
  const std::lock_guard lock(mutex_);
  return message.done ? host_moment(message.arrived) : nullptr;
}

void Wire::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Wire::run() {
  HostClock::time_point free{};
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    Message& message = *waiting_.front();
    message.arrived = std::max(message.arrived, free + message.takes);
    free = message.arrived;
    lock.unlock();
    // At once, so that the copy does not delay the arrival.
    for (const Piece& piece : message.pieces) {
      if (piece.from != nullptr) {
        std::memcpy(piece.to, piece.from, piece.bytes);
      } else {
        std::memset(piece.to, 0, piece.bytes);
      }
    }
    lock.lock();
    if (changed_.wait_until(lock, message.arrived, [&] { return closed_; })) return;
    message.done = true;
    waiting_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace rtp
