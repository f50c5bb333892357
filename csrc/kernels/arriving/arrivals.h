// How a kernel follows the hops of a pass: which tile a block takes next, and what the kernel and the hops tell each
// other. Compiled for GPUs, and for CPUs, where tests run it against every order of arrival.
//
// A pass has positions, one for each shard, and a position has tiles. A block takes a tile of a shard that has arrived;
// it waits only where there is none, and holds no tile meanwhile. What it waits for is a hop, which in turn may wait
// for the tiles of an earlier shard to be made, since that lies in the slot that the hop lands in: those are in the
// hands of blocks that run. So a pass ends however few blocks run at once, as long as one does.
//
//   channel's stream                     kernel
//   await freed of the one before  <-    raise freed: the last tile of that shard has been read
//   the hop
//   raise arrived                  ->    take tiles of this shard
//
// Streams lower `freed`, the last block to leave lowers `arrived`, so that all words are 0 between passes and a pass
// that was captured in a graph can be replayed.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RTP_ON_BOTH __host__ __device__
#else
#define RTP_ON_BOTH
#endif

namespace rtp {

constexpr int kMostPositions = 32;
constexpr int kPassWords = 2 * kMostPositions;  // `arrived` of all positions, then `freed`

// Counters of one pass, in device memory, 0 at its beginning.
struct ArrivalCounters {
  unsigned taken[kMostPositions];  // tiles that blocks have asked for; more than there are where they came too late
  unsigned read[kMostPositions];   // tiles whose operands have been read
  unsigned left;                   // blocks that have ended
};

// One pass, as its kernel sees it.
struct Arrivals {
  int positions;
  bool in_order;              // no tile of a position before all of the positions before it are taken
  uint32_t waits, frees;      // bits: positions that wait for a hop; positions whose slot a hop waits for
  unsigned blocks;            // of the launch
  int tiles[kMostPositions];  // of each position, at least one
  uint64_t* words;            // kPassWords
  ArrivalCounters* counters;
};

struct TakenTile {
  int position;  // -1: none is left
  int index;     // among those of its position
};

// `Words`: how memory is read and written that others see. acquire(word) and release(word, value) are for streams and
// copy engines, look(counter), add(counter) (which returns what it was) and set(counter, value) for blocks; each orders
// what comes before or after it, as its name says. pause() lets time pass.

// The next tile of a block. One of its threads calls it; `first` is its own, 0 at first.
template <typename Words>
RTP_ON_BOTH inline TakenTile next_tile(const Arrivals& pass, Words& words, int& first) {
  while (true) {
    bool over = true;
    for (int position = first; position < pass.positions; ++position) {
      const auto tiles = static_cast<unsigned>(pass.tiles[position]);
      if (words.look(&pass.counters->taken[position]) >= tiles) {
        if (position == first) ++first;
        continue;
      }
      over = false;
      if ((pass.waits >> position & 1u) != 0 && words.acquire(&pass.words[position]) == 0) {
        if (pass.in_order) break;
        continue;
      }
      const unsigned index = words.add(&pass.counters->taken[position]);
      if (index < tiles) return {position, static_cast<int>(index)};
    }
    if (over) return {-1, 0};
    words.pause();
  }
}

// The block has read all that it needs of a tile's shard. One thread calls it, after all the others have read.
template <typename Words>
RTP_ON_BOTH inline void tile_read(const Arrivals& pass, Words& words, int position) {
  const unsigned before = words.add(&pass.counters->read[position]);
  if (before + 1 != static_cast<unsigned>(pass.tiles[position])) return;
  if ((pass.frees >> position & 1u) != 0) words.release(&pass.words[kMostPositions + position], 1);
}

// Sums of several positions: the turn of the next one to add to a tile of the sum. Whoever is before it has taken its
// tile earlier, and so runs.
template <typename Words>
RTP_ON_BOTH inline void await_turn(Words& words, const unsigned* turns, unsigned turn) {
  while (words.look(turns) != turn) words.pause();
}

// The block ends: it found no tile.
template <typename Words>
RTP_ON_BOTH inline void leave(const Arrivals& pass, Words& words) {
  if (words.add(&pass.counters->left) + 1 != pass.blocks) return;
  for (int position = 0; position < pass.positions; ++position) {
    if ((pass.waits >> position & 1u) != 0) words.release(&pass.words[position], 0);
  }
}

}  // namespace rtp
