"""Distribution of a model over GPUs, and dtypes of its states."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from rtp_ext.options import check_gradients, check_in_place
from rtp_ext.planner.constants import check_at_least, check_known
from rtp_ext.planner.native import travel_bytes
from rtp_ext.planner.specs.cluster import Cluster
from rtp_ext.planner.specs.model import ModelSpec
from rtp_ext.recipe_planes import Recipe, recipe
from rtp_ext.words import Budget, Bundle, Format, GradientTravel, PassGradientRoute, RecipeName, Route, Topology, Travel

SCHEDULES = ("gpipe", "1f1b", "interleaved")
RECOMPUTE = ("none", "selective", "full")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_MOMENTS = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
STACKS = ("auto", "megatron", "torch")
LOSSES = ("auto", "eager", "loss-parallel", "megatron", "compiled", "fused")
BUFFERS = get_args(Budget)
COLLECTIVE = ("auto", "yes", "no")
BUNDLES = (True, False, *get_args(Bundle))
ROUTES = tuple(route for route in get_args(Route) if route != "gather")
GRADIENT_ROUTES = get_args(PassGradientRoute)
TRAVELS = (None, *get_args(Travel))  # of weights; None: the compute dtype
GRADIENT_TRAVELS = (None, *get_args(GradientTravel))
FROZEN = (None, *get_args(Format))
RECIPES_OF_RINGS = (None, *get_args(RecipeName))
OUTER = ("allreduce", "zero", "local_sgd", "diloco", "gossip")
TOPOLOGIES = get_args(Topology)
FP8_SCALINGS = ("tensorwise", "rowwise")
LARGEST = 1024  # limit of ring and pipeline sizes


def in_eight_bits(recipe: str, rtp: int) -> dict[str, Any]:
    """Returns the fields of products in eight bits: the recipe of a ring, and what is nearest to it in other plans."""
    peers = {"fp8": True, "fp8_scaling": "tensorwise" if recipe.startswith("float8_tensorwise") else "rowwise"}
    return {"recipe": recipe} if rtp > 1 else peers


@dataclass(frozen=True)
class Strategy:
    """A plan. It uses dp * tp * pp * cp * rtp GPUs.

    Attributes:
        dp: data-parallel replicas, over which `zero` shards.
        tp: tensor-parallel ranks; with `sequence_parallel` they also share the activations between their products.
        pp: pipeline stages, run by `schedule`; `interleave` is the number of model chunks of a stage (above 1 needs
            the interleaved schedule). At most 1024 stages.
        cp: context-parallel ranks, which share the tokens of a sample.
        ep: ranks among the data-parallel ones that share the experts of a mixture. With rtp: ranks of the ring that
            experts are divided over, next to each other; they rotate over rtp / ep (`RotationDims(expert=)`).
        rtp: ranks of a rotation ring, at most 1024; every rank has its own batch.
        zero: sharded states: 0 none, 1 optimizer state, 2 also gradients, 3 also parameters (`fully_shard`).
        micro_batch: samples of one forward of one replica.
        recompute: of activations: `none`, `selective`, `full` (one input per layer is kept).
        in_place: the local shards of RTP themselves travel, with one weight slot instead of two.
        bundle: RTP rotates MLPs and attention as bundles; `"recompute"`: keeps nothing of the hidden slices.
        fused_loss: vocabulary head and loss are one operation without logits.
        param_dtype: compute dtype of layers. reduce_dtype: of gradients that are summed over ranks.
        optimizer: `adamw`, `sgd-momentum` or `sgd`; its state and master weights are float32.
        stack: the software whose allocations are predicted: `megatron` (bf16 weights, float32 main gradients and master
            copies, fused kernels) or `torch` (float32 parameters cast by a mixed-precision policy, plain kernels).
            `auto`: torch for zero=3 and rtp, otherwise megatron.
        loss: `eager`, `loss-parallel` (DTensor), `megatron`, `compiled` or `fused`; `auto` follows from the stack,
            tp and fused_loss.
        flash_attention: attention without a stored score matrix.
        fp8: without rotation: the matrix products of the layers' weights run in eight bits, as with torchao; saved
            tensors stay in `param_dtype`, so that memory does not change. fp8_scaling: one scale per tensor, with which
            fully_shard gathers eight bits, or one per row (`rowwise`).
        recipe: of rotation: products in eight bits, as of `rtp_ext.fully_rotate(model, recipe=...)`.
        route: of rotation, as in `rtp_ext.Ring`; `auto` takes two levels where the ring spans several nodes with
            several of its ranks on each and links inside a node are faster than a port, otherwise the ring (the
            engine's `auto` does not consider links).
        gradient_route: of rotation: partial sums travel along the ring (`chain`), or each contribution is sent to its
            owner (`direct`).
        travel: dtype in which rotating weights travel; None: the compute dtype. gradient_travel: `int8` on the gradient
            route `direct`; None: reduce_dtype.
        late_gradients: of rotation, as in `rtp_ext.Ring`: 1, or 0 with buffers='lean'. It takes slots. Times
            do not depend on it: plans of whole blocks have a number of their own (`TimeReport.ring`).
        outer: policy between replicas of a ring (`rtp_ext.outer`), and the `period` in steps of policies that do not
            act in every step. topology: of gossip.
        replicate: of `zero=3`: number of groups of data-parallel ranks that each hold all shards; gradients are summed
            over the groups (hybrid sharding, HSDP). Rings are replicated by dp.
        symm_mem: of `zero=3`: `FSDPModule.set_symm_mem_for_comm`. The planner assumes that its gathers and
            reduce-scatters take no multiprocessors.
        offload: shards, gradients and optimizer state are in host memory, and the optimizer runs there (`zero=3`, rtp).
        compiled: elementwise kernels of the torch stack are fused (torch.compile). fused_norm: only RMSNorm is fused.
        buffers: of rotation: `auto`, the fastest plan of groups, routes and look-ahead whose buffers stay at most those
            of `fully_shard`, or `lean`, slots of one shard. group: of rotation: shards in a product, at most, as in
            `rtp_ext.Ring`; 0: as the fastest plan has.
        collective: of rotation, as in `rtp_ext.Ring`: `auto`, where the fastest plan has it, `yes` or `no`. Such a ring
            has transport `nccl` inside a node, too.
        to_come: names, joined by +, or `all`, of what such plans may use although the engine does NOT have it yet
            (`PIECES` of rtp_ext/planner/rotation/family.py, where BUILT says what it has).
        frozen: `nf4`, `mxfp4` or `int8`: weights of the linear layers and experts of a ring's model, and of a head that
            `fused_loss` fuses, are frozen and stored in blocks of this format, as with
            `rtp_ext.fully_rotate(model, frozen=...)`. It needs adapters.
        lora_rank: of adapters around all linear layers, which alone are trained, in float32; 0: none. Experts and
            routers have none. Weights of the model that are not in blocks are then kept in `param_dtype`.
        stage_layers: layers of every pipeline stage; empty: equal numbers. stage_recompute: for how many of them
            `recompute` applies; empty: for all.
        cp_balanced: context-parallel ranks have equal shares of the causal mask; otherwise the last has the largest.

    Raises:
        ValueError: a value that no field allows, or fields that contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    rtp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    recompute: str = "none"
    in_place: bool = False
    bundle: bool | str = True
    fused_loss: bool = False
    param_dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    ep: int = 1
    optimizer: str = "adamw"
    stack: str = "auto"
    loss: str = "auto"
    flash_attention: bool = True
    fp8: bool = False
    fp8_scaling: str = "tensorwise"
    route: str = "auto"
    gradient_route: str = "chain"
    recipe: str | None = None
    travel: str | None = None
    gradient_travel: str | None = None
    late_gradients: int | None = None
    buffers: str = "auto"
    group: int = 0
    collective: str = "auto"
    to_come: str = ""
    frozen: str | None = None
    lora_rank: int = 0
    outer: str = "allreduce"
    period: int = 1
    topology: str = "one-peer"
    replicate: int = 1
    symm_mem: bool = False
    offload: bool = False
    compiled: bool = False
    fused_norm: bool = False
    cp_balanced: bool = True
    stage_layers: tuple[int, ...] = ()
    stage_recompute: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        degrees = ("dp", "tp", "pp", "cp", "rtp", "ep", "micro_batch", "interleave", "period", "replicate")
        check_at_least("strategy", 1, **{degree: getattr(self, degree) for degree in degrees})
        for degree in ("pp", "rtp"):
            if getattr(self, degree) > LARGEST:
                raise ValueError(
                    f"strategy: expected {degree} of at most {LARGEST}, since rings are simulated step by step and "
                    f"pipelines stage by stage, got {getattr(self, degree)}"
                )
        check_at_least("strategy", 0, late_gradients=self.late_passes, lora_rank=self.lora_rank, group=self.group)
        check_known("schedule", self.schedule, SCHEDULES)
        check_known("recompute", self.recompute, RECOMPUTE)
        check_known("optimizer", self.optimizer, OPTIMIZER_MOMENTS)
        check_known("stack", self.stack, STACKS)
        check_known("loss", self.loss, LOSSES)
        check_known("param_dtype", self.param_dtype, DTYPE_BYTES)
        check_known("reduce_dtype", self.reduce_dtype, DTYPE_BYTES)
        check_known("fp8_scaling", self.fp8_scaling, FP8_SCALINGS)
        check_known("route", self.route, ROUTES)
        check_known("buffers", self.buffers, BUFFERS)
        check_known("collective", self.collective, COLLECTIVE)
        check_known("gradient_route", self.gradient_route, GRADIENT_ROUTES)
        check_known("outer policy", self.outer, OUTER)
        check_known("topology", self.topology, TOPOLOGIES)
        formats = {"travel": TRAVELS, "gradient_travel": GRADIENT_TRAVELS, "frozen": FROZEN}
        for name, known in {**formats, "recipe": RECIPES_OF_RINGS}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"strategy: expected {name} of {known}, got {getattr(self, name)!r}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"strategy: expected zero to be 0, 1, 2 or 3, got {self.zero!r}")
        if self.bundle not in BUNDLES:
            raise ValueError(f"strategy: expected bundle to be True, False or 'recompute', got {self.bundle!r}")
        if self.interleave > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"strategy: interleave {self.interleave} needs schedule 'interleaved', got {self.schedule!r}"
            )
        if self.schedule == "interleaved" and self.pp == 1:
            raise ValueError("strategy: the interleaved schedule needs pp of at least 2, got 1")
        sharing = "rtp" if self.rtp > 1 else "dp"
        if getattr(self, sharing) % self.ep:
            raise ValueError(
                f"strategy: expected {sharing} divisible by ep, got {getattr(self, sharing)} and {self.ep}"
            )
        if self.rtp > 1 and (self.zero or self.stack == "megatron"):
            raise ValueError(
                f"strategy: rtp shards states by itself, and runs on torch: expected zero=0 and stack 'auto' or "
                f"'torch' with it, got zero={self.zero} and stack {self.stack!r}"
            )
        self._check_rotation()
        self._check_stages()
        if self.replicate > 1 and (self.zero != 3 or self.dp % self.replicate):
            raise ValueError(
                "strategy: replicate is of zero=3 and divides dp (rings are replicated by dp), got replicate "
                f"{self.replicate} with zero={self.zero} and dp {self.dp}"
            )
        if self.symm_mem and self.zero != 3:
            raise ValueError(f"strategy: expected zero=3 with symm_mem, got zero={self.zero}")
        if self.offload and not (self.zero == 3 or self.rtp > 1):
            raise ValueError(
                f"strategy: offload needs zero=3 or rtp of at least 2, got zero={self.zero}, rtp {self.rtp}"
            )
        if self.offload and self.rtp == 1 and self.pp > 1:
            raise ValueError(
                "strategy: expected pp 1 with offload and zero=3, whose pipelines gather a stage for the whole step, "
                f"got {self.pp}"
            )
        if (self.compiled or self.fused_norm) and self.effective_stack != "torch":
            raise ValueError("strategy: compiled and fused_norm are of the torch stack; Megatron's kernels are fused")

    def _check_stages(self) -> None:
        """Raises ValueError for stage_layers or stage_recompute that do not match this pipeline."""
        for name in ("stage_layers", "stage_recompute"):
            given, least = getattr(self, name), int(name == "stage_layers")
            if given and (len(given) != self.pp or self.interleave > 1 or min(given) < least):
                raise ValueError(
                    f"strategy: expected {name} of {self.pp} stages, not interleaved, at least {least} each, got "
                    f"{given} with interleave {self.interleave}"
                )
        if self.stage_recompute and self.recompute == "none":
            raise ValueError("strategy: stage_recompute needs recompute selective or full, got none")

    def _check_rotation(self) -> None:
        """Raises ValueError for rotation options without a ring, and for contradictory ones."""
        own = (
            *("in_place", "route", "gradient_route", "travel", "gradient_travel", "late_gradients"),
            *("buffers", "group", "collective", "to_come"),
            *("recipe", "frozen", "lora_rank", "outer", "period"),
        )
        for name in own:
            if self.rtp == 1 and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"strategy: {name} needs rtp of at least 2, got {name} {getattr(self, name)!r} with rtp 1"
                )
        if self.in_place:
            check_in_place("strategy", self.travel, self.route)
        if self.group > 1 and self.buffers == "lean":
            raise ValueError(
                f"strategy: expected buffers 'auto' with group {self.group}, since lean ones have one shard, got 'lean'"
            )
        if self.group > 1 and self.travel is not None:
            raise ValueError(
                f"strategy: expected travel None with group {self.group}, since weights in another format are computed "
                f"shard by shard, got {self.travel!r}"
            )
        check_gradients("strategy", self.gradient_route, self.gradient_travel, self.route)
        if self.fp8 and self.rtp > 1:
            raise ValueError(
                "strategy: fp8 is of plans without rotation: expected recipe='float8_rowwise' or another "
                f"recipe with rtp {self.rtp}, got fp8 True"
            )
        plain: dict[str, Any] = {"in_place": False, "gradient_travel": None, "frozen": None, "lora_rank": 0, "tp": 1}
        alone = {"to_come": "", "offload": False, "gradient_route": "chain"}
        divided = {**plain, "offload": False, "gradient_route": "chain"}
        asked = {"to_come": self.to_come, "recipe": self.recipe, "ep of a ring": self.rtp > 1 and self.ep > 1}
        fixed = ({**plain, "recipe": None}, {**plain, **alone}, divided)
        for (option, given), values in zip(asked.items(), fixed, strict=True):
            for name, value in values.items() if given else ():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"strategy: expected {name} {value!r} with {option}, whose plans are of plain training, got "
                        f"{getattr(self, name)!r}"
                    )
        if self.rtp > 1 and self.ep > 1 and self.outer not in ("allreduce", "zero"):
            raise ValueError(f"strategy: expected outer allreduce or zero with ep of a ring, got {self.outer!r}")
        if self.recipe and (self.outer == "zero" or self.collective == "yes"):
            raise ValueError(
                f"strategy: expected collective auto or no, and no outer zero, with recipe {self.recipe}, got "
                f"collective {self.collective} and outer {self.outer}"
            )
        if self.frozen is not None and self.lora_rank == 0:
            raise ValueError(
                f"strategy: frozen {self.frozen!r} needs lora_rank of at least 1, since only adapters are trained"
            )
        others = {"tp": 1, "in_place": False, "offload": False, "outer": "allreduce"}
        if self.freezes and (unlike := [name for name, value in others.items() if getattr(self, name) != value]):
            raise ValueError(
                f"strategy: frozen weights: expected {unlike[0]} {others[unlike[0]]!r}, got "
                f"{getattr(self, unlike[0])!r}"
            )
        if self.outer in ("allreduce", "zero") and self.period != 1:
            raise ValueError(f"strategy: outer {self.outer} acts in every step: expected period 1, got {self.period}")
        if self.outer == "zero" and self.offload:
            raise ValueError("strategy: outer zero has no offload")

    @property
    def late_passes(self) -> int:
        """Passes whose gradients may still be arriving while backward goes on."""
        return int(self.buffers != "lean") if self.late_gradients is None else self.late_gradients

    @property
    def planes(self) -> Recipe | None:
        """The planes of its recipe."""
        return None if self.recipe is None else recipe(self.recipe)

    @property
    def bundles(self) -> bool:
        """Whether an MLP rotates as one operation."""
        return self.rtp > 1 and bool(self.bundle) and not self.freezes and self.recipe is None

    @property
    def freezes(self) -> bool:
        """Whether the weights of the model are frozen; adapters are trained."""
        return self.lora_rank > 0

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp * self.rtp

    @property
    def replicas(self) -> int:
        """Groups of ranks with different batches: the data-parallel replicas and the ranks of the ring."""
        return self.dp * self.rtp

    def hosts(self, cluster: Cluster) -> int:
        """Returns the number of nodes of a two-level ring; 1 on other routes.

        Raises:
            ValueError: route two-level where the ranks of the ring are not spread evenly over several nodes.
        """
        local = max(1, cluster.gpus_per_node // (self.tp * self.cp))
        spread = self.rtp > local > 1 and self.rtp % local == 0
        if self.route == "two-level" and not spread:
            raise ValueError(
                "strategy: route two-level needs a ring over several nodes, equally many ranks on each, got "
                f"{self.rtp} ranks, {local} to a node"
            )
        faster = cluster.nccl_ring_bytes_per_s > cluster.nic_bytes_per_s  # otherwise two levels gain nothing
        taken = self.route == "two-level" or (self.route == "auto" and faster and not self.in_place)
        return self.rtp // local if spread and taken and self.gradient_route == "chain" else 1

    @property
    def shards(self) -> int:
        """Ranks over which `zero` shards states."""
        return self.dp * self.cp // self.replicate

    @property
    def travel_bytes(self) -> float:
        """Bytes of a value of a rotating weight; in eight bits including its share of a scale per 128 values."""
        return travel_bytes(self.travel, self.param_bytes)

    @property
    def gradient_travel_bytes(self) -> float:
        """Bytes of a value of a rotating gradient."""
        return travel_bytes(self.gradient_travel, self.reduce_bytes)

    @property
    def effective_stack(self) -> str:
        if self.stack != "auto":
            return self.stack
        return "torch" if self.zero == 3 or self.rtp > 1 else "megatron"

    @property
    def effective_loss(self) -> str:
        if self.fused_loss:
            return "fused"
        if self.loss != "auto":
            return self.loss
        if self.effective_stack == "megatron":
            return "megatron"
        return "loss-parallel" if self.tp > 1 else "eager"

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.param_dtype]

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.reduce_dtype]

    def micro_batches(self, global_batch: int | None) -> int:
        """Returns the micro-batches of one step of one replica. Without a global batch: one per pipeline stage.

        Raises:
            ValueError: a global batch that the replicas cannot share.
        """
        if global_batch is None:
            return self.pp
        check_at_least("strategy", 1, global_batch=global_batch)
        share = self.replicas * self.micro_batch
        if global_batch < share or global_batch % share:
            raise ValueError(
                f"strategy: expected a global batch that is a multiple of dp * rtp * micro_batch = {self.dp} * "
                f"{self.rtp} * {self.micro_batch} = {share} samples, got {global_batch}"
            )
        return global_batch // share

    def check(self, model: ModelSpec, cluster: Cluster, global_batch: int | None = None) -> None:
        """Raises ValueError if this plan cannot run this model on this cluster."""
        if self.gpus > cluster.gpus:
            raise ValueError(
                f"strategy: dp * tp * pp * cp * rtp = {self.dp} * {self.tp} * {self.pp} * {self.cp} * {self.rtp} = "
                f"{self.gpus} GPUs, but the cluster has {cluster.gpus}"
            )
        if cluster.cpus and self.effective_stack == "megatron":
            raise ValueError(
                f"strategy: expected stack 'torch' on {cluster.name}, whose ranks are sockets of CPUs, got 'megatron'"
            )
        scaled = self.recipe or (self.fp8 and "fp8")
        mx = self.planes is not None and self.planes.forward.exponents and not cluster.block_exponents
        if scaled and (mx or not cluster.fp8_achievable_flops_per_s):
            kind = " and exponents of blocks (MX)" if mx else ""
            raise ValueError(
                f"strategy: {scaled} needs GPUs whose products take eight bits{kind}, with a known rate: expected "
                f"fp8_achievable_flops_per_s{' and block_exponents' if mx else ''}, got none for {cluster.name}"
            )
        chunks = self.pp * self.interleave
        divisible = [
            ("heads", model.heads, "tp", self.tp),
            ("kv_heads", model.kv_heads, "tp", self.tp),
            ("ffn", model.ffn, "tp", self.tp),
            ("seq", model.seq, "cp", self.cp),
        ]
        if self.sequence_parallel:
            divisible.append(("seq / cp", model.seq // self.cp, "tp", self.tp))
        if self.interleave > 1 and (model.layers + 2) % chunks:  # Llama 3 counts embedding and head as one layer each
            divisible.append(("layers", model.layers, "pp * interleave", chunks))
        for what, size, by, degree in divisible:
            if size % degree:
                raise ValueError(f"strategy: expected {what} divisible by {by}, got {size} and {degree}")
        if model.layers < chunks:
            raise ValueError(f"strategy: {model.layers} layers are too few for {chunks} pipeline chunks")
        if self.stage_layers and sum(self.stage_layers) != model.layers:
            raise ValueError(f"strategy: expected stage_layers of {model.layers} layers, got {sum(self.stage_layers)}")
        name, ranks = ("rtp", self.rtp) if self.rtp > 1 else ("ep", self.ep)
        if self.ep > 1 and (not model.experts or model.experts % ranks):
            raise ValueError(f"strategy: expected experts divisible by {name}, got {model.experts} and {ranks}")
        if self.ep > 1 and self.rtp > 1 and cluster.cpus:
            raise ValueError(f"strategy: expected ep 1 with a ring of CPUs, which has no model of time, got {self.ep}")
        self.micro_batches(global_batch)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
