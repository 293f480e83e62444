"""Nodes of a post-training flow, their ops and their ports. Declarations only: nothing is loaded here.

An op declares the columns it ``reads`` (must have a writer), ``uses`` (reads when some op writes them) and ``writes``.
A port is the short name of an op, for ``flow.connect(actor.output, reward.input)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.errors import RequestError

EXAMPLE_FACTS = ("preferred", "label", "margin")  # what a data set says of its rows; each where it has it
ROWS = ("prompt_ids", "response_ids", "group")  # what a model needs to compute on rows; a group shares its prompt


class FlowError(RequestError):
    """The flow can't be run as drawn; the message names the nodes."""


@dataclass(frozen=True)
class Op:
    """One thing a node does once per lap."""

    node: Node
    name: str
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    chosen: bool = False  # an algorithm's own; a flow drawn by edges alone doesn't imply it

    @property
    def label(self) -> str:
        return f"{self.node.name}.{self.name}"


@dataclass(frozen=True)
class Port:
    """A named end of an edge; it stands for ``op``."""

    node: Node
    name: str
    op: Op

    @property
    def label(self) -> str:
        return f"{self.node.name}.{self.name}"


class Node:
    """A role in the flow. ``model`` is a hub name, a folder or a loaded module; ``config`` is the role's section."""

    kind: ClassVar[str]
    ports: ClassVar[dict[str, str]] = {}  # port -> op
    outputs: ClassVar[tuple[str, ...]] = ("output",)

    def __init__(self, config: Any = None, *, model: Any = None, name: str | None = None) -> None:
        if isinstance(config, str):
            config, model = None, config
        self.config, self.model, self.name = config, model, name or self.kind
        self.ops: dict[str, Op] = {op.name: op for op in self._ops()}

    def _ops(self) -> Iterator[Op]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "ops":
            raise AttributeError(name)
        if name in self.ops:
            return self.ops[name]
        if name in self.ports:
            return Port(self, name, self._port_op(name))
        known = ", ".join([*self.ops, *self.ports])
        raise FlowError(f"{self.name} ({type(self).__name__}) has no op or port {name!r}; it has: {known}")

    def _port_op(self, port: str) -> Op:
        return self.ops[self.ports[port]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Data(Node):
    """Prompts, in a seeded order."""

    kind = "data"

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "next", writes=("prompt_ids", "group"))


class Examples(Data):
    """Rows of a data set that are trained on as they are: pairs, labelled answers, chats."""

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "next", writes=("prompt_ids", "group", "response_ids", "response_mask", *EXAMPLE_FACTS))


class Rollout(Node):
    """Samples responses with the weights of ``weights``."""

    kind = "rollout"

    def __init__(self, config: Any = None, *, weights: Actor, name: str | None = None) -> None:
        self.weights = weights
        super().__init__(config, name=name)

    def _ops(self) -> Iterator[Op]:
        written = ("response_ids", "response_mask", "sampled_logprobs", "finish_reason", "version")
        yield Op(self, "generate", reads=("prompt_ids", "group"), writes=written)


class Actor(Node):
    """The policy that is trained. ``output`` stands for the rows of its rollout."""

    kind = "actor"
    ports: ClassVar[dict[str, str]] = {"output": "logprobs", "update_signal": "update"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "logprobs", reads=ROWS, writes=("old_logprobs",))
        shaped_by = ("values", "old_logprobs", "ref_logprobs", "greedy_scores", "token_rewards")
        yield Op(
            self, "advantages", reads=("scores", "response_mask", "group"), uses=shaped_by,
            writes=("advantages", "returns"),
        )  # fmt: skip
        yield Op(
            self, "update", reads=(*ROWS, "response_mask", "advantages", "sampled_logprobs"),
            uses=("old_logprobs", "ref_logprobs"),
        )  # fmt: skip
        yield Op(
            self, "distill", reads=("response_mask", "old_logprobs", "teacher_logprobs"),
            writes=("advantages", "returns"), chosen=True,
        )  # fmt: skip
        yield Op(self, "prefer", reads=("scores", "group"), writes=("preferred",), chosen=True)  # a group's best, worst
        yield Op(
            self, "fit", reads=(*ROWS, "response_mask"),
            uses=("ref_logprobs", "sampled_logprobs", *EXAMPLE_FACTS), chosen=True,
        )  # fmt: skip


class Reference(Node):
    """The frozen starting policy, for the KL penalty."""

    kind = "reference"
    ports: ClassVar[dict[str, str]] = {"input": "logprobs", "output": "logprobs"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "logprobs", reads=ROWS, writes=("ref_logprobs",))
        yield Op(self, "drift", reads=(*ROWS, "response_mask", "sampled_logprobs"))  # KL of a few rows, as a metric


class Teacher(Node):
    """A frozen model to learn from; it judges the student's own tokens."""

    kind = "teacher"
    ports: ClassVar[dict[str, str]] = {"input": "logprobs", "output": "logprobs"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "logprobs", reads=ROWS, writes=("teacher_logprobs",))


class ProcessReward(Node):
    """A model whose log-ratio to the starting policy is each token's reward; it learns from the rows' outcomes."""

    kind = "process_reward"
    ports: ClassVar[dict[str, str]] = {"input": "rewards", "output": "rewards"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "rewards", reads=(*ROWS, "response_mask"), writes=("token_rewards",))
        yield Op(self, "update", reads=(*ROWS, "response_mask", "scores"))


class Critic(Node):
    """The value model."""

    kind = "critic"
    ports: ClassVar[dict[str, str]] = {"input": "values", "output": "values"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "values", reads=ROWS, writes=("values",))
        yield Op(self, "update", reads=(*ROWS, "response_mask", "values", "returns"))


class RewardModel(Node):
    """Scores rows: reward functions, rules, a Hugging Face reward model, or several of them, mixed by weight."""

    kind = "reward"
    ports: ClassVar[dict[str, str]] = {"input": "score", "output": "score"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "score", reads=("prompt_ids", "response_ids", "finish_reason"), writes=("scores",))
        yield Op(
            self, "baseline", reads=("prompt_ids",), writes=("greedy_scores",), chosen=True
        )  # of one greedy answer per prompt
