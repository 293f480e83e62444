"""Every column a batch can carry: what it holds, its shape letters and who writes it.

Shape letters: ``B`` rows, ``P`` prompt tokens, ``R`` response tokens (both ragged, one run of values per row).
A column is written once per lap by one op and read by others; the flow derives its edges from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column: ``shape`` is ``"B"`` (a value per row), ``"BP"`` or ``"BR"`` (ragged); ``writer`` is ``node.op``."""

    name: str
    dtype: str
    shape: str
    writer: str
    meaning: str


COLUMNS: dict[str, Column] = {
    c.name: c
    for c in (
        Column("prompt_ids", "int64", "BP", "data.next", "prompt tokens as the policy sees them, no padding"),
        Column("group", "int64", "B", "data.next", "number of the row's prompt within the lap; equal for its samples"),
        Column("response_ids", "int64", "BR", "rollout.generate", "sampled tokens, the end-of-sequence token included"),
        Column(
            "response_mask", "bool", "BR", "rollout.generate", "True on tokens the policy chose, False on tool tokens"
        ),
        Column(
            "chosen",
            "bool",
            "BR",
            "rollout.generate",
            "with mask_truncated: the mask before rows left it",
        ),
        Column(
            "sampled_logprobs",
            "float32",
            "BR",
            "rollout.generate",
            "log-probability under the sampled-from density; NaN: not sampled",
        ),
        Column("finish_reason", "str", "B", "rollout.generate", "stop, length or abort"),
        Column("version", "int64", "B", "rollout.generate", "weights version that sampled the row"),
        Column("scores", "float64", "B", "reward.score", "total reward of the row; NaN where every reward abstained"),
        Column("greedy_scores", "float64", "B", "reward.baseline", "total reward of the prompt's greedy response"),
        Column("preferred", "int64", "B", "data.next", "1 chosen, -1 rejected, 0 neither; pairs share their group"),
        Column("label", "float64", "B", "data.next", "1 for a good answer, 0 for a bad one"),
        Column("margin", "float64", "B", "data.next", "by how much the chosen answer is better; NaN: not known"),
        Column("old_logprobs", "float32", "BR", "actor.logprobs", "log-probability by the trainer before the update"),
        Column("ref_logprobs", "float32", "BR", "reference.logprobs", "log-probability by the frozen starting policy"),
        Column("teacher_logprobs", "float32", "BR", "teacher.logprobs", "log-probability by the teacher"),
        Column("token_rewards", "float32", "BR", "process_reward.rewards", "implicit reward of each response token"),
        Column("values", "float32", "BR", "critic.values", "value before each response token"),
        Column(
            "advantages", "float32", "BR", "actor.advantages", "advantage of each response token; 0 outside the mask"
        ),
        Column("returns", "float32", "BR", "actor.advantages", "value target of each response token"),
    )
}
