"""The nodes of a cluster: which of them may host a worker, and what to say where none can.

Nodes are dictionaries as ``ray.nodes()`` has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl.cluster.group import Spec
from verl.config.devices import LABEL, Device, written
from verl.config.errors import RequestError


def may_host(specs: Sequence[Spec], nodes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each spec the ids of the nodes that may host it, nothing where all may; ``nodes`` as in ``ray.nodes()``.

    ``RequestError`` where a node doesn't exist, or where one or all together have too few GPUs.
    """
    wanted: Counter[str | None] = Counter(spec.node for spec in specs if on_gpu(spec))
    found = {spec.node: [n for n in nodes if spec.node is not None and _is_called(n, spec.node)] for spec in specs}
    for name, those in found.items():
        mine = asked_for([spec for spec in specs if spec.node == name])
        if name is not None and not those:
            raise RequestError(f"device_map asks for {mine}, and the cluster has no such node: {existing(nodes)}")
        if name is not None and wanted[name] > _gpus(those):
            raise RequestError(f"device_map asks for {mine}, more than there are: {existing(nodes)}")
    if sum(wanted.values()) > (have := _gpus(nodes)):
        fits = written([Device("cuda", i) for i in range(have)]) if have else "cpu"
        roles = list(dict.fromkeys(role for spec in specs for role in spec.role.split(", ")))
        maps = [
            "{" + ", ".join(f"{role}: {place}" for role in roles) + "}"
            for place in (fits, "[0]" if have > 1 else "cpu")
        ]
        raise RequestError(
            f"device_map asks for {asked_for(specs)}, more than there are: {existing(nodes)}; "
            f"device_map: {' or '.join(dict.fromkeys(maps))} would fit"
        )
    return [[node["NodeID"] for node in found[spec.node]] for spec in specs]


def on_gpu(spec: Spec) -> bool:
    return spec.device.startswith("cuda")


def _gpus(nodes: Sequence[dict[str, Any]]) -> int:
    return sum(int(node["Resources"].get("GPU", 0)) for node in nodes)


def _labels(node: dict[str, Any]) -> list[str]:
    """Its custom resources, and its kinds of accelerators (``A100``)."""
    plain = ("CPU", "GPU", "memory", "object_store_memory")
    return [
        name.removeprefix("accelerator_type:")
        for name in node["Resources"]
        if name not in plain and "node:" not in name
    ]


def _is_called(node: dict[str, Any], name: str) -> bool:
    if name.startswith(LABEL):
        return name.removeprefix(LABEL).lower() in (label.lower() for label in _labels(node))
    names = (node["NodeName"], node["NodeManagerAddress"], node["NodeManagerHostname"])
    return name in names or (len(name) >= 6 and node["NodeID"].startswith(name))


def asked_for(specs: Sequence[Spec]) -> str:
    """``2 GPUs of node1 (actor), 1 CPU worker (critic)``."""
    kinds = Counter((on_gpu(spec), spec.node, spec.role) for spec in specs)
    parts = []
    for (gpu, node, role), n in kinds.items():
        what = _count(n, "GPU" if gpu else "CPU worker")
        parts.append(f"{what}{f' of {node}' if node else ''} ({role})")
    return ", ".join(parts)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n != 1)


def existing(nodes: Sequence[dict[str, Any]]) -> str:
    """``node first (vm) has 2 GPUs, 8 CPUs and the labels A100``, and so on."""
    parts = []
    for node in nodes:
        labels = ", ".join(_labels(node))
        has = f"{_count(_gpus([node]), 'GPU')}, {_count(int(node['Resources'].get('CPU', 0)), 'CPU')}"
        also = f" and the labels {labels}" if labels else ""
        parts.append(f"node {node['NodeName']} ({node['NodeManagerHostname']}) has {has}{also}")
    return "; ".join(parts)
