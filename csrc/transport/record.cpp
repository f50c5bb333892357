#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "base/checks.h"
#include "transport/sink.h"
#include "transport/transport.h"

namespace rtp {
namespace {

int64_t clock_ns(clockid_t clock) noexcept {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// The sinks whose records the signal handler writes.
std::array<std::atomic<Sink*>, 256> sinks{};
std::atomic<int> asking{0};

void copy_text(char* to, size_t bytes, const std::string& from) {
  std::memset(to, 0, bytes);
  std::memcpy(to, from.data(), std::min(from.size(), bytes - 1));
}

bool write_all(int file, const void* data, size_t bytes) noexcept {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(file, from, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    from += done;
    bytes -= static_cast<size_t>(done);
  }
  return true;
}

}  // namespace

// The header of a file. Names follow, then entries.
struct Sink::Header {
  char magic[8];
  uint32_t header_bytes, names, name_bytes, entries, entry_bytes;
  int32_t rank, ranks, pid;
  uint64_t next;         // number of the next entry
  int64_t steady, wall;  // current time of both clocks
  uint32_t posted[2];    // total hops by channel
  uint64_t waiting_for;  // entry of the awaited hop; 0: none
  int64_t waiting_since;
  uint32_t waiting_end;
  uint32_t on_host;
  char ring[64], transport[32], host[128], reason[1024];
};

void Sink::enlist() {
  for (auto& place : sinks) {
    Sink* none = nullptr;
    if (place.compare_exchange_strong(none, this)) break;  // with more rings than places, the signal skips this one
  }
}

void Sink::strike() {
  for (auto& place : sinks) {
    Sink* self = this;
    place.compare_exchange_strong(self, nullptr);
  }
  while (asking.load() > 0) usleep(100);  // a handler on another thread may still use this object
}

void Sink::identify(const Place& place) {
  place_ = place;
  const char* wish = std::getenv("RTP_RECORD_DIR");
  const char* temporary = std::getenv("TMPDIR");
  on_failure_ = wish == nullptr || *wish != '\0';
  std::string folder = wish != nullptr && *wish != '\0' ? wish : temporary != nullptr ? temporary : "/tmp";
  const std::string path = concat(folder, "/rtp_record_", place.ring, "_rank", place.rank, ".bin");
  RTP_CHECK_VALUE(path.size() + 5 < kPathBytes, "RTP_RECORD_DIR: expected a shorter path than ", path);
  copy_text(partial_, kPathBytes, path + ".new");
  copy_text(path_, kPathBytes, path);
}

std::string Sink::last_hop() const {
  const uint64_t next = next_.load(std::memory_order_relaxed);
  for (uint64_t number = next - 1; number > 0 && number + kEntries >= next; --number) {
    const Entry& entry = entries_[number % kEntries];
    if (entry.number != number || entry.kind != Kind::hop) continue;
    const std::string operation = names_.get() + entry.operation * kNameBytes;
    if (entry.hops == 0) return concat(operation, ", as a graph");
    const std::string to = entry.to == Hop::kAllRanks ? "all ranks" : concat("rank ", entry.to);
    return concat(operation, ", ", rtp::name(entry.channel), " hop ", entry.index + 1, " of ", entry.hops, " to ", to);
  }
  return "";
}

std::string Sink::write_record(const std::string& reason) {
  if (path_[0] == '\0') throw std::runtime_error("a record needs a ring with a name");
  if (!write(reason.c_str())) throw std::runtime_error(concat("cannot write ", path_, ": ", std::strerror(errno)));
  return path_;
}

const std::string& Sink::fail(std::string& reason) noexcept {
  if (path_[0] != '\0' && on_failure_) {
    note_ = write(reason.c_str()) ? concat("; what this rank did last: ", path_)
                                  : concat("; the record of this rank could not be written to ", path_);
    reason += note_;
  }
  return note_;
}

#if defined(__has_feature)
#define RTP_HAS_FEATURE(name) __has_feature(name)
#else
#define RTP_HAS_FEATURE(name) 0
#endif

// Callable at any time, also by a signal handler: other threads may be writing entries. An incomplete entry has number
// 0.
#if defined(__SANITIZE_THREAD__) || RTP_HAS_FEATURE(thread_sanitizer)
__attribute__((no_sanitize("thread")))
#endif
bool Sink::write(const char* reason) const noexcept {
  const int before = errno;
  Header header{};
  std::memcpy(header.magic, "RTPREC01", 8);
  header.header_bytes = sizeof(Header);
  header.names = kNames;
  header.name_bytes = kNameBytes;
  header.entries = kEntries;
  header.entry_bytes = sizeof(Entry);
  header.rank = place_.rank;
  header.ranks = place_.ranks;
  header.pid = getpid();
  header.next = next_.load(std::memory_order_relaxed);
  header.steady = clock_ns(CLOCK_MONOTONIC);  // the clock of entries
  header.wall = clock_ns(CLOCK_REALTIME);
  std::memcpy(header.posted, posted_, sizeof posted_);
  header.waiting_for = waiting_for_;
  header.waiting_since = waiting_since_;
  header.waiting_end = static_cast<uint32_t>(waiting_end_);
  header.on_host = place_.on_host ? 1 : 0;
  std::strncpy(header.ring, place_.ring.c_str(), sizeof header.ring - 1);
  std::strncpy(header.transport, place_.transport.c_str(), sizeof header.transport - 1);
  std::strncpy(header.host, place_.host.c_str(), sizeof header.host - 1);
  std::strncpy(header.reason, reason, sizeof header.reason - 1);
  unlink(partial_);  // what lies there may be of others: a link, a pipe, a file that they can read
  const int file = open(partial_, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return false;
  bool good = write_all(file, &header, sizeof header) && write_all(file, names_.get(), kNames * kNameBytes) &&
              write_all(file, entries_.get(), kEntries * sizeof(Entry));
  good = close(file) == 0 && good;
  good = good && rename(partial_, path_) == 0;
  if (!good) {
    const int problem = errno;
    unlink(partial_);
    errno = problem;
  }
  if (good) errno = before;
  return good;
}

void Sink::on_signal(int) noexcept {
  const int before = errno;
  ++asking;
  for (const auto& place : sinks) {
    const Sink* sink = place.load();
    if (sink != nullptr && sink->path_[0] != '\0') sink->write("asked for by SIGUSR1");
  }
  --asking;
  errno = before;
}

bool Sink::take_signal() {
  struct sigaction now{};
  if (sigaction(SIGUSR1, nullptr, &now) != 0) return false;
  if ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == &Sink::on_signal) return true;
  if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return false;
  struct sigaction mine{};
  mine.sa_handler = &Sink::on_signal;
  mine.sa_flags = SA_RESTART;
  sigemptyset(&mine.sa_mask);
  return sigaction(SIGUSR1, &mine, nullptr) == 0;
}

}  // namespace rtp
