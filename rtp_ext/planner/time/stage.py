"""Time of one micro-batch on one GPU of a pipeline stage: computes and exposed communication."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from rtp_ext.planner.constants import TimeConstants, host_constant
from rtp_ext.planner.memory.states import buffer_bytes, layer_count, recomputed_layers, stage_layers
from rtp_ext.planner.rotation import family
from rtp_ext.planner.rotation.operations import RotatedOperation, rotations_of
from rtp_ext.planner.rotation.seconds import RotationTime, rotation_seconds
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.planner.specs.strategy import Strategy
from rtp_ext.planner.time.links import Group, all_reduce_s, exchange_s, gather_s, send_s, taken_s
from rtp_ext.planner.time.work import Seconds, gathers_codes, head_seconds, layer_seconds, traffic_s


@dataclass(frozen=True)
class Groups:
    """Collectives of a plan. Ranks are numbered tp fastest, then cp, rtp, dp, pp (Megatron-LM's order)."""

    tp: Group
    cp: Group
    rtp: Group
    dp: Group
    outer: Group  # ranks that hold the same shards: replicas of a ring, or of fully_shard
    pp_across_nodes: bool

    @classmethod
    def of(cls, cluster: Cluster, strategy: Strategy) -> Groups:
        inner = strategy.tp * strategy.cp
        ring = inner * strategy.rtp
        # without a ring, context-parallel ranks share gradients and shards with the data-parallel ones
        shards = Group(cluster, strategy.shards, strategy.tp)
        whole = Group(cluster, strategy.dp, ring)
        return cls(
            Group(cluster, strategy.tp),
            Group(cluster, strategy.cp, strategy.tp),
            Group(cluster, strategy.rtp, inner),
            shards if strategy.rtp == 1 else whole,
            Group(cluster, strategy.replicate, strategy.tp * strategy.shards) if strategy.rtp == 1 else whole,
            ring * strategy.dp >= cluster.gpus_per_node,
        )


def host_rate(cluster: Cluster, name: str) -> float:
    """Returns the bandwidth of a GPU's link to its host, or its share of the host's memory. Raises ValueError if it is
    unknown."""
    rate = getattr(cluster, name)
    if not rate:
        raise ValueError(f"cluster {cluster.name}: expected {name} for offload, got none")
    return float(rate)


@dataclass
class StageTime:
    """Seconds of one micro-batch by component; `forward` and `backward` are the computes among them."""

    components: dict[str, float]
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return sum(self.components.values())


class StageClock:
    """Times of a plan's parts that all stages share, and of each stage."""

    def __init__(self, model: ModelSpec, cluster: Cluster, strategy: Strategy, constants: TimeConstants):
        self.model, self.cluster, self.strategy, self.constants = model, cluster, strategy, constants
        self.groups = Groups.of(cluster, strategy)
        self.tokens = strategy.micro_batch * model.seq // strategy.cp
        self.layer = layer_seconds(model, strategy, cluster, constants, self.tokens)
        self.head = head_seconds(model, strategy, cluster, constants, self.tokens)
        self.per_layer = {**self._compute(), **self._collectives()}
        self._stages: dict[tuple[int, int, bool, bool], StageTime] = {}
        self._plain: StageClock | None = None
        self.rotated: list[RotationTime] = []
        self.ends: dict[str, list[RotationTime]] = {}
        self.block: family.BlockTime | None = None  # of a ring whose blocks are planned as a whole
        self.planned_bytes = 0.0  # of such a plan's buffers
        self.adapters_s = 0.0  # of gathers in one layer
        self.root: dict[str, float] = {}  # of fully_shard beside its layers
        if strategy.rtp > 1:
            self._add_rotation()
        elif strategy.zero == 3 and strategy.pp == 1:
            self._add_unshard()
        if strategy.offload:
            self._add_offload()
        self.per_layer["launches"] = self._launches()

    @property
    def ring_options(self) -> dict[str, Any]:
        """As `TimeReport.ring`."""
        if self.block is None:
            return {}
        return self.block.plan.ring_options(self.groups.rtp, self.strategy.hosts(self.cluster))

    # -- one layer ----------------------------------------------------------------------------------------------------

    def _compute(self) -> dict[str, float]:
        """Returns compute times of one layer. Full recomputation adds a forward; selective adds unfused attention
        (Megatron-LM, arXiv 2205.05198), or half the products and the elementwise kernels (torchtitan)."""
        layer, strategy = self.layer, self.strategy
        again = 0.0
        if strategy.recompute == "full":
            again = layer.forward
        elif strategy.recompute == "selective":
            if strategy.effective_stack == "torch":
                again = layer.gemm[0] / 2 + layer.elementwise[0]
            elif not strategy.flash_attention:
                again = layer.attention[0]
        return {
            "gemm": sum(layer.gemm),
            "attention": sum(layer.attention),
            "elementwise": sum(layer.elementwise),
            "recomputation": again,
        }

    def _launches(self) -> float:
        """Returns the time by which the host exceeds the GPU in issuing a layer's kernels and transfers. The host runs
        ahead, so that the slower of the two decides (PyTorch's asynchronous execution; measured: a lower bound of the
        time of small layers in vTrain's runs)."""
        passes = 1 + (self.strategy.recompute == "full")
        host = self._kernels_s()
        host += sum(passes * time.host_s[0] + time.host_s[1] for time in self.rotated)
        if self.block is not None:
            host += self.block.host_s
        return max(0.0, host - sum(self.per_layer.values()))

    def _kernels_s(self) -> float:
        """Returns the time in which the host issues a layer's kernels, besides those of the engine."""
        strategy, (forward, backward) = self.strategy, self.layer.kernels
        if strategy.recompute == "full":
            backward += forward
        elif strategy.recompute == "selective" and not strategy.flash_attention:
            backward += forward // 3
        if "unsharding" in self.per_layer:
            backward += int(host_constant("unshard_kernels"))
        return (forward + backward) * self.constants.host_s

    def _collectives(self) -> dict[str, float]:
        """Returns the time of a layer's collectives.

        Tensor parallelism: two all-reduces in forward, two in backward, or as many gathers and scatters with sequence
        parallelism (arXiv 1909.08053, 2205.05198); recomputation repeats the forward's. Context parallelism gathers
        keys and values, and scatters their gradients (arXiv 2407.21783). Experts exchange tokens twice each way.
        """
        model, strategy, constants = self.model, self.strategy, self.constants
        passes = 2 + (strategy.recompute == "full")
        hidden = self.tokens * model.hidden * strategy.param_bytes
        if strategy.sequence_parallel:
            parallel = self._sequence_parallel(passes)
        else:
            parallel = 2 * passes * all_reduce_s(self.groups.tp, hidden, constants)
        keys = self.tokens * strategy.cp * 2 * model.kv_features // strategy.tp * strategy.param_bytes
        exchanged = 0.0
        if strategy.ep > 1:
            group = Group(self.cluster, strategy.ep, strategy.tp * strategy.cp)
            exchanged = 2 * passes * exchange_s(group, hidden * model.experts_per_token, constants)
        return {
            "tensor_parallel": parallel,
            "context_parallel": (passes + 1) * gather_s(self.groups.cp, keys, constants),
            "expert_parallel": exchanged,
        }

    def _sequence_parallel(self, passes: int) -> float:
        """Returns the time of two gathers and two scatters per pass, of sequences that are cut.

        The torch stack adds three costs. Samples are its outer dimension, so that gathered and scattered tensors are
        copied unless there is one sample (torch/distributed/_functional_collectives.py: chunk and cat). Selective
        recomputation keeps the scattered tensor and gathers again (torchtitan, _save_list). With one eight-bit scale
        per tensor, gathers carry eight bits (torchao, Float8ColwiseParallel and Float8RowwiseParallel; torchtitan does
        not use them with a scale per row).
        """
        model, strategy, constants, group = self.model, self.strategy, self.constants, self.groups.tp
        numbers = self.tokens * model.hidden
        scattered = numbers * strategy.param_bytes
        if strategy.effective_stack != "torch":
            return 4 * passes * gather_s(group, scattered, constants)
        gathered = numbers if strategy.fp8 and strategy.fp8_scaling == "tensorwise" else scattered
        gathers, scatters = 2 * (passes + (strategy.recompute == "selective")), 2 * passes
        copied = scatters * scattered + (gathers * gathered if strategy.micro_batch > 1 else 0)
        return (
            gathers * gather_s(group, gathered, constants)
            + scatters * gather_s(group, scattered, constants)
            + (traffic_s(2 * copied, self.cluster, constants) if group.ranks > 1 else 0.0)
        )

    # -- travelling weights -------------------------------------------------------------------------------------------

    def overlapped(self, group: Group, communication: float, window: float) -> tuple[float, float]:
        """Returns the communication that a window of computing does not hide, and what the computing is slower beyond
        that, since NCCL takes multiprocessors meanwhile (share: Calculon's system files)."""
        taken = 0.0 if self.strategy.symm_mem else taken_s(group, min(communication, window), self.constants)
        exposed = max(0.0, communication - window)
        return exposed, max(0.0, taken - exposed)

    def copies_s(self, values: float, gathers: int) -> float:
        """Returns the time of copies on the compute stream of fully_shard: out of the buffer of each gather, and of
        gradients into that of a reduce-scatter, which casts them (torch/distributed/fsdp/_fully_shard,
        foreach_all_gather_copy_out and foreach_reduce_scatter_copy_in). Megatron-LM's weights and gradients are views
        of such buffers (core/distributed/fsdp)."""
        if self.groups.dp.ranks == 1 or self.strategy.effective_stack != "torch":
            return 0.0
        moved = 2 * gathers * self.strategy.param_bytes + self.strategy.param_bytes + self.strategy.reduce_bytes
        return traffic_s(values * moved, self.cluster, self.constants)

    def _add_unshard(self) -> None:
        """Adds fully_shard: the next layer is gathered while one computes; backward gathers again and scatters the
        gradients of the previous layer (arXiv 2304.11277).

        Units are those of torchtitan (models/llama3/parallelize.py): the embedding, each layer, and the last norm with
        the head, which stays gathered after its forward. The first two gathers and the last two scatters are exposed.
        A tied table is in the root, which stays gathered until its scatter, the last."""
        model, strategy, constants, group = self.model, self.strategy, self.constants, self.groups.dp

        def gather(values: float, codes: float = 0.0) -> float:
            """codes: of the values, that are gathered in eight bits."""
            return gather_s(group, (values - codes) * strategy.param_bytes + codes, constants)

        def scatter(values: float) -> float:
            return gather_s(group, values * strategy.reduce_bytes, constants)

        layer, first = layer_count(model, strategy), model.embedding_parameters / strategy.tp
        last = 0.0 if model.tied else model.head_parameters / strategy.tp + model.final_norm_parameters
        again = 0.0 if model.tied else first  # gathered anew for the backward
        out, both = self.copies_s(layer, 1), self.copies_s(layer, 2)
        forward = self.layer.forward + both - out
        backward = self.layer.backward + self.per_layer["recomputation"] + out
        matrices = sum(outputs * inputs for outputs, inputs in model.linear_shapes) / strategy.tp
        ahead = gather(layer, matrices if gathers_codes(strategy) else 0.0)
        back = ahead + scatter(layer)
        of_layer = [(ahead, forward), (back, backward)]
        # the last layer has another gather ahead of it, and another scatter behind it, the first another gather
        of_root = [
            *((gather(last), forward), (ahead, self.head.backward)),
            *((ahead + scatter(last), backward), (gather(again) + scatter(layer), backward)),
        ]
        replaced = [of_layer[0], of_layer[1], of_layer[1]]

        def added(windows: list[tuple[float, float]]) -> tuple[float, float]:
            pairs = [self.overlapped(group, communication, window) for communication, window in windows]
            return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

        seen, lost = added(of_layer)
        self.per_layer |= {"unsharding": seen, "interference": lost, "copies": both}
        (seen_root, lost_root), (seen_less, lost_less) = added(of_root), added(replaced)
        self.root = {
            "unsharding": gather(first) + ahead + scatter(layer) + scatter(first) + seen_root - seen_less,
            "interference": lost_root - lost_less,
            "copies": self.copies_s(first, 1 if model.tied else 2) + self.copies_s(last, 1),
        }

    def _add_offload(self) -> None:
        """Adds offloading: shards come from the host for every pass, and gradients return in float32 over PCIe (torch's
        CPUOffloadPolicy); only the exposed part counts."""
        strategy, rate = self.strategy, host_rate(self.cluster, "pcie_bytes_per_s")
        shards = strategy.rtp if strategy.rtp > 1 else strategy.shards
        one = 4 * layer_count(self.model, strategy) / shards / rate
        back = self.layer.backward + self.per_layer["recomputation"]
        shown = max(0.0, one - self.layer.forward) + max(0.0, one - back)  # both directions are concurrent
        self.per_layer["rotation" if strategy.rtp > 1 else "unsharding"] += shown

    def _add_rotation(self) -> None:
        """Replaces products by rotated ones: adds their extra time as `split`, and exposed hops as `rotation`. Adapters
        are too small for hops: each is gathered before its product, as the engine's `auto` does."""
        strategy, adapters = self.strategy, list[RotatedOperation]()
        rotations = self._rotations(1, False, False)
        if family.plans_blocks(strategy, self.cluster):
            pieces = family.pieces_on(strategy, self.groups.rtp, strategy.hosts(self.cluster))
            self._add_family(tuple(rotations), pieces)
            return
        if strategy.lora_rank:
            adapters = [rotation for rotation in rotations if rotation.trains]
        times = [self._rotation(rotation, self.groups.rtp) for rotation in rotations if rotation not in adapters]
        self.rotated += times
        passes = 1 + (strategy.recompute == "full")
        split, copied, shown, lost = self._summed(times, passes)
        for rotation in adapters:
            values = sum(weight.shard_elements(1) for weight in rotation.weights)
            ways = ((passes + 1, strategy.param_bytes), (1, strategy.reduce_bytes))
            self.adapters_s += sum(n * gather_s(self.groups.rtp, values * size, self.constants) for n, size in ways)
        self.per_layer |= {"split": split, "copies": copied, "rotation": shown + self.adapters_s, "interference": lost}
        self.ends = {
            "embedding": self._embedding(self.groups.rtp),
            "head": [self._rotation(rotation, self.groups.rtp) for rotation in self._rotations(0, False, True)],
        }

    def _embedding(self, group: Group) -> list[RotationTime]:
        """Returns the times of the embedding, by rows where that is faster (`embedding="auto"`): not with a format in
        which weights travel, nor in place."""
        strategy, found = self.strategy, []
        for rotation in self._rotations(0, True, False):
            times = [self._rotation(rotation, group)]
            asked = strategy.in_place or strategy.travel is not None
            if "rows" in family.pieces_of(strategy.to_come) and not asked:
                sizes = (strategy.param_bytes, strategy.reduce_bytes)
                times.append(family.rows_seconds(times[0], rotation, self.tokens, group, self.constants, *sizes))
            found.append(min(times, key=lambda time: sum(time.makespan_s) + sum(time.casts_s)))
        return found

    def _add_family(self, rotations: tuple[RotatedOperation, ...], pieces: frozenset[str]) -> None:
        """As `_add_rotation`, with the fastest plan of the whole block whose buffers stay within those of fully_shard,
        or the lean one."""
        strategy, layer = self.strategy, self.layer
        sizes = family.Sizes(
            strategy.param_bytes,
            strategy.reduce_bytes,
            strategy.bundle == "recompute",
            self.model.experts_per_token,
            strategy.travel,
            "joined" in pieces,
            strategy.hosts(self.cluster),
        )
        passes = 1 + (strategy.recompute == "full")
        budget, layers = buffer_bytes(self.model, strategy), stage_layers(self.model, strategy, strategy.pp - 1)
        kept = self.model.vocab * self.model.hidden / strategy.tp * strategy.param_bytes  # of the head
        again = (passes - 1) * layer.gemm[0]
        others = (sum(self.per_layer.values()) - sum(layer.gemm) - again, self._kernels_s())
        ring, last = self.groups.rtp, tuple(self._rotations(0, False, True))
        ways = [False, *([True] if family.has_collectives(rotations, ring.ranks, sizes, pieces) else [])]
        if strategy.collective == "yes":
            if len(ways) == 1:
                raise ValueError(
                    "strategy: expected collective auto or no where no plan can have it (group below all shards, "
                    "buffers lean, route two-level, travel, shards above the slot cap), got yes"
                )
            ways = [True]
        found = []
        for collective, head_bytes in itertools.product(ways, (0.0, *([kept] if "head" in pieces else []))):
            group = dataclasses.replace(ring, nccl=collective and ring.nodes == 1)
            block = family.fastest_block(
                rotations,
                self._gaps(len(rotations)),
                self.tokens,
                group,
                self.constants,
                sizes,
                pieces,
                strategy.buffers == "lean",
                budget - head_bytes,
                passes,
                others,
                strategy.group,
                collective,
                last,
            )
            ends = {
                "embedding": self._embedding(group),
                "head": [self._rotation(rotation, group, kept=head_bytes > 0) for rotation in last],
            }
            seconds = layers * block.beside(*others)
            seconds += sum(sum(time.makespan_s) for times in ends.values() for time in times)
            found.append((block.buffers_bytes + head_bytes, seconds, block, ends))
        budget = max(budget, min(each[0] for each in found))
        within = [each for each in found if each[0] <= budget]
        self.planned_bytes, _, best, self.ends = min(within, key=lambda one: one[1])
        self.block = best
        self.per_layer |= {
            "split": best.computes_s - sum(layer.gemm) - again,
            "copies": best.casts_s,
            "rotation": best.exposed_s,
            "interference": best.lost_s,
        }

    def _gaps(self, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the seconds of other kernels before each of `count` operations of a block, in the order of forward:
        norms and activations before the first and the last, attention before the one after the projections."""
        forward, backward = [0.0] * count, [0.0] * count
        place = max(1, count - 2)
        for gaps, index in ((forward, 0), (backward, 1)):
            gaps[0] += self.layer.elementwise[index] / 2
            gaps[-1] += self.layer.elementwise[index] / 2
            # in backward, attention comes before the projections of its inputs
            gaps[place if index == 0 else place - 1] += self.layer.attention[index]
        backward[-1] += self.per_layer["recomputation"] if self.strategy.recompute == "selective" else 0.0
        return tuple(forward), tuple(backward)

    def _rotations(self, layers: int, embedding: bool, head: bool) -> list[RotatedOperation]:
        strategy = self.strategy
        made, _ = rotations_of(
            self.model,
            bundle=strategy.bundle,
            fused_loss=strategy.fused_loss,
            tp=strategy.tp,
            layers=layers,
            embedding=embedding,
            head=head,
            own_head=True,
            frozen=strategy.frozen,
            lora_rank=strategy.lora_rank,
            recipe=strategy.planes,
            ranks=strategy.rtp,
            parts=strategy.ep,
        )
        return made

    def _rotation(self, rotation: RotatedOperation, group: Group, *, kept: bool = False) -> RotationTime:
        strategy = self.strategy
        joins = "joined" in family.pieces_of(strategy.to_come) and not strategy.freezes and len(rotation.weights) > 1
        times = [self._timed(rotation, group, kept, joined) for joined in ((False, True) if joins else (False,))]
        return min(times, key=lambda time: sum(time.makespan_s) + sum(time.casts_s))

    def _timed(self, rotation: RotatedOperation, group: Group, kept: bool, joined: bool) -> RotationTime:
        strategy = self.strategy
        return rotation_seconds(
            rotation,
            self.tokens,
            group,
            self.constants,
            compute_bytes=strategy.param_bytes,
            reduce_bytes=strategy.reduce_bytes,
            in_place=strategy.in_place,
            recompute=strategy.bundle == "recompute",
            experts_per_token=self.model.experts_per_token,
            route="direct" if strategy.route == "direct" else "ring",
            hosts=strategy.hosts(self.cluster),
            gradient_route=strategy.gradient_route,
            travel=strategy.travel,
            gradient_travel=strategy.gradient_travel,
            kept=kept,
            joined=joined,
        )

    @staticmethod
    def _summed(times: list[RotationTime], forwards: int) -> tuple[float, float, float, float]:
        """Returns split, copies, rotation and interference of some rotations."""
        split = copied = shown = lost = 0.0
        for time in times:
            for index, count in ((0, forwards), (1, 1)):
                exposed = time.makespan_s[index] - time.computes_s[index]
                split += count * (time.computes_s[index] - time.unsplit_s[index])
                copied += count * time.casts_s[index]
                shown += count * exposed
                lost += count * max(0.0, time.taken_s[index] - exposed)
        return split, copied, shown, lost

    # -- stages -------------------------------------------------------------------------------------------------------

    def stage(self, index: int) -> StageTime:
        """Returns one micro-batch of a stage: its layers, and embedding or head where it has one."""
        layers, last = stage_layers(self.model, self.strategy, index), index == self.strategy.pp - 1
        kind = (layers, recomputed_layers(self.model, self.strategy, index), index == 0, last)
        if kind not in self._stages:
            self._stages[kind] = self._stage(*kind)
        return self._stages[kind]

    def _stage(self, layers: int, again: int, first: bool, last: bool) -> StageTime:
        strategy = self.strategy
        parts = {name: again * seconds for name, seconds in self.per_layer.items()}
        if again < layers:  # some layers are not recomputed
            if self._plain is None:
                plain = dataclasses.replace(strategy, recompute="none", stage_recompute=())
                self._plain = StageClock(self.model, self.cluster, plain, self.constants)
            for name, seconds in self._plain.per_layer.items():
                parts[name] += (layers - again) * seconds
        forward, backward = layers * self.layer.forward, layers * self.layer.backward
        backward += parts["recomputation"]
        if last:
            self._add(parts, self.head)
            forward, backward = forward + self.head.forward, backward + self.head.backward
        if strategy.rtp > 1:
            for name, there in (("embedding", first), ("head", last)):
                if there:
                    for part, seconds in zip(
                        ("split", "copies", "rotation", "interference"), self._end(name), strict=True
                    ):
                        parts[part] += seconds
        elif strategy.zero == 3 and strategy.pp == 1:
            for name, seconds in self.root.items():
                parts[name] += seconds
        if strategy.pp > 1:
            parts["pipeline_messages"] = self._messages(forward + backward)
        return StageTime(parts, forward, backward)

    def _end(self, name: str) -> tuple[float, float, float, float]:
        split, copied, shown, lost = self._summed(self.ends[name], 1)
        if name == "embedding":  # its rows are not part of the time of unsplit products
            split += sum(sum(time.unsplit_s) for time in self.ends[name])
        return split, copied, shown, lost

    @staticmethod
    def _add(parts: dict[str, float], seconds: Seconds) -> None:
        parts["gemm"] += sum(seconds.gemm)
        parts["elementwise"] += sum(seconds.elementwise)

    def _messages(self, computes: float) -> float:
        """Returns the time of sending hidden states to the next stage and gradients back, for each chunk. Megatron-LM
        sends each tensor-parallel rank's part and gathers it there (arXiv 2104.04473, section 4.1); the interleaved
        schedule sends during the computing of another chunk (overlap-p2p-communication)."""
        strategy = self.strategy
        parted = strategy.sequence_parallel or strategy.effective_stack == "megatron"
        size = self.tokens * self.model.hidden * strategy.param_bytes
        shared = strategy.tp if parted else 1
        one = send_s(self.cluster, size / shared, self.constants, across_nodes=self.groups.pp_across_nodes)
        if parted and not strategy.sequence_parallel:
            one += gather_s(self.groups.tp, size, self.constants)
        if strategy.interleave == 1:
            return 2 * one
        return strategy.interleave * max(0.0, 2 * one - computes / strategy.interleave)
