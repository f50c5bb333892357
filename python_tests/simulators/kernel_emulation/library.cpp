// Kernel launches on emulated threads, for Python's ctypes.
#include <cstdlib>

#include "compute/gemm/gemm_layout.h"
#include "emulated_cuda.h"
#include "kernels/activation.h"
#include "kernels/embedding.h"
#include "kernels/logits.h"
#include "kernels/pack.h"
#include "kernels/quantize.h"

extern "C" {

void set_backward(int backward) {
  emulation::set_order(backward != 0 ? emulation::Order::backward : emulation::Order::forward);
}
const char* message() { return emulation::message(); }

// Memory with exact bounds for the address sanitizer.
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
                          sizeof(rtp::AddConvertedParameters)};
  return static_cast<int>(bytes[which]);
}

uint16_t bfloat16_bits(float x) { return emulation::bfloat16_bits(x); }
float bfloat16_value(uint16_t bits) { return emulation::bfloat16_value(bits); }
uint16_t float16_bits(float x) { return emulation::float16_bits(x); }
float float16_value(uint16_t bits) { return emulation::float16_value(bits); }

// The layout of out = a @ b as {left is b, transpose left, transpose right, m, n, k, ld left, ld right, ld out}. Sizes
// and strides are {rows, columns, row stride, column stride}. Returns 0 if cuBLAS needs copies of the matrices.
int gemm_layout(const int64_t* out, const int64_t* a, const int64_t* b, int64_t* result) {
  const auto matrix = [](const int64_t* m) { return rtp::MatrixLayout{m[0], m[1], m[2], m[3]}; };
  const auto layout = rtp::gemm_layout(matrix(out), matrix(a), matrix(b));
  if (!layout) return 0;
  const int64_t values[] = {
      layout->left_is_b, layout->transpose_left, layout->transpose_right, layout->m,         layout->n,
      layout->k,         layout->left_stride,    layout->right_stride,    layout->out_stride};
  std::memcpy(result, values, sizeof(values));
  return 1;
}

int planted(int which, float* values, int count);  // in planted.cu

}  // extern "C"
