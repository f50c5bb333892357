// Launches of all kernels, for Python's ctypes.
#include <cstdlib>

#include "kernels/activation.h"
#include "kernels/blocks.h"
#include "kernels/codes.h"
#include "kernels/embedding.h"
#include "kernels/logits.h"
#include "kernels/pack.h"
#include "kernels/quantize.h"

extern "C" {

void* allocate(size_t bytes) { return std::malloc(bytes); }
void release(void* memory) { std::free(memory); }

int hidden_forward(const rtp::HiddenForward* hidden) { return rtp::launch_hidden_forward(*hidden, nullptr); }
int hidden_backward(const rtp::HiddenBackward* hidden) { return rtp::launch_hidden_backward(*hidden, nullptr); }
int logit_sums(const rtp::LogitSums* sums) { return rtp::launch_logit_sums(*sums, nullptr); }
int logit_gradient(const rtp::LogitGradient* gradient) { return rtp::launch_logit_gradient(*gradient, nullptr); }
int embedding_gather(const rtp::EmbeddingGather* gather) { return rtp::launch_embedding_gather(*gather, nullptr); }
int embedding_scatter(const rtp::EmbeddingScatter* scatter) { return rtp::launch_embedding_scatter(*scatter, nullptr); }
int pack(const rtp::PackEntry* entries, int count) {
  rtp::PackBatch batch{};
  batch.count = count;
  for (int i = 0; i < count; ++i) batch.entries[i] = entries[i];
  return rtp::launch_pack(batch, nullptr);
}

int quantize(const rtp::QuantizeParameters* given) { return rtp::launch_quantize(*given, nullptr); }
int dequantize(const rtp::DequantizeParameters* given) { return rtp::launch_dequantize(*given, nullptr); }
int dequantize_blocks(const rtp::DequantizeBlocksParameters* given) {
  return rtp::launch_dequantize_blocks(*given, nullptr);
}
int block_amax(const rtp::CodeMatrix* matrix) { return rtp::launch_block_amax(*matrix, nullptr); }
int quantize_codes(const rtp::CodesParameters* given) { return rtp::launch_quantize_codes(*given, nullptr); }
int finds_amax(const rtp::CodesParameters* given) { return rtp::finds_amax(*given); }
int add_converted(const rtp::AddConvertedParameters* given) { return rtp::launch_add_converted(*given, nullptr); }

// Sizes of the structures above, in order, to verify Python's mirrors of them.
int structure_bytes(int which) {
  const size_t bytes[] = {sizeof(rtp::HiddenForward),
                          sizeof(rtp::HiddenBackward),
                          sizeof(rtp::LogitSums),
                          sizeof(rtp::LogitGradient),
                          sizeof(rtp::EmbeddingGather),
                          sizeof(rtp::EmbeddingScatter),
                          sizeof(rtp::PackEntry),
                          sizeof(rtp::QuantizeParameters),
                          sizeof(rtp::DequantizeParameters),
                          sizeof(rtp::AddConvertedParameters),
                          sizeof(rtp::DequantizeBlocksParameters),
                          sizeof(rtp::CodeMatrix),
                          sizeof(rtp::CodesParameters)};
  return static_cast<int>(bytes[which]);
}

}  // extern "C"
