"""GPUs, nodes and links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_ext.command_line import did_you_mean, read_json
from rtp_ext.gpu_rates import LINKS, data_sheet, link_bytes_per_second
from rtp_ext.planner.constants import check_at_least, check_known, constants


@dataclass(frozen=True)
class Cluster:
    """`gpus` equal GPUs in nodes of `gpus_per_node`. Rates are bytes or operations per second.

    Attributes:
        memory_bytes: nominal capacity of one GPU in decimal bytes: an 80 GB GPU has 80e9.
        bf16_flops_per_s: dense peak. Of presets this, hbm_bytes_per_s and nccl_ring_bytes_per_s are those of the GPU's
            name in `rtp_ext.gpu_rates`.
        bf16_achievable_flops_per_s: the highest rate that a matrix product reaches in practice.
        hbm_bytes_per_s: peak bandwidth of the GPU's memory.
        nvlink_bytes_per_s: nominal, per GPU and direction.
        nccl_ring_bytes_per_s: of a hop, and bus bandwidth of NCCL's ring, inside a node, per GPU.
        nic_bytes_per_s: of the network, per GPU and direction.
        exponentials_per_s: of the special function units; fused attention needs one per score. 0: not modelled.
        pcie_bytes_per_s: between a GPU and its host, per direction. host_bytes_per_s: one GPU's share of the host's
            memory bandwidth. 0: unknown; offloading is then refused.
        all_reduce: name of a table in constants.json, `all_reduce`, with measured seconds of collectives inside a node
            by ranks and bytes; empty: latency and bandwidth are used.
        peer_access: whether the GPUs of a node access each other's memory. Transport `ce` needs that; otherwise hops
            inside a node take NCCL.
        cpus: whether a rank is a socket of CPUs: it has neither a CUDA context nor NCCL's buffers.
        fp8_achievable_flops_per_s: as bf16_achievable_flops_per_s, for eight-bit products; 0: unsupported or unknown.
        block_exponents: whether products of eight bits take blocks with exponents (MX), as on Blackwell.

    Raises:
        ValueError: no GPUs, or rates and sizes that are not positive.
    """

    name: str
    gpus: int
    memory_bytes: float
    bf16_flops_per_s: float
    bf16_achievable_flops_per_s: float
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    nccl_ring_bytes_per_s: float
    nic_bytes_per_s: float
    streaming_multiprocessors: int
    gpus_per_node: int = 8
    fp8_achievable_flops_per_s: float = 0.0
    exponentials_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    all_reduce: str = ""
    peer_access: bool = True
    cpus: bool = False
    block_exponents: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        owner = f"cluster {self.name}"
        sizes = ("gpus", "gpus_per_node", "streaming_multiprocessors")
        check_at_least(owner, 1, **{size: getattr(self, size) for size in sizes})
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0.0 else 1e-300
            if field.type == "float" and not (isinstance(value, int | float) and least <= value < float("inf")):
                raise ValueError(f"{owner}: expected a positive {field.name}, got {value!r}")

    @classmethod
    def preset(cls, name: str, *, gpus: int = 8, gpus_per_node: int | None = None, link: str | None = None) -> Cluster:
        """Returns nodes of `a100-80gb`, `h100-80gb`, `h200-141gb`, `b200-180gb`, `gb200-186gb`, ... (constants.json);
        of CPUs without GPUs, `xeon-8452y-512gb`, one rank a socket.

        Args:
            gpus_per_node: GPUs of a node, joined by `link`; default: the preset's own, 8 or 72.
            link: `nvlink`, `pcie` (with direct access of GPUs to each other) or `host memory` (without); default: the
                preset's own.

        Raises:
            ValueError: an unknown preset or link, or `nvlink` for a GPU that has none.
        """
        own = _preset(name, link)
        if gpus_per_node is not None:
            own["gpus_per_node"] = gpus_per_node
        return cls(name=name, gpus=gpus, **own)

    @classmethod
    def from_json(cls, told: str | Path | Mapping[str, Any], *, gpus: int | None = None) -> Cluster:
        """Reads a JSON file or a dictionary with the fields of the class.

        `base` names a preset, and `link` its link as in `preset`; the other fields then override it:
        `{"base": "h100-80gb", "name": "h100-96gb", "gpus": 128, "memory_bytes": 96e9}`.

        Raises:
            ValueError: an unreadable file; unknown or missing fields.
        """
        given = dict(told) if isinstance(told, Mapping) else read_json(told, "cluster")
        label = given.get("name", "given" if isinstance(told, Mapping) else str(told))
        base = given.pop("base", None)
        if base is not None:
            given = {"name": base, "gpus": 8, **_preset(base, given.pop("link", None)), **given}
        if gpus is not None:
            given["gpus"] = gpus
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(given) - set(fields))
        missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
        if unknown and not set(given) & (set(fields) - {"name", "gpus"}):
            raise ValueError(
                f"cluster {label}: expected the fields of rtp_ext.planner.Cluster, such as base, gpus or memory_bytes; "
                f"got {', '.join(unknown[:8])}"
            )
        if unknown or missing:
            near = did_you_mean(unknown[0], fields) if len(unknown) == 1 else ""
            problems = [f"unknown fields {', '.join(unknown)}{near}"] if unknown else []
            problems += [f"missing fields {', '.join(missing)}"] if missing else []
            raise ValueError(f"cluster {label}: {'; '.join(problems)}")
        return cls(**given)

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def offloads(self) -> bool:
        """Whether the rates that offloading takes are known."""
        return self.pcie_bytes_per_s > 0 and self.host_bytes_per_s > 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _preset(name: str, link: str | None) -> dict[str, Any]:
    """Returns the fields of a preset except its name and the number of GPUs."""
    check_known("GPU", name, constants()["gpus"])
    own = {"gpus_per_node": 8, "link": "nvlink", **constants()["gpus"][name]}
    if own.get("cpus"):
        if link is not None:
            raise ValueError(f"GPU {name}: expected no link, since its ranks are sockets of CPUs, got {link!r}")
        return {key: value for key, value in own.items() if key != "link"}
    sheet = data_sheet(own.pop("data_sheet"))
    if sheet is None:
        raise ValueError(f"GPU {name}: constants.json names a data sheet that rtp_ext.gpu_rates does not have")
    kind = own.pop("link")
    if link is not None and link != kind:
        check_known("link", link, LINKS)
        if link == "nvlink":
            raise ValueError(
                f"GPU {name}: expected link pcie or 'host memory', since NVLink does not join a node of it"
            )
        kind = link
        own["all_reduce"] = ""  # measured over NVLink
    return {
        "bf16_flops_per_s": sheet.flops,
        "hbm_bytes_per_s": sheet.memory_bytes_per_second,
        "nccl_ring_bytes_per_s": link_bytes_per_second(sheet.nvlink_bytes_per_second, kind),
        "peer_access": kind != "host memory",
        **own,
    }
