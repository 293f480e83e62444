"""Every ``algorithm.name`` through a whole run on a tiny model: what must hold before, during and after two laps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.trainer.reward import first_low, low_ids
from verl.algorithms.advantages import gdpo
from verl.batch import Batch
from verl.config.algorithm import AlgorithmConfig
from verl.config.errors import ConfigError, RunError
from verl.config.load import dump, load_config
from verl.config.model import OptimizerConfig
from verl.config.recipes import RECIPES
from verl.trainer.base import Run
from verl.workers.actor import ActorWorker, parts_of

PAIRS = [
    ("xa", "ab", "c"),
    ("b", "ca", "xx"),
    ("xc", "b", "ac"),
    ("ab", "a", "cb"),
    ("xu", "abc", "a"),
    ("s", "c", "ba"),
]
SAMPLED = [name for name, recipe in RECIPES.items() if recipe.samples]
OFFLINE = [name for name, recipe in RECIPES.items() if not recipe.samples]
ONE_ROW = ("ppo", "reinforce_plus_plus", "remax", "distill")  # no group


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), tiny.f_llama(), tiny.f_bpe(template="plain"))


@pytest.fixture
def make(model, tmp_path):
    """A configuration for an algorithm; offline ones get their rows in a usual format."""

    def configure(name, run_dir="run", **keys):
        algorithm = {"name": name} | keys.pop("algorithm", {})
        base = {
            "actor_model_config": {"model_name_or_path": model, "dtype": "fp32", "optimizer": {"lr": 1e-3}},
            "algorithm": algorithm,
            "micro_batch_size": 4,
            "max_prompt_length": 16,
            "max_response_length": 8,
            "total_steps": 2,
            "run_dir": str(tmp_path / run_dir),
            "metrics": {"tensorboard": False},
        }
        if RECIPES[name].samples:
            base |= {
                "dataset": [{"prompt": p} for p, *_ in PAIRS],
                "reward_fn": [low_ids] if name != "distill" else [],  # functions themselves: no scoring processes
                "rollout_batch_size": 16,
                "group_size": 1 if name in ONE_ROW else 4,
            }
            if name == "distill":
                base["teacher_model_config"] = {"model_name_or_path": model, "dtype": "fp32"}
            if name == "pass_k":
                base |= {"algorithm": {"pass_k": 2} | algorithm, "reward_fn": first_low}
            if name == "dapo":
                base["algorithm"] = {"max_refills": 50} | algorithm
        else:
            base |= {"dataset": write(tmp_path, RECIPES[name].data), "train_batch_size": 8}
            base["eval"] = {"dataset": base["dataset"]}
        return load_config(None, **(base | keys))

    return configure


def write(folder, kind):
    file = Path(folder) / f"{kind}.jsonl"
    lines = {
        "pairs": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS],
        "labelled": [
            {"prompt": p, "completion": (c, r)[i % 2], "label": i % 2 == 0} for i, (p, c, r) in enumerate(PAIRS)
        ],
        "chats": [
            {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c, _ in PAIRS
        ],
    }[kind]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def run(cfg, stop_at=None, resume=False):
    with Run(cfg, console=False) as r:
        r.prepare(r.store.load() if resume else None)
        summary = r.train()
        weights = {
            f"{role}/{n}": t.detach().clone()
            for role, engine in r.controller.workers.engines.items()
            for n, t in engine.shards()
        }
    lines = [json.loads(line) for line in (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return summary, weights, lines


@pytest.mark.parametrize("name", RECIPES)
def test_two_laps_train(make, name):
    """Weights move, metrics are finite, nothing sampled is reported where nothing is sampled."""
    torch.manual_seed(0)
    cfg = make(name, total_steps=1)
    with Run(cfg, console=False) as r:
        r.prepare()
        start = {n: t.detach().clone() for n, t in r.controller.workers.actor.engine.shards()}
        first = r.step().metrics
        end = dict(r.controller.workers.actor.engine.shards())
        if name != "distill":  # the teacher is the student's start: nothing to learn, exactly
            assert first["policy/optimizer_steps"] == 1 and first["policy/grad_norm"] > 0
            assert any(not torch.equal(start[n], end[n]) for n in start)
        else:
            assert first["distill/kl"] == pytest.approx(0, abs=1e-6)
        r.train()
    assert all(v is None or math.isfinite(v) for v in first.values())
    sampled = {"time/generate", "rollout/logprob_diff_max", "kl/mean", "kl/coef", "time/publish", "reward/mean"}
    if RECIPES[name].samples:
        assert {"reward/mean", "time/generate", "kl/mean"} <= first.keys()
    else:
        assert not sampled & first.keys() and not any(key.startswith(("reward/", "generate/")) for key in first)


@pytest.mark.parametrize(
    ("name", "loss", "more"),
    [
        ("dpo", math.log(2), {"preference/margin": 0.0, "preference/accuracy": 0.0}),
        ("ipo", (1 / (2 * 0.1)) ** 2, {"preference/margin": 0.0}),
        ("kto", 0.5, {"preference/margin": 0.0}),
        ("online_dpo", math.log(2), {"preference/margin": 0.0}),
    ],
)
def test_before_the_first_step_policy_and_reference_are_one(make, name, loss, more):
    first = run(make(name))[2][0]
    assert first["policy/loss"] == pytest.approx(loss, rel=1e-5)
    for key, value in more.items():
        assert first[key] == pytest.approx(value, abs=1e-5), key


@pytest.mark.parametrize("name", OFFLINE)
def test_held_out_rows_are_judged_by_the_same_numbers(make, name):
    """Judged on the rows of the one lap, before and after."""
    rows = len(PAIRS) * (2 if RECIPES[name].data == "pairs" else 1)
    cfg = make(name, train_batch_size=rows, micro_batch_size=2, shuffle=False, total_steps=3)
    summary, _, lines = run(cfg)
    assert summary.before.metrics["eval/loss"] == pytest.approx(lines[0]["policy/loss"], rel=1e-4)
    assert summary.after.metrics["eval/loss"] < summary.before.metrics["eval/loss"]
    assert not any(key.startswith(("reward/", "kl/", "rollout/", "time/generate", "time/reward")) for key in lines[0])


@pytest.mark.parametrize("name", RECIPES)
def test_micro_batches_change_nothing(make, name):
    keys = {
        "actor_model_config": make(name).actor_model_config.model_dump() | {"optimizer": {"name": "sgd", "lr": 0.1}}
    }
    one = run(make(name, "a", micro_batch_size=16 if RECIPES[name].samples else 8, total_steps=1, **keys))
    many = run(make(name, "b", micro_batch_size=2, total_steps=1, **keys))
    for key in one[1]:
        torch.testing.assert_close(one[1][key], many[1][key], rtol=0, atol=2e-5, msg=key)
    assert one[2][0]["policy/loss"] == pytest.approx(many[2][0]["policy/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["dpo", "kto", "sft", "reward_model", "prime", "dapo"])
def test_resume_is_exact(make, name):
    whole = run(make(name, "whole", total_steps=3))
    run(make(name, "halves", total_steps=2))
    rest = run(make(name, "halves", total_steps=3), resume=True)
    assert whole[1].keys() == rest[1].keys()
    for key in whole[1]:
        torch.testing.assert_close(whole[1][key], rest[1][key], rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("name", OFFLINE)
def test_a_resolved_file_reads_back(make, name, tmp_path):
    cfg = make(name)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(cfg))
    assert load_config(file).algorithm == cfg.algorithm and "rollout" not in dump(cfg)


@pytest.mark.parametrize("key", ["rollout_batch_size", "group_size", "num_rollout_workers", "init_kl_coef"])
def test_offline_algorithms_refuse_rollout_keys(make, key):
    with pytest.raises(ConfigError, match=rf"{key}: dpo trains on the data set's own rows"):
        make("dpo", **{key: 2})


def test_pairs_are_never_split(make):
    with pytest.raises(ConfigError, match=r"micro_batch_size is 1: must be even"):
        make("dpo", micro_batch_size=1)
    with pytest.raises(ConfigError, match="train_batch_size is 9: must be even"):
        make("dpo", train_batch_size=9)


def test_kto_needs_a_second_row(make):
    with pytest.raises(ConfigError, match=r"train_batch_size is 1: KTO's baseline .* at least 2"):
        make("kto", train_batch_size=1, micro_batch_size=1)


def test_distillation_moves_the_student_to_its_teacher(make, tmp_path):
    teacher = tiny.save(tmp_path / "teacher", tiny.f_llama(seed=1), tiny.f_bpe(template="plain"))
    actor = make("distill").actor_model_config.model_copy(update={"optimizer": OptimizerConfig(lr=3e-3)})
    keys = {"teacher_model_config": {"model_name_or_path": teacher, "dtype": "fp32"}, "actor_model_config": actor}
    lines = run(make("distill", rollout_batch_size=32, micro_batch_size=32, total_steps=6, **keys))[2]
    assert lines[-1]["distill/kl"] < 0.7 * lines[0]["distill/kl"]
    assert lines[0]["reward/mean"] is None


def test_a_teacher_with_another_vocabulary_is_refused(make, tmp_path):
    tokenizer = tiny.f_bpe(template="plain")
    tokenizer.add_tokens(["zz"])
    teacher = tiny.save(tmp_path / "teacher", tiny.f_llama(), tokenizer)
    with pytest.raises(Exception, match="another vocabulary than the policy"):
        run(make("distill", teacher_model_config={"model_name_or_path": teacher}))


def test_dynamic_sampling_refills_flat_groups(make):
    """A reward that is flat on some prompts: those groups are drawn anew, and every trained group tells something."""
    flat = lambda prompt, response_ids: 0.0 if prompt in ("xa", "b") else float(response_ids[0] < 16)  # noqa: E731
    line = run(make("dapo", reward_fn=flat, total_steps=1, algorithm={"overlong_share": 0.0, "max_refills": 50}))[2][0]
    assert line["rollout/refills"] > 0 and line["rollout/groups_sampled"] > 4
    assert line["policy/rows_trained"] == 16
    assert 0 < line["reward/flat_groups"] <= 1 - 4 / line["rollout/groups_sampled"]


def test_dynamic_sampling_stops_with_its_counts(make):
    with pytest.raises(RunError, match=r"of 12 groups sampled, 12 got one reward, .* 0 of 4 are there .*max_refills 2"):
        run(make("dapo", reward_fn=lambda response: 1.0, algorithm={"max_refills": 2}))


def test_overlong_rows_pay_and_truncated_rows_leave_the_loss(make):
    line = run(make("grpo", total_steps=1, algorithm={"overlong_share": 1.0}))[2][0]
    assert line["reward/overlong_penalty"] < 0
    masked = run(make("grpo", "masked", total_steps=1, algorithm={"mask_truncated": True}))[2][0]
    assert masked["response/truncated"] > 0.5  # the tiny model seldom stops
    assert masked["policy/rows_trained"] == round(16 * (1 - masked["response/truncated"]))


def test_the_kl_of_rows_out_of_the_loss_stays_in_their_group_s_mean(make, monkeypatch):
    """Else the rows that ended would be pushed down by their whole KL."""
    seen, estimate = [], ActorWorker.advantages

    def spied(self, batch, lap):
        estimate(self, batch, lap)
        seen.append(batch)

    monkeypatch.setattr(ActorWorker, "advantages", spied)
    actor = make("rloo").actor_model_config.model_copy(update={"optimizer": OptimizerConfig(lr=1e-2)})
    run(make("rloo", actor_model_config=actor, algorithm={"mask_truncated": True}, init_kl_coef=1.0, seed=4))
    rows = zip(*(seen[1].ragged(name).rows() for name in ("old_logprobs", "ref_logprobs", "advantages")), strict=True)
    rows, scores, groups = list(rows), seen[1].tensor("scores").tolist(), seen[1].tensor("group").tolist()
    totals = [score - (old - ref).sum().item() for score, (old, ref, _) in zip(scores, rows, strict=True)]
    ended = [i for i, mask in enumerate(seen[1].ragged("response_mask").rows()) if mask.any()]
    assert 0 < len(ended) < 16 and max(abs(t - s) for t, s in zip(totals, scores, strict=True)) > 0.1
    for i, (_, _, advantages) in enumerate(rows):
        others = [totals[k] for k in range(16) if groups[k] == groups[i] and k != i]
        expected = totals[i] - sum(others) / len(others) if i in ended else 0.0
        assert advantages.tolist() == pytest.approx([expected] * len(advantages), abs=1e-5)


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "icepop", "reject"])
def test_correction_changes_nothing_where_sampler_and_trainer_agree(make, correction):
    plain = run(make("grpo", "plain"))
    fixed = run(make("grpo", "fixed", algorithm={"correction": correction}))
    for key in plain[1]:
        torch.testing.assert_close(plain[1][key], fixed[1][key], rtol=0, atol=1e-5)
    assert fixed[2][0]["correction/effective_share"] == pytest.approx(1, abs=1e-4)
    assert fixed[2][0]["correction/changed"] == 0


def test_online_dpo_scores_at_the_sampler_s_temperature(make):
    line = run(make("online_dpo", rollout={"temperature": 0.5}))[2][0]
    assert line["policy/loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_online_dpo_leaves_masked_rows_out_of_its_pairs(make):
    line = run(make("online_dpo", algorithm={"mask_truncated": True}, rollout_batch_size=32))[2][0]
    assert line["policy/rows_trained"] <= round(32 * (1 - line["response/truncated"]))


def test_a_group_s_deviation_of_a_penalty_alone_is_refused(make):
    with pytest.raises(ConfigError, match=r"kl_in is reward with algorithm.scale std.*scale none would fit"):
        make("dapo", algorithm={"kl_in": "reward"}, init_kl_coef=0.1)
    make("dapo", algorithm={"kl_in": "reward", "scale": "none"}, init_kl_coef=0.1)
    make("dapo", algorithm={"kl_in": "reward"})


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("distill", {"kl_in": "reward"}, "kl_in is reward, but distill reads no sum of rewards"),
        ("pass_k", {"kl_in": "reward"}, "kl_in is reward, but pass_k"),
        ("gdpo", {"overlong_share": 0.5}, "overlong_share is 0.5, but gdpo"),
        ("gdpo", {"dynamic_sampling": True}, "dynamic_sampling is true, but gdpo"),
        ("distill", {"overlong_share": 0.5}, "overlong_share is 0.5, but distill"),
        ("pass_k", {"pass_k": 16}, "pass_k is 16 and group_size is 4"),
        ("ppo", {"dynamic_sampling": True}, "ppo compares no rows of a group"),
        ("grpo", {"old_logprobs": "sampler", "correction": "tis"}, "its weight would count twice"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(make, name, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(name, algorithm=keys)


def test_online_dpo_refuses_a_kl_penalty_but_tells_the_kl(make):
    with pytest.raises(ConfigError, match="init_kl_coef is 4, but online_dpo has no KL penalty"):
        make("online_dpo", init_kl_coef=4)
    lines = run(make("online_dpo"))[2]
    assert lines[0]["kl/mean"] == pytest.approx(0, abs=1e-6) and lines[1]["kl/mean"] > 1e-6


def test_online_dpo_needs_two_answers(make):
    with pytest.raises(ConfigError, match=r"group_size is 1: .* needs at least 2"):
        make("online_dpo", group_size=1, algorithm={"allow_singletons": True})


@pytest.mark.parametrize(("name", "least"), [("dpo", 48), ("online_dpo", 32)])
def test_a_token_budget_holds_a_pair(make, name, least):
    with pytest.raises(ConfigError, match=f"max_tokens_per_micro_batch {least} or"):
        make(name, max_tokens_per_micro_batch=least - 1)
    assert run(make(name, max_tokens_per_micro_batch=least))[2][0]["policy/grad_norm"] > 0


def test_a_reported_reward_doesn_t_decide_what_distillation_trains(make, tmp_path):
    teacher = tiny.save(tmp_path / "teacher", tiny.f_llama(seed=1), tiny.f_bpe(template="plain"))
    keys = {"teacher_model_config": {"model_name_or_path": teacher, "dtype": "fp32"}, "total_steps": 1}
    without = run(make("distill", "a", **keys))
    silent = run(make("distill", "b", reward_fn=lambda response: None, **keys))
    for key in without[1]:
        assert torch.equal(without[1][key], silent[1][key])


def test_gdpo_leaves_a_row_without_a_score_out_of_every_reward():
    """One reward failed on the first row: the other reward's statistics don't count that row either."""
    batch = Batch(["0", "1", "2", "3"])
    batch["scores"] = torch.tensor([math.nan, 0.0, 0.0, 0.0], dtype=torch.float64)
    batch["reward_parts"] = [{"a": 1.0, "b": None}, *({"a": 0.0, "b": 0.0} for _ in range(3))]
    parts = parts_of(batch)
    assert math.isnan(parts["a"][0])
    assert gdpo(parts, [1.0, 1.0], torch.zeros(4, dtype=torch.int64)).tolist() == [0.0] * 4


@pytest.mark.parametrize(("name", "key"), [("prime", "process_reward_model_config"), ("ppo", "critic_model_config")])
def test_whoever_reads_the_policy_s_tokens_needs_its_vocabulary(make, tmp_path, name, key):
    tokenizer = tiny.f_bpe(template="plain")
    tokenizer.add_tokens(["zz"])
    other = tiny.save(tmp_path / "other", tiny.f_llama(), tokenizer)
    with pytest.raises(Exception, match=f"{key}: .* has another vocabulary than the policy"):
        run(make(name, **{key: {"model_name_or_path": other}}))


def test_the_process_reward_s_section_adds_to_the_actor_s(make):
    cfg = make(
        "prime", process_reward_model_config={"optimizer": {"lr": 1e-5, "schedule": "linear"}}, mini_batch_size=4
    )
    section = cfg.process_reward_model_config
    assert section.model_name_or_path == cfg.actor_model_config.model_name_or_path and section.dtype == "fp32"
    with Run(cfg, console=False) as r:
        r.prepare()
        r.train()
        judge = r.controller.workers.process_reward.engine
        assert judge.optimizer.total_steps == judge.optimizer.step_number == 2  # a step per lap, of mini-batches four


def test_kto_never_matches_a_row_with_its_own_prompt(make, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": "xa", "completion": "b", "label": True}) + "\n")
    with pytest.raises(Exception, match="rows of at least two prompts"):
        run(make("kto", dataset=str(file), eval={"dataset": None}))


def test_a_kto_lap_of_one_prompt_has_no_baseline_and_goes_on(make, tmp_path):
    file, one = tmp_path / "some.jsonl", tmp_path / "one.jsonl"
    rows = [{"prompt": p, "completion": c, "label": x} for p, c, x in [("xa", "b", 1), ("xa", "c", 0), ("b", "a", 1)]]
    rows.append(rows[0] | {"prompt": "s"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    keys = {"dataset": str(file), "train_batch_size": 2, "micro_batch_size": 2, "shuffle": False}
    lines = run(make("kto", eval={"dataset": None}, total_steps=4, checkpoint={"every_steps": 2}, **keys))[2]
    assert [line["preference/one_prompt"] for line in lines] == [1, 0, 1, 0]
    assert [line["preference/kl_baseline"] == 0 for line in lines[::2]] == [True, True]
    resumed = run(make("kto", eval={"dataset": None}, total_steps=5, **keys), resume=True)[2]
    assert len(resumed) == 5 and resumed[4]["preference/one_prompt"] == 1
    with pytest.raises(Exception, match=r"eval\.dataset: .* rows of at least two prompts"):
        run(make("kto", "judged", eval={"dataset": str(one)}, **keys))


def test_kto_s_mismatched_rows_keep_the_length_limit(make, tmp_path):
    file = tmp_path / "long.jsonl"
    rows = [("x" * 18, "b", True), ("c", "a" * 18, False)]
    file.write_text("".join(json.dumps({"prompt": p, "completion": c, "label": x}) + "\n" for p, c, x in rows))
    cfg = make("kto", dataset=str(file), eval={"dataset": None}, train_batch_size=2, micro_batch_size=2,
               max_tokens_per_micro_batch=24)  # fmt: skip
    with Run(cfg, console=False) as r:
        r.prepare()
        examples = r.feed.take(2)
        lengths = r.controller.source.lot(examples).batch
        whole = lengths.ragged("prompt_ids").lengths + lengths.ragged("response_ids").lengths
        assert whole.max() <= 24 and len(whole) == 4
        r.feed.restore({**r.feed.state()})
        r.step()


def test_sampler_and_trainer_are_compared_in_every_lap(make):
    line = run(make("grpo"))[2][0]
    assert line["rollout/kl"] == pytest.approx(0, abs=1e-6)
    assert line["rollout/effective_share"] == pytest.approx(1, abs=1e-4)


def test_the_sampler_may_stand_for_the_old_policy(make):
    keys = {"algorithm": {"old_logprobs": "sampler"}, "mini_batch_size": 8}
    line = run(make("grpo", **keys))[2][0]
    assert "time/actor.logprobs" not in line and line["policy/optimizer_steps"] == 2


def test_defaults_are_the_recipe_s():
    assert AlgorithmConfig(name="gspo").filled.loss_reduction == "seq-mean-token-mean"
    assert AlgorithmConfig(name="gspo").filled.clip_range == (3e-4, 4e-4)
    assert AlgorithmConfig(name="gspo", clip_ratio=0.1).filled.clip_range == (0.1, 0.1)
    assert AlgorithmConfig(name="dapo").filled.dynamic_sampling is True
    assert AlgorithmConfig(name="dapo", dynamic_sampling=False).filled.dynamic_sampling is False
    assert AlgorithmConfig(name="simpo").filled.beta == 2.0
