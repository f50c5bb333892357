#include "engine/hops/gradient_quantizer.h"

#include <ATen/ops/empty.h>

#include "base/checks.h"
#include "compute/pack.h"
#include "compute/quantize.h"

namespace rtp {
namespace {

bool quantized(const at::Tensor& travelling, const at::Tensor& wide) {
  return travelling.scalar_type() == at::kByte && wide.scalar_type() != at::kByte;
}

void dequantize_into(const at::Tensor& to, std::vector<at::Tensor> from, bool add) {
  const bool narrow = quantized(from[0], to);
  if (!to.is_contiguous() && (narrow || from.size() > 1)) {  // kernels that take several at once need rows
    const at::Tensor rows = add ? to.contiguous() : at::empty(to.sizes(), to.options());
    dequantize_into(rows, std::move(from), add);
    to.copy_(rows);
    return;
  }
  if (!add) {
    narrow ? dequantize(to, from[0]) : static_cast<void>(to.copy_(from[0]));
    from.erase(from.begin());
  }
  if (narrow) {
    for (const at::Tensor& each : from) dequantize_add(to, each);
  } else if (!from.empty()) {
    add_converted(to, from);
  }
}

}  // namespace

void dequantize_into(Streams& streams, std::vector<at::Tensor> to, std::vector<std::vector<at::Tensor>> from,
                     bool add) {
  streams.on_compute([to = std::move(to), from = std::move(from), add] {
    for (size_t index = 0; index < to.size(); ++index) {
      std::vector<at::Tensor> arrived;
      for (const auto& slot : from) arrived.push_back(slot[index]);
      dequantize_into(to[index], std::move(arrived), add);
    }
  });
}

GradientQuantizer::GradientQuantizer(SlotPool& pool, Streams& streams, const ShardBundle& gradient, int shards)
    : pool_(pool), wide_(gradient) {
  for (size_t index = 0; index < wide_.layouts.size(); ++index) {
    TensorLayout& each = wide_.layouts[index];
    const at::ScalarType local = wide_.local[index].scalar_type();
    RTP_ASSERT(each.travel == TravelFormat::int8 || c10::elementSize(each.dtype) < c10::elementSize(local),
               "contributions must travel in fewer bits than their sum has");
    each.dtype = local;
    each.travel = TravelFormat::plain;
  }
  slot_ = pool_.lease(Channel::gradient, wide_.slot_bytes(shards));
  slot_->usage.wait_for_all(streams);
}

std::vector<at::Tensor> GradientQuantizer::views(const Place& place) const {
  std::vector<at::Tensor> views;
  for (size_t index = 0; index < wide_.layouts.size(); ++index)
    views.push_back(wide_.in_slot(slot_->memory, place, index));
  return views;
}

void GradientQuantizer::round(const std::vector<at::Tensor>& travelling, const Place& place) const {
  const std::vector<at::Tensor> sums = views(place);
  std::vector<PackItem> items;
  for (size_t index = 0; index < sums.size(); ++index) {
    if (quantized(travelling[index], sums[index])) {
      quantize(travelling[index], sums[index]);
    } else {
      items.push_back({sums[index], travelling[index]});
    }
  }
  pack(items);
}

}  // namespace rtp
