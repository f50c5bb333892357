"""Mutants of the transport `ce`, and of the shards that copy engines copy, with one planted mistake each, which the
tests of their protocols must detect."""

from __future__ import annotations

import os
from pathlib import Path

# name -> text in csrc/transport/ce/ce.cpp, and its replacement
CE_MUTANTS = {
    "copies before the slot is offered": (
        """      flags_->await(Kind::offer, there, owner, stream);
      push ? copy_there(hop, stream, captured) : copy_here(hop, stream, captured);
""",
        """      push ? copy_there(hop, stream, captured) : copy_here(hop, stream, captured);
      flags_->await(Kind::offer, there, owner, stream);
""",
    ),
    "raises the flag before the copy": (
        """      push ? copy_there(hop, stream, captured) : copy_here(hop, stream, captured);
      flags_->raise(Kind::done, there, owner, engine_, stream, captured);
""",
        """      flags_->raise(Kind::done, there, owner, engine_, stream, captured);
      push ? copy_there(hop, stream, captured) : copy_here(hop, stream, captured);
""",
    ),
    "shares flags between weights and gradients": (
        "Place here{hop.channel,",
        "Place here{Channel::weight,",
    ),
    "offers slots that are still in use": (
        "user(channel, push ? HopMemory::target : HopMemory::source) = offers_[index(channel)].get();",
        "",
    ),
    "does not await that a slot was read, pull": (
        "      flags_->await(Kind::done, here, peer, returns);\n",
        "      if (push) flags_->await(Kind::done, here, peer, returns);\n",
    ),
    "reports what was sent before it was read, pull": (
        "      returned = supervise(hop, peer, returns);\n",
        "      returned = supervise(hop, peer, push ? returns : stream);\n",
    ),
}
# A mistake that only slots of several shards show (route gather)
GATHER_MUTANTS = {
    "shares flags between the shards of a slot, pull": (
        "number, push ? hop.receive_shard : hop.send_shard, hop.second_half};",
        "number, 0, hop.second_half};",
    ),
}
ALSO = {  # the second change of a mutant with two changes
    "shares flags between weights and gradients": (
        "Place there{hop.channel,",
        "Place there{Channel::weight,",
    ),
    "shares flags between the shards of a slot, pull": (
        "number, push ? hop.send_shard : hop.receive_shard, hop.second_half};",
        "number, 0, hop.second_half};",
    ),
}
# Correct protocols in lock-step, which only tests of the overlap detect
OFFER = "flags_->raise(Kind::offer, here, peer, engine_, offers, captured);"
LOCK_STEP = {
    "offers follow the copies, push": (
        OFFER,
        OFFER.replace("offers", "push ? (join(stream, offers), stream) : offers"),
    ),
    "offers follow the copies, pull": (
        OFFER,
        OFFER.replace("offers", "push ? offers : (join(stream, offers), stream)"),
    ),
    "the next copy follows the returns, pull": (
        "push ? stream : returns_[index(hop.channel)].get();",
        "stream;",
    ),
}
ALL = CE_MUTANTS | GATHER_MUTANTS | LOCK_STEP
# name -> text in csrc/engine/shards/copied/copy_pulls.h, and its replacement
COPIED_MUTANTS = {
    "copies into a slot that a compute still reads": (
        "    streams_.order_after(stream_.get(), streams_.record_compute());\n",
        "",
    ),
    "computes before the copy has ended": (
        "    void wait() override { streams_.order_compute_after(arrived_); }\n",
        "    void wait() override {}\n",
    ),
}


def modes_of(mutant: str) -> list[str]:
    """Returns the modes of `ce` in which the mutant differs from the original."""
    return [mode for mode in ("push", "pull") if mutant.endswith(mode)] or ["push", "pull"]


MODES_OF_MUTANTS = [(mutant, mode) for mutant in CE_MUTANTS for mode in modes_of(mutant)]


def _replace(text: str, change: tuple[str, str]) -> str:
    before, after = change
    if text.count(before) != 1:
        raise AssertionError(f"expected once in the source, found {text.count(before)} times:\n{before}")
    return text.replace(before, after)


def write_ce_mutants(source: Path, folder: Path) -> None:
    """Writes all mutants of `source` (ce.cpp) into mutated_transport_ce.h in `folder`."""
    text = source.read_text()
    includes, body = text.split("namespace rtp {\n", 1)
    body = body[: body.index("std::optional<std::string> ce_refusal()")]
    parts = [includes]
    for number, (name, change) in enumerate(ALL.items()):
        mutant = _replace(body, change)
        if name in ALSO:
            mutant = _replace(mutant, ALSO[name])
        parts.append(
            f"namespace rtp::mutant_{number} {{\n{mutant}"
            "std::shared_ptr<CeTransport> make(const RingEnd& end, const std::string& id) {\n"
            f"  return std::make_shared<CopyEngineTransport>(end, id);\n}}\n}}  // namespace rtp::mutant_{number}\n"
        )
    makers = ", ".join(f"rtp::mutant_{number}::make" for number in range(len(ALL)))
    parts.append(
        "std::shared_ptr<rtp::CeTransport> make_mutated_ce_transport(int mutant, const rtp::RingEnd& end,\n"
        "                                                            const std::string& id) {\n"
        f"  static constexpr decltype(&rtp::mutant_0::make) makers[] = {{{makers}}};\n"
        "  return makers[mutant](end, id);\n}\n"
    )
    _write(folder / "mutated_transport_ce.h", "".join(parts))


def write_copied_mutants(folder: Path, generated: Path) -> None:
    """Writes all mutants of the shards that copy engines copy, which are in `folder`, into mutated_copied_shards.h in
    `generated`."""
    pulls, copied, offloaded = (
        (folder / file).read_text() for file in ("copy_pulls.h", "copied_shards.cpp", "offloaded_shards.cpp")
    )
    includes = "".join(line for line in (pulls + copied + offloaded).splitlines(True) if line.startswith("#include"))
    bodies = [text.split("namespace rtp {\n", 1)[1] for text in (pulls, copied, offloaded)]
    ends = ("}  // namespace rtp", "std::shared_ptr<ShardSource> make_copied", "std::shared_ptr<ShardSource> make_offl")
    pulls, *sources = (body[: body.index(end)] for body, end in zip(bodies, ends, strict=True))
    parts = [includes]
    for number, change in enumerate(COPIED_MUTANTS.values()):
        parts.append(
            f"namespace rtp::copied_mutant_{number} {{\n{_replace(pulls, change)}{''.join(sources)}"
            "std::shared_ptr<ShardSource> copied(const std::string& id, int rank, int ranks, int64_t bytes,\n"
            "                                    at::Device device, std::chrono::milliseconds timeout) {\n"
            "  return std::make_shared<CopiedShards>(id, rank, ranks, bytes, device, timeout);\n}\n"
            "std::shared_ptr<ShardSource> offloaded(int rank, int ranks, int64_t bytes, at::Device device) {\n"
            "  return std::make_shared<OffloadedShards>(rank, ranks, bytes, device);\n}\n"
            f"}}  // namespace rtp::copied_mutant_{number}\n"
        )
    makers = ", ".join(
        f"{{&rtp::copied_mutant_{n}::copied, &rtp::copied_mutant_{n}::offloaded}}" for n in range(len(COPIED_MUTANTS))
    )
    parts.append(
        "struct CopiedMutant {\n  decltype(&rtp::make_copied_shards) copied;\n"
        "  decltype(&rtp::make_offloaded_shards) offloaded;\n};\n"
        f"constexpr CopiedMutant kCopiedMutants[] = {{{makers}}};\n"
    )
    _write(generated / "mutated_copied_shards.h", "".join(parts))


def _write(file: Path, text: str) -> None:
    """Writes a file. An unchanged file keeps its modification time."""
    if not file.exists() or file.read_text() != text:
        made = file.with_name(f"{file.name}.{os.getpid()}")  # another process may be reading the file
        made.write_text(text)
        made.replace(file)
