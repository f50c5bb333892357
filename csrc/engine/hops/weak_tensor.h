// Tensors that are recognised again without being kept alive, and the versions that show writes to parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <vector>

namespace rtp {

// Storage and geometry of a tensor, without keeping it alive.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor)
      : storage_(tensor.storage().getWeakStorageImpl()),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        offset_(tensor.storage_offset()),
        options_(tensor.options().requires_grad(std::nullopt)) {}

  // Undefined if the memory has been freed.
  at::Tensor lock() const {
    const c10::intrusive_ptr<c10::StorageImpl> alive = storage_.lock();
    if (!alive) return {};
    return at::empty({0}, options_).set_(c10::Storage(alive), offset_, sizes_, strides_);
  }
  bool is(const at::Tensor& tensor) const {
    return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl() && !storage_.expired() &&
           offset_ == tensor.storage_offset() && options_.dtype() == tensor.dtype() &&
           tensor.sizes() == at::IntArrayRef(sizes_) && tensor.strides() == at::IntArrayRef(strides_);
  }
  // Also of freed memory, which another rank may still hold: a weak pointer keeps the address from being used again.
  bool is(const WeakTensor& other) const {
    return storage_._unsafe_get_target() == other.storage_._unsafe_get_target() && offset_ == other.offset_ &&
           options_.dtype() == other.options_.dtype() && sizes_ == other.sizes_ && strides_ == other.strides_;
  }
  // A tensor of this kind with other contents.
  at::Tensor like() const { return at::empty(sizes_, options_); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;
  at::TensorOptions options_;
};

inline std::vector<int64_t> versions_of(const std::vector<c10::VariableVersion>& watched) {
  std::vector<int64_t> versions;
  for (const c10::VariableVersion& each : watched) versions.push_back(each.current_version());
  return versions;
}

}  // namespace rtp
