"""A flow: stages of ops, edges derived from the columns they read and write, checked before anything is loaded.

Two forms, freely mixed. Stages, in the order a lap runs them::

    flow = DataFlow(Data(), rollout, actor, reward)
    flow.collect(rollout.generate, reward.score)
    flow.run(actor.advantages)
    flow.run(actor.update)
    flow.publish(actor, to=rollout)

or edges, from which the stages follow of nodes that are in none::

    flow.connect(actor.output, reward.input)
    flow.connect(reward.output, actor.update_signal)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from verl.columns import COLUMNS
from verl.dataflow.nodes import Actor, Critic, Data, FlowError, Node, Op, Port, Reference, RewardModel, Rollout


@dataclass(frozen=True)
class Stage:
    """Ops of one line of the drawing; they may run together. ``collect`` loops until the lap's rows are there."""

    kind: Literal["collect", "run"]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Plan:
    """A checked flow: the stages of one lap and, for each column, its last reader."""

    stages: tuple[Stage, ...]
    nodes: tuple[Node, ...]
    publishes: tuple[tuple[Actor, Rollout], ...]
    last_reader: dict[str, Op]

    def node(self, kind: type[Node]) -> Node | None:
        return next((n for n in self.nodes if isinstance(n, kind)), None)

    def has(self, op: str) -> bool:
        """Whether ``kind.op`` runs, such as ``actor.logprobs``, whatever the node is named."""
        return any(op == f"{o.node.kind}.{o.name}" for stage in self.stages for o in stage.ops)


class DataFlow:
    """A drawing of one lap. Building and checking it needs no weights, no device and no existing model."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes: list[Node] = []
        self.stages: list[Stage] = []
        self.edges: list[tuple[Port, Port]] = []
        self.publishes: list[tuple[Actor, Rollout]] = []
        for node in nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        if node in self.nodes:
            return
        if not isinstance(node, Node):
            raise FlowError(f"a flow is made of nodes, not of {node!r}")
        twin = next((n for n in self.nodes if n.name == node.name), None)
        if twin is not None:
            raise FlowError(f"two nodes are named {node.name!r}: {twin!r} and {node!r}; give one another name=")
        self.nodes.append(node)

    def _stage(self, kind: Literal["collect", "run"], ops: tuple[Op, ...]) -> DataFlow:
        for op in ops:
            if not isinstance(op, Op):
                raise FlowError(f"{kind}() takes ops such as actor.update, not {op!r}")
            self._add(op.node)
        if not ops:
            raise FlowError(f"{kind}() needs at least one op")
        self.stages.append(Stage(kind, ops))
        return self

    def collect(self, *ops: Op) -> DataFlow:
        """The one loop inside a lap: sample and score until ``train_batch_size`` rows are there."""
        return self._stage("collect", ops)

    def run(self, *ops: Op) -> DataFlow:
        """A stage; its ops may run together."""
        return self._stage("run", ops)

    def publish(self, actor: Actor, *, to: Rollout) -> DataFlow:
        """End of a lap: ``to`` samples from ``actor``'s new weights."""
        self._add(actor)
        self._add(to)
        self.publishes.append((actor, to))
        return self

    def connect(self, source: Port, target: Port) -> DataFlow:
        """An explicit edge from an output port to an input port."""
        for port, wanted in ((source, "an output"), (target, "an input")):
            if not isinstance(port, Port):
                raise FlowError(f"connect() takes ports such as actor.output, not {port!r}")
            is_output = port.name in port.node.outputs
            if is_output != (wanted == "an output"):
                raise FlowError(f"connect({source.label}, {target.label}): {port.label} is not {wanted} port")
        if source.node is target.node:
            raise FlowError(f"connect({source.label}, {target.label}) joins {source.node!r} to itself")
        self._add(source.node)
        self._add(target.node)
        self.edges.append((source, target))
        return self

    def compile(self, needs: Iterable[str] = ()) -> Plan:
        """Check the drawing and order it. ``needs``: columns that the algorithm must find written."""
        needs = list(needs)
        flow = self._staged(needs) if self.edges or not self.stages else self
        order = [op for stage in flow.stages for op in stage.ops]
        sources = [op for node in flow.nodes if isinstance(node, Data) for op in node.ops.values()]
        if not sources:
            raise FlowError("the flow has no Data node, so nothing writes the prompts")
        writer: dict[str, Op] = {}
        for i, op in enumerate(order):
            if op in order[:i]:
                raise FlowError(f"{op.label} is in the flow twice")
        for op in [*sources, *order]:
            for column in op.writes:
                other = writer.setdefault(column, op)
                added = isinstance(op.node, RewardModel) and isinstance(other.node, RewardModel)  # scores are summed
                if other is not op and not added:
                    raise FlowError(f"column {column!r} has two writers: {other.label} and {op.label}")
        flow._check_reads(order, writer, needs)
        flow._check_edges(order, writer)
        flow._check_nodes(order)
        for rollout in (n for n in flow.nodes if isinstance(n, Rollout)):
            if not any(to is rollout for _, to in flow.publishes):
                raise FlowError(f"{rollout!r} would never get new weights: add flow.publish(actor, to={rollout.name})")
        last = {
            column: op
            for op in order
            for column in (*op.reads, *op.uses, *op.keeps)
            if column in writer or column in op.keeps
        }
        return Plan(tuple(flow.stages), tuple(flow.nodes), tuple(flow.publishes), last)

    def _check_nodes(self, order: list[Op]) -> None:
        """Each does something, at a place where it can; all but rewards are the only ones of their kind."""
        kinds: dict[str, Node] = {}
        for node in self.nodes:
            twin = kinds.setdefault(node.kind, node)
            if twin is not node and not isinstance(node, RewardModel):
                raise FlowError(f"{twin!r} and {node!r}: a flow has one {type(node).__name__}")
            ops = [node.ops["score"]] if isinstance(node, RewardModel) else list(node.ops.values())
            if not isinstance(node, Data) and not any(op in order for op in ops):
                names = ", ".join(op.name for op in ops)
                raise FlowError(f"{node!r} is in the flow but none of its ops runs: {names}")
        for stage in self.stages:
            for op in stage.ops:
                place = "collect" if isinstance(op.node, Rollout | RewardModel) else "run"
                if stage.kind != place:
                    raise FlowError(f"{op.label} is drawn with {stage.kind}(): it belongs to {place}()")

    def _check_reads(self, order: list[Op], writer: dict[str, Op], needs: Iterable[str]) -> None:
        seen = {column for op in writer.values() if isinstance(op.node, Data) for column in op.writes}
        for stage in self.stages:
            done = set(seen)
            for op in stage.ops:  # ops of one stage run together: only collect hands rows on inside the stage
                for column in op.reads:
                    if column not in writer:
                        guess = get_close_matches(column, COLUMNS, 1)
                        by = f"; {COLUMNS[column].writer} would write it" if column in COLUMNS else ""
                        raise FlowError(f"{op.label} reads {column!r}, which no op writes{by or f' ({guess})'}")
                    if column not in (done if stage.kind == "collect" else seen):
                        raise FlowError(
                            f"{op.label} reads {column!r} before {writer[column].label} has written it; "
                            f"move {writer[column].label} to an earlier stage"
                        )
                done.update(op.writes)
            seen = done
        for column in needs:
            if column not in writer:
                by = COLUMNS[column].writer
                raise FlowError(f"the algorithm needs column {column!r}, which {by} writes; the flow doesn't run {by}")

    def _check_edges(self, order: list[Op], writer: dict[str, Op]) -> None:
        place = {op: i for i, stage in enumerate(self.stages) for op in stage.ops}
        for source, target in self.edges:
            ends = [self._implied(source), target.op]
            for port, op in zip((source, target), ends, strict=True):
                if op not in place:
                    raise FlowError(f"edge {source.label} -> {target.label}: {port.label} ({op.label}) never runs")
            first, second = (place[op] for op in ends)
            if first > second:
                raise FlowError(
                    f"edge {source.label} -> {target.label} runs backwards (a cycle): "
                    f"{ends[1].label} is in stage {second + 1}, {ends[0].label} in stage {first + 1}"
                )

    def _implied(self, port: Port) -> Op:
        """The op a port stands for; ``actor.output`` are the rows of the rollout that uses the actor's weights."""
        if isinstance(port.node, Actor) and port.name == "output":
            for node in self.nodes:
                if isinstance(node, Rollout) and node.weights is port.node:
                    return node.ops["generate"]
        return port.op

    def _staged(self, needs: list[str]) -> DataFlow:
        """With stages for the nodes that edges alone draw, around those that are there. Data, rollout and, for a KL
        penalty, the reference are implied."""
        if not self.edges:
            raise FlowError("the flow is empty: add stages with run() or edges with connect()")
        drawn = {op for stage in self.stages for op in stage.ops}
        actor = next((n for n in self.nodes if isinstance(n, Actor)), None)
        if actor is None:
            raise FlowError(f"the flow has no Actor among {self.nodes}, so nothing is trained")
        rollout = next((n for n in self.nodes if isinstance(n, Rollout)), None) or Rollout(weights=actor)
        data = next((n for n in self.nodes if isinstance(n, Data)), None) or Data()
        flow = DataFlow(data, rollout, *self.nodes)
        flow.edges, flow.publishes = list(self.edges), list(self.publishes)
        if "ref_logprobs" in needs and not any(isinstance(n, Reference) for n in self.nodes):
            flow._add(Reference())
        free = [n for n in flow.nodes if drawn.isdisjoint(n.ops.values()) and not isinstance(n, Data | Rollout)]
        if not self.stages:
            self._check_cycle()
        self._check_reached(actor, [n for n in free if n in self.nodes], actor.ops["update"] in drawn)
        sampled, *loops = [stage.ops for stage in self.stages if stage.kind == "collect"] or [()]
        stages = [stage for stage in self.stages if stage.kind == "run"]
        scores = [op for node in free for op in node.ops.values() if "scores" in op.writes]
        flow.collect(*{rollout.ops["generate"]} - drawn, *sampled, *scores)
        for ops in loops:
            flow.collect(*ops)
        passes = [
            op
            for node in free
            for op in node.ops.values()
            if op.writes and not op.chosen and op not in scores and op is not actor.ops["advantages"]
        ]
        if passes:
            flow.run(*passes)
        updates = [node.ops["update"] for node in free if isinstance(node, Critic)]
        updates += {actor.ops["update"]} - drawn
        last = next((i for i, s in enumerate(stages) if actor.ops["update"] in s.ops), len(stages))
        flow.stages += stages[:last]
        if actor.ops["advantages"] not in drawn:
            flow.run(actor.ops["advantages"])
        flow.stages += stages[last:]
        if updates:
            flow.run(*updates)
        return flow if any(to is rollout for _, to in flow.publishes) else flow.publish(actor, to=rollout)

    def _check_cycle(self) -> None:
        after: dict[Op, set[Op]] = {}
        for source, target in self.edges:
            after.setdefault(source.op, set()).add(target.op)
        path: list[Op] = []
        done: set[Op] = set()

        def visit(op: Op) -> None:
            if op in path:
                loop = " -> ".join(o.label for o in [*path[path.index(op) :], op])
                raise FlowError(f"the edges form a cycle: {loop}")
            if op in done:
                return
            path.append(op)
            for following in after.get(op, ()):
                visit(following)
            path.pop()
            done.add(op)

        for op in list(after):
            visit(op)

    def _check_reached(self, actor: Actor, free: list[Node], updated: bool) -> None:
        """Every node that edges alone draw must lead to the actor's update."""
        reaches: set[Node] = {actor}
        while True:
            more = {s.node for s, t in self.edges if t.node in reaches} - reaches
            if not more:
                break
            reaches |= more
        for node in free:
            if node not in reaches:
                raise FlowError(f"{node!r} leads nowhere: connect its output towards {actor.name}.update_signal")
        if not updated and not any(t.node is actor and t.name == "update_signal" for _, t in self.edges):
            raise FlowError(f"nothing is connected to {actor.name}.update_signal, so {actor.name} is never trained")

    def describe(self) -> str:
        """Stages, columns and models as text."""
        plan = self.compile()
        lines = []
        for number, stage in enumerate(plan.stages, 1):
            lines.append(f"{number}. {stage.kind}")
            for op in stage.ops:
                reads = ", ".join([*op.reads, *(f"{c}?" for c in op.uses)])
                lines.append(f"     {op.label:<22} reads {reads or '-'}; writes {', '.join(op.writes) or '-'}")
        lines += [
            f"{len(plan.stages) + 1}. publish {actor.name} to {rollout.name}" for actor, rollout in plan.publishes
        ]
        lines += [f"{node.name}: {node.about}" for node in plan.nodes if node.about is not None]
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """The column edges as a Mermaid flowchart."""
        plan = self.compile()
        ops = [op for node in plan.nodes if isinstance(node, Data) for op in node.ops.values()]
        ops += [op for stage in plan.stages for op in stage.ops]
        lines = ["flowchart LR"]
        for op in ops:
            sources: dict[Op, list[str]] = {}
            for column in (*op.reads, *op.uses):
                for writer in (o for o in ops if column in o.writes):
                    sources.setdefault(writer, []).append(column)
            lines += [f"  {s.label} -->|{', '.join(columns)}| {op.label}" for s, columns in sources.items()]
        return "\n".join(lines)
