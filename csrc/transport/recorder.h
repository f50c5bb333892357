// What a ring did last: passes, computes, hops, waits and collectives, with times and peers. Always on.
//
// A fixed ring buffer of plain structs: an event takes one place and one or two looks at the clock, and neither locks
// nor allocates. It is written to a file when the ring fails, and on request; the function that writes calls nothing
// that a signal handler may not. `python -m rtp_ext record` reads the files of all ranks: rtp_ext/observe/record.py,
// which knows the layout of these structs.
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
    uint64_t number;  // from 1, of all entries; 0: being written
    int64_t begin;    // of a hop: when it was posted
    int64_t end;      // of a hop: when a wait found that it had arrived
    int64_t sent;     // of a hop: when a wait found that it had left
    uint64_t bytes;   // of a hop: that it sends
    uint32_t count;   // of a hop: how many of its channel were posted before; of a wait: the same of its hop
    uint16_t operation;
    int16_t to;     // of a hop and of a wait
    int16_t from;   // the same; of a compute: the owner of the shard
    int16_t index;  // of a hop, among those of its channel in the pass
    int16_t hops;   // of its channel in the pass
    Kind kind;
    Channel channel;
    uint8_t what;  // of a compute: Compute, or kMove for a copy or an addition; of a wait: End
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

  // Where and as whom it writes. `ring`: the same on all ranks of a ring, and on no other one. Before this it writes
  // nothing. The folder is that of RTP_RECORD_DIR, or else the temporary one; an empty RTP_RECORD_DIR: nothing is
  // written when a ring fails.
  struct Place {
    int rank = 0;
    int ranks = 1;
    std::string ring, transport, host;
    bool on_host = true;  // computes and waits are the host's own; else its times are those of enqueueing
  };
  void identify(const Place& place);
  // For measuring what it costs.
  void enable(bool on) { on_ = on; }

  // Each returns a number for `end`; 0 while it is not enabled.
  uint64_t begin_pass(const std::string& operation);
  uint64_t begin_compute(uint64_t pass, const Step& step);
  uint64_t begin_collective(const std::string& operation);
  void end(uint64_t number);

  uint64_t post(const Hop& hop, int64_t before);
  // Runs `wait`, for one end of a hop. One that throws stays open, so that the file tells of it.
  template <typename Wait>
  void waiting(uint64_t hop, End which, Wait&& wait) {
    const int64_t begin = begin_wait(hop, which);
    wait();
    end_wait(hop, which, begin);
  }

  // The hop that was posted last, as Hop::describe says it, and to whom; empty where none is known.
  std::string last_hop() const;

  // Writes the file and returns its path. Throws std::runtime_error where that cannot be done.
  std::string dump(const std::string& reason);
  // The same for a ring that has failed: adds to `reason` where the file is, and returns what it has added.
  const std::string& fail(std::string& reason) noexcept;
  const std::string& note() const { return note_; }

  // Lets SIGUSR1 write the files of all rings of the process. False where somebody else handles that signal.
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
  std::unique_ptr<char[]> names_;  // kNames times kNameBytes
  std::unordered_map<std::string, uint16_t> known_;
  const std::pair<const std::string, uint16_t>* named_ = nullptr;  // of known_, asked for last: hops of a pass share it
  std::atomic<uint64_t> next_{1};
  bool on_ = true;
  bool on_failure_ = true;
  Place place_;
  char path_[kPathBytes] = {}, partial_[kPathBytes] = {};
  uint32_t posted_[2] = {};
  // The wait that is under way; its hop is an entry.
  uint64_t waiting_for_ = 0;
  int64_t waiting_since_ = 0;
  End waiting_end_ = End::received;
  std::string note_;
};

}  // namespace rtp
