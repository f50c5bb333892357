// A rotation as data: the ordered hops and computes of one pass on one rank. No torch, no CUDA.
//
// The executor, the tests, the planner's timeline and the plot read it. A new variant or route needs only a new
// schedule.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace rtp {

// The kind of data that travels. Weights and gradients never share a communicator.
enum class Channel : uint8_t { weight, gradient };

enum class Pass : uint8_t {
  forward,  // compute(j) for owners r, r-1, ..., r-R+1
  // dgrad(j) with weights that travel in the other direction, wgrad(j) into partial gradients that travel with them
  backward,
};

enum class Route : uint8_t {
  ring,       // every hop goes to the neighbour
  direct,     // step s receives the shard directly from its owner
  gather,     // direct, in one group of all shards: for layers too small to overlap with a hop
  two_level,  // shards rotate inside a host, while each rank sends its shard of the phase to the next host
};

// How a backward reduces the contributions of all ranks to the gradient of a shard.
enum class GradientRoute : uint8_t {
  chain,   // a partial sum travels the ring, and every rank adds to it
  direct,  // every rank sends its contribution directly to the owner of the shard, which adds them
};

enum class Compute : uint8_t { forward, dgrad, wgrad };

// gather: shards of all owners come into one slot on every rank; scatter: every owner gets the sum of all ranks'
// contributions to its gradient. Each is one operation of all ranks.
enum class Action : uint8_t { hop, compute, copy, add, gather, scatter };
inline bool is_collective(Action action) { return action == Action::gather || action == Action::scatter; }

// How the halves of a gradient lie in a buffer, if it travels in halves: `together` as its rows do; `apart`, each where
// it is for every owner, so that halves of different owners do not overlap.
enum class Halves : uint8_t { none, together, apart };

// A named memory region: the local tensor of a channel ("home"), or one of its slots.
struct Buffer {
  Channel channel = Channel::weight;
  int slot = kHome;  // kHome, or the index of a slot of this channel
  // A slot of a group holds the shards of `count` owners from `first` on, modulo the ranks, in the order of owners: the
  // shards of owners with consecutive numbers are adjacent.
  int first = 0;
  int count = 1;
  int at = kAnywhere;  // or it holds contributions of `count` ranks to one gradient: the place of this one
  Halves halves = Halves::none;
  int content = -1;  // of a slot of weights: see Schedule::contents

  static constexpr int kAnywhere = -1;
  static constexpr int kHome = -1;
  static constexpr int kNone = -2;

  bool exists() const { return slot != kNone; }
  bool is_home() const { return slot == kHome; }
  bool is_group() const { return count > 1; }
  bool halved() const { return halves != Halves::none; }
  bool has_parts() const { return is_group() || halved(); }
  // The place of an owner's shard in the slot, in a ring of `ranks`.
  int place(int owner, int ranks) const;
  // The buffer of the same step on the rank `distance` places up the ring.
  Buffer moved(int distance, int ranks) const;
};

inline constexpr Buffer kNoBuffer{Channel::weight, Buffer::kNone};
inline constexpr int kNoOwner = -1;

// The rows of a gradient shard that a step uses: all, or one half; each half travels in its own chain.
enum class Half : uint8_t { whole, first, second };

// One entry of a schedule. Fields that an action does not use keep their defaults.
struct Step {
  Action action = Action::compute;

  // hop: `send`, the shard of `send_owner`, leaves for rank `to`; the shard of `receive_owner` arrives from rank `from`
  // in `receive`. `outer`: the hop goes between hosts, concurrently with those inside a host. copy: copies `send` to
  // `receive` on this rank (both of owner `send_owner`); add: adds it. Both then add what is in the next `count - 1`
  // places, in this order. gather, scatter: `send` and `receive` are the same slot, with a place for every owner, and
  // both owners are this rank; a gather fills the places of the others, a scatter replaces its own contribution by the
  // sum.
  Channel channel = Channel::weight;
  bool outer = false;
  int to = -1;
  int from = -1;
  int send_owner = -1;
  int receive_owner = -1;
  Buffer send = kNoBuffer;
  Buffer receive = kNoBuffer;
  int count = 1;

  // compute: the kind of product, and the owners of its shards: `owners` from `owner` on, modulo the ranks. A wgrad
  // adds to `gradient_in` (kNoBuffer: starts from zero) and writes `gradient_out`; usually the two are the same buffer.
  // The wgrad of a bundle also reads the weight. Computes with different `lane` run on different streams and may
  // overlap.
  Compute compute = Compute::forward;
  int owner = kNoOwner;
  int owners = 1;
  int lane = 0;
  Buffer weight = kNoBuffer;
  Buffer gradient_in = kNoBuffer;
  Buffer gradient_out = kNoBuffer;

  Half half = Half::whole;  // half of the gradient

  // Whether it moves data between ranks.
  bool travels() const { return action == Action::hop || is_collective(action); }

  // What a copy or an addition takes: one of `count`.
  Buffer arrival(int index) const {
    Buffer arrival = send;
    if (index > 0) arrival.at += index;
    return arrival;
  }

  // A compute of a group whose owners wrap around is two products, as its shards are adjacent up to the last owner and
  // from the first one on. Returns one of the products(ranks), with consecutive owners.
  int products(int ranks) const { return owners < ranks && owner + owners > ranks ? 2 : 1; }
  Step product(int index, int ranks) const;
  // Returns these products in the order in which their shards lie in a slot.
  std::vector<Step> ranges(int ranks) const;
};

// One use of a buffer, or of a part of it: of a place in the slot of a group, of one half.
struct Access {
  Buffer buffer;
  int place = 0;
  Half half = Half::whole;
};

// Return the accesses of a step in a ring of `ranks`.
std::vector<Access> reads(const Step& step, int ranks);
std::vector<Access> writes(const Step& step, int ranks);

// Returns a short description of a step: "dgrad W2", "W2 -> 3, W1 <- 1".
std::string label(const Step& step);

struct ScheduleOptions {
  auto operator<=>(const ScheduleOptions&) const = default;

  Pass pass = Pass::forward;
  Route route = Route::ring;
  bool in_place = false;          // the local shard itself travels and returns in the last weight hop
  bool dgrad = true;              // backward only: compute the input gradient (weights travel)
  bool wgrad = true;              // backward only: compute the weight gradient (gradients travel)
  bool receive_in_slots = false;  // the transport receives gradients in slots only, not in the local tensor
  bool bundle = false;            // backward only: wgrad(j) depends on dgrad(j), so that weights always travel
  bool halves = false;  // backward only: gradients travel in two halves; excludes gradient route direct, two levels
  // except bundles and groups: forwards alternate between two streams, dgrads and wgrads have one each
  bool two_lanes = false;
  // backward only: the pass may end before the last gradient hop has arrived: see Schedule::ends_late
  bool late = false;
  int hosts = 1;  // route two_level, or sourced: number of hosts; each holds the same number of consecutive ranks
  GradientRoute gradient_route = GradientRoute::chain;  // backward only: direct excludes route two_level
  bool narrow = false;   // gradient route direct only: contributions travel in fewer bits than the dtype of their sum
  bool apart = false;    // gradient route direct only: contributions have a place each and are added at once
  bool sourced = false;  // forward only: the shards come from a source without hops: see ShardSource
  int group = 1;         // shards in a product, at most; not in place, sourced, or on two levels
  // A group of all shards is filled by one gather, and its gradients leave by one scatter; requires gradient route
  // chain and excludes halves.
  bool collective = false;

  // Returns whether both make the same hops. The number of compute streams may differ between ranks: it depends on each
  // rank's own tokens and device.
  bool same_hops(const ScheduleOptions& other) const {
    ScheduleOptions mine = *this;
    mine.two_lanes = other.two_lanes;
    return mine == other;
  }
};

struct Schedule {
  // The accesses of a step.
  struct Accesses {
    std::vector<Access> reads, writes;
  };

  // What a slot of weights holds, from the first step that writes it to the last that uses it, as positions of steps. A
  // pass that is ahead has each of its contents in memory of its own.
  struct Content {
    int shards;
    int first_product, last_use;
  };

  int ranks = 1;
  int rank = 0;
  ScheduleOptions options;
  std::vector<Step> steps;
  std::vector<Accesses> accesses;  // by step
  int weight_hops = 0;             // number of hops by channel; a collective counts as one
  int gradient_hops = 0;
  std::vector<int> weight_slots;  // by slot: the number of shards that it holds
  std::vector<int> gradient_slots;
  std::vector<Content> contents;  // in the order in which they are written
  std::vector<int> moves;         // positions of the steps that move weights: hops and copies
  bool uses_home = false;         // whether a hop or product reads the local weight
  int last_of_home = -1;          // position of the last step that does

  // Returns whether the last step adds the last arriving gradient to the local tensor, or copies it there, and no other
  // step waits for it: it may run after the pass.
  bool ends_late() const { return options.late && gradient_hops > 0; }

  const std::vector<int>& slots(Channel channel) const {
    return channel == Channel::weight ? weight_slots : gradient_slots;
  }
  int hops(Channel channel) const { return channel == Channel::weight ? weight_hops : gradient_hops; }
};

// Returns the schedule of one pass of rank `rank` in a ring of `ranks`. Throws std::invalid_argument for invalid
// arguments. Source: RTP, arXiv 2311.01635; orders and slots as in docs/design.md, 'How rotation works'.
Schedule make_schedule(int ranks, int rank, const ScheduleOptions& options);

const char* name(Channel channel);
const char* name(Pass pass);
const char* name(Route route);
const char* name(GradientRoute route);
const char* name(Compute compute);
const char* name(Action action);

}  // namespace rtp
