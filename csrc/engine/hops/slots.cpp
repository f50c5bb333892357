#include "engine/hops/slots.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>

#include "base/checks.h"
#include "compute/pack.h"
#include "compute/quantize.h"

namespace rtp {
namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(shape[dim], 1);
  return strides;
}

// A tensor on `bytes` of memory. Made without the dispatcher, whose narrow and two views take a third of a small pass.
at::Tensor view_of(const at::Tensor& memory, int64_t offset, int64_t bytes, at::ScalarType dtype,
                   const std::vector<int64_t>& shape) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t start = memory.storage_offset() * static_cast<int64_t>(memory.element_size()) + offset;
  RTP_ASSERT(offset >= 0 && offset + bytes <= static_cast<int64_t>(memory.nbytes()) && start % element == 0 &&
                 product(shape) * element == bytes,
             "a view of ", bytes, " bytes at ", offset, " does not fit in ", memory.nbytes());
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage()), memory.key_set(),
                                                             c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(start / element);
  impl->set_sizes_contiguous(shape);
  if (!memory.is_inference() && !view.is_inference())
    impl->set_version_counter(memory.unsafeGetTensorImpl()->version_counter());
  return view;
}

// Returns the bytes of a slot before a tensor, or all bytes: see [Note: order in a slot].
template <typename Bytes>
int64_t bytes_before(const std::vector<TensorLayout>& layouts, size_t index, Bytes&& bytes_of) {
  const auto is_matrix = [&](size_t tensor) { return layouts[tensor].shapes.front().size() > 1; };
  return packed_bytes(layouts.size(), [&](size_t other) {
    const bool before =
        index == layouts.size() || (is_matrix(other) == is_matrix(index) ? other < index : is_matrix(other));
    return before ? bytes_of(layouts[other]) : 0;
  });
}

// Slots allocated by a transport.
struct TransportMemory {
  Transport& transport;
  Channel channel;
  int64_t number;
  bool fixed;
  const std::function<at::Tensor(int64_t)>& preferred;

  std::shared_ptr<Slot> allocate(int64_t bytes) const {
    at::Tensor memory = preferred ? preferred(bytes) : at::Tensor();
    if (!memory.defined()) memory = transport.allocate(channel, bytes);
    auto slot = std::make_shared<Slot>(Slot{std::move(memory), {}, false, number});
    slot->usage.record_write(transport.streams().record_compute());  // it may have been freed on the compute stream
    return slot;
  }
  bool before(const std::shared_ptr<Slot>& a, const std::shared_ptr<Slot>& b) const {
    return fixed && a->number < b->number;
  }
  void release(const std::shared_ptr<Slot>& slot) const {
    slot->usage.wait_for_all(transport.streams());
    transport.release(channel, slot->memory);
  }
  int64_t bytes(const std::shared_ptr<Slot>& slot) const { return slot->memory.numel(); }
  bool movable(const std::shared_ptr<Slot>& slot) const { return !slot->captured; }
};

// Scratch memory of this rank.
struct OwnMemory {
  at::Device device;

  std::shared_ptr<Slot> allocate(int64_t bytes) const {
    return std::make_shared<Slot>(
        Slot{at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device)), {}, false, 0});
  }
  bool before(const std::shared_ptr<Slot>&, const std::shared_ptr<Slot>&) const { return false; }
  // The allocator may have assigned the memory to another stream than the one that used it last.
  void release(const std::shared_ptr<Slot>& slot) const {
    if (device.is_cuda()) {
      slot->memory.record_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
  int64_t bytes(const std::shared_ptr<Slot>& slot) const { return slot->memory.numel(); }
  bool movable(const std::shared_ptr<Slot>& slot) const { return !slot->captured; }
};

}  // namespace

int64_t TensorLayout::elements(int owner) const { return product(shapes[owner]); }

bool TensorLayout::quantized() const {
  return frozen || quantizes(travel, static_cast<int64_t>(c10::elementSize(dtype)));
}

bool TensorLayout::casts(at::ScalarType local) const { return !frozen && (local != dtype || quantized()); }

at::ScalarType TensorLayout::wire_dtype() const {
  if (!quantized()) return dtype;
  return frozen || travel == TravelFormat::int8 ? at::kByte : at::kBFloat16;
}

std::vector<int64_t> TensorLayout::wire_shape(int owner) const {
  return frozen || travel == TravelFormat::int8 ? std::vector<int64_t>{bytes(owner)} : shapes[owner];
}

int64_t TensorLayout::bytes(int owner) const {
  return travelling_bytes(elements(owner), frozen, travel, static_cast<int64_t>(c10::elementSize(dtype)));
}

Rows TensorLayout::rows(int owner, Half half) const {
  return half_rows(half, shapes[owner].empty() ? 1 : shapes[owner][0]);
}

int64_t TensorLayout::bytes_of(int owner, int64_t rows) const {
  const int64_t all = this->rows(owner, Half::whole).count;
  return all == 0 ? 0 : rows * (bytes(owner) / all);
}

int64_t TensorLayout::dequantized_bytes(int owner) const {
  return quantized() ? elements(owner) * static_cast<int64_t>(c10::elementSize(dtype)) : 0;
}

int64_t ShardBundle::offset(const Place& place, size_t index) const {
  // the shard of owner 0 is the largest one, and shards of a group have its distance
  const int largest = place.shards > 1 ? 0 : place.first;
  const int64_t before =
      bytes_before(layouts, index, [&](const TensorLayout& layout) { return place.shards * layout.bytes(largest); });
  return place.place == 0 ? before : before + place.place * layouts[index].bytes(0);
}

// The shard of owner 0 is the largest one, and its first half the larger one.
int64_t ShardBundle::half_offset(Half half, size_t index) const {
  const auto first = [](const TensorLayout& layout) { return layout.bytes_of(0, layout.rows(0, Half::first).count); };
  const int64_t before = bytes_before(layouts, index, [&](const TensorLayout& each) { return 2 * first(each); });
  return before + (half == Half::second ? first(layouts[index]) : 0);
}

int64_t ShardBundle::slot_bytes(int shards, bool halved) const {
  if (shards == 1 && halved) return half_offset(Half::first, layouts.size());
  if (shards > 1) return offset({0, 1, shards}, layouts.size());
  int64_t most = 0;
  for (size_t owner = 0; owner < layouts.front().shapes.size(); ++owner) {
    most = std::max(most, offset({static_cast<int>(owner)}, layouts.size()));
  }
  return most;
}

int64_t ShardBundle::dequantized_offset(int owner, size_t index) const {
  return bytes_before(layouts, index, [&](const TensorLayout& layout) { return layout.dequantized_bytes(owner); });
}

int64_t ShardBundle::dequantized_bytes() const {
  int64_t most = 0;
  for (size_t owner = 0; owner < layouts.front().shapes.size(); ++owner) {
    most = std::max(most, dequantized_offset(static_cast<int>(owner), layouts.size()));
  }
  return most;
}

at::Tensor ShardBundle::in_slot(const at::Tensor& memory, const Place& place, size_t index) const {
  const TensorLayout& layout = layouts[index];
  int64_t bytes = layout.bytes(place.first);
  std::vector<int64_t> shape = layout.wire_shape(place.first);
  for (int each = 1; each < place.owners; ++each) {
    const int owner = (place.first + each) % static_cast<int>(layout.shapes.size());
    const std::vector<int64_t> more = layout.wire_shape(owner);
    RTP_ASSERT(!layout.quantized() && std::equal(shape.begin() + 1, shape.end(), more.begin() + 1, more.end()),
               "the shards of a group must differ in rows only");
    bytes += layout.bytes(owner);
    shape[0] += more[0];
  }
  return view_of(memory, offset(place, index), bytes, layout.wire_dtype(), shape);
}

at::Tensor ShardBundle::half_in_slot(const at::Tensor& memory, int owner, Half half, size_t index) const {
  const TensorLayout& layout = layouts[index];
  const int64_t rows = layout.rows(owner, half).count;
  std::vector<int64_t> shape = layout.wire_shape(owner);
  shape.empty() ? shape.push_back(rows) : static_cast<void>(shape[0] = rows);
  return view_of(memory, half_offset(half, index), layout.bytes_of(owner, rows), layout.wire_dtype(), shape);
}

at::Tensor ShardBundle::dequantized(const at::Tensor& place, int owner, size_t index) const {
  const TensorLayout& layout = layouts[index];
  return view_of(place, dequantized_offset(owner, index), layout.dequantized_bytes(owner), layout.dtype,
                 layout.shapes[owner]);
}

at::Tensor ShardBundle::local_view(int owner, int rank, size_t index) const {
  const at::Tensor& tensor = local[index];
  if (owner == rank) return tensor;
  const auto& shape = layouts[index].shapes[owner];
  return tensor.as_strided(shape, contiguous_strides(shape), tensor.storage_offset());
}

std::vector<at::Tensor> ShardBundle::views(const Place& place, int rank, const Slot* slot) const {
  std::vector<at::Tensor> views;
  for (size_t index = 0; index < layouts.size(); ++index) {
    views.push_back(slot == nullptr ? local_view(place.first, rank, index) : in_slot(slot->memory, place, index));
  }
  return views;
}

void ShardBundle::stage(Streams& streams, const at::Tensor& memory, int rank) {
  std::vector<PackItem> items;
  for (size_t index = 0; index < layouts.size(); ++index) {
    const at::Tensor copy = in_slot(memory, {rank}, index);
    if (local[index].defined() && layouts[index].travel == TravelFormat::int8) {
      quantize(copy, local[index]);
    } else if (local[index].defined()) {
      items.push_back({local[index], copy});
    }
    local[index] = copy;
  }
  streams.on_compute([items = std::move(items)] { pack(items); });
}

bool ShardBundle::cast() const {
  for (size_t index = 0; index < layouts.size(); ++index) {
    if (layouts[index].casts(local[index].scalar_type())) return true;
  }
  return turned;
}

at::Tensor half_of(const at::Tensor& whole, Half half) {
  if (half == Half::whole) return whole;
  const at::Tensor rows = whole.dim() == 0 ? whole.view({1}) : whole;
  const Rows part = half_rows(half, rows.size(0));
  return rows.narrow(0, part.first, part.count);
}

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) {
    spans.push_back({static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())});
  }
  return spans;
}

Hop hop_of(const Schedule& schedule, const Step& step, std::string operation, int index) {
  Hop hop;
  hop.channel = step.channel, hop.action = step.action;
  hop.in_parts = step.send.has_parts() || step.receive.has_parts();
  hop.two_level = schedule.options.route == Route::two_level;
  hop.to = step.to, hop.from = step.from;
  hop.send_shard = step.send_owner, hop.receive_shard = step.receive_owner;
  hop.second_half = step.half == Half::second;
  hop.operation = std::move(operation);
  hop.index = index, hop.count = schedule.hops(step.channel);
  return hop;
}

Place place_of(const Schedule& schedule, const Buffer& buffer, int owner, int owners) {
  const int shards = buffer.is_home() ? 1 : schedule.slots(buffer.channel)[static_cast<size_t>(buffer.slot)];
  const bool wraps = owner + owners > schedule.ranks;
  return {owner, owners, shards, buffer.is_group() ? buffer.place(wraps ? 0 : owner, schedule.ranks) : 0};
}

void set_memory(Hop& hop, const Schedule& schedule, const Step& step, const ShardBundle& bundle,
                const std::vector<at::Tensor>& send, const std::vector<at::Tensor>& receive) {
  hop.send = spans_of(send), hop.receive = spans_of(receive);
  const auto offset = [&](const Buffer& buffer, int peer, int owner, size_t index) {
    if (buffer.halves == Halves::apart) return static_cast<size_t>(bundle.half_offset(step.half, index));
    const Place place = place_of(schedule, buffer.moved(peer - schedule.rank, schedule.ranks), owner);
    return static_cast<size_t>(bundle.offset(place, index) + bundle.layouts[index].bytes_before(owner, step.half));
  };
  for (size_t index = 0; index < send.size(); ++index) {
    hop.remote_receive_offsets.push_back(offset(step.receive, step.to, step.send_owner, index));
    hop.remote_send_offsets.push_back(offset(step.send, step.from, step.receive_owner, index));
  }
}

void set_collective_memory(Hop& hop, const Schedule& schedule, const ShardBundle& bundle, const at::Tensor& slot) {
  hop.send_slot = hop.receive_slot = static_cast<std::byte*>(slot.data_ptr());
  const bool adds = hop.action == Action::scatter;
  if (adds) hop.dtype = bundle.layouts.front().wire_dtype();
  for (size_t index = 0; index < bundle.layouts.size(); ++index) {
    const TensorLayout& layout = bundle.layouts[index];
    RTP_ASSERT(!adds || layout.wire_dtype() == hop.dtype, hop.describe(), " must add numbers of one dtype");
    std::byte* const start = hop.send_slot + bundle.offset({0, 1, schedule.ranks}, index);
    const auto piece = static_cast<size_t>(layout.bytes(0));
    const Span whole{start, static_cast<size_t>(schedule.ranks) * piece};
    const Span own{start + static_cast<size_t>(schedule.rank) * piece, piece};
    hop.send.push_back(adds ? whole : own);
    hop.receive.push_back(adds ? own : whole);
  }
}

void wait(Transfer& transfer, End end) { transfer.wait(end); }

void Usage::wait_for_all(Streams& streams) {
  before_write([](const auto& transfer, End end) { wait(*transfer, end); },
               [&](const StreamEvent& event) { streams.order_compute_after(event); });
  *this = Usage{};
}

std::shared_ptr<Slot> SlotPool::lease(Channel channel, int64_t bytes) {
  Ledger& slots = ledger(channel);
  const int64_t number = slots.count().allocations;
  std::shared_ptr<Slot> slot = slots.lease(bytes, TransportMemory{*transport_, channel, number, fixed_, memory_});
  slot->captured = slot->captured || captured_by_user();
  return slot;
}

std::shared_ptr<Slot> SlotPool::lease_scratch(int64_t bytes) {
  std::shared_ptr<Slot> slot = scratch_.lease(bytes, OwnMemory{device_});
  slot->captured = slot->captured || captured_by_user();
  return slot;
}

bool SlotPool::captured_by_user() const {
  const Streams& streams = transport_->streams();
  return streams.capture() != 0 && !streams.capturing();
}

void SlotPool::clear() {
  scratch_.clear(OwnMemory{device_});
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    ledger(channel).clear(TransportMemory{*transport_, channel, 0, false, memory_});
  }
}

void SlotPool::settle(Channel channel) {
  for (const auto& slot : ledger(channel).free()) slot->usage.wait_for_all(transport_->streams());
  settled_ = transport_->streams().record_compute();
  ++settles_;
}

void SlotPool::reset_peak() {
  for (Ledger& ledger : ledgers_) ledger.reset_peak();
  scratch_.reset_peak();
}

void Hops::add(const Counts& pass, int times) {
  for (size_t kind = 0; kind < counts_.size(); ++kind) {
    counts_[kind] += times * pass.hops[kind];
    bytes_[kind] += times * pass.bytes[kind];
  }
}

void Hops::mark(Hop& hop) {
  if (std::exchange(updated_, false)) ++updates_;
  hop.updates = updates_;
}

void Hops::meet(const std::string& collective, int rank, int ranks) {
  if (!meeting_.defined()) meeting_ = transport_->allocate(Channel::weight, 2);
  auto* const memory = static_cast<std::byte*>(meeting_.data_ptr());
  Hop hop;
  hop.to = (rank + 1) % ranks, hop.from = (rank + ranks - 1) % ranks;
  hop.receive = {{memory, 1}}, hop.send = {{memory + 1, 1}};
  hop.receive_slot = memory;
  hop.operation = collective, hop.count = Hop::kCollective;
  mark(hop);
  const std::unique_ptr<Transfer> transfer = transport_->post(hop);
  transfer->wait_received();
  transfer->wait_sent();
}

std::shared_ptr<Transfer> Hops::post(Hop& hop, const std::vector<Usage*>& sources, const std::vector<Usage*>& targets,
                                     const EventHandle& traced, const PassHandle& pass, int position) {
  Transport& transport = *transport_;
  mark(hop);
  HopMemory memory = HopMemory::source;
  const auto after = [&](const StreamEvent& event) { transport.order_memory_after(hop, memory, event); };
  const auto after_hop = [&](const auto& earlier, End end) {
    StreamEvent event = earlier->event(end);
    if (!event) {
      EventHandle waiting;
      if (traced) waiting = sink_.begin_slot(pass, position, traced->label);
      earlier->wait(end);
      sink_.end(waiting);
      event = transport.streams().record_compute();
    }
    after(event);
  };
  for (const Usage* source : sources) source->before_read(after_hop, after);
  memory = HopMemory::target;
  for (const Usage* target : targets) target->before_write(after_hop, after);
  const EventHandle posting = sink_.begin_posting(pass, position, traced);
  sink_.depart(traced, hop);
  if (delay_.count() > 0) {
    transport.delay(hop, std::chrono::microseconds(random_() % static_cast<uint64_t>(delay_.count() + 1)));
  }
  const size_t kind = static_cast<size_t>(hop.channel);
  const std::shared_ptr<Transfer> transfer = sink_.post(traced, hop, counts_[kind]);
  for (Usage* source : sources) source->record_send(transfer);
  for (Usage* target : targets) target->record_receive(transfer);
  ++counts_[kind];
  bytes_[kind] += static_cast<int64_t>(hop.bytes_sent());
  sink_.end(posting);
  return transfer;
}

}  // namespace rtp
