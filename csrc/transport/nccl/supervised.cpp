#include "transport/nccl/supervised.h"

#include <algorithm>

namespace rtp {
namespace {

constexpr auto kGivingUp = std::chrono::seconds(2);  // aborted work ends within milliseconds, if at all
// polls before an ended process counts as failed: it may exit in good order before its last hop completes here
constexpr int kUnanswered = 5;

NcclCommunicators connect(const RingEnd& end, const std::vector<std::string>& ids, const CommunicatorOptions& options) {
  const DeviceScope scope(end.device);
  return NcclCommunicators(ids, end.rank, end.ranks, end.device, options, end.timeout);
}

}  // namespace

std::pair<RingEnd, RingEnd> levels_of(const RingEnd& ring, int per_host) {
  RTP_CHECK_VALUE(per_host >= 1 && ring.ranks % per_host == 0, "expected hosts of equally many of ", ring.ranks,
                  " ranks, got ", per_host, " a host");
  RingEnd outer = ring;
  outer.shards = ring.ranks;
  outer.distance = per_host;
  outer.streams = std::make_shared<CudaStreams>(ring.device);
  outer.failure = std::make_shared<SharedFailure>();
  RingEnd inner = outer;
  inner.rank = ring.rank % per_host;
  inner.ranks = per_host;
  inner.first = ring.rank - inner.rank;
  inner.distance = 1;
  return {inner, outer};
}

SupervisedTransport::SupervisedTransport(const RingEnd& end, const std::vector<std::string>& ids,
                                         const CommunicatorOptions& options)
    : CudaTransport(end.device, end.streams), end_(end), communicators_(connect(end, ids, options)) {}

SupervisedTransport::~SupervisedTransport() {
  // A trial hop failed and may still be running.
  if (!watchdog_ && !slots_.empty()) static_cast<void>(new decltype(slots_)(std::move(slots_)));
}

void SupervisedTransport::run_trial_hops() {
  const DeviceScope scope(device_);
  for (const Channel channel : {Channel::weight, Channel::gradient}) {
    const at::Tensor from = allocate(channel, 1), to = allocate(channel, 1);
    Hop hop;
    hop.channel = channel;
    hop.to = (end_.rank + end_.distance) % end_.ranks;
    hop.from = (end_.rank + end_.ranks - end_.distance) % end_.ranks;
    hop.send_slot = static_cast<std::byte*>(from.data_ptr());
    hop.receive_slot = static_cast<std::byte*>(to.data_ptr());
    hop.send = {{hop.send_slot, 1}};
    hop.receive = {{hop.receive_slot, 1}};
    hop.remote_receive_offsets = hop.remote_send_offsets = {0};
    hop.operation = "the first hop of the ring";
    hop.count = 1;
    cudaStream_t stream = this->stream(channel);
    order_hops_after(channel, streams_.record_compute());
    enqueue(hop, stream);
    Event end;
    end.record(stream);
    const auto start = std::chrono::steady_clock::now();
    while (!end.reached()) {
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > end_.timeout) {
        const auto given_up = std::chrono::steady_clock::now();
        while (give_up() && !end.reached() && std::chrono::steady_clock::now() - given_up < kGivingUp) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        throw_timeout(hop, end_.first + hop.from, waited, "the hop did not end");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    release(channel, from);
    release(channel, to);
  }
}

void SupervisedTransport::start() {
  Watchdog::Callbacks callbacks;
  callbacks.find_failure = [this](const std::vector<int>& awaited) { return find_failure(awaited); };
  callbacks.give_up = [this](const Failure& failure) {
    if (end_.peer_status) end_.peer_status->report_failure(failure.reason);
    if (end_.failure) end_.failure->set(failure);
    const DeviceScope scope(device_);
    return give_up();
  };
  watchdog_ = std::make_unique<Watchdog>(device_, end_.timeout, end_.first, std::move(callbacks));
}

std::unique_ptr<Transfer> SupervisedTransport::post(const Hop& hop) {
  const DeviceScope scope(device_);
  watchdog_->check();
  cudaStream_t stream = this->stream(hop.channel);
  Ends ends;
  try {
    ends = enqueue(hop, stream);
  } catch (const RotationError&) {
    watch_rest(hop, stream);
    watchdog_->check();  // the watchdog's reason is more specific
    throw;
  }
  if (!ends.received) {
    ends.received = streams_.event(stream);
    watch(hop, ends.received);
  }
  if (!ends.sent) ends.sent = ends.received;
  return transfer(ends.sent, ends.received);
}

// Hops that are being captured are not supervised: their events cannot be queried, and they run when the graph does.
// after_graph() supervises a graph of this package as a whole.
void SupervisedTransport::watch(const Hop& hop, const StreamEvent& done) {
  if (streams_.capturing()) return;
  if (streams_.capture() != 0) {
    captured_ = true;
  } else {
    watchdog_->watch(hop, done);
  }
}

// Supervises the part of a failed hop that was enqueued.
void SupervisedTransport::watch_rest(const Hop& hop, cudaStream_t stream) noexcept {
  try {
    watch(hop, streams_.event(stream));
  } catch (...) {  // the original error is being propagated
  }
}

void SupervisedTransport::after_graph(const std::string& operation, const StreamEvent& end) {
  Hop all;
  all.operation = operation;
  all.to = all.from = Watchdog::kAnyRank;
  watchdog_->watch(all, end);
}

std::optional<Failure> SupervisedTransport::find_failure(const std::vector<int>& oldest) {
  std::vector<int> awaited = oldest;
  if (std::find(oldest.begin(), oldest.end(), Watchdog::kAnyRank) != oldest.end()) {
    awaited.clear();
    for (int peer = 0; peer < end_.ranks; ++peer) {
      if (peer != end_.rank) awaited.push_back(peer);
    }
  }
  if (end_.failure) {
    if (auto failure = end_.failure->get()) return failure;
  }
  if (auto error = communicators_.asynchronous_error()) return Failure{Failure::Kind::nccl, *error};
  if (!end_.peer_status) return std::nullopt;
  if (auto reported = end_.peer_status->failed_peer()) return Failure{Failure::Kind::lost, *reported};
  for (int& peer : awaited) peer += end_.first;
  const auto ended = end_.peer_status->ended(awaited);
  unanswered_ = ended ? unanswered_ + 1 : 0;
  if (unanswered_ < kUnanswered) return std::nullopt;
  return Failure{Failure::Kind::lost,
                 concat("rank ", *ended, " of the ring did not answer: ", why_lost(PeerState::gone))};
}

bool SupervisedTransport::give_up() noexcept {
  communicators_.abort();
  return false;
}

void SupervisedTransport::abort(const std::string& reason) noexcept {
  if (!watchdog_) return;  // the constructor has not finished
  watchdog_->fail({Failure::Kind::other, reason});
  watchdog_->drain(kGivingUp);
}

void SupervisedTransport::close() {
  const DeviceScope scope(device_);
  watchdog_->drain(end_.timeout);
  watchdog_->check();
  watchdog_->stop();
  deregister_all();
  communicators_.finalize();
}

void SupervisedTransport::drop() noexcept {
  if (!watchdog_->drain(end_.timeout)) {
    abort("dropped while a hop was in flight");
    return;
  }
  const DeviceScope scope(device_);
  cudaStreamSynchronize(streams_.compute());  // the compute stream may still use the slots
  watchdog_->stop();
  give_up();
}

void SupervisedTransport::check() const {
  if (watchdog_) watchdog_->check();
}

void SupervisedTransport::refuse_capture() const {
  if (streams_.capture() == 0) return;
  throw RotationError(
      concat("transport ", name(),
             ": slots cannot be made or ended while a graph is captured; run the same pass once before"));
}

void SupervisedTransport::finish_uses(Channel channel) const {
  RTP_CUDA_CHECK(cudaStreamSynchronize(stream(channel)));
  RTP_CUDA_CHECK(cudaStreamSynchronize(streams_.compute()));
}

StreamEvent SupervisedTransport::supervise(const Hop& hop, int peer, cudaStream_t stream) {
  const StreamEvent reached = streams_.event(stream);
  if (watchdog_) {  // without a watchdog, run_trial_hops() waits for the hop
    Hop awaited = hop;
    awaited.from = peer;
    watch(awaited, reached);
  }
  return reached;
}

bool SupervisedTransport::all_hops_ended() noexcept {
  if (!watchdog_) return false;  // a trial hop failed
  if (end_.failure && end_.failure->hops_run_on) return false;
  return !watchdog_->failed() || (!captured_ && watchdog_->drain(kGivingUp));
}

void SupervisedTransport::leak_slots_in_use() noexcept {
  const bool over = all_hops_ended();
  if (!over && end_.failure) end_.failure->hops_run_on = true;
  watchdog_->stop();
  if (!over) static_cast<void>(new decltype(slots_)(std::move(slots_)));
}

}  // namespace rtp
