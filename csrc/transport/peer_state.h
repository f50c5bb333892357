// What a rank knows of another one: the words of all transports.
#pragma once

#include <cstdint>
#include <string>

namespace rtp {

enum class PeerState : uint32_t { awaited, present, closed, failed, gone };

// A rank that accepts no more hops, and why.
struct Lost {
  int rank = 0;
  std::string reason;
};

// Returns why a rank in a state accepts no more hops; empty if it does. `told`: the reason that it has given.
inline std::string why_lost(PeerState state, const std::string& told = "") {
  switch (state) {
    case PeerState::closed:
      return "it closed its ring";
    case PeerState::failed:
      return "its ring failed" + (told.empty() ? told : ": " + told);
    case PeerState::gone:
      return "its process has ended";
    default:
      return "";
  }
}

}  // namespace rtp
