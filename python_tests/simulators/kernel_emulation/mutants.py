"""kernels/arriving/arrivals.h with one mistake each: what the tests of the protocol must notice."""

from __future__ import annotations

import os
from pathlib import Path

# name -> what stands in arrivals.h, and what stands in its place
ARRIVALS_MUTANTS = {
    "takes a tile before its shard has arrived": (
        "words.acquire(&pass.words[position]) == 0) {",
        "words.acquire(&pass.words[position]) == 2) {",
    ),
    "gives a slot free when one tile has been read": (
        "if (before + 1 != static_cast<unsigned>(pass.tiles[position])) return;",
        "if (before != 0) return;",
    ),
    "does not give slots free": (
        "words.release(&pass.words[kMostPositions + position], 1);",
        "words.look(&pass.counters->left);",
    ),
    "leaves words raised": (
        "words.release(&pass.words[position], 0);",
        "words.look(&pass.counters->left);",
    ),
    "holds a tile while it waits": (
        """      if ((pass.waits >> position & 1u) != 0 && words.acquire(&pass.words[position]) == 0) {
        if (pass.in_order) break;
        continue;
      }
      const unsigned index = words.add(&pass.counters->taken[position]);
""",
        """      const unsigned index = words.add(&pass.counters->taken[position]);
      while ((pass.waits >> position & 1u) != 0 && words.acquire(&pass.words[position]) == 0) words.pause();
""",
    ),
    "adds without waiting for its turn": (
        "while (words.look(turns) != turn) words.pause();",
        "static_cast<void>(turns), static_cast<void>(turn), words.dawdle();",
    ),
    "takes tiles beyond the last": (
        "if (index < tiles) return",
        "if (index <= tiles) return",
    ),
}


def write_arrivals_mutants(source: Path, folder: Path) -> None:
    """Writes arrivals.h as it is and all its mutants into mutated_arrivals.h in `folder`, each in a namespace with a
    struct Protocol. An unchanged file keeps its time, so that it is not compiled again."""
    text = source.read_text()
    body = text[text.index("namespace rtp {\n") + len("namespace rtp {\n") : text.rindex("}  // namespace rtp")]
    parts = ["#pragma once\n#include <cstdint>\n#define RTP_ON_BOTH\n"]
    for number, (before, after) in enumerate([("", ""), *ARRIVALS_MUTANTS.values()]):
        if before and body.count(before) != 1:
            raise AssertionError(f"expected once in the source, found {body.count(before)} times:\n{before}")
        mutant = body.replace(before, after) if before else body
        parts.append(
            f"namespace rtp::arrivals_{number} {{\n{mutant}"
            "struct Protocol {\n  using Pass = Arrivals;\n  using Counters = ArrivalCounters;\n"
            "  template <typename Words>\n  static auto next(const Pass& pass, Words& words, int& first) {\n"
            "    return next_tile(pass, words, first);\n  }\n"
            "  template <typename Words>\n  static void read(const Pass& pass, Words& words, int position) {\n"
            "    tile_read(pass, words, position);\n  }\n"
            "  template <typename Words>\n  static void turn(Words& words, const unsigned* turns, unsigned turn) {\n"
            "    await_turn(words, turns, turn);\n  }\n"
            "  template <typename Words>\n  static void leave(const Pass& pass, Words& words) {\n"
            f"    arrivals_{number}::leave(pass, words);\n  }}\n}};\n}}  // namespace rtp::arrivals_{number}\n"
        )
    protocols = ", ".join(f"rtp::arrivals_{number}::Protocol" for number in range(len(ARRIVALS_MUTANTS) + 1))
    parts.append(f"#define RTP_MUTATED_ARRIVALS {protocols}\n")
    file = folder / "mutated_arrivals.h"
    if not file.exists() or file.read_text() != "".join(parts):
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{file.name}.{os.getpid()}"  # another process may be compiling
        made.write_text("".join(parts))
        made.replace(file)
