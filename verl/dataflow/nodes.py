"""Nodes of a post-training flow, their ops and their ports. Declarations only: nothing is loaded here.

An op declares the columns it ``reads`` (must have a writer), ``uses`` (reads when some op writes them) and ``writes``,
and how its rows sit on the ranks of its node (``seats``).
A port is the short name of an op, for ``flow.connect(actor.output, reward.input)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl.config.errors import RequestError
from verl.config.section import listed

EXAMPLE_FACTS = ("preferred", "label", "margin")  # what a data set says of its rows; each where it has it
ROWS = ("prompt_ids", "response_ids", "group")  # what a model needs to compute on rows; a group shares its prompt
Seating = Literal["pass", "update", "one"]


class FlowError(RequestError):
    """The flow can't be run as drawn; the message names the nodes."""


@dataclass(frozen=True)
class Op:
    """One thing a node does once per lap.

    ``seats``: every row, spread over the node's ranks (``pass``); the trained rows of each mini-batch, spread
    (``update``); or all rows together on the first rank (``one``), for statistics of the whole batch.
    ``keeps``: columns that no drawing shows, read or written where there are such: what ops of a node hand each other,
    or what the rows' source gives them.
    """

    node: Node
    name: str
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seats: Seating = "pass"
    keeps: tuple[str, ...] = ()
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

    @property
    def about(self) -> str | None:
        """What the node names, for people; None: nothing."""
        model = getattr(self.config, "model_name_or_path", None) if self.model is None else self.model
        return None if model is None else f"model {_called(model)}"

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
        yield Op(self, "logprobs", reads=ROWS, uses=("response_mask", "sampled_logprobs"), writes=("old_logprobs",))
        shaped_by = ("values", "old_logprobs", "sampled_logprobs", "ref_logprobs", "greedy_scores", "token_rewards",
                     "chosen")  # fmt: skip
        yield Op(
            self, "advantages", reads=("scores", "response_mask", "group"), uses=shaped_by,
            writes=("advantages", "returns"), seats="one", keeps=("reward_parts", "covariance_tokens"),
        )  # fmt: skip
        yield Op(
            self, "update", reads=(*ROWS, "response_mask", "advantages", "sampled_logprobs"),
            uses=("old_logprobs", "ref_logprobs"), seats="update", keeps=("covariance_tokens",),
        )  # fmt: skip
        yield Op(
            self, "distill", reads=("response_mask", "old_logprobs", "teacher_logprobs"), uses=("sampled_logprobs",),
            writes=("advantages", "returns"), seats="one", keeps=("covariance_tokens",), chosen=True,
        )  # fmt: skip
        yield Op(  # a group's best and worst; the mask loses the others
            self, "prefer", reads=("scores", "group", "response_mask"), writes=("preferred",), seats="one", chosen=True
        )  # fmt: skip
        yield Op(
            self, "fit", reads=(*ROWS, "response_mask"), uses=("ref_logprobs", *EXAMPLE_FACTS), seats="update",
            keeps=("mismatched", "answer_mask"), chosen=True,
        )  # fmt: skip


class Reference(Node):
    """The frozen starting policy, for the KL penalty."""

    kind = "reference"
    ports: ClassVar[dict[str, str]] = {"input": "logprobs", "output": "logprobs"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "logprobs", reads=ROWS, uses=("sampled_logprobs",), writes=("ref_logprobs",))
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
        yield Op(
            self, "rewards", reads=(*ROWS, "response_mask"), writes=("token_rewards",), keeps=("process_reward_start",)
        )  # fmt: skip
        yield Op(self, "update", reads=(*ROWS, "response_mask", "scores"), keeps=("process_reward_start",))


class Critic(Node):
    """The value model."""

    kind = "critic"
    ports: ClassVar[dict[str, str]] = {"input": "values", "output": "values"}

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "values", reads=ROWS, writes=("values",), keeps=("critic_hidden",))
        yield Op(
            self, "update", reads=(*ROWS, "response_mask", "values", "returns"), seats="update",
            keeps=("critic_hidden",),
        )  # fmt: skip


class RewardModel(Node):
    """Scores rows: by a Hugging Face reward model, by ``reward_fn`` (``module:function``, a rule's name, a callable, or
    a list of these), or, where it names neither, by the rewards of the configuration.

    A flow may have several: a row's total is the sum of ``weight`` times score over all of them.
    """

    kind = "reward"
    ports: ClassVar[dict[str, str]] = {"input": "score", "output": "score"}

    def __init__(
        self, config: Any = None, *, model: Any = None, reward_fn: Any = None, weight: float = 1.0,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, model=model, name=name)
        self.rewards, self.weight = listed(reward_fn), weight
        if self.rewards and self.names_model:
            raise FlowError(f"{self!r} names a model and a reward_fn: give each a node of its own")

    @property
    def names_model(self) -> bool:
        return self.model is not None or self.config is not None

    @property
    def about(self) -> str:
        rewards = ", ".join(_called(entry) for entry in self.rewards)
        what = super().about or (f"reward {rewards}" if rewards else "the configuration's rewards")
        return f"{what}, weight {self.weight:g}"

    def _ops(self) -> Iterator[Op]:
        yield Op(self, "score", reads=("prompt_ids", "response_ids", "finish_reason"), writes=("scores",))
        yield Op(
            self, "baseline", reads=("prompt_ids",), writes=("greedy_scores",), chosen=True
        )  # of one greedy answer per prompt


def _called(named: Any) -> str:
    """A name for people, of what may be an object."""
    named = named.get("name") if isinstance(named, Mapping) else named
    return named if isinstance(named, str) else getattr(named, "__name__", type(named).__name__)
