"""The Python interface as its users write it, with models and devices that exist on a laptop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.rewards.test_model import deberta, word_tokenizer
from tests.trainer.brief import brief_llama
from verl.config.errors import ConfigError, RequestError

SHORT = {"max_prompt_length": 64, "max_response_length": 5, "micro_batch_size": 4}
PAIRS = [
    {"prompt": prompt, "chosen": f"{a}{b}a", "rejected": f"{a}{b}c"}
    for prompt in ("xa", "xb", "xc", "us") for a in "bstx" for b in "bst"
]  # fmt: skip


@pytest.fixture(scope="module")
def model_name(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("policy"), brief_llama(), tiny.f_bpe(template="plain"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Default run folders land in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pairs_file(tmp_path):
    file = tmp_path / "hh-rlhf.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return str(file)


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_version():
    import verl

    assert verl.__version__[0].isdigit()


def drawn(policy, value, scorer):
    from verl import Actor, Critic, DataFlow, RewardModel

    flow = DataFlow()
    actor, critic, reward = Actor(model=policy), Critic(model=value), RewardModel(model=scorer)
    flow.connect(actor.output, reward.input)
    flow.connect(reward.output, critic.input)
    flow.connect(critic.output, actor.update_signal)
    return flow


def test_a_flow_is_drawn_and_described_without_models():
    text = drawn("llama_7b_policy", "value_net", "hf_reward_model").describe()
    for part in ("rollout.generate", "reward.score", "critic.values", "actor.update", "scores", "llama_7b_policy"):
        assert part in text


def test_a_flow_runs(model_name, tmp_path):
    from verl import RLTrainer

    reward = tiny.save(tmp_path / "reward", deberta(), word_tokenizer())
    with RLTrainer(
        flow=drawn(model_name, model_name, reward), rollout_batch_size=8, num_rollout_steps=2, run_dir="flow", **SHORT
    ) as trainer:
        metrics = trainer.step()
        assert metrics["critic/loss"] > 0 and metrics["policy/grad_norm"] > 0 and metrics["reward/mean"] != 0
        assert trainer.run.controller.plan.has("reference.logprobs")  # PPO's KL penalty implies it
    assert lines_of("flow")[0]["step"] == 1


def test_sections_of_a_flow_s_nodes_count_and_keywords_win(model_name):
    from verl import Actor, Data, DataFlow, RewardModel, RLTrainer, Rollout
    from verl.config.engine import RolloutConfig
    from verl.config.model import ModelConfig

    actor = Actor(ModelConfig(optimizer={"lr": 1e-2}, lora_r=3), model="another")
    rollout, reward = Rollout(RolloutConfig(temperature=0.5), weights=actor), RewardModel()
    flow = DataFlow(Data(), rollout, actor, reward).collect(rollout.generate, reward.score)
    flow.run(actor.advantages).run(actor.update).publish(actor, to=rollout)
    given = {"actor_model_config": ModelConfig(lora_r=5), "reward_fn": lambda x: 1.0}
    cfg = RLTrainer(model_name, flow=flow, **given).config
    assert cfg.actor_model_config.model_name_or_path == model_name and cfg.reward_model_config is None
    assert cfg.actor_model_config.optimizer.lr == 1e-2 and cfg.actor_model_config.lora_r == 5
    assert cfg.rollout.temperature == 0.5


def mixed(policy, *rewards):
    """GRPO with a reference, several rewards, and a policy that isn't called actor."""
    from verl import Actor, Data, DataFlow, Reference, Rollout

    actor, reference = Actor(model=policy, name="policy"), Reference(name="start")
    rollout = Rollout(weights=actor, name="sampler")
    flow = DataFlow(Data()).collect(rollout.generate, *(reward.score for reward in rewards))
    return flow.run(actor.logprobs, reference.logprobs).run(actor.advantages).run(actor.update).publish(
        actor, to=rollout
    )  # fmt: skip


def first_id(response_ids):
    return float(response_ids[0])


def test_scores_of_several_reward_nodes_are_mixed_by_weight(model_name, tmp_path, monkeypatch):
    from verl import RewardModel, RLTrainer
    from verl.config.load import load_config
    from verl.rewards.base import RewardRow
    from verl.rewards.model import RewardModelScorer

    monkeypatch.setattr("verl.runtime.collect.SHOWN", 99)
    monkeypatch.setattr("verl.trainer.base.SHOWN", 99)
    judge = tiny.save(tmp_path / "reward", deberta(), word_tokenizer())
    flow = mixed(
        model_name,
        RewardModel(reward_fn=first_id, name="low", weight=-0.25),
        RewardModel(model=judge, name="helpful"),
        RewardModel(judge, name="again", weight=2),
        RewardModel(reward_fn="tests.trainer.reward:low_ids", name="brief", weight=0.5),
        RewardModel(weight=10),  # the configuration's
    )
    keys = {"rollout_batch_size": 8, "group_size": 4, "num_rollout_steps": 2, "init_kl_coef": 0.1, "run_dir": "mixed"}
    with RLTrainer(flow=flow, reward_fn=[lambda x: 1.0], dataset=["xa", "ab"], **keys, **SHORT) as trainer:
        metrics = trainer.step()
        again = trainer.step()
        cfg = trainer.config
    assert cfg.reward_weights == [10, -0.25, 1, 2, 0.5] and cfg.reward_model_config is None
    lines = [json.loads(line) for line in Path("mixed/samples.jsonl").read_text().splitlines()]
    scorer = RewardModelScorer(cfg.reward_models["reward_fn[2]"], torch.device("cpu"))
    for line in lines:
        parts, ids = line["rewards"], line["response_ids"]
        assert list(parts) == ["lambda", "low", "helpful", "again", "brief"]
        assert parts["low"] == ids[0] and parts["brief"] == sum(i < 16 for i in ids) / len(ids)
        fields = {"prompt": "xa" if "xa" in line["prompt"] else "ab"}
        row = RewardRow("0", "0", line["prompt"], line["response"], (), tuple(ids), "stop", fields)
        assert parts["helpful"] == parts["again"] == pytest.approx(scorer.score([row])[0], abs=1e-5)
        total = 10 * 1 - 0.25 * parts["low"] + 1 * parts["helpful"] + 2 * parts["again"] + 0.5 * parts["brief"]
        assert line["reward"] == pytest.approx(total)
    first = [line for line in lines if line["step"] == 1]
    assert len(first) == 8
    assert metrics["reward/helpful"] == pytest.approx(sum(line["rewards"]["helpful"] for line in first) / 8)
    assert metrics["reward/mean"] == pytest.approx(sum(line["reward"] for line in first) / 8)

    # an actor of another name trains, its KL is measured, and its time is told under its name
    assert metrics["policy/grad_norm"] > 0 and metrics["time/policy.update"] > 0 and metrics["time/start.logprobs"] > 0
    assert metrics["time/update"] == metrics["time/policy.update"]
    assert again["kl/mean"] is not None and again["policy/loss"] is not None

    # the file of the run says the same, but for the function that only Python has
    text = Path("mixed/config.yaml").read_text()
    assert "as: helpful" in text and "as: brief" in text
    functions = [{"name": "tests.trainer.reward:low_ids"}, *cfg.reward_fn[1:]]
    written = load_config(Path("mixed/config.yaml"), reward_fn=functions)
    assert written.reward_models == cfg.reward_models and written.reward_weights == cfg.reward_weights


def test_a_model_of_an_unnamed_node_is_the_configuration_s_and_keywords_win():
    from verl import RewardModel, RLTrainer

    flow = mixed("m", RewardModel(model="some/reward", weight=0.5), RewardModel(reward_fn=["exact", len], name="other"))
    cfg = RLTrainer(flow=flow, reward_fn="numeric", reward_model_config={"micro_batch_size": 3}).config
    assert cfg.reward_model_config.model_name_or_path == "some/reward" and cfg.reward_model_config.micro_batch_size == 3
    assert cfg.reward_fn == ["numeric", "exact", len] and cfg.reward_weights == [1, 1, 1, 0.5]
    cfg = RLTrainer(flow=flow, reward_fn="numeric", reward_weights=[1, 2, 3, 4]).config
    assert cfg.reward_weights == [1, 2, 3, 4]


def test_reward_nodes_that_make_no_sense():
    from verl import Actor, Data, DataFlow, Reference, RewardModel, RLTrainer, Rollout

    one = RewardModel(reward_fn="exact", name="one")
    with pytest.raises(RequestError, match=r"RewardModel\('two'\) names no reward, and neither does the configuration"):
        _ = RLTrainer(flow=mixed("m", one, RewardModel(name="two"))).config
    with pytest.raises(RequestError, match=r"RewardModel\('two'\) and RewardModel\('three'\) name no reward"):
        _ = RLTrainer(flow=mixed("m", RewardModel(name="two"), RewardModel(name="three")), reward_fn="exact").config
    with pytest.raises(RequestError, match="3 weights for 1 rewards"):
        _ = RLTrainer(flow=mixed("m", one), reward_weights=[1.0, 2.0, 3.0]).config
    actor, reference = Actor(model="m"), Reference(model="another")
    rollout = Rollout(weights=actor)
    flow = DataFlow(Data()).collect(rollout.generate, one.score).run(reference.logprobs, actor.advantages)
    with pytest.raises(RequestError, match=r"Reference\('reference'\) takes no model"):
        _ = RLTrainer(flow=flow.run(actor.update).publish(actor, to=rollout)).config


def test_a_flow_whose_models_do_not_exist_is_refused_at_the_first_step():
    from verl import RLTrainer

    trainer = RLTrainer(flow=drawn("./llama_7b_policy", "./value_net", "./hf_reward_model"))
    with pytest.raises(RequestError, match="llama_7b_policy"):
        trainer.step()


def test_a_flow_takes_loaded_modules(model_name, tmp_path):
    from verl import RLTrainer
    from verl.utils.model import create_model

    reward = tiny.save(tmp_path / "reward", deberta(), word_tokenizer())
    policy = create_model(model_name)
    before = policy.lm_head.weight.detach().clone()
    keys = {"actor_model_config": {"optimizer": {"lr": 1e-2}}, "rollout_batch_size": 8, "total_steps": 1}
    with RLTrainer(flow=drawn(policy, create_model(model_name), reward), **keys, **SHORT) as trainer:
        trainer.step()
    assert not torch.equal(before, policy.lm_head.weight)


def test_ppo_first_form_loads_nothing_and_says_what_is_missing(model_name):
    from verl.trainer.ppo import PPOTrainer

    parallel = {"fsdp": True, "tensor_parallel_size": 2}
    form = {"value_model": "value_head", "optimizer": "adamw", "parallel_config": parallel}
    with pytest.raises(RequestError, match="PPOTrainer has no data set"):
        PPOTrainer(policy_model="llama_7b", **form).step()
    whole = {"dataset": ["xa", "xb", "xc", "ab"], "reward_fn": "tests.trainer.reward:low_ids"}
    cfg = PPOTrainer(policy_model=model_name, **form, **whole).config
    assert cfg.actor_model_config.fsdp_config.tensor_parallel_size == 2
    if not torch.cuda.is_available():
        assert cfg.device_map == {"actor": ["cpu:0", "cpu:1"]}
        with PPOTrainer(policy_model=model_name, **form, **whole, rollout_batch_size=4, **SHORT) as trainer:
            assert trainer.step()["policy/grad_norm"] > 0
            assert len(trainer.run.controller.crew.ranks) == 2


def test_ppo_on_preference_pairs_fits_a_reward_head_first(model_name, pairs_file, caplog):
    from transformers import AutoModelForSequenceClassification

    from verl.config.model import RewardModelConfig
    from verl.data.loader import PreferenceDataset
    from verl.rewards.base import RewardRow
    from verl.rewards.model import RewardModelScorer
    from verl.trainer.ppo import PPOTrainer

    dataset = PreferenceDataset(pairs_file)
    trainer = PPOTrainer(
        policy_model=model_name, value_model=model_name, dataset=dataset, lr=1e-5, batch_size=8, run_dir="ppo",
        total_steps=3, **SHORT
    )  # fmt: skip
    assert not Path("ppo").exists()
    caplog.set_level("INFO", "verl")
    with trainer:
        for _epoch in range(3):
            trainer.step()
        assert trainer.config.actor_model_config.optimizer.lr == 1e-5
        assert trainer.config.train_batch_size == trainer.config.rollout_batch_size == 8
    assert "fitting a pairwise reward head on the 48 preference pairs" in caplog.text
    assert [line["step"] for line in lines_of("ppo")] == [1, 2, 3]

    again = PPOTrainer(model_name, dataset=dataset, batch_size=8, run_dir="ppo", overwrite=True, total_steps=1, **SHORT)
    assert again.train().step == 1  # and the head it has fitted is still there

    model, info = AutoModelForSequenceClassification.from_pretrained("ppo/reward_model", output_loading_info=True)
    assert model.config.num_labels == 1 and not info["missing_keys"]
    scorer = RewardModelScorer(RewardModelConfig(model_name_or_path="ppo/reward_model"), torch.device("cpu"))
    chosen, rejected = (
        scorer.score([RewardRow(str(i), "", "", r[side], (), (), "stop", {"prompt": r["prompt"]})
                      for i, r in enumerate(PAIRS)])
        for side in ("chosen", "rejected")
    )  # fmt: skip
    assert sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(PAIRS) > 0.8


def test_ppo_with_a_value_head_on_the_policy_and_an_optimizer_factory(model_name):
    from verl.trainer.ppo import PPOTrainer

    made = []

    def factory(parameters, lr):
        made.append(torch.optim.SGD(parameters, lr=lr))
        return made[-1]

    with PPOTrainer(
        policy_model=model_name, value_model="value_head", optimizer=factory, lr=1e-2, parallel_config={"fsdp": True},
        dataset=["xa", "xb", "ab"], reward_fn="tests.trainer.reward:low_ids", batch_size=8, total_steps=2, **SHORT
    ) as trainer:  # fmt: skip
        assert trainer.step()["critic/loss"] > 0
        assert len(made) == 1 and made[0].param_groups[0]["lr"] == 1e-2
        assert trainer.config.critic_model_config.shares == "actor"


def test_create_model_generates(model_name):
    from verl.utils.model import create_model

    model = create_model(model_name, device="cpu")
    input_ids = torch.tensor([[1, 3, 4]])
    output = model.generate(input_ids, max_new_tokens=20)
    assert output[0, :3].tolist() == [1, 3, 4] and 4 <= output.shape[1] <= 23


def test_rl_trainer_runs_on_the_built_in_prompts(model_name):
    from verl.trainer import RLTrainer

    trainer = RLTrainer(model_name=model_name, reward_fn=lambda x: 1.0, num_rollout_steps=2, num_update_steps=1)
    assert not Path("runs").exists()
    summary = trainer.train()
    assert summary.step == 2 and summary.last["reward/mean"] == 1.0
    assert [line["step"] for line in lines_of("runs/default")] == [1, 2]


def test_a_reward_of_one_argument_gets_each_text(model_name):
    from verl.trainer import RLTrainer

    seen = []

    def reward(x):
        seen.append(x)
        return float(len(x))

    RLTrainer(model_name=model_name, reward_fn=reward, dataset=["xa"], num_rollout_steps=1, rollout_batch_size=8,
              group_size=8, **SHORT).train()  # fmt: skip
    assert len(seen) == 8 and all(isinstance(text, str) for text in seen)


def test_update_steps_are_passes_over_each_batch(model_name):
    from verl.trainer import RLTrainer

    keys = {"dataset": ["xa"], "rollout_batch_size": 8, "group_size": 8, "reward_fn": "tests.trainer.reward:low_ids"}
    summary = RLTrainer(model_name, num_rollout_steps=1, num_update_steps=3, **keys, **SHORT).train()
    assert summary.last["policy/optimizer_steps"] == 3


def test_what_is_missing_is_said_at_the_first_step(model_name, pairs_file):
    from verl.trainer import PPOTrainer, RLTrainer

    cases = {
        "actor_model_config.model_name_or_path is missing": RLTrainer(reward_fn=lambda x: 1.0),
        "there is no reward": RLTrainer(model_name=model_name),
        "no data set": PPOTrainer(model_name, reward_fn=lambda x: 1.0),
        "no reward": PPOTrainer(model_name, dataset=["xa"]),
        "not_there.jsonl": RLTrainer(model_name, reward_fn=lambda x: 1.0, dataset="not_there.jsonl"),
        "./no_model": RLTrainer("./no_model", reward_fn=lambda x: 1.0),
        "tensor": PPOTrainer(model_name, dataset=["xa"], parallel_config={"tensor": 2}),
        "rollout_batch_sise": RLTrainer(model_name, reward_fn=lambda x: 1.0, rollout_batch_sise=8),
    }
    for message, trainer in cases.items():
        with pytest.raises(RequestError, match=message):
            trainer.step()
    with pytest.raises(ConfigError, match=r"model_name_or_path is missing[\s\S]*there is no reward"):
        RLTrainer().train()  # both in one message


def test_runs_never_share_a_folder(model_name):
    from verl.trainer import RLTrainer

    keys = {"dataset": ["xa"], "rollout_batch_size": 8, "num_rollout_steps": 1, "group_size": 8} | SHORT
    keys["reward_fn"] = "tests.trainer.reward:low_ids"
    folders = [RLTrainer(model_name, **keys).train().run_dir for _ in range(2)]
    assert folders == [Path("runs/default"), Path("runs/default-2")]
    with pytest.raises(RequestError, match=r"runs/default already holds a run.*overwrite=True"):
        RLTrainer(model_name, run_dir="runs/default", **keys).step()
    replaced = RLTrainer(model_name, run_dir="runs/default", overwrite=True, **keys)
    assert replaced.train().step == 1 and len(lines_of("runs/default")) == 1
    with pytest.raises(RequestError, match="already holds a run"):
        replaced.step()  # its run has ended; starting again would mix the two
