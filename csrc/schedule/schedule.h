// A rotation as data: the ordered hops and computes of one pass on one rank. No torch, no CUDA.
//
// Four readers share it: the executor, the tests, the planner's timeline and the plot. A new variant or route is a
// new schedule and nothing else.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace rtp {

// What travels. Weights and gradients never share a communicator.
enum class Channel : uint8_t { weight, gradient };

enum class Pass : uint8_t {
  forward,   // compute(j) for owners r, r-1, ..., r-R+1
  backward,  // dgrad(j) with weights that travel the other way, wgrad(j) into partial gradients that travel with them
};

enum class Route : uint8_t {
  ring,       // every hop goes to the neighbour
  direct,     // step s receives the shard straight from its owner
  gather,     // all shards first, then one product with the whole: for layers too small to hide a hop
  two_level,  // shards turn inside a host, while each rank hands its own of the phase to the next host
};

// How a backward makes one gradient of a shard from what all ranks contribute.
enum class GradientRoute : uint8_t {
  chain,   // a partial sum travels the ring, and every rank adds to it
  direct,  // every contribution goes straight to the owner of the shard, who adds it up
};

enum class Compute : uint8_t { forward, dgrad, wgrad };

enum class Action : uint8_t { hop, compute, copy, add };

// A named piece of memory: the local tensor of a channel, one of its slots, or the slot that holds every owner's shard.
struct Buffer {
  Channel channel = Channel::weight;
  int slot = kHome;  // kHome, kWhole, or the index of a slot of this channel

  static constexpr int kHome = -1;
  static constexpr int kNone = -2;
  static constexpr int kWhole = -3;

  bool exists() const { return slot != kNone; }
  bool is_home() const { return slot == kHome; }
  bool is_whole() const { return slot == kWhole; }
  bool operator==(const Buffer&) const = default;
};

inline constexpr Buffer kNoBuffer{Channel::weight, Buffer::kNone};
inline constexpr int kAllOwners = -1;

// Which rows of a gradient shard travel: all, or one half, each in a chain of its own.
enum class Half : uint8_t { whole, first, second };

// One entry of a schedule. Fields that an action does not use keep their defaults.
struct Step {
  Action action = Action::compute;

  // hop: `send` leaves for rank `to` with the shard of `send_owner`; the shard of `receive_owner` arrives from `from`
  // in `receive`. `outer`: between hosts, beside those inside a host. copy: `send` is copied to `receive` on this rank
  // (both of owner `send_owner`); add: added to it.
  Channel channel = Channel::weight;
  bool outer = false;
  int to = -1;
  int from = -1;
  int send_owner = -1;
  int receive_owner = -1;
  Buffer send = kNoBuffer;
  Buffer receive = kNoBuffer;

  // compute: which product, with whose shard (kAllOwners: with the whole at once). wgrad adds to `gradient_in`
  // (kNoBuffer: starts from zero) and writes `gradient_out`; usually the two are one buffer. The wgrad of a bundle
  // reads the weight too. Computes of different lanes may run side by side.
  Compute compute = Compute::forward;
  int owner = kAllOwners;
  int lane = 0;
  Buffer weight = kNoBuffer;
  Buffer gradient_in = kNoBuffer;
  Buffer gradient_out = kNoBuffer;

  Half half = Half::whole;  // of the gradient, in hops and wgrads

  bool operator==(const Step&) const = default;
};

// One use of a buffer, by part: of the slot that holds every shard, the owner; of a local tensor that travels in
// halves, the half.
struct Access {
  Buffer buffer;
  int part = kAll;

  static constexpr int kAll = -1;
};

// What a step reads and writes in a ring of `ranks`.
std::vector<Access> reads(const Step& step, int ranks);
std::vector<Access> writes(const Step& step, int ranks);

// A step in a few characters: "dgrad W2", "W2 -> 3, W1 <- 1".
std::string label(const Step& step);

struct ScheduleOptions {
  auto operator<=>(const ScheduleOptions&) const = default;

  Pass pass = Pass::forward;
  Route route = Route::ring;
  bool in_place = false;          // the local shard itself travels, and comes home in the last weight hop
  bool dgrad = true;              // backward only: is the input gradient wanted (weights travel)
  bool wgrad = true;              // backward only: is the weight gradient wanted (gradients travel)
  bool receive_in_slots = false;  // the transport can receive gradients in slots only, not in the local tensor
  bool bundle = false;            // backward only: wgrad(j) needs what dgrad(j) computed, so that weights always travel
  bool halves = false;            // backward only, not of bundles nor two levels: gradients travel in two halves
  bool two_streams = false;       // not of bundles: forwards alternate between lanes, dgrads and wgrads have one each
  bool deferred = false;          // backward only: the pass may end before the last gradient hop has arrived, see below
  int hosts = 1;                  // of route two_level: how many, neighbours in the ring, each with as many ranks
  GradientRoute gradient_route = GradientRoute::chain;  // backward only: direct neither gathers nor has two levels
  bool rounded = false;  // of gradient route direct: contributions travel in fewer bits than their sum has

  // Whether both make the same hops. Lanes are each rank's own affair: they follow from its own tokens and device.
  bool same_hops(const ScheduleOptions& other) const {
    ScheduleOptions mine = *this;
    mine.two_streams = other.two_streams;
    return mine == other;
  }
};

struct Schedule {
  // What a step reads and writes.
  struct Accesses {
    std::vector<Access> reads, writes;
  };

  int ranks = 1;
  int rank = 0;
  ScheduleOptions options;
  std::vector<Step> steps;
  std::vector<Accesses> accesses;  // of every step
  int weight_hops = 0;             // hops of each channel
  int gradient_hops = 0;
  int weight_slots = 0;  // slots of each channel that the steps name
  int gradient_slots = 0;
  bool whole_weight = false;  // whether the steps name the slot that holds every shard
  bool whole_gradient = false;

  // The gradient that arrives last is added to the local tensor by the last step, which nothing in the pass waits for:
  // it may run after the pass.
  bool defers_reduction() const { return options.deferred && gradient_hops > 0; }

  int slots(Channel channel) const { return channel == Channel::weight ? weight_slots : gradient_slots; }
  int hops(Channel channel) const { return channel == Channel::weight ? weight_hops : gradient_hops; }
};

// The schedule of one pass of rank `rank` in a ring of `ranks`. Throws std::invalid_argument for an impossible ring.
// Source: RTP, arXiv 2311.01635; orders and slots as in docs/design.md, 'How rotation works'.
Schedule make_schedule(int ranks, int rank, const ScheduleOptions& options);

const char* name(Channel channel);
const char* name(Pass pass);
const char* name(Route route);
const char* name(GradientRoute route);
const char* name(Compute compute);
const char* name(Action action);

}  // namespace rtp
