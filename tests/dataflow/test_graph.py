"""Flows: both forms, what they derive, and every way to draw one wrong."""

from __future__ import annotations

import pytest

from verl import Actor, Critic, Data, DataFlow, Reference, RewardModel, Rollout
from verl.config.load import load_config
from verl.config.recipes import RECIPES
from verl.dataflow.nodes import FlowError
from verl.trainer.flows import flow_of, needs


def config(**keys):
    base = {"actor_model_config": {"model_name_or_path": "m"}, "dataset": "d.jsonl", "reward_fn": "exact"}
    return load_config(None, **(base | keys))


def labels(plan) -> list[list[str]]:
    return [[op.label for op in stage.ops] for stage in plan.stages]


def ops(plan) -> list[str]:
    return [label for stage in labels(plan) for label in stage]


def test_the_connected_form_of_the_documentation_is_ppo():
    flow = DataFlow()
    actor, critic, reward = (
        Actor(model="llama_7b_policy"),
        Critic(model="value_net"),
        RewardModel(model="hf_reward_model"),
    )
    flow.connect(actor.output, reward.input)
    flow.connect(reward.output, critic.input)
    flow.connect(critic.output, actor.update_signal)
    assert labels(flow.compile()) == [
        ["rollout.generate", "reward.score"],
        ["actor.logprobs", "critic.values"],
        ["actor.advantages"],
        ["critic.update", "actor.update"],
    ]
    assert "reference.logprobs" in ops(flow.compile(needs=["ref_logprobs"]))
    text = flow.describe()
    assert "actor.advantages" in text and "model llama_7b_policy" in text and "publish actor to rollout" in text
    assert "actor.advantages -->|returns| critic.update" in flow.to_mermaid()


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "gspo", "dapo", "reinforce_plus_plus"])
def test_built_in_flows_run_only_the_passes_that_somebody_reads(name):
    cfg = config(algorithm={"name": name}, init_kl_coef=0)
    found = ops(flow_of(cfg).compile(needs(cfg)))
    assert ("critic.values" in found) == (name == "ppo")
    assert "actor.logprobs" not in found and "reference.logprobs" not in found  # one step per lap: the ratio is 1
    several = config(algorithm={"name": name, "update_epochs": 2}, init_kl_coef=0.1)
    found = ops(flow_of(several).compile(needs(several)))
    assert "actor.logprobs" in found and "reference.logprobs" in found


OWN_OPS = {
    "remax": {"reward.baseline"},
    "prime": {"process_reward.update", "process_reward.rewards"},
    "distill": {"teacher.logprobs", "actor.distill", "actor.logprobs"},
    "online_dpo": {"reference.logprobs", "actor.prefer", "actor.fit"},
    "clip_cov": {"actor.logprobs"},
    "dpo": {"reference.logprobs", "actor.fit"},
    "kto": {"reference.logprobs", "actor.fit"},
    "orpo": {"actor.fit"},
    "sft": {"actor.fit"},
    "reward_model": {"actor.fit"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_flow_holds_what_the_recipe_needs(name):
    teacher = {"teacher_model_config": {"model_name_or_path": "t"}} if name == "distill" else {}
    base = {"actor_model_config": {"model_name_or_path": "m"}, "dataset": "d.jsonl"}
    make = config if RECIPES[name].samples else lambda **keys: load_config(None, **(base | keys))
    cfg = make(algorithm={"name": name}, **teacher)
    found = set(ops(flow_of(cfg).compile(needs(cfg))))
    assert OWN_OPS.get(name, set()) <= found
    assert ("rollout.generate" in found) == RECIPES[name].samples
    assert ("critic.values" in found) == (name == "ppo")
    if not RECIPES[name].samples:
        assert found <= {"reference.logprobs", "actor.fit"}


def nodes():
    actor = Actor()
    return Data(), Rollout(weights=actor), actor, RewardModel(), Critic()


def test_a_column_without_a_writer_names_who_would_write_it():
    data, rollout, actor, _, _ = nodes()
    flow = DataFlow(data, rollout, actor).collect(rollout.generate).run(actor.advantages).publish(actor, to=rollout)
    with pytest.raises(FlowError, match=r"actor\.advantages reads 'scores', which no op writes; reward\.score"):
        flow.compile()
    with pytest.raises(FlowError, match=r"needs column 'values', which critic\.values writes"):
        flow_of(config(algorithm={"name": "grpo"})).compile(needs=["values"])


def test_a_reader_before_its_writer_is_told_where_to_move_it():
    data, rollout, actor, reward, _ = nodes()
    flow = DataFlow(data, rollout).collect(rollout.generate).run(actor.advantages).run(reward.score)
    with pytest.raises(FlowError, match=r"reads 'scores' before reward\.score has written it"):
        flow.publish(actor, to=rollout).compile()


def two_rewards(*ops):
    """A flow with two reward nodes; ``ops`` are run before the advantages."""
    data, rollout, actor, _, _ = nodes()
    helpful = RewardModel(model="some/reward", name="helpful")
    brief = RewardModel(reward_fn=["length", len], name="brief", weight=0.25)
    flow = DataFlow(data).collect(rollout.generate, helpful.score, brief.score)
    return flow.run(*ops, actor.advantages).run(actor.update).publish(actor, to=rollout), actor, helpful, brief


def test_rewards_are_the_one_column_with_several_writers():
    flow, actor, helpful, brief = two_rewards()
    assert labels(flow.compile())[0] == ["rollout.generate", "helpful.score", "brief.score"]
    lines = flow.describe().splitlines()
    assert "helpful: model some/reward, weight 1" in lines and "brief: reward length, len, weight 0.25" in lines
    mermaid = flow.to_mermaid()
    assert "helpful.score -->|scores| actor.advantages" in mermaid
    assert "brief.score -->|scores| actor.advantages" in mermaid

    connected = DataFlow().connect(actor.output, helpful.input).connect(helpful.output, actor.update_signal)
    connected.connect(brief.output, actor.update_signal)
    assert labels(connected.compile())[0] == ["rollout.generate", "helpful.score", "brief.score"]

    with pytest.raises(FlowError, match=r"two nodes are named 'helpful'"):
        flow.collect(RewardModel(name="helpful").score)
    with pytest.raises(FlowError, match=r"brief\.score is in the flow twice"):
        flow.collect(brief.score).compile()


def test_two_writers_of_anything_else():
    twin = Reference(name="second")
    with pytest.raises(FlowError, match=r"'ref_logprobs' has two writers: reference\.logprobs and second\.logprobs"):
        two_rewards(Reference().logprobs, twin.logprobs)[0].compile()
    with pytest.raises(FlowError, match=r"Actor\('student'\) and Actor\('actor'\): a flow has one Actor"):
        two_rewards(Actor(name="student").logprobs)[0].compile()


def test_a_reward_node_names_one_thing_and_scores():
    assert RewardModel(weight=2).about == "the configuration's rewards, weight 2"
    assert RewardModel(reward_fn={"name": "length", "max_tokens": 5}).about == "reward length, weight 1"
    with pytest.raises(FlowError, match=r"RewardModel\('both'\) names a model and a reward_fn"):
        RewardModel("some/model", reward_fn=len, name="both")
    flow, *_ = two_rewards()
    with pytest.raises(FlowError, match=r"RewardModel\('idle'\) is in the flow but none of its ops runs: score"):
        flow.collect(RewardModel(name="idle").baseline).compile()


def test_sampling_and_scoring_are_collected_everything_else_is_run():
    flow, *_ = two_rewards()
    with pytest.raises(FlowError, match=r"reference\.logprobs is drawn with collect\(\): it belongs to run\(\)"):
        flow.collect(Reference().logprobs).compile()
    with pytest.raises(FlowError, match=r"late\.score is drawn with run\(\): it belongs to collect\(\)"):
        two_rewards(RewardModel(name="late").score)[0].compile()


def test_what_a_plan_has_does_not_depend_on_names():
    data, actor, reward = Data(), Actor(name="policy"), RewardModel(name="judge")
    rollout = Rollout(weights=actor, name="sampler")
    flow = DataFlow(data).collect(rollout.generate, reward.score, reward.baseline)
    plan = flow.run(actor.advantages).run(actor.update).publish(actor, to=rollout).compile()
    assert plan.has("reward.baseline") and plan.has("actor.update") and not plan.has("policy.update")


def test_ops_of_one_stage_run_together_so_they_may_not_read_each_other():
    data, rollout, actor, reward, _ = nodes()
    flow = DataFlow(data, rollout).collect(rollout.generate, reward.score).run(actor.advantages, actor.update)
    with pytest.raises(FlowError, match=r"actor\.update reads 'advantages' before"):
        flow.publish(actor, to=rollout).compile()


def test_a_node_that_does_nothing_and_a_rollout_without_weights():
    data, rollout, actor, reward, critic = nodes()
    flow = DataFlow(data, rollout, critic).collect(rollout.generate, reward.score).run(actor.advantages)
    with pytest.raises(FlowError, match=r"Critic\('critic'\) is in the flow but none of its ops runs"):
        flow.run(actor.update).publish(actor, to=rollout).compile()
    flow = DataFlow(data, rollout).collect(rollout.generate, reward.score).run(actor.advantages).run(actor.update)
    with pytest.raises(FlowError, match="would never get new weights"):
        flow.compile()


def test_edges_that_make_no_sense():
    actor, reward, critic = Actor(), RewardModel(), Critic()
    with pytest.raises(FlowError, match=r"has no op or port 'outputt'; it has: logprobs, .*output, update_signal"):
        actor.outputt  # noqa: B018
    with pytest.raises(FlowError, match=r"actor\.update_signal is not an output port"):
        DataFlow().connect(actor.update_signal, reward.input)
    with pytest.raises(FlowError, match="to itself"):
        DataFlow().connect(actor.output, actor.update_signal)
    flow = DataFlow()
    flow.connect(reward.output, critic.input)
    flow.connect(critic.output, reward.input)
    flow.connect(critic.output, actor.update_signal)
    with pytest.raises(FlowError, match=r"form a cycle: reward\.score -> critic\.values -> reward\.score"):
        flow.compile()
    flow = DataFlow()
    flow.connect(actor.output, reward.input)
    with pytest.raises(FlowError, match="leads nowhere"):
        flow.compile()
    with pytest.raises(FlowError, match="flow is empty"):
        DataFlow().compile()


def test_an_explicit_edge_may_not_run_backwards_through_the_stages():
    data, rollout, actor, reward, critic = nodes()
    reference = Reference()
    flow = DataFlow(data, rollout).collect(rollout.generate, reward.score).run(critic.values, reference.logprobs)
    flow.run(actor.advantages).run(critic.update, actor.update).publish(actor, to=rollout)
    flow.connect(reward.output, critic.input)
    assert flow.compile()
    flow.connect(critic.output, reward.input)
    with pytest.raises(FlowError, match=r"edge critic\.output -> reward\.input runs backwards"):
        flow.compile()


def test_stages_and_edges_complete_each_other():
    """Nodes that no stage has are staged as their edges say; the rest stays where it was drawn."""
    _, rollout, actor, reward, critic = nodes()
    brief = RewardModel(name="brief", reward_fn=len)
    flow = DataFlow(Data()).collect(rollout.generate, reward.score)
    flow.connect(reward.output, actor.update_signal).publish(actor, to=rollout)
    assert labels(flow.compile()) == [["rollout.generate", "reward.score"], ["actor.logprobs"],
                                      ["actor.advantages"], ["actor.update"]]  # fmt: skip
    flow = DataFlow(Data()).run(Reference().logprobs)
    flow.connect(actor.output, reward.input).connect(reward.output, actor.update_signal)
    plan = flow.compile(["ref_logprobs"])
    assert labels(plan) == [["rollout.generate", "reward.score"], ["actor.logprobs"], ["reference.logprobs"],
                            ["actor.advantages"], ["actor.update"]]  # fmt: skip
    flow = DataFlow(Data()).collect(rollout.generate, reward.score).run(actor.logprobs).run(actor.update)
    flow.connect(actor.output, brief.input).connect(brief.output, critic.input)
    flow.connect(critic.output, actor.update_signal)
    plan = flow.compile()
    assert labels(plan) == [["rollout.generate", "reward.score", "brief.score"], ["critic.values"], ["actor.logprobs"],
                            ["actor.advantages"], ["actor.update"], ["critic.update"]]  # fmt: skip
    assert [(a, r) for a, r in plan.publishes] == [(actor, rollout)]
    flow.connect(critic.output, reward.input)
    with pytest.raises(FlowError, match="runs backwards"):
        flow.compile()
