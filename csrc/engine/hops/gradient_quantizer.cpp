#include "engine/hops/gradient_quantizer.h"

#include "base/checks.h"
#include "compute/pack.h"
#include "compute/quantise.h"

namespace rtp {
namespace {

bool quantised(const at::Tensor& travelling, const at::Tensor& wide) {
  return travelling.scalar_type() == at::kByte && wide.scalar_type() != at::kByte;
}

void dequantize_into(const at::Tensor& to, const at::Tensor& from, bool add) {
  if (quantised(from, to)) {
    add ? dequantise_add(to, from) : dequantise(to, from);
  } else if (add) {
    add_widened(to, from);
  } else {
    to.copy_(from);
  }
}

}  // namespace

void dequantize_into(Lanes& lanes, std::vector<at::Tensor> to, std::vector<at::Tensor> from, bool add) {
  lanes.on_compute([to = std::move(to), from = std::move(from), add] {
    for (size_t part = 0; part < from.size(); ++part) dequantize_into(to[part], from[part], add);
  });
}

GradientQuantizer::GradientQuantizer(SlotPool& pool, Lanes& lanes, const Cargo& gradient)
    : pool_(pool), wide_(gradient) {
  for (size_t part = 0; part < wide_.parts.size(); ++part) {
    Part& each = wide_.parts[part];
    const at::ScalarType home = wide_.home[part].scalar_type();
    RTP_ASSERT(each.wire == Wire::int8 || c10::elementSize(each.dtype) < c10::elementSize(home),
               "a contribution travels in fewer bits than its sum has");
    each.dtype = home;
    each.wire = Wire::plain;
  }
  slot_ = pool_.lease(Channel::gradient, wide_.slot_bytes());
  slot_->usage.settle(lanes);
}

std::vector<at::Tensor> GradientQuantizer::views(int owner) const {
  std::vector<at::Tensor> views;
  for (size_t part = 0; part < wide_.parts.size(); ++part) views.push_back(wide_.in_slot(slot_->memory, owner, part));
  return views;
}

void GradientQuantizer::round(const std::vector<at::Tensor>& travelling, int owner) const {
  const std::vector<at::Tensor> sums = views(owner);
  std::vector<PackItem> items;
  for (size_t part = 0; part < sums.size(); ++part) {
    if (quantised(travelling[part], sums[part])) {
      quantise(travelling[part], sums[part]);
    } else {
      items.push_back({sums[part], travelling[part]});
    }
  }
  pack(items);
}

}  // namespace rtp
