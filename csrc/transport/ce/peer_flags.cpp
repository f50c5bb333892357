#include "transport/ce/peer_flags.h"

#include <cuda.h>

#include <algorithm>
#include <array>

namespace rtp {
namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int count, CUstreamBatchMemOpParams*, unsigned int flags);

// Found through the CUDA runtime, because the driver library is not linked. Version 11.7 of the function needs no
// driver option.
BatchMemOp find_batch_mem_op() {
#if CUDART_VERSION >= 12050
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 11070, cudaEnableDefault, &result);
  if (status == cudaSuccess && result == cudaDriverEntryPointSuccess) return reinterpret_cast<BatchMemOp>(found);
#endif
  return nullptr;
}

// Waits until `word` is 1, then resets it to 0. A single call, which a graph captures as one node. Words have 32 bits,
// because not every device supports 64-bit operations (CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS).
CUresult wait_and_reset(BatchMemOp batch_mem_op, uint32_t* word, cudaStream_t stream) {
  std::array<CUstreamBatchMemOpParams, 2> operations{};
  operations[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operations[0].waitValue.address = reinterpret_cast<CUdeviceptr>(word);
  operations[0].waitValue.value = 1;
  operations[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  operations[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operations[1].writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  operations[1].writeValue.value = 0;
  operations[1].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // ordered after all earlier work, system-wide
  return batch_mem_op(stream, operations.size(), operations.data(), 0);
}

// Copies the constant words, which follow the `count` flags and are always 1, over the flags.
void raise_words(uint32_t* words, int64_t count, cudaStream_t stream) {
  RTP_CUDA_CHECK(cudaMemcpyAsync(words, words + count, count * sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

std::optional<std::string> stream_wait_refusal() {
  if (find_batch_mem_op() != nullptr) return std::nullopt;
  return "the CUDA driver lacks cuStreamBatchMemOp, or rtp_ext was built with CUDA before 12.5";
}

int64_t PeerFlags::count(int ranks, int shards) { return int64_t{2} * 2 * kSlots * shards * 2 * ranks; }

int64_t PeerFlags::bytes(int ranks, int shards) {
  return 2 * count(ranks, shards) * static_cast<int64_t>(sizeof(uint32_t));
}

PeerFlags::PeerFlags(const PeerMemory& peers, const at::Tensor& memory, int rank, int ranks, int shards,
                     cudaStream_t side)
    : batch_mem_op_(reinterpret_cast<void*>(find_batch_mem_op())),
      rank_(rank),
      ranks_(ranks),
      shards_(shards),
      flags_(count(ranks, shards)) {
  RTP_ASSERT(batch_mem_op_ != nullptr, *stream_wait_refusal());
  // Before the registration, so that no peer can write to the memory yet.
  raise_words(static_cast<uint32_t*>(memory.data_ptr()), flags_, side);
  std::vector<uint32_t> words(static_cast<size_t>(memory.nbytes()) / sizeof(uint32_t), 0);
  std::fill(words.end() - flags_, words.end(), 1);
  RTP_CUDA_CHECK(cudaMemcpyAsync(memory.data_ptr(), words.data(), memory.nbytes(), cudaMemcpyHostToDevice, side));
  RTP_CUDA_CHECK(cudaStreamSynchronize(side));
  region_ = peers.share(memory);
}

int64_t PeerFlags::flag(Kind kind, const Place& place, int raiser) const {
  const int64_t group = static_cast<int64_t>(place.channel) * 2 + static_cast<int64_t>(kind);
  RTP_ASSERT(place.shard < shards_, "a shard without flags");
  return (((group * kSlots + place.slot) * shards_ + place.shard) * 2 + (place.second ? 1 : 0)) * ranks_ + raiser;
}

void PeerFlags::raise(Kind kind, const Place& place, int peer, const CopyEngine& engine, cudaStream_t stream,
                      bool captured) const {
  const uint32_t* one = word(rank_, flags_);
  engine.copy({{word(peer, flag(kind, place, rank_)), one, sizeof(uint32_t)}}, stream, captured);
}

void PeerFlags::await(Kind kind, const Place& place, int peer, cudaStream_t stream) const {
  const CUresult status =
      wait_and_reset(reinterpret_cast<BatchMemOp>(batch_mem_op_), word(rank_, flag(kind, place, peer)), stream);
  if (status != CUDA_SUCCESS) {
    throw CudaError(concat("cuStreamBatchMemOp failed with code ", static_cast<int>(status)));
  }
}

void PeerFlags::raise_all(cudaStream_t stream) const { raise_words(word(rank_, 0), flags_, stream); }

int64_t PeerFlags::raised() const {
  std::vector<uint32_t> words(flags_);
  RTP_CUDA_CHECK(cudaMemcpy(words.data(), word(rank_, 0), flags_ * sizeof(uint32_t), cudaMemcpyDeviceToHost));
  return std::count(words.begin(), words.end(), 1);
}

}  // namespace rtp
