#include "engine/cargo.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checks.h"
#include "compute/pack.h"

namespace rtp {
namespace {

constexpr int64_t kAlignment = 64;  // of a part inside a slot, bytes: a cache line, and any vector load

int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t product(const std::vector<int64_t>& shape, size_t from = 0) {
  return std::accumulate(shape.begin() + static_cast<int64_t>(from), shape.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(shape[dim], 1);
  return strides;
}

at::Tensor view_of(const at::Tensor& memory, int64_t offset, int64_t bytes, at::ScalarType dtype,
                   const std::vector<int64_t>& shape) {
  return memory.narrow(0, offset, bytes).view(dtype).view(shape);
}

}  // namespace

int64_t Part::elements(int owner) const { return product(shapes[owner]); }

int64_t Part::bytes(int owner) const { return elements(owner) * static_cast<int64_t>(c10::elementSize(dtype)); }

int64_t Part::whole_bytes() const {
  int64_t total = 0;
  for (size_t owner = 0; owner < shapes.size(); ++owner) total += bytes(static_cast<int>(owner));
  return total;
}

int64_t Cargo::offset(int owner, size_t part) const {
  int64_t offset = 0;
  for (size_t before = 0; before < part; ++before) offset += align(parts[before].bytes(owner));
  return offset;
}

int64_t Cargo::slot_bytes() const {
  int64_t most = 0;
  for (size_t owner = 0; owner < parts.front().shapes.size(); ++owner) {
    most = std::max(most, offset(static_cast<int>(owner), parts.size()));
  }
  return most;
}

int64_t Cargo::whole_offset(int owner, size_t part) const {
  int64_t offset = 0;
  for (size_t before = 0; before < part; ++before) offset += align(parts[before].whole_bytes());
  for (int before = 0; before < owner; ++before) offset += parts[part].bytes(before);
  return offset;
}

int64_t Cargo::whole_bytes() const { return whole_offset(0, parts.size()); }

at::Tensor Cargo::in_slot(const at::Tensor& memory, int owner, size_t part) const {
  const Part& layout = parts[part];
  return view_of(memory, offset(owner, part), layout.bytes(owner), layout.dtype, layout.shapes[owner]);
}

at::Tensor Cargo::in_whole(const at::Tensor& memory, int owner, size_t part) const {
  const Part& layout = parts[part];
  if (owner != kAllOwners) {
    return view_of(memory, whole_offset(owner, part), layout.bytes(owner), layout.dtype, layout.shapes[owner]);
  }
  std::vector<int64_t> shape = layout.shapes.front();
  shape[0] = 0;
  for (const auto& of_owner : layout.shapes) {
    RTP_ASSERT(std::equal(shape.begin() + 1, shape.end(), of_owner.begin() + 1, of_owner.end()),
               "shards of one whole differ in rows only");
    shape[0] += of_owner[0];
  }
  return view_of(memory, whole_offset(0, part), layout.whole_bytes(), layout.dtype, shape);
}

at::Tensor Cargo::at_home(int owner, int rank, size_t part) const {
  const at::Tensor& tensor = home[part];
  if (owner == rank) return tensor;
  const auto& shape = parts[part].shapes[owner];
  return tensor.as_strided(shape, contiguous_strides(shape), tensor.storage_offset());
}

void Cargo::stage(const at::Tensor& memory, int rank) {
  std::vector<PackItem> items;
  for (size_t part = 0; part < parts.size(); ++part) {
    const at::Tensor copy = in_slot(memory, rank, part);
    if (home[part].defined()) items.push_back({home[part], copy});
    home[part] = copy;
  }
  pack(items);
}

Cargo Cargo::rows(Half half, int rank) const {
  Cargo cut = *this;
  for (size_t part = 0; part < parts.size(); ++part) {
    for (auto& shape : cut.parts[part].shapes) shape[0] = half_rows(half, shape[0]).count;
    const HalfRows own = half_rows(half, parts[part].shapes[rank][0]);
    cut.home[part] = home[part].narrow(0, own.first, own.count);
  }
  return cut;
}

HalfRows half_rows(Half half, int64_t rows) {
  const int64_t first = (rows + 1) / 2;
  if (half == Half::whole) return {0, rows};
  return half == Half::first ? HalfRows{0, first} : HalfRows{first, rows - first};
}

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) {
    spans.push_back({static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())});
  }
  return spans;
}

}  // namespace rtp
