// The most recent events of a ring: passes, computes, hops, waits and collectives, with times and peers. Always on.
//
// A fixed-size ring buffer of plain structs: an event takes one entry and one or two clock reads, without locks or
// allocations. The buffer is written to a file when the ring fails, and on request; the writing function is
// async-signal-safe. `python -m rtp_ext record` reads the files of all ranks; rtp_ext/observe/record.py depends on the
// layout of these structs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "schedule/schedule.h"
#include "schedule/uses.h"

namespace rtp {

struct Hop;

class Recorder {
 public:
  enum class Kind : uint8_t { pass, compute, hop, wait, collective };

  // Times are nanoseconds of the host's steady clock; 0: not yet.
  struct Entry {
    uint64_t number;  // counts all entries from 1; 0: being written
    int64_t begin;    // hop: when it was posted
    int64_t end;      // hop: when a wait found that it had arrived
    int64_t sent;     // hop: when a wait found that it had left
    uint64_t bytes;   // hop: bytes sent
    uint32_t count;   // hop: number of earlier hops of its channel; wait: the same of its hop
    uint16_t operation;
    int16_t to;     // hop and wait: the receiving rank
    int16_t from;   // hop and wait: the sending rank; compute: the owner of the shard
    int16_t index;  // hop: index among those of its channel in the pass
    int16_t hops;   // hop: number of hops of its channel in the pass
    Kind kind;
    Channel channel;
    uint8_t what;  // compute: Compute, or kMove for a copy or an addition; wait: End
    uint8_t padding[7];
  };
  static_assert(sizeof(Entry) == 64);
  static constexpr uint8_t kMove = 3;

  static constexpr uint64_t kEntries = 8192;
  static constexpr size_t kNames = 512, kNameBytes = 96;

  Recorder();
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Identity and location of the record file. `ring`: equal on all ranks of a ring, and unique to it. Before this call,
  // no file is written. The folder is RTP_RECORD_DIR or, if unset, the temporary folder; an empty RTP_RECORD_DIR
  // disables the file of a failed ring.
  struct Place {
    int rank = 0;
    int ranks = 1;
    std::string ring, transport, host;
    bool on_host = true;  // the host computes and waits; otherwise times are those of enqueueing
  };
  void identify(const Place& place);
  // For measuring its cost.
  void enable(bool on) { on_ = on; }

  // Each returns a number for end(); 0 while it is disabled.
  uint64_t begin_pass(const std::string& operation);
  uint64_t begin_compute(uint64_t pass, const Step& step);
  uint64_t begin_collective(const std::string& operation);
  void end(uint64_t number);

  uint64_t post(const Hop& hop, int64_t before);
  // Runs `wait` for one end of a hop. A wait that throws stays open, so that the file shows it.
  template <typename Wait>
  void waiting(uint64_t hop, End which, Wait&& wait) {
    const int64_t begin = begin_wait(hop, which);
    wait();
    end_wait(hop, which, begin);
  }

  // The most recently posted hop, in the format of Hop::describe, and its receiver; empty if there is none.
  std::string last_hop() const;

  // Writes the file and returns its path. Throws std::runtime_error on failure.
  std::string dump(const std::string& reason);
  // The same for a failed ring: appends the path of the file to `reason`, and returns the appended text.
  const std::string& fail(std::string& reason) noexcept;
  const std::string& note() const { return note_; }

  // Makes SIGUSR1 write the files of all rings of the process. Returns false if the signal has another handler.
  static bool take_signal();

 private:
  static constexpr size_t kPathBytes = 512;

  struct Header;

  Entry* add(Kind kind);
  uint16_t name(const std::string& operation);
  int64_t begin_wait(uint64_t hop, End which);
  void end_wait(uint64_t hop, End which, int64_t begin);
  bool write(const char* reason) const noexcept;
  static void on_signal(int) noexcept;

  std::unique_ptr<Entry[]> entries_;
  std::unique_ptr<char[]> names_;  // kNames * kNameBytes
  std::unordered_map<std::string, uint16_t> known_;
  // most recent entry of known_: the hops of a pass share it
  const std::pair<const std::string, uint16_t>* named_ = nullptr;
  std::atomic<uint64_t> next_{1};
  bool on_ = true;
  bool on_failure_ = true;
  Place place_;
  char path_[kPathBytes] = {}, partial_[kPathBytes] = {};
  uint32_t posted_[2] = {};
  // The wait in progress; waiting_for_ is the entry of its hop.
  uint64_t waiting_for_ = 0;
  int64_t waiting_since_ = 0;
  End waiting_end_ = End::received;
  std::string note_;
};

}  // namespace rtp
