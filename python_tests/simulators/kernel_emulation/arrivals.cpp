// kernels/arriving/arrivals.h, right and with a mistake each (mutants.py), against shards that arrive in any order:
// blocks are threads of the system, of which some run at once, and a thread stands for the stream of the hops. And the
// kernel's own source while such a thread feeds it.
#include <ucontext.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "emulated_cuda.h"
#include "emulated_tensor_cores.h"
#include "kernels/arriving/arriving_gemm.h"
#include "mutated_arrivals.h"

namespace {

struct ArrivalCase {
  int mutant;  // 0: none
  int positions;
  int slots;  // that hops land in, one after the other
  int sums;   // whether positions add to the same tiles
  int tiles;  // of a position; one more of every other one, unless they are sums
  int blocks;
  int together;  // blocks that run at once
  int torn;      // whether counters lose counts
  int seed;
  int order[rtp::kMostPositions];  // in which positions arrive; the rest, as many as are negative, are there at first
};

struct Stuck {};

// Functions that take turns at random on one thread, so that a case goes the same way every time. Now and then one is
// left far behind the others.
class Turns {
 public:
  explicit Turns(unsigned seed) : random_(seed + 1) {}

  void add(std::function<void()> work) {
    auto one = std::make_unique<One>();
    one->work = std::move(work);
    one->stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&one->context);
    one->context.uc_stack.ss_sp = one->stack.get();
    one->context.uc_stack.ss_size = kStackBytes;
    one->context.uc_link = &main_;
    makecontext(&one->context, enter, 0);
    all_.push_back(std::move(one));
  }
  void run() {
    const size_t late = random_() % (2 * all_.size());  // it may be none
    while (!all_.empty()) {
      size_t next = random_() % all_.size();
      if (next == late && all_.size() > 1 && random_() % 16 != 0) next = (next + 1) % all_.size();
      current_ = all_[next].get();
      swapcontext(&main_, &current_->context);
      if (current_->done) all_.erase(all_.begin() + static_cast<int64_t>(next));
    }
  }
  void next() { swapcontext(&current_->context, &main_); }
  unsigned random() { return static_cast<unsigned>(random_()); }

 private:
  static constexpr size_t kStackBytes = size_t{64} << 10;
  struct One {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::function<void()> work;
    bool done = false;
  };
  static void enter() {
    One& one = *current_;
    one.work();
    one.done = true;
  }

  static inline One* current_ = nullptr;
  std::vector<std::unique_ptr<One>> all_;
  ucontext_t main_;
  std::minstd_rand random_;
};

// What a case shares between those that take turns.
struct Room {
  uint64_t words[rtp::kPassWords] = {};
  int slots[rtp::kMostPositions];  // the position whose shard lies there; -1: a part of one
  int slot_of[rtp::kMostPositions] = {};
  int made[rtp::kMostPositions][64] = {};
  int added[64] = {};
  Turns* turns = nullptr;
  int idle = 0;  // pauses since a word was last written
  std::string problem;

  void tell(const std::string& text) {
    if (problem.empty()) problem = text;
  }
};

class CheckedWords {
 public:
  CheckedWords(Room& room, bool torn) : room_(room), torn_(torn) {}

  uint64_t acquire(const uint64_t* word) { return dawdle(), *word; }
  void release(uint64_t* word, uint64_t value) { dawdle(), room_.idle = 0, *word = value; }
  unsigned look(const unsigned* counter) { return dawdle(), *counter; }
  unsigned add(unsigned* counter) {
    dawdle();
    room_.idle = 0;
    const unsigned before = *counter;
    if (torn_) dawdle();
    *counter = before + 1;
    return before;
  }
  void set(unsigned* counter, unsigned value) { dawdle(), room_.idle = 0, *counter = value; }
  void pause() {
    if (++room_.idle > 20000) room_.tell("it does not end");
    if (!room_.problem.empty()) throw Stuck{};
    room_.turns->next();
  }
  void dawdle() {
    for (unsigned times = room_.turns->random() % 3; times > 0; --times) room_.turns->next();
  }

 private:
  Room& room_;
  bool torn_;
};

template <typename Protocol>
class Check {
 public:
  explicit Check(const ArrivalCase& given) : given_(given), room_(std::make_unique<Room>()) {
    pass_.positions = given.positions;
    pass_.in_order = given.sums != 0;
    pass_.blocks = static_cast<unsigned>(given.blocks);
    pass_.words = room_->words;
    for (int position = 0; position < given.positions; ++position) {
      pass_.tiles[position] = given.tiles + (given.sums == 0 ? position % 2 : 0);
      room_->slot_of[position] = rtp::kMostPositions - 1 - position;  // of its own: there at first
      room_->slots[rtp::kMostPositions - 1 - position] = position;
    }
    while (arriving_ < given.positions && given.order[arriving_] >= 0) {
      const int position = given.order[arriving_];
      room_->slot_of[position] = arriving_ % given.slots;
      pass_.waits |= 1u << position;
      if (arriving_ + given.slots < given.positions && given.order[arriving_ + given.slots] >= 0) {
        pass_.frees |= 1u << position;
      }
      ++arriving_;
    }
    for (int slot = 0; slot < given.slots; ++slot) room_->slots[slot] = -1;
  }

  // Twice, with the same words: as a graph is replayed.
  std::string run() {
    for (int turn = 0; turn < 2 && room_->problem.empty(); ++turn) once(turn);
    return room_->problem;
  }

 private:
  void once(int turn) {
    Room& room = *room_;
    Turns turns(static_cast<unsigned>(2 * given_.seed + turn));
    room.turns = &turns;
    counters_ = {};
    pass_.counters = &counters_;
    std::fill(std::begin(turns_), std::end(turns_), 0u);
    std::memset(room.made, 0, sizeof(room.made));
    std::memset(room.added, 0, sizeof(room.added));
    turns.add([&] { guarded([&] { feed(); }); });
    int next = 0;
    for (int worker = 0; worker < given_.together; ++worker) {
      turns.add([&] {
        for (int block = next++; block < given_.blocks; block = next++) guarded([&] { run_block(); });
      });
    }
    turns.run();
    if (!room.problem.empty()) return;
    for (const uint64_t word : room.words) {
      if (word != 0) room.tell("a word is raised after the pass");
    }
    for (int position = 0; position < given_.positions; ++position) {
      for (int tile = 0; tile < pass_.tiles[position]; ++tile) {
        const int made = room.made[position][tile];
        if (made != 1) room.tell("tile " + name(position, tile) + " was made " + std::to_string(made) + " times");
      }
    }
  }

  template <typename Action>
  void guarded(Action&& action) {
    try {
      action();
    } catch (const Stuck&) {
    }
  }

  static std::string name(int position, int tile) { return std::to_string(tile) + " of " + std::to_string(position); }

  void feed() {
    CheckedWords words(*room_, given_.torn != 0);
    for (int number = 0; number < arriving_; ++number) {
      const int position = given_.order[number];
      if (number >= given_.slots) {
        uint64_t* const freed = &room_->words[rtp::kMostPositions + given_.order[number - given_.slots]];
        while (words.acquire(freed) == 0) words.pause();
        words.release(freed, 0);
      }
      room_->slots[number % given_.slots] = -1;
      words.dawdle();
      room_->slots[number % given_.slots] = position;
      words.release(&room_->words[position], 1);
    }
  }

  void run_block() {
    CheckedWords words(*room_, given_.torn != 0);
    int first = 0;
    for (auto tile = Protocol::next(pass_, words, first); tile.position >= 0;
         tile = Protocol::next(pass_, words, first)) {
      if (!room_->problem.empty()) throw Stuck{};
      if (tile.index >= pass_.tiles[tile.position]) room_->tell("there is no tile " + name(tile.position, tile.index));
      ++room_->made[tile.position][tile.index];
      for (int look = 0; look < 2; ++look, words.dawdle()) {
        const int found = room_->slots[room_->slot_of[tile.position]];
        if (found != tile.position) {
          room_->tell("tile " + name(tile.position, tile.index) + " reads shard " + std::to_string(found));
        }
      }
      Protocol::read(pass_, words, tile.position);
      if (given_.sums == 0) continue;
      unsigned* const turn = &turns_[tile.index];
      Protocol::turn(words, turn, static_cast<unsigned>(tile.position));
      const int before = room_->added[tile.index];
      words.dawdle();
      if (before != tile.position || room_->added[tile.index] != before) {
        room_->tell("tile " + name(tile.position, tile.index) + " is added after " + std::to_string(before));
      }
      room_->added[tile.index] = before + 1;
      words.set(turn, static_cast<unsigned>(tile.position) + 1);
    }
    Protocol::leave(pass_, words);
  }

  const ArrivalCase given_;
  std::unique_ptr<Room> room_;
  typename Protocol::Pass pass_{};
  typename Protocol::Counters counters_{};
  unsigned turns_[64] = {};
  int arriving_ = 0;
};

template <typename... Protocols>
std::string check_mutant(const ArrivalCase& given) {
  std::string problem = "no such mutant";
  int number = 0;
  ((number++ == given.mutant ? static_cast<void>(problem = Check<Protocols>(given).run()) : static_cast<void>(0)), ...);
  return problem;
}

// A shard that arrives while a kernel runs.
struct Feed {
  void* to;
  const void* from;
  int64_t bytes;
  int64_t position;
  int64_t after;  // the position whose shard lies there until it has been read; -1: none
};

}  // namespace

extern "C" {

// Null where nothing is wrong.
const char* arrivals_problem(const ArrivalCase* given) {
  static std::string problem;
  problem = check_mutant<RTP_MUTATED_ARRIVALS>(*given);
  return problem.empty() ? nullptr : problem.c_str();
}

// Runs the kernel while a thread feeds it; `blind`: every word looks as if it were raised, and shards come too late.
// Whatever has not arrived is NaN. Returns 0, or 1 after a violation.
int arriving_gemm(const rtp::ArrivingGemm* gemm, int blocks, int together, const Feed* feeds, int count, int delay_us,
                  int blind) {
  emulation::blind = blind != 0;
  emulation::word_delay_us = delay_us;
  emulation::set_together(together);
  const auto spoil = [](const Feed& feed) { std::memset(feed.to, 0xff, static_cast<size_t>(feed.bytes)); };
  for (int number = 0; number < count; ++number) spoil(feeds[number]);
  const auto feed_all = [=] {
    const rtp::DeviceWords words;
    for (const Feed* feed = feeds; feed != feeds + count; ++feed) {
      if (feed->after >= 0) {
        uint64_t* const freed = &gemm->arrivals.words[rtp::kMostPositions + feed->after];
        while (__atomic_load_n(freed, __ATOMIC_ACQUIRE) == 0) words.pause();
        words.release(freed, 0);
        spoil(*feed);
      }
      emulation::dawdle_at_words();
      std::memcpy(feed->to, feed->from, static_cast<size_t>(feed->bytes));
      words.release(&gemm->arrivals.words[feed->position], 1);
    }
  };
  std::thread feeder;
  if (blind == 0) feeder = std::thread(feed_all);
  const int status = rtp::launch_arriving_gemm(*gemm, blocks, nullptr);
  if (feeder.joinable()) feeder.join();
  emulation::set_together(1);
  emulation::blind = false;
  return status;
}

int arriving_bytes(int which) {
  const size_t bytes[] = {sizeof(rtp::ArrivingGemm), sizeof(rtp::ArrivingProduct), sizeof(rtp::Arrivals),
                          sizeof(ArrivalCase), sizeof(rtp::ArrivalCounters)};
  return static_cast<int>(bytes[which]);
}

}  // extern "C"
