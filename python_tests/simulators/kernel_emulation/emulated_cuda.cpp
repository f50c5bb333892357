#include "emulated_cuda.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = size_t{256} << 10;

enum class State { waiting_to_start, running, at_barrier, at_exchange, done };

struct Abandoned {};  // unwinds a fiber of a failed launch

// A stack on which threads run one after the other, each until its first wait or its end.
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  void* shadow = nullptr;  // shadow stack of the address sanitizer
  int thread = -1;         // -1: idle
};

struct Thread {
  State state = State::waiting_to_start;
  Fiber* fiber = nullptr;
  int exchanges = 0;
};

struct Warp {  // values published by the lanes; two buffers, because a lane may be one exchange ahead
  uint64_t values[2][kLanes];
};

class Block {
 public:
  int run(dim3 grid, dim3 block, const std::function<void()>& kernel);

  void wait(State state) {
    Fiber& fiber = *current_;
    threads_[static_cast<size_t>(fiber.thread)].state = state;
    leave(fiber);
    if (!error_.empty()) throw Abandoned{};
  }
  void exchange(const void* give, void* take, size_t bytes, int source) {
    const int index = current_->thread;
    Thread& thread = threads_[static_cast<size_t>(index)];
    const int turn = thread.exchanges++ % 2;
    if (threads_.size() % kLanes != 0) throw Violation("a shuffle in a block whose last warp is not whole");
    auto& values = warps_[static_cast<size_t>(index / kLanes)].values[turn];
    std::memcpy(&values[index % kLanes], give, bytes);
    wait(State::at_exchange);
    std::memcpy(take, &values[source], bytes);
  }
  void work(Fiber& fiber);
  void enter_first();

  Fiber* current_ = nullptr;
  int64_t epoch_ = 0;
  int64_t number_ = 0;
  Order order_ = Order::forward;
  std::string message_;

 private:
  bool run_block();
  Fiber& idle_fiber();
  void resume(Fiber& fiber);
  void leave(Fiber& fiber);
  void resume_all(const std::vector<int>& threads);
  void place(int thread);
  void fail(const std::string& error) {
    if (error_.empty()) error_ = error;
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  const std::function<void()>* kernel_ = nullptr;
  int started_ = 0;
  std::string error_;
  ucontext_t scheduler_;
  void* scheduler_shadow_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_bytes_ = 0;
};

Block engine;

void fiber_main() {
  Fiber& fiber = *engine.current_;
  engine.enter_first();
  engine.work(fiber);
}

Fiber& Block::idle_fiber() {
  for (auto& fiber : fibers_) {
    if (fiber->thread < 0) return *fiber;
  }
  auto fiber = std::make_unique<Fiber>();
  fiber->stack = std::make_unique<char[]>(kStackBytes);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, fiber_main, 0);
  fibers_.push_back(std::move(fiber));
  return *fibers_.back();
}

void Block::resume(Fiber& fiber) {
  current_ = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_shadow_, fiber.stack.get(), kStackBytes);
#endif
  swapcontext(&scheduler_, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_shadow_, nullptr, nullptr);
#endif
}

void Block::leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber.shadow, scheduler_stack_, scheduler_bytes_);
#endif
  swapcontext(&fiber.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.shadow, nullptr, nullptr);
#endif
}

void Block::enter_first() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_bytes_);
#endif
}

void Block::place(int thread) {
  const unsigned index = static_cast<unsigned>(thread);
  threadIdx = dim3(index % blockDim.x, index / blockDim.x % blockDim.y, index / (blockDim.x * blockDim.y));
}

void Block::work(Fiber& fiber) {
  while (true) {
    while (error_.empty() && started_ < static_cast<int>(threads_.size())) {
      const int turn = started_++;
      const int thread = order_ == Order::forward ? turn : static_cast<int>(threads_.size()) - 1 - turn;
      fiber.thread = thread;
      threads_[static_cast<size_t>(thread)] = {State::running, &fiber, 0};
      place(thread);
      try {
        (*kernel_)();
      } catch (const Abandoned&) {
      } catch (const std::exception& error) {
        fail(error.what());
      }
      threads_[static_cast<size_t>(thread)].state = State::done;
    }
    fiber.thread = -1;
    leave(fiber);
  }
}

void Block::resume_all(const std::vector<int>& threads) {
  for (const int thread : threads) threads_[static_cast<size_t>(thread)].state = State::running;
  for (const int thread : threads) {
    place(thread);
    resume(*threads_[static_cast<size_t>(thread)].fiber);
  }
}

bool Block::run_block() {
  ++number_;
  ++epoch_;
  started_ = 0;
  const int count = static_cast<int>(threads_.size());
  std::fill(threads_.begin(), threads_.end(), Thread{});
  const auto in_state = [&](State state, int begin, int end) {
    std::vector<int> found;
    for (int thread = begin; thread < end; ++thread) {
      if (threads_[static_cast<size_t>(thread)].state == state) found.push_back(thread);
    }
    if (order_ == Order::backward) std::reverse(found.begin(), found.end());
    return found;
  };
  while (true) {
    while (error_.empty() && started_ < count) resume(idle_fiber());
    const std::vector<int> barred = in_state(State::at_barrier, 0, count);
    const std::vector<int> exchanging = in_state(State::at_exchange, 0, count);
    if (!error_.empty()) {
      resume_all(barred);
      resume_all(exchanging);
      return false;
    }
    if (barred.empty() && exchanging.empty()) return true;
    if (static_cast<int>(barred.size()) == count) {
      ++epoch_;
      resume_all(barred);
      continue;
    }
    bool moved = false;
    for (int first = 0; first < count; first += kLanes) {
      const std::vector<int> lanes = in_state(State::at_exchange, first, std::min(first + kLanes, count));
      if (lanes.size() != kLanes) continue;
      resume_all(lanes);
      moved = true;
    }
    if (moved) continue;
    fail(exchanging.empty()
             ? "only " + std::to_string(barred.size()) + " of " + std::to_string(count) + " threads reach a barrier"
             : "only some lanes of a warp reach a shuffle: " + std::to_string(exchanging.size()) +
                   " threads of the block wait there");
  }
}

int Block::run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  gridDim = grid;
  blockDim = block;
  kernel_ = &kernel;
  error_.clear();
  message_.clear();
  threads_.resize(static_cast<size_t>(block.x) * block.y * block.z);
  warps_.resize((threads_.size() + kLanes - 1) / kLanes);
  const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  for (int64_t turn = 0; turn < blocks; ++turn) {
    const auto index = static_cast<unsigned>(order_ == Order::forward ? turn : blocks - 1 - turn);
    blockIdx = dim3(index % grid.x, index / grid.x % grid.y, index / (grid.x * grid.y));
    if (run_block()) continue;
    message_ = error_;
    return 1;
  }
  return 0;
}

}  // namespace

void set_order(Order order) { engine.order_ = order; }
int run(dim3 grid, dim3 block, const std::function<void()>& kernel) { return engine.run(grid, block, kernel); }
const char* message() { return engine.message_.c_str(); }
int thread_index() { return engine.current_->thread; }
int64_t epoch() { return engine.epoch_; }
int64_t block_number() { return engine.number_; }
void barrier() { engine.wait(State::at_barrier); }
void exchange(const void* give, void* take, size_t bytes, int source) { engine.exchange(give, take, bytes, source); }

uint16_t bfloat16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float bfloat16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

uint16_t float16_bits(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  int exponent = -13;  // below it: equally spaced subnormal numbers
  if (magnitude > 0) std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -13);
  // 11 significant bits; nearbyint rounds ties to even
  const auto steps = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
  return sign | static_cast<uint16_t>(((exponent + 13) << 10) + steps);
}

float float16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = fraction != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace emulation
