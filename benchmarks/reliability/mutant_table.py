"""Mistakes for mutants.py: what stands in a file, what stands there instead, and which tests have to notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str  # of the repository
    before: str  # occurs once
    after: str
    tests: tuple[str, ...]  # files of python_tests, or tests in them: path::name


_FUNCTIONAL = "rtp_ext/functional/"
_OUTER = "rtp_ext/outer/"
_LINEAR = ("functional/test_linear.py",)
_MLP = ("functional/test_mlp.py",)
_EXPERTS = ("functional/test_experts.py", "functional/test_experts_biases.py")
_HEAD = ("functional/test_cross_entropy.py",)
_EMBEDDING = ("functional/test_embedding.py",)
_CONVOLUTION = ("functional/test_convolution.py",)
_WRITES = ("functional/test_autograd.py::test_weights_written_before_a_backward",)
_FLYWEIGHT = ("nn/test_flyweight.py", "nn/test_flyweight_behaviour.py")
_WHOLE = ("convert/test_whole_embedding.py",)
_GATHERED = ("convert/test_gathered.py", "convert/test_convert.py")
_APART = ("outer/test_apart.py",)
_COMPRESSION = ("outer/test_compressors.py", "outer/test_compression.py")

MUTANTS = (
    # -- operations: functional/_call.py -------------------------------------------------------------------------------
    Mutant(
        "gradients are reduced in the compute dtype",
        _FUNCTIONAL + "_call.py",
        "reduce = reduce_dtype or (torch.float64 if compute == torch.float64 else torch.float32)",
        "reduce = reduce_dtype or compute",
        _LINEAR,
    ),
    Mutant(
        "the reduce dtype that was asked for is not taken",
        _FUNCTIONAL + "_call.py",
        "reduce = reduce_dtype or (torch.float64",
        "reduce = (torch.float64",
        _CONVOLUTION,
    ),
    Mutant(
        "autocast casts float64",
        _FUNCTIONAL + "_call.py",
        "if autocasts and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:",
        "if autocasts and torch.is_autocast_enabled(kind):",
        (*_LINEAR, *_MLP, "convert/test_behaviour.py"),
    ),
    Mutant(
        "gradients are not cast to the dtype of their parameters",
        _FUNCTIONAL + "_call.py",
        "return [None if gradient is None else rounded(gradient, parameter.dtype) for parameter, gradient in pairs]",
        "return [gradient for parameter, gradient in pairs]",
        _LINEAR,
    ),
    Mutant(
        "ranks do not compare which gradients of parameters they want",
        _FUNCTIONAL + "_call.py",
        "f\"gradients of {', '.join(home.what for home in homes)} {call.needs[-len(homes) :]}\",",
        "",
        ("ring/test_failures.py", "convert/test_agreement.py"),
    ),
    Mutant(
        "plain shards are not compared with the chunk rule",
        _FUNCTIONAL + "_call.py",
        "if list(shape) != expected:",
        "if False:",
        (*_MLP, *_EXPERTS),
    ),
    # -- linear --------------------------------------------------------------------------------------------------------
    Mutant(
        "the bias gradient of a layer cut along its inputs is summed",
        _FUNCTIONAL + "linear.py",
        "dbias = None if dbias is None else rounded(dbias, ctx.bias_dtype)",
        "dbias = None if dbias is None else rounded(dbias * ctx.call.ring.size, ctx.bias_dtype)",
        _LINEAR,
    ),
    Mutant(
        "the weight gradient of a layer cut along its inputs is not cast",
        _FUNCTIONAL + "linear.py",
        "dweight = None if dweight is None else rounded(dweight, weight.dtype)",
        "",
        _LINEAR,
    ),
    Mutant(
        "an input is saved that no gradient needs",
        _FUNCTIONAL + "linear.py",
        "keep = any(ctx.needs_parameter)",
        "keep = True",
        (*_LINEAR, "functional/test_split_backward.py", "convert/test_behaviour.py"),
    ),
    Mutant(
        "a write to a weight before its backward goes unnoticed",
        _FUNCTIONAL + "linear.py",
        "read = [any(ctx.needs_input[which] for which in inputs) for inputs in bundle.multiplied]",
        "read = [False for inputs in bundle.multiplied]",
        _WRITES,
    ),
    Mutant(
        "weights travel where no gradient of the input is wanted",
        _FUNCTIONAL + "linear.py",
        "            needs[: bundle.inputs],\n",
        "            [True] * bundle.inputs,\n",
        _LINEAR,
    ),
    # -- MLP -----------------------------------------------------------------------------------------------------------
    Mutant(
        "the bias of up is also that of the gate",
        _FUNCTIONAL + "mlp.py",
        '("gate bias", parameters.gate_bias, 0, 1),',
        '("gate bias", parameters.up_bias, 0, 1),',
        _MLP,
    ),
    Mutant(
        "geglu approximates", _FUNCTIONAL + "mlp.py", '"geglu": ("gelu", True)', '"geglu": ("gelu_tanh", True)', _MLP
    ),
    Mutant(
        "hidden values are kept though they are to be recomputed",
        _FUNCTIONAL + "mlp.py",
        "keep = not recompute and any(call.needs)",
        "keep = any(call.needs)",
        _MLP,
    ),
    Mutant(
        "a write to the weight of down goes unnoticed",
        _FUNCTIONAL + "mlp.py",
        'found = {"down weight": hidden, "down bias": False}',
        'found = {"down weight": False, "down bias": False}',
        _WRITES,
    ),
    Mutant(
        "a bias of the gate alone is taken",
        _FUNCTIONAL + "mlp.py",
        "if gated and (gate_bias is None) != (up_bias is None):",
        "if False:",
        _MLP,
    ),
    # -- experts -------------------------------------------------------------------------------------------------------
    Mutant(
        "a write to up goes unnoticed where it is recomputed from",
        _FUNCTIONAL + "experts.py",
        '"up bias": not keep,',
        '"up bias": False,',
        (*_EXPERTS, *_WRITES),
    ),
    Mutant(
        "interleaved gates are taken for halves",
        _FUNCTIONAL + "experts.py",
        "interleaved=interleaved,",
        "interleaved=False,",
        _EXPERTS,
    ),
    Mutant("gates are not clamped", _FUNCTIONAL + "experts.py", "clamped=clamped,", "clamped=None,", _EXPERTS),
    Mutant(
        "ranks do not compare the limits of clamped gates",
        _FUNCTIONAL + "experts.py",
        '("clamped", clamped),',
        "",
        _EXPERTS,
    ),
    Mutant(
        "a negative index of an expert is taken",
        _FUNCTIONAL + "experts.py",
        "(int(flat.min()) < 0 or",
        "(False or",
        _EXPERTS,
    ),
    Mutant(
        "hidden values of experts are kept though they are to be recomputed",
        _FUNCTIONAL + "experts.py",
        "keep = not recompute and any(call.needs)",
        "keep = any(call.needs)",
        _EXPERTS,
    ),
    # -- cross-entropy -------------------------------------------------------------------------------------------------
    Mutant(
        "the mean counts targets that are ignored",
        _FUNCTIONAL + "cross_entropy.py",
        "return loss.sum() / flat.ne(ignore_index).sum()",
        "return loss.sum() / flat.numel()",
        _HEAD,
    ),
    Mutant(
        "labels are not smoothed",
        _FUNCTIONAL + "cross_entropy.py",
        "label_smoothing=label_smoothing,",
        "label_smoothing=0.0,",
        _HEAD,
    ),
    Mutant(
        "logits are not capped", _FUNCTIONAL + "cross_entropy.py", "soft_cap=soft_cap or 0.0,", "soft_cap=0.0,", _HEAD
    ),
    Mutant("the z-loss counts twice", _FUNCTIONAL + "cross_entropy.py", "z_loss=z_loss,", "z_loss=2 * z_loss,", _HEAD),
    Mutant(
        "the gradient of the loss is one",
        _FUNCTIONAL + "cross_entropy.py",
        "            dloss.contiguous(),\n",
        "            torch.ones_like(dloss),\n",
        _HEAD,
    ),
    # -- embedding, convolution, flyweight -----------------------------------------------------------------------------
    Mutant(
        "the padding row gets a gradient",
        _FUNCTIONAL + "embedding.py",
        "return home, (shape, padding_idx % shape[0])",
        "return home, (shape, -1)",
        _EMBEDDING,
    ),
    Mutant(
        "a padding row that is counted from the end gets a gradient",
        _FUNCTIONAL + "embedding.py",
        "return home, (shape, padding_idx % shape[0])",
        "return home, (shape, padding_idx)",
        _EMBEDDING,
    ),
    Mutant(
        "the gradient of a table is not cast",
        _FUNCTIONAL + "embedding.py",
        "rounded(dweight, ctx.weight_dtype)",
        "dweight",
        _EMBEDDING,
    ),
    Mutant(
        "gradients of convolutions are summed",
        _FUNCTIONAL + "convolution.py",
        "scale = 1.0 / call.ring.size",
        "scale = 1.0",
        _CONVOLUTION,
    ),
    Mutant(
        "a shard takes the inputs of another group",
        _FUNCTIONAL + "convolution.py",
        "begin // outputs * inputs, groups * inputs, groups)",
        "start // outputs * inputs, groups * inputs, groups)",
        _CONVOLUTION,
    ),
    Mutant(
        "uneven padding is put on the other side",
        _FUNCTIONAL + "convolution.py",
        "before = tuple(t // 2 for t in total)\n        after = tuple(t - t // 2 for t in total)",
        "after = tuple(t // 2 for t in total)\n        before = tuple(t - t // 2 for t in total)",
        _CONVOLUTION,
    ),
    Mutant(
        "the bias gradient of a convolution is summed over one extent less",
        _FUNCTIONAL + "convolution.py",
        "dims = [0, *range(2, part.dim())]",
        "dims = [0, *range(3, part.dim())]",
        _CONVOLUTION,
    ),
    Mutant(
        "what is added once stands at the other end",
        _FUNCTIONAL + "_copies.py",
        "[before, after])",
        "[after, before])",
        _FLYWEIGHT,
    ),
    Mutant(
        "a backward draws other random numbers than its forward",
        _FUNCTIONAL + "_copies.py",
        "torch.set_rng_state(states[0])",
        "torch.get_rng_state()",
        _FLYWEIGHT,
    ),
    # -- parameters ----------------------------------------------------------------------------------------------------
    Mutant(
        "shards begin as if all were of this size",
        "rtp_ext/parameters/sharding.py",
        "return sum(sizes[: ring.rank]), sizes[ring.rank]",
        "return ring.rank * sizes[ring.rank], sizes[ring.rank]",
        _LINEAR,
    ),
    Mutant(
        "a shard that rotates does not share the version of its parameter",
        "rtp_ext/parameters/sharding.py",
        "    share_version(home, parameter)  # whoever writes to one of them writes to both\n",
        "",
        _WRITES,
    ),
    Mutant(
        "gradients of gathered parameters are summed",
        "rtp_ext/parameters/gather.py",
        "ring.all_reduce(flat).div_(ring.size)",
        "ring.all_reduce(flat)",
        _GATHERED,
    ),
    Mutant(
        "gathered parameters that no rank has used get zeros",
        "rtp_ext/parameters/gather.py",
        'unused = (used == 0).tolist() if ring.device.type == "cpu" else [False] * len(layouts)',
        "unused = [False] * len(layouts)",
        _GATHERED,
    ),
    Mutant(
        "this rank's part of a gathered gradient is that of even shards",
        "rtp_ext/parameters/gather.py",
        "whole.narrow(self.dim, sum(self.sizes[:owner]), self.sizes[owner])",
        "whole.narrow(self.dim, owner * self.sizes[owner], self.sizes[owner])",
        _GATHERED,
    ),
    # -- conversion ----------------------------------------------------------------------------------------------------
    Mutant(
        "rows are renormalised that this rank has looked up, alone",
        "rtp_ext/convert/parts/whole_embedding.py",
        "rows = self.ring.all_reduce(looked_up).nonzero().view(-1)",
        "rows = looked_up.nonzero().view(-1)",
        _WHOLE,
    ),
    Mutant(
        "frequencies are those of this rank's batch",
        "rtp_ext/convert/parts/whole_embedding.py",
        "total.div_(ring.all_reduce(counts).clamp_",
        "total.div_(counts.clamp_",
        _WHOLE,
    ),
    Mutant(
        "labels of a fused head are not shifted",
        "rtp_ext/convert/parts/head.py",
        "nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "labels",
        ("families/test_cross_entropy_head.py", "families/test_families.py"),
    ),
    Mutant(
        "a fused head divides by the tokens of this rank as well",
        "rtp_ext/convert/parts/head.py",
        '"mean" if num_items_in_batch is None else "sum"',
        '"mean"',
        ("families/test_cross_entropy_head.py", "families/test_families.py", "families/test_changed_models.py"),
    ),
    Mutant(
        "layers with one input give what they computed of other weights",
        "rtp_ext/convert/parts/together.py",
        "return x._version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), weights",
        "return x._version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)",
        ("families/test_bundled_edges.py", "convert/test_edges.py", "convert/test_behaviour.py"),
    ),
    Mutant(
        "gathered parameters are not gathered again once they were written",
        "rtp_ext/convert/parts/gathered.py",
        "return then == now and (had_grad or not grad)",
        "return had_grad or not grad",
        (*_GATHERED, *_WRITES),
    ),
    Mutant(
        "the step count of a stand-in is a shard",
        "rtp_ext/convert/optimizers.py",
        'isinstance(value, torch.Tensor) and key != "step" and value.shape == shard.shape',
        "isinstance(value, torch.Tensor) and value.shape == shard.shape",
        ("optimizers/test_stock.py", "optimizers/test_steps_apart.py"),
    ),
    # -- outer policies ------------------------------------------------------------------------------------------------
    Mutant(
        "weights are summed over replicas",
        _OUTER + "apart/means.py",
        "flight.flat.div_(self.size).split",
        "flight.flat.split",
        _APART,
    ),
    Mutant(
        "an outer gradient has the wrong sign",
        _OUTER + "apart/diloco.py",
        "moved.append(anchor - held(weights[name][1]).to(anchor.dtype))",
        "moved.append(held(weights[name][1]).to(anchor.dtype) - anchor)",
        _APART,
    ),
    Mutant(
        "the share that is kept is the other one",
        _OUTER + "apart/diloco.py",
        "(weight.to(anchor.dtype) - anchor) * self.keep",
        "(weight.to(anchor.dtype) - anchor) * (1 - self.keep)",
        _APART,
    ),
    Mutant(
        "the warmup is a step short",
        _OUTER + "apart/local_sgd.py",
        "self._steps <= self.warmup",
        "self._steps < self.warmup",
        _APART,
    ),
    Mutant(
        "gossip mixes with the weights of the other direction",
        _OUTER + "apart/gossip.py",
        "alpha=float(matrix[me, replica])",
        "alpha=float(matrix[replica, me])",
        _APART,
    ),
    Mutant(
        "weights of a grid are not those of Metropolis",
        _OUTER + "apart/mixing.py",
        "1.0 / (1 + max(",
        "1.0 / max(1, max(",
        ("outer/test_mixing.py",),
    ),
    Mutant(
        "gradients are summed over replicas",
        _OUTER + "all_reduce.py",
        "return flight.flat.div_(self.size).split(",
        "return flight.flat.split(",
        ("outer/test_all_reduce.py",),
    ),
    Mutant(
        "the divide factor is forgotten",
        _OUTER + "all_reduce.py",
        "if scale != 1.0:",
        "if False:",
        ("outer/test_divide_factors.py",),
    ),
    Mutant(
        "error feedback has the wrong sign",
        _OUTER + "compression.py",
        "memory[ERROR] = values - own",
        "memory[ERROR] = own - values",
        _COMPRESSION,
    ),
    Mutant(
        "levels are rounded down",
        _OUTER + "compressors.py",
        "(padded / steps).round()",
        "(padded / steps).floor()",
        _COMPRESSION,
    ),
    Mutant(
        "RandomK without feedback is not scaled",
        _OUTER + "compressors.py",
        "1.0 if self.error_feedback else flat.numel() / count",
        "1.0",
        _COMPRESSION,
    ),
    Mutant(
        "a reduced piece counts once among gradients that are not reduced",
        _OUTER + "zero.py",
        ".copy_(held(before)).mul_(self.size)",
        ".copy_(held(before))",
        ("outer/test_zero_outer.py",),
    ),
    # -- ring ----------------------------------------------------------------------------------------------------------
    Mutant(
        "partial sums begin with what is in memory",
        "rtp_ext/ring/primitives.py",
        "                        tensor.zero_()",
        "                        pass",
        ("ring/test_ring.py",),
    ),
    Mutant(
        "gradients of micro-batches add up in 16 bits",
        "rtp_ext/ring/autograd.py",
        "if wide is not None and version == gradient._version:",
        "if False:",
        ("outer/test_all_reduce.py", "outer/test_with_replicas.py"),
    ),
    Mutant(
        "the last owner is asked for by its neighbour's part",
        "rtp_ext/ring/mesh.py",
        "whole = whole.split(sizes, placement.dim)[mesh.get_local_rank(index)]",
        "whole = whole.split(sizes, placement.dim)[-1 - mesh.get_local_rank(index)]",
        ("parameters/test_state.py", "outer/test_zero_outer.py"),
    ),
    # -- engine --------------------------------------------------------------------------------------------------------
    Mutant(
        "gradients are not averaged", "csrc/ops/rotation.cpp", "scale_(1.0 / executor.ranks())", "scale_(1.0)", _MLP
    ),
    Mutant(
        "the gate is computed from kept values of up",
        "csrc/ops/bundles/mlp.cpp",
        "gate = layout.slice(kept[1], owner);",
        "gate = layout.slice(kept[0], owner);",
        _MLP,
    ),
    Mutant(
        "the bias of down is forgotten where there are no tokens of it",
        "csrc/ops/bundles/mlp.cpp",
        "if (layout.bias_sizes[owner] > 0) add_bias_gradient(sums, layout.down_bias",
        "if (layout.bias_sizes[owner] > 1) add_bias_gradient(sums, layout.down_bias",
        _MLP,
    ),
    Mutant(
        "chunks of tokens overwrite each other's gradient",
        "csrc/ops/bundles/cross_entropy.cpp",
        "return first > 0 ? of_shard.out(part) : of_shard.arrived(part);",
        "return of_shard.arrived(part);",
        _HEAD,
    ),
    Mutant(
        "the gradient of the z-loss is halved",
        "csrc/ops/bundles/cross_entropy.cpp",
        "mul_(2 * shape.z_loss)",
        "mul_(shape.z_loss)",
        _HEAD,
    ),
    Mutant(
        "the bias of a layer cut along its inputs is forgotten",
        "csrc/ops/partial_linear.cpp",
        "if (bias) y.add_(whole_bias);",
        "",
        _LINEAR,
    ),
    Mutant(
        "a shard without tokens passes nothing on",
        "csrc/ops/embedding.cpp",
        "      pass_on(out, sums.arrived(kTable));\n",
        "      if (step->owner != executor.rank()) pass_on(out, sums.arrived(kTable));\n",
        _EMBEDDING,
    ),
    Mutant(
        "rows of a projection start with its shard",
        "csrc/ops/linear.cpp",
        "row = begin - start;",
        "row = 0;",
        ("nn/test_attention.py",),
    ),
)
