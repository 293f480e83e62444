"""One step of each algorithm as a drawing. The recipe (config/recipes.py) says which one and what it needs."""

from __future__ import annotations

from verl.config.rules import number_of_rewards
from verl.config.run import RunConfig
from verl.dataflow.graph import DataFlow
from verl.dataflow.nodes import (
    Actor,
    Critic,
    Data,
    Examples,
    Op,
    ProcessReward,
    Reference,
    RewardModel,
    Rollout,
    Teacher,
)


def flow_of(cfg: RunConfig) -> DataFlow:
    """The drawing of ``algorithm.name``."""
    recipe = cfg.algorithm.recipe
    if not recipe.samples:
        return offline_flow(cfg)
    if recipe.pairs_sampled:
        return online_pairs_flow(cfg)
    return ppo_flow(cfg) if "values" in recipe.needs else sampled_flow(cfg)


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


def sampled_flow(cfg: RunConfig) -> DataFlow:
    """Without a critic: the baseline is the group's, the batch's or a greedy answer's, or a teacher takes its place."""
    needs = cfg.algorithm.recipe.needs
    actor, reference = Actor(cfg.actor_model_config), Reference()
    reward, rollout = RewardModel(cfg.reward_model_config), Rollout(cfg.rollout, weights=actor)
    process_reward, teacher = ProcessReward(cfg.process_reward_model_config), Teacher(cfg.teacher_model_config)

    flow = DataFlow(Data(), rollout, actor)
    scores = [reward.score] if number_of_rewards(cfg) else []  # distillation needs none; one that is given is told
    flow.collect(rollout.generate, *scores, *([reward.baseline] if "greedy" in needs else []))
    before = passes(cfg, actor, reference)
    if "teacher" in needs:
        before.append(teacher.logprobs)
    if "process_reward" in needs:
        flow.run(process_reward.update)
        before.append(process_reward.rewards)
    if before:
        flow.run(*before)
    flow.run(actor.distill if "teacher" in needs else actor.advantages)
    flow.run(actor.update)
    flow.publish(actor, to=rollout)
    return flow


def online_pairs_flow(cfg: RunConfig) -> DataFlow:
    """Online DPO: the best and the worst sampled answer of each prompt are a preference pair."""
    actor, reference = Actor(cfg.actor_model_config), Reference()
    reward, rollout = RewardModel(cfg.reward_model_config), Rollout(cfg.rollout, weights=actor)

    flow = DataFlow(Data(), rollout, actor, reward)
    flow.collect(rollout.generate, reward.score)
    flow.run(reference.logprobs, actor.prefer)
    flow.run(actor.fit)
    flow.publish(actor, to=rollout)
    return flow


def offline_flow(cfg: RunConfig) -> DataFlow:
    """Pairs, labelled answers, chats: nothing is sampled."""
    actor, reference = Actor(cfg.actor_model_config), Reference()

    flow = DataFlow(Examples(), actor)
    if "reference" in cfg.algorithm.recipe.needs:
        flow.run(reference.logprobs)
    flow.run(actor.fit)
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
    """With one optimizer step per lap the policy is its own past: ratio 1, no pass. These read it before the update."""
    algorithm, recipe = cfg.algorithm, cfg.algorithm.recipe
    if "teacher" in recipe.needs:
        return True
    if not recipe.samples or recipe.advantage is None or algorithm.old_logprobs == "sampler":
        return False
    several_steps = algorithm.update_epochs > 1 or cfg.mini_batch_size != cfg.train_batch_size
    in_reward = bool(cfg.init_kl_coef) and algorithm.kl_in == "reward"
    return several_steps or in_reward or recipe.loss in ("clip_cov", "kl_cov")


def needs(cfg: RunConfig) -> list[str]:
    """Columns that the configured algorithm can't do without, whoever drew the flow."""
    written = {
        "values": "values", "greedy": "greedy_scores", "teacher": "teacher_logprobs",
        "process_reward": "token_rewards", "reference": "ref_logprobs",
    }  # fmt: skip
    columns = [column for need, column in written.items() if need in cfg.algorithm.recipe.needs]
    if cfg.init_kl_coef and "ref_logprobs" not in columns:
        columns.append("ref_logprobs")
    if needs_old_logprobs(cfg):
        columns.append("old_logprobs")
    return columns
