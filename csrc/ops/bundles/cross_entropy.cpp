#include "ops/bundles/cross_entropy.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "base/checks.h"
#include "compute/gemm/gemm.h"
#include "compute/gemm/gemm_layout.h"
#include "compute/logits.h"

namespace rtp {
namespace {

// Limits for a chunk of tokens: its logits take a small part of the memory of all logits of one shard, and its GEMM has
// enough rows to be efficient.
constexpr int64_t kLogitBytes = int64_t{64} << 20;
constexpr int64_t kLeastRows = 128;
constexpr int64_t kLeastChunks = 4;

constexpr OperationKind kCrossEntropy = operation_kind("linear cross-entropy");
constexpr int kWeight = 0, kBias = 1;

LinearShape linear_shape(const CrossEntropyShape& shape) {
  return {shape.vocabulary, shape.features, true, shape.transposed, shape.frozen};
}

// The vocabulary shards of the current step, and the computation of their logits.
class VocabularyShard {
 public:
  VocabularyShard(const std::vector<at::Tensor>& shard, const Weights& head, const CrossEntropyShape& shape,
                  const std::vector<Weights::Range>& vocabulary, const at::Tensor& targets, const at::Tensor& buffer)
      : shape_(shape),
        start_(vocabulary.front().first),
        targets_(targets),
        ignore_index_(shape.ignore_index),
        buffer_(buffer) {
    weight_ = gemm_operand(outputs_first(head.as_stored(kWeight, shard[kWeight]), linear_shape(shape)));
    if (shape.bias) bias_ = shard[kBias].to(buffer.scalar_type());
    if (vocabulary.size() == 1) return;
    // Columns of two ranges, the first from 0 on: targets become columns; those between have none.
    const int64_t before = vocabulary[0].count, after = vocabulary[1].first;
    const at::Tensor outside = targets.ge(before).logical_and_(targets.lt(after));
    targets_ = targets.add(targets.ge(after), before - after).masked_fill_(outside, size());
    targets_.masked_fill_(targets.eq(shape.ignore_index), kIgnored);
    ignore_index_ = kIgnored;
  }

  const at::Tensor& weight() const { return weight_; }
  int64_t size() const { return weight_.size(0); }

  // On a CPU, converts 16-bit GEMM operands to float32 once for all chunks; on other devices, the GEMM converts them.
  at::Tensor gemm_operand(const at::Tensor& operand) const {
    return operand.is_cpu() ? operand.to(buffer_.scalar_type()) : operand;
  }

  // Returns the logits [rows, size] of the tokens x [rows, features] from `first` on, in the buffer.
  LogitChunk logits(const at::Tensor& x, int64_t first) const {
    const int64_t stride = aligned_stride(size(), static_cast<int64_t>(buffer_.element_size()));
    const at::Tensor z = buffer_.narrow(0, 0, x.size(0) * stride).view({x.size(0), stride}).narrow(1, 0, size());
    gemm(z, bias_, gemm_operand(x), weight_.t());
    return {z, targets_.narrow(0, first, x.size(0)), start_, ignore_index_, shape_.soft_cap};
  }

 private:
  static constexpr int64_t kIgnored = -1;

  const CrossEntropyShape& shape_;
  int64_t start_;
  at::Tensor targets_;
  int64_t ignore_index_;
  at::Tensor buffer_, weight_, bias_;
};

Weights head_weights(Executor& executor, const RotationOptions& options, Pass pass, const CrossEntropyShape& shape,
                     const std::vector<at::Tensor>& parameters) {
  RTP_CHECK_VALUE(
      !shape.frozen || (!shape.transposed && (!shape.bias || rows_of_blocks(*shape.frozen, shape.features) == 1)),
      options.name, ": expected a frozen weight stored [vocabulary, features], and with a bias one whose rows ",
      "fill whole blocks, got rows of ", shape.features);
  Weights head(executor, options, kCrossEntropy, pass, parameters);
  head.add(weight_facts(linear_shape(shape)));
  head.add({{shape.vocabulary}}, shape.bias);
  return head;
}

// The memory for the logits of a product, with one shard or a group, or a chunk of a shard, for some tokens at once.
struct LogitBuffer {
  LogitBuffer(const Weights& head, const Schedule& schedule, const at::Tensor& x, at::ScalarType sums) {
    int64_t most = 0;
    for (const Step& step : schedule.steps) {
      if (step.action == Action::compute) most = std::max(most, head.extent(kWeight, step));
    }
    const int64_t tokens = x.size(0);
    const auto element = static_cast<int64_t>(c10::elementSize(sums));
    const int64_t row = std::max<int64_t>(most, 1) * element;
    tokens_at_once = std::max(std::min(kLogitBytes / row, (tokens + kLeastChunks - 1) / kLeastChunks), kLeastRows);
    memory = at::empty({std::min(tokens_at_once, tokens) * aligned_stride(most, element)}, x.options().dtype(sums));
  }

  int64_t tokens_at_once;
  at::Tensor memory;
};

void check_targets(const at::Tensor& x, const at::Tensor& targets, const CrossEntropyShape& shape,
                   const RotationOptions& options) {
  RTP_CHECK_TYPE(targets.scalar_type() == at::kLong && targets.dim() == 1 && targets.is_contiguous(), options.name,
                 ": expected contiguous int64 targets [M], got ", targets.scalar_type(), " ", targets.sizes());
  RTP_CHECK_VALUE(targets.numel() == x.size(0), options.name, ": expected ", x.size(0), " targets, got ",
                  targets.numel());
  RTP_CHECK_TYPE(targets.device() == x.device(), options.name, ": expected targets on ", x.device().str(), ", got ",
                 targets.device().str());
  if (targets.numel() == 0) return;
  const at::Tensor valid =
      targets.ge(0).logical_and_(targets.lt(shape.vocabulary)).logical_or_(targets.eq(shape.ignore_index)).all();
  if (!targets.is_cpu()) {
    at::_assert_async(valid);
    return;
  }
  if (valid.item<bool>()) return;
  const at::Tensor wrong = targets.masked_select(
      targets.ne(shape.ignore_index).logical_and_(targets.lt(0).logical_or_(targets.ge(shape.vocabulary))));
  TORCH_CHECK_INDEX(false, options.name, ": expected targets in [0, ", shape.vocabulary, ") or ", shape.ignore_index,
                    ", got ", wrong[0].item<int64_t>());
}

// Returns for every owner whether another compute runs between its dgrad and its wgrad.
std::vector<bool> separate_wgrads(const Schedule& schedule) {
  std::vector<bool> separate(static_cast<size_t>(schedule.ranks), false);
  int last = kNoOwner;  // owner of the previous compute
  for (const Step& step : schedule.steps) {
    if (step.action != Action::compute) continue;
    if (step.compute == Compute::wgrad) separate[static_cast<size_t>(step.owner)] = step.owner != last;
    last = step.owner;
  }
  return separate;
}

}  // namespace

CrossEntropyResult cross_entropy_forward(Executor& executor, const at::Tensor& x, const at::Tensor& targets,
                                         const std::vector<at::Tensor>& parameters, const CrossEntropyShape& shape,
                                         const RotationOptions& options) {
  check_operand(executor, options, "an input", x, shape.features);
  check_targets(x, targets, shape, options);
  const int64_t tokens = x.size(0);
  const auto sums = x.options().dtype(accumulation_dtype(options.compute_dtype));
  const Weights whole = head_weights(executor, options, Pass::forward, shape, parameters);

  // Running maximum, sum of exp(z - maximum), z of the target, sum of z. The maximum starts finite: if all logits of a
  // shard are -inf (a masked part of the vocabulary), this avoids -inf - -inf.
  const at::Tensor lse = at::zeros({2, tokens}, sums);
  const at::Tensor most = lse.select(0, 0).fill_(std::numeric_limits<float>::lowest());
  const at::Tensor scaled = lse.select(0, 1);
  const at::Tensor hit = at::zeros({tokens}, sums);
  const at::Tensor total = shape.label_smoothing > 0 ? at::zeros({tokens}, sums) : at::Tensor();

  whole.each_chunk([&](const Weights& head) {
    ShardBundle bundle = *head.bundle();
    const Schedule& schedule = forward_schedule(executor, head.options(), bundle, {.groups = head.grouped()});
    const LogitBuffer buffer(head, schedule, x, accumulation_dtype(options.compute_dtype));
    Execution pass(executor, schedule, std::move(bundle), std::nullopt, options.name + " forward");
    pass.wrap_groups();
    while (const Step* step = pass.next()) {
      const std::vector<Weights::Range> vocabulary = head.ranges(kWeight, *step);
      if (vocabulary.empty()) continue;
      const VocabularyShard shard(pass.weight(), head, shape, vocabulary, targets, buffer.memory);
      for (int64_t first = 0; first < tokens; first += buffer.tokens_at_once) {
        const int64_t rows = std::min(buffer.tokens_at_once, tokens - first);
        const auto of = [&](const at::Tensor& per_token) { return per_token.narrow(0, first, rows); };
        add_logits(shard.logits(of(x), first), {of(most), of(scaled), of(hit), total.defined() ? of(total) : total});
      }
    }
  });
  // Subtracts logits first: their differences are exact even if the logits have few digits left.
  at::Tensor loss = scaled.log_().add(most.sub(hit), 1 - shape.label_smoothing);
  if (total.defined()) {
    loss.add_(most.sub(total, 1.0 / static_cast<double>(shape.vocabulary)), shape.label_smoothing);
  }
  if (shape.z_loss > 0) {
    const at::Tensor sum = most.add(scaled);
    loss.addcmul_(sum, sum, shape.z_loss);
  }
  loss.masked_fill_(targets.eq(shape.ignore_index), 0);
  return {loss, lse};
}

std::vector<at::Tensor> cross_entropy_backward(Executor& executor, const at::Tensor& dloss, const at::Tensor& x,
                                               const at::Tensor& targets, const at::Tensor& lse,
                                               const std::vector<at::Tensor>& parameters,
                                               const CrossEntropyShape& shape, bool needs_x,
                                               const std::vector<bool>& needs_parameter,
                                               const RotationOptions& options) {
  const int64_t tokens = x.size(0);
  const at::ScalarType sum_dtype = accumulation_dtype(options.compute_dtype);
  const Weights whole = head_weights(executor, options, Pass::backward, shape, parameters);
  const Gradients gradients(executor, options, whole, needs_parameter);
  const LinearShape linear = linear_shape(shape);

  // d loss / d z = coefficient p - hit [z is the target's] - everywhere, and coefficient p = exp(z - most) factor
  const at::Tensor g = dloss.masked_fill(targets.eq(shape.ignore_index), 0);
  const at::Tensor most = lse.select(0, 0);
  at::Tensor factor = g.mul(lse.select(0, 1).neg().exp_());
  if (shape.z_loss > 0) factor.mul_(lse.sum(0).mul_(2 * shape.z_loss).add_(1));
  const double everywhere = shape.label_smoothing / static_cast<double>(shape.vocabulary);
  const auto sums = x.options().dtype(sum_dtype);
  const at::Tensor dx = needs_x ? at::zeros({tokens, shape.features}, sums) : at::Tensor();

  int64_t tokens_at_once = 0;
  const auto of = [&](const at::Tensor& per_token, int64_t first) {
    return per_token.narrow(0, first, std::min(tokens_at_once, tokens - first));
  };
  // Returns the gradient of the logits of one chunk, [rows, size].
  const auto gradient_of_logits = [&](const VocabularyShard& shard, int64_t first) {
    return logit_gradient(shard.logits(of(x, first), first),
                          {of(most, first), of(factor, first), of(g, first), shape.label_smoothing, everywhere},
                          options.compute_dtype);
  };
  const auto add_dx = [&](const VocabularyShard& shard, const at::Tensor& dz, int64_t first) {
    if (dx.defined()) gemm(of(dx, first), of(dx, first), dz, shard.weight());
  };

  whole.each_chunk([&](const Weights& head) {
    std::optional<ShardBundle> weights = head.bundle(), travelling = gradients.bundle(head);
    const BackwardNeeds needs{
        .wgrad = gradients.any(), .bundle = kCrossEntropy.bundle, .permits = {.groups = head.grouped()}};
    const Schedule& schedule = backward_schedule(executor, head.options(), weights, needs);
    const LogitBuffer buffer(head, schedule, x, sum_dtype);
    tokens_at_once = buffer.tokens_at_once;
    Execution pass(executor, schedule, std::move(weights), std::move(travelling), options.name + " backward");
    const std::vector<bool> is_separate = separate_wgrads(schedule);
    pass.wrap_groups();
    at::Tensor first_chunk;  // first chunk of a shard: computed in its dgrad, reused in its wgrad
    while (const Step* step = pass.next()) {
      const std::vector<Weights::Range> vocabulary = head.ranges(kWeight, *step);
      if (vocabulary.empty()) continue;
      const VocabularyShard shard(pass.weight(), head, shape, vocabulary, targets, buffer.memory);
      // A wgrad that does not directly follow its dgrad recomputes the logits.
      const bool separate = is_separate[static_cast<size_t>(step->owner)];
      if (step->compute == Compute::dgrad) {
        // The first chunk overlaps with the hop of the partial gradient; the other chunks follow in wgrad.
        const bool dgrad_only = separate || !gradients.any();
        for (int64_t first = 0; first < (dgrad_only ? tokens : std::min(tokens_at_once, tokens));
             first += tokens_at_once) {
          if (dgrad_only && !dx.defined()) break;
          first_chunk = gradient_of_logits(shard, first);
          add_dx(shard, first_chunk, first);
        }
        continue;
      }
      const Gradients::Sums of_shard(gradients, pass);
      for (const int parameter : {kWeight, shape.bias ? kBias : -1}) {
        if (tokens == 0 && of_shard.wants(parameter))
          copy_or_zero(of_shard.out(parameter), of_shard.arrived(parameter));
      }
      for (int64_t first = 0; first < tokens; first += tokens_at_once) {
        const bool reuse = first == 0 && !separate;
        const at::Tensor dz = reuse ? first_chunk : gradient_of_logits(shard, first);
        if (!reuse && !separate) add_dx(shard, dz, first);
        // the received partial sum, then the sum of the previous chunks
        const auto before = [&](int parameter) {
          return first > 0 ? of_shard.out(parameter) : of_shard.arrived(parameter);
        };
        if (of_shard.wants(kWeight)) {
          gemm(outputs_first(of_shard.out(kWeight), linear), outputs_first(before(kWeight), linear), dz.t(),
               shard.gemm_operand(of(x, first)), of_shard.scale());
        }
        if (shape.bias && of_shard.wants(kBias)) {
          column_sum(of_shard.out(kBias), before(kBias), dz, of_shard.scale());
        }
      }
    }
  });

  std::vector<at::Tensor> result{dx.defined() ? dx.to(options.compute_dtype) : at::Tensor()};
  for (at::Tensor& gradient : gradients.result()) result.push_back(std::move(gradient));
  return result;
}

}  // namespace rtp
