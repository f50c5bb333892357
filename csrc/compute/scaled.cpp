#include "compute/scaled.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/checks.h"
#include "compute/codes.h"
#include "compute/gemm/gemm.h"
#include "compute/joined.h"

namespace rtp {
namespace {

at::ScalarType dtype_of(CodeFormat format) {
  return format == CodeFormat::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

// Whether a matrix has one scale, or one for each row, in float32.
bool by_rows(const Codes& matrix) {
  return matrix.scales.scalar_type() == at::kFloat && matrix.block[1] >= matrix.codes.size(1) &&
         (matrix.block[0] == 1 || matrix.block[0] >= matrix.codes.size(0));
}

// The scales of a matrix along whose columns they do not vary: one for each row.
at::Tensor of_rows(const Codes& matrix) {
  const int64_t rows = matrix.codes.size(0);
  const at::Tensor scales = matrix.scales.size(0) == 1 ? matrix.scales.expand({rows, 1})
                            : matrix.block[0] == 1     ? matrix.scales
                                                       : matrix.scales.repeat_interleave(matrix.block[0], 0);
  return scales.narrow(0, 0, rows).flatten().contiguous().unsqueeze(1);
}

// The codes of operand b of a product on a GPU, whose columns are contiguous.
at::Tensor in_columns(const at::Tensor& codes) {
  if (codes.stride(0) == 1) return codes;
  return codes.view(at::kByte).t().contiguous().view(codes.scalar_type()).t();
}

ScaledMatrix::Scales kind_of(const Codes& matrix) {
  using Scales = ScaledMatrix::Scales;
  if (matrix.scales.scalar_type() != at::kFloat) return Scales::of_32;
  return matrix.block[0] == 128 && matrix.block[1] == 128 ? Scales::of_128x128 : Scales::of_128;
}

// The operands of a product as torch._scaled_mm and cuBLASLt take them.
std::pair<ScaledMatrix, ScaledMatrix> operands(const Codes& a, const Codes& b) {
  const bool on_gpu = a.codes.is_cuda();
  const at::Tensor right = on_gpu ? in_columns(b.codes) : b.codes;
  const at::Tensor left = on_gpu && a.codes.stride(1) != 1 ? a.codes.contiguous() : a.codes;
  if (!by_rows(a) || !by_rows(b.t())) {
    return {{left, laid_scales(a.scales, kind_of(a)), kind_of(a)},
            {right, laid_scales(b.t().scales, kind_of(b)).t(), kind_of(b)}};
  }
  using Scales = ScaledMatrix::Scales;
  if (a.scales.numel() == 1 && b.scales.numel() == 1) {
    return {{left, a.scales, Scales::one}, {right, b.scales, Scales::one}};
  }
  return {{left, of_rows(a), Scales::outer}, {right, of_rows(b.t()).t(), Scales::outer}};
}

// Joins scales by bytes where they have one each: autocast has no rule for concatenated exponents.
at::Tensor joined_scales(std::vector<at::Tensor> scales) {
  const at::ScalarType dtype = scales.front().scalar_type();
  if (c10::elementSize(dtype) > 1) return at::cat(scales);
  for (at::Tensor& each : scales) each = each.view(at::kByte);
  return at::cat(scales).view(dtype);
}

}  // namespace

Codes Codes::columns(int64_t first, int64_t count) const {
  RTP_ASSERT(scales.dim() == 2, "swizzled exponents are not cut");
  const int64_t wide = block[1], all = codes.size(1);
  if (wide >= all) return {codes.narrow(1, first, count), scales, {block[0], std::max<int64_t>(count, 1)}};
  RTP_ASSERT(first % wide == 0 && (count % wide == 0 || first + count == all), "columns ", first, " to ", first + count,
             " cut a block of ", wide);
  return {codes.narrow(1, first, count), scales.narrow(1, first / wide, (count + wide - 1) / wide), block};
}

at::Tensor Codes::dequantized() const {
  RTP_ASSERT(scales.dim() == 2, "swizzled exponents are not read");
  at::Tensor wide = scales.to(at::kFloat);
  if (scales.size(0) > 1 && block[0] > 1) wide = wide.repeat_interleave(block[0], 0).narrow(0, 0, codes.size(0));
  if (scales.size(1) > 1 && block[1] > 1) wide = wide.repeat_interleave(block[1], 1).narrow(1, 0, codes.size(1));
  return codes.to(at::kFloat).mul_(wide);
}

Codes joined(const std::vector<Codes>& parts, bool summed) {
  if (parts.size() == 1) return parts.front();
  const Codes& first = parts.front();
  const bool by_rows = !summed && first.block[1] >= first.codes.size(1);
  std::vector<at::Tensor> codes, scales;
  for (const Codes& each : parts) {
    RTP_ASSERT(each.scales.dim() == 2, "swizzled exponents are not joined");
    RTP_ASSERT(by_rows || (each.block == first.block && each.codes.size(0) % each.block[0] == 0), "blocks differ");
    codes.push_back(each.codes.view(at::kByte));
    scales.push_back(by_rows ? of_rows(each) : each.scales);
  }
  const Extents block{by_rows ? 1 : first.block[0], first.block[1]};
  return {joined_rows(codes).view(first.codes.scalar_type()), joined_scales(scales), block};
}

Codes joined_columns(const std::vector<Codes>& parts) {
  if (parts.size() == 1) return parts.front();
  const Codes& first = parts.front();
  std::vector<at::Tensor> codes, scales;
  for (const Codes& each : parts) {
    RTP_ASSERT(each.block == first.block && each.codes.size(1) % each.block[1] == 0, "blocks differ");
    codes.push_back(each.codes.view(at::kByte));
    scales.push_back(each.scales.t());  // in the order of columns: see CodePlane::by_columns
  }
  return {at::cat(codes, 1).view(first.codes.scalar_type()), joined_scales(scales).t(), first.block};
}

at::ScalarType scale_dtype(const CodePlane& plane) { return has_exponents(plane.rule) ? at::kByte : at::kFloat; }

CodeMemory empty_codes(const CodePlane& plane, int64_t rows, int64_t columns, at::Device device,
                       std::optional<int64_t> stacked) {
  const auto room = [&](const Extents& extents, at::ScalarType dtype) {
    std::vector<int64_t> shape(extents.begin(), extents.end());
    if (stacked) shape.insert(shape.begin(), *stacked);
    return at::empty(shape, at::TensorOptions().device(device).dtype(dtype));
  };
  return {room(plane.code_memory(rows, columns), at::kByte),
          room(plane.scale_memory(rows, columns), scale_dtype(plane))};
}

Codes codes_in(const CodePlane& plane, const CodeMemory& memory, int64_t rows, int64_t columns) {
  Codes found{memory.codes.view(dtype_of(plane.format)), memory.scales, plane.block(rows, columns)};
  if (plane.transposed) found.codes = found.codes.t();
  if (has_exponents(plane.rule)) found.scales = found.scales.view(at::kFloat8_e8m0fnu);
  if (plane.swizzled()) {
    found.scales = found.scales.view(-1);
  } else if (plane.by_columns()) {
    found.scales = found.scales.t();
  } else {
    found.scales = found.scales.narrow(1, 0, plane.scale_shape(rows, columns)[1]);
  }
  return found;
}

void quantize_into(const CodePlane& plane, const CodeMemory& memory, const at::Tensor& values, bool inputs_first,
                   const std::optional<at::Tensor>& amax) {
  const int64_t rows = values.size(0), columns = values.size(1);
  const Codes out = inputs_first ? codes_in(plane, memory, columns, rows).t() : codes_in(plane, memory, rows, columns);
  quantize_codes(out.codes, out.scales, values, amax, {out.block[0], out.block[1]}, plane.rule);
}

Codes quantized(const CodePlane& plane, const at::Tensor& values) {
  const CodeMemory memory = empty_codes(plane, values.size(0), values.size(1), values.device());
  quantize_into(plane, memory, values.size(1) > 1 && values.stride(1) != 1 ? values.contiguous() : values);
  return codes_in(plane, memory, values.size(0), values.size(1));
}

at::Tensor scaled_product(const Codes& a, const Codes& b, at::ScalarType dtype, bool fast) {
  const int64_t rows = a.codes.size(0), columns = b.codes.size(1);
  if (rows == 0 || columns == 0 || a.codes.size(1) == 0) {
    return at::zeros({rows, columns}, a.codes.options().dtype(dtype));
  }
  const bool in_blocks = !by_rows(a) || !by_rows(b.t()), on_gpu = a.codes.is_cuda();
  if (in_blocks && !on_gpu) return at::mm(a.dequantized(), b.dequantized()).to(dtype);
  const auto [left, right] = operands(a, b);
  if (on_gpu && left.kind == ScaledMatrix::Scales::outer) dtype = at::kBFloat16;
  return at::_scaled_mm(left.codes, right.codes, left.scales, right.scales, std::nullopt, std::nullopt, dtype, fast);
}

void scaled_gemm(const at::Tensor& out, const at::Tensor& in, const Codes& a, const Codes& b, double alpha) {
  if (a.codes.is_cpu()) return gemm(out, in, a.dequantized(), b.dequantized(), alpha);
#ifdef RTP_WITH_CUDA
  if (out.numel() > 0 && a.codes.size(1) > 0) {
    const auto [left, right] = operands(a, b);
    if (gemm_scaled(out, in, left, right, alpha)) return;
  }
#endif
  at::Tensor result = out;
  const at::Tensor product = scaled_product(a, b, at::kFloat, false);
  in.defined() ? at::add_out(result, in, product, alpha) : at::mul_out(result, product, at::scalar_tensor(alpha));
}

}  // namespace rtp
