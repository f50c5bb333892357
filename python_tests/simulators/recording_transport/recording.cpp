// A synchronous transport that records the requests that asynchronous streams would receive, and the memory that every
// torch operator reads and writes meanwhile.
#include <ATen/core/function_schema.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <set>

// The sources, in one translation unit because torch's headers dominate the compile time.
#include "../../../csrc/device/streams.cpp"
#include "../../../csrc/schedule/schedule.cpp"
#include "../../../csrc/schedule/two_level.cpp"
#include "../../../csrc/transport/record.cpp"
#include "../../../csrc/transport/sink.cpp"
#include "../../../csrc/transport/transport.cpp"

namespace {

using namespace rtp;

using Spans = std::vector<std::pair<uintptr_t, size_t>>;  // address, bytes

// One record. `lane`: 0 or 1 for the compute streams; 2 for weight hops and 3 for gradient hops, and for what their
// sources wait for; 4 and 5 for what their targets wait for; 6 to 9 the same for hops between hosts.
struct Record {
  std::string kind;  // memory, hop, marked; mark, received, sent: waits for the record with this id
  int lane = 0;
  int64_t id = -1;  // id of an event or a hop
  std::string text;
  Spans reads, writes;
};

int lane_of(Channel channel, bool outer, HopMemory memory = HopMemory::source) {
  return 2 + static_cast<int>(channel) + 2 * static_cast<int>(memory) + (outer ? 4 : 0);
}

// The memory of a tensor, row by row if it has gaps.
Spans spans_of_view(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  std::vector<size_t> order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tensor.stride(a) < tensor.stride(b); });
  Spans spans{{reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), tensor.element_size()}};
  for (const size_t dim : order) {
    const size_t stride = static_cast<size_t>(tensor.stride(dim)) * tensor.element_size();
    const size_t count = stride == 0 ? 1 : static_cast<size_t>(tensor.size(dim));
    if (spans.size() == 1 && stride == spans[0].second) {
      spans[0].second *= count;
      continue;
    }
    const Spans inner = spans;
    for (size_t index = 1; index < count; ++index) {
      for (const auto& [address, bytes] : inner) spans.emplace_back(address + index * stride, bytes);
    }
  }
  return spans;
}

class Accesses {
 public:
  void add(Record record) { records.push_back(std::move(record)); }

  // Keeps tensors alive, so that no memory is reused during the recording.
  void keep(const at::Tensor& tensor) {
    if (kept_.insert(tensor.storage().unsafeGetStorageImpl()).second) storages_.push_back(tensor.storage());
  }
  void append(Spans& spans, const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.layout() != at::kStrided) return;
    keep(tensor);
    const Spans more = spans_of_view(tensor);
    spans.insert(spans.end(), more.begin(), more.end());
  }
  void append(Spans& spans, const c10::IValue& value) {
    if (value.isTensor()) append(spans, value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) append(spans, tensor);
    }
  }

  std::vector<Record> records;
  int lane = 0;  // current compute stream
  std::optional<at::CallbackHandle> callback;
  int64_t next = 0;  // id

 private:
  std::set<const void*> kept_;
  std::vector<c10::Storage> storages_;
};

std::unique_ptr<Accesses> recorder = std::make_unique<Accesses>();

// -- what operators read and write ------------------------------------------------------------------------------------

// Operators that read or change only the shape of a tensor.
bool touches_no_memory(const std::string& name) {
  for (const char* start : {"aten::empty", "aten::new_", "aten::set_", "aten::resize", "aten::detach", "aten::size",
                            "aten::stride", "aten::result_type", "aten::is_", "aten::record_stream"}) {
    if (name.rfind(start, 0) == 0) return true;
  }
  return name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema || touches_no_memory(schema->name())) return nullptr;
  Record record{"memory", recorder->lane, -1, schema->name(), {}, {}};
  const auto& returns = schema->returns();
  bool writes = false;
  const auto inputs = function.inputs();
  for (size_t index = 0; index < std::min(inputs.size(), schema->arguments().size()); ++index) {
    const c10::AliasInfo* alias = schema->arguments()[index].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    writes = writes || written;
    recorder->append(record.reads, inputs[index]);
    if (written) recorder->append(record.writes, inputs[index]);
  }
  const bool view = !writes && !returns.empty() &&
                    std::all_of(returns.begin(), returns.end(),
                                [](const auto& returned) { return returned.alias_info() != nullptr; });
  if (!view && !(record.reads.empty() && record.writes.empty())) recorder->add(std::move(record));
  return nullptr;
}

// Records memory that an operator allocated and wrote.
void after_operator(const at::RecordFunction& function, at::ObserverContext*) {
  const auto schema = function.operator_schema();
  if (!schema) return;
  Record record{"memory", recorder->lane, -1, schema->name() + " (new)", {}, {}};
  const auto& returns = schema->returns();
  for (size_t index = 0; index < std::min(returns.size(), function.outputs().size()); ++index) {
    if (returns[index].alias_info() == nullptr) recorder->append(record.writes, function.outputs()[index]);
  }
  if (!record.writes.empty()) recorder->add(std::move(record));
}

// -- the transport ----------------------------------------------------------------------------------------------------

// A point that can be waited for: a mark of a compute stream, or one end of a hop.
struct Point {
  std::string kind;  // of the wait
  int64_t id;
};

class RecordedTransfer : public Transfer {
 public:
  explicit RecordedTransfer(int64_t id) : id_(id) {}
  void wait_received() override { recorder->add({"received", recorder->lane, id_, "", {}, {}}); }
  void wait_sent() override { recorder->add({"sent", recorder->lane, id_, "", {}, {}}); }
  StreamEvent event(End end) const override {
    return std::make_shared<Point>(Point{end == End::received ? "received" : "sent", id_});
  }

 private:
  int64_t id_;
};

// Records that a lane waits for a point.
void wait(int lane, const StreamEvent& event) {
  if (!event) return;
  const auto point = std::static_pointer_cast<Point>(event);
  recorder->add({point->kind, lane, point->id, "", {}, {}});
}

class RecordingStreams : public Streams {
 public:
  explicit RecordingStreams(int multiprocessors) : multiprocessors_(multiprocessors) {}

  bool on_host() const override { return false; }
  StreamEvent record_compute() override {
    auto event = std::make_shared<Point>(Point{"mark", recorder->next++});
    recorder->add({"marked", recorder->lane, event->id, "", {}, {}});
    return event;
  }
  void order_compute_after(const StreamEvent& event) override { wait(recorder->lane, event); }
  void select_compute_stream(int lane) override { recorder->lane = lane; }
  int multiprocessors() const override { return multiprocessors_; }

 private:
  int multiprocessors_;
};

class RecordingTransport : public Transport {
 public:
  RecordingTransport(int multiprocessors, bool sends_anywhere, bool receives_anywhere, int rank, int per_host)
      : Transport(std::make_unique<RecordingStreams>(multiprocessors)),
        sends_anywhere_(sends_anywhere),
        receives_anywhere_(receives_anywhere),
        rank_(rank),
        per_host_(per_host) {}

  const char* name() const override { return "recording"; }

  std::unique_ptr<Transfer> post(const Hop& hop) override {
    Record record{"hop", lane_of(hop.channel, outer(hop.to)), recorder->next++, hop.describe(), {}, {}};
    if (is_collective(hop.action)) {
      for (size_t part = 0; part < hop.send.size(); ++part) collect(hop, part, record);
    }
    for (size_t part = 0; part < hop.receive.size() && !is_collective(hop.action); ++part) {
      const Span& from = hop.send[part];
      const Span& to = hop.receive[part];
      const size_t bytes = std::min(to.bytes, from.bytes);
      if (bytes > 0) std::memcpy(to.data, from.data, bytes);
      if (to.bytes > bytes) std::memset(to.data + bytes, 0, to.bytes - bytes);
      if (from.bytes > 0) record.reads.emplace_back(reinterpret_cast<uintptr_t>(from.data), from.bytes);
      if (to.bytes > 0) record.writes.emplace_back(reinterpret_cast<uintptr_t>(to.data), to.bytes);
    }
    const int64_t id = record.id;
    recorder->add(std::move(record));
    return std::make_unique<RecordedTransfer>(id);
  }

  void order_hops_after(Channel channel, const StreamEvent& event) override {
    for (const bool outer : {false, true}) {
      for (const HopMemory memory : {HopMemory::source, HopMemory::target})
        wait(lane_of(channel, outer, memory), event);
    }
  }
  void order_memory_after(const Hop& hop, HopMemory memory, const StreamEvent& event) override {
    wait(lane_of(hop.channel, outer(hop.to), memory), event);
  }

  // Memory is allocated and freed in the order of the compute stream, as by a stream-ordered allocator.
  at::Tensor allocate(Channel, int64_t bytes) override {
    at::Tensor memory = at::empty({bytes}, at::kByte);
    record_use("allocate", memory);
    return memory;
  }
  void release(Channel, const at::Tensor& memory) override { record_use("release", memory); }
  bool sends_anywhere() const override { return sends_anywhere_; }
  bool receives_anywhere() const override { return receives_anywhere_; }

  void abort(const std::string&) noexcept override {}
  void close() override {}

  bool has_collectives() const override { return true; }

 private:
  // All pieces of a gather are this rank's; a scatter adds up those of its whole.
  static void collect(const Hop& hop, size_t part, Record& record) {
    const at::DisableRecordFunctionGuard unseen;
    const bool gathers = hop.action == Action::gather;
    const Span &own = gathers ? hop.send[part] : hop.receive[part],
               &whole = gathers ? hop.receive[part] : hop.send[part];
    auto& others = gathers ? record.writes : record.reads;
    const auto numbers = static_cast<int64_t>(own.bytes / c10::elementSize(hop.dtype));
    at::Tensor sum = at::from_blob(own.data, {numbers}, hop.dtype);
    for (std::byte* at = whole.data; at < whole.data + whole.bytes; at += own.bytes) {
      if (at == own.data) continue;
      gathers ? static_cast<void>(std::memcpy(at, own.data, own.bytes))
              : static_cast<void>(sum.add_(at::from_blob(at, {numbers}, hop.dtype)));
      others.emplace_back(reinterpret_cast<uintptr_t>(at), own.bytes);
    }
    auto& mine = gathers ? record.reads : record.writes;
    if (own.bytes > 0) mine.emplace_back(reinterpret_cast<uintptr_t>(own.data), own.bytes);
  }

  static void record_use(const char* text, const at::Tensor& memory) {
    Record record{"memory", recorder->lane, -1, text, {}, {}};
    recorder->append(record.writes, memory);
    recorder->add(std::move(record));
  }

  bool outer(int to) const { return per_host_ > 0 && to / per_host_ != rank_ / per_host_; }

  bool sends_anywhere_;
  bool receives_anywhere_;
  int rank_, per_host_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Record>(m, "Record")
      .def_readonly("kind", &Record::kind)
      .def_readonly("lane", &Record::lane)
      .def_readonly("id", &Record::id)
      .def_readonly("text", &Record::text)
      .def_readonly("reads", &Record::reads)
      .def_readonly("writes", &Record::writes);
  m.def(
      "transport",
      [](int multiprocessors, bool sends_anywhere, bool receives_anywhere, int rank,
         int per_host) -> std::shared_ptr<Transport> {
        return std::make_shared<RecordingTransport>(multiprocessors, sends_anywhere, receives_anywhere, rank, per_host);
      },
      py::kw_only(), py::arg("multiprocessors") = 0, py::arg("sends_anywhere") = true,
      py::arg("receives_anywhere") = true, py::arg("rank") = 0, py::arg("per_host") = 0);
  m.def("start", [] {
    recorder = std::make_unique<Accesses>();
    recorder->callback = at::addGlobalCallback(at::RecordFunctionCallback(before_operator, after_operator)
                                                   .needsInputs(true)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
  });
  m.def("records", [] { return recorder->records; });
  m.def("stop", [] {
    if (recorder->callback) at::removeCallback(*recorder->callback);
    recorder = std::make_unique<Accesses>();
  });
}
