"""One step of each algorithm as a drawing."""

from __future__ import annotations

from verl.config.run import RunConfig
from verl.dataflow.graph import DataFlow
from verl.dataflow.nodes import Actor, Critic, Data, Op, Reference, RewardModel, Rollout


def ppo_flow(cfg: RunConfig) -> DataFlow:
    """PPO: values, GAE, critic and actor updates. The reference is there when the KL penalty is."""
    actor, critic = Actor(cfg.actor_model_config), Critic(cfg.critic_model_config)
    reference, reward = Reference(), RewardModel(cfg.reward_model_config)
    rollout = Rollout(cfg.rollout, weights=actor)

    flow = DataFlow(Data(), rollout, actor, critic, reward)
    flow.collect(rollout.generate, reward.score)  # until train_batch_size rows are there
    flow.run(*passes(cfg, actor, reference), critic.values)  # side by side
    flow.run(actor.advantages)
    flow.run(critic.update, actor.update)
    flow.publish(actor, to=rollout)
    return flow


def group_flow(cfg: RunConfig) -> DataFlow:
    """GRPO, RLOO: the group's other samples are the baseline, so there is no critic."""
    actor, reference = Actor(cfg.actor_model_config), Reference()
    reward = RewardModel(cfg.reward_model_config)
    rollout = Rollout(cfg.rollout, weights=actor)

    flow = DataFlow(Data(), rollout, actor, reward)
    flow.collect(rollout.generate, reward.score)
    if ops := passes(cfg, actor, reference):
        flow.run(*ops)
    flow.run(actor.advantages)
    flow.run(actor.update)
    flow.publish(actor, to=rollout)
    return flow


def passes(cfg: RunConfig, actor: Actor, reference: Reference) -> list[Op]:
    """Passes without gradients before the update, only those whose numbers somebody reads."""
    ops = []
    if needs_old_logprobs(cfg):
        ops.append(actor.logprobs)
    if cfg.init_kl_coef:
        ops.append(reference.logprobs)
    elif cfg.kl_sample_rows:
        ops.append(reference.drift)
    return ops


def needs_old_logprobs(cfg: RunConfig) -> bool:
    """With one optimizer step per lap the policy is its own past: ratio 1, no pass. KL in the reward needs it."""
    several_steps = cfg.algorithm.update_epochs > 1 or cfg.mini_batch_size != cfg.train_batch_size
    return several_steps or bool(cfg.init_kl_coef and cfg.algorithm.kl_place == "reward")


def needs(cfg: RunConfig) -> list[str]:
    """Columns that the configured algorithm can't do without, whoever drew the flow."""
    columns = ["values"] if cfg.algorithm.needs_critic else []
    if cfg.init_kl_coef:
        columns.append("ref_logprobs")
    if needs_old_logprobs(cfg):
        columns.append("old_logprobs")
    return columns


FLOWS = {"ppo": ppo_flow, "grpo": group_flow, "rloo": group_flow}
