"""Reading, overriding, judging as a whole, deriving and writing back."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.samples import README_FILE, SIBLINGS, load, refusal
from verl.config.errors import ConfigError, RequestError
from verl.config.load import dump, load_config
from verl.config.model import ModelConfig, OptimizerConfig


@pytest.fixture
def readme_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(README_FILE)
    return path


def test_promised_file(readme_file):
    cfg = load_config(readme_file)
    assert (cfg.rollout_batch_size, cfg.train_batch_size, cfg.mini_batch_size, cfg.micro_batch_size) == (
        128,
        512,
        128,
        32,
    )
    assert (cfg.group_size, cfg.gradient_accumulation_steps, cfg.total_epochs, cfg.total_steps) == (1, 4, 1.0, None)
    assert cfg.init_kl_coef == 0.1
    assert cfg.actor_model_config.lora_r == 64
    assert cfg.reward_model_config.micro_batch_size == 64
    assert cfg.reward_weights == [1.0]
    assert cfg.critic_model_config.optimizer.lr == 1e-5


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings(name, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SIBLINGS[name])
    cfg = load_config(path)
    assert cfg.mini_batch_size == cfg.micro_batch_size * 4
    assert (
        load_config(path, [f"micro_batch_size={cfg.micro_batch_size // 2}"]).mini_batch_size * 2 == cfg.mini_batch_size
    )


def test_minimal_file():
    cfg = load(rollout_batch_size=16, micro_batch_size=4)
    assert (cfg.train_batch_size, cfg.mini_batch_size, cfg.gradient_accumulation_steps) == (16, 16, 4)


def test_defaults_of_the_algorithm():
    grpo, ppo = load(algorithm={"name": "grpo"}), load()
    assert (grpo.group_size, grpo.init_kl_coef, grpo.critic_model_config) == (8, 0.0, None)
    assert (ppo.group_size, ppo.init_kl_coef) == (1, 0.1)
    assert ppo.critic_model_config is not None


def test_critic_computes_in_the_actors_dtype():
    cfg = load(actor_model_config={"model_name_or_path": "m", "dtype": "fp32"}, critic_model_config={"use_lora": True})
    assert cfg.critic_model_config.dtype == "fp32"
    assert cfg.critic_model_config.use_lora


def test_critic_keeps_its_learning_rate_when_other_optimizer_keys_are_given():
    for optimizer in ("sgd", {"max_grad_norm": 2.0}):
        assert load(critic_model_config={"optimizer": optimizer}).critic_model_config.optimizer.lr == 1e-5


def test_order_of_precedence(readme_file):
    cfg = load_config(readme_file, ["seed=1", "rollout.temperature=0.5", "rollout.top_k=3"], rollout={"top_k": 4})
    assert (cfg.seed, cfg.rollout.temperature, cfg.rollout.top_k) == (1, 0.5, 4)


def test_override_values_are_yaml(readme_file):
    cfg = load_config(
        readme_file,
        [
            "actor_model_config.optimizer.lr=1e-6",
            "rollout.stop=['\\n', a]",
            "kl_target=null",
            "reward_fn=my.module:f",
            "dataset={name: arithmetic, high: 9}",
            "critic_model_config.shares=actor",
            "total_epochs=3",
        ],
    )
    assert cfg.actor_model_config.optimizer.lr == 1e-6
    assert cfg.rollout.stop == ["\\n", "a"]
    assert cfg.reward_fn == ["my.module:f"]
    assert cfg.dataset == {"name": "arithmetic", "high": 9}
    assert cfg.critic_model_config.shares == "actor"
    assert cfg.total_epochs == 3.0


@pytest.mark.parametrize("override", ["rollout", "=3", "--seed"])
def test_malformed_override(override):
    with pytest.raises(ConfigError, match="write key=value"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run_dir=", "'run_dir=' gives no value; write run_dir=null"),
        ("run_dir=  ", "gives no value"),
        ("run_dir=#x", "gives no value"),
        ("run_dir=a #b", "what follows # is a comment"),
        ("rollout.stop=[a", r"override 'rollout.stop=\[a': can't be read: .*expected ',' or '\]'"),
        ("run_dir=@x", "override 'run_dir=@x': can't be read"),
        ("seed=" + "9" * 5000, "can't be read: Exceeds the limit"),
    ],
)
def test_an_override_without_a_whole_value(override, words, readme_file):
    with pytest.raises(ConfigError, match=words):
        load_config(readme_file, ["seed=1", override])


def test_values_that_look_like_comments_are_values(readme_file):
    assert load_config(readme_file, ["run_dir='a #b'"]).run_dir == "a #b"
    assert load_config(readme_file, ["run_dir=a#b"]).run_dir == "a#b"


def test_an_optimizers_name_is_short_for_a_section_that_overrides_go_into(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("actor_model_config: {optimizer: sgd}")
    ways = [
        (path, ["actor_model_config.optimizer.lr=0.5"], {}),
        (None, ["actor_model_config.optimizer=sgd", "actor_model_config.optimizer.lr=0.5"], {}),
        (None, ["actor_model_config.optimizer.lr=0.5", "actor_model_config.optimizer=sgd"], {}),
        (path, [], {"actor_model_config": {"optimizer": {"lr": 0.5}}}),
    ]
    for file, overrides, values in ways:
        optimizer = load_config(file, overrides, partial=True, **values).actor_model_config.optimizer
        assert (optimizer.name, optimizer.lr) == ("sgd", 0.5)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("algorithm: grpo", ["algorithm.gamma=0.9"], r"algorithm is 'grpo' .* nothing can be set in it \(gamma\)"),
        ("algorithm: grpo", ["algorithm={gamma: 0.9}"], "algorithm is 'grpo'"),
        ("eval: 5", ["eval.limit=3"], "eval is 5"),
        ("", ["eval=5", "eval.limit=3"], "eval is 5"),
        ("device_map: cpu", ["device_map.critic=cpu"], "device_map is 'cpu'"),
    ],
)
def test_a_value_where_a_section_belongs_is_not_replaced_in_silence(text, overrides, words, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(path, overrides, partial=True)


def test_a_name_may_become_a_mapping():
    cfg = load_config(None, ["dataset=a", "dataset={name: arithmetic}"], partial=True)
    assert cfg.dataset == {"name": "arithmetic"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("on: 1", "true is no key"),
        ("eval: {no: 1}", "false in eval is no key"),
        ("seed: " + "9" * 5000, "can't be read"),
        ("eval: " + "[" * 3000, "can't be read"),
        ("eval.limit: 3", r"eval.limit is not a key: a file nests it, eval: \{limit: \.\.\.\}"),
        ("prefetch: 2", "prefetch is not a key: there is nothing to set, the data set is read"),
        ("x: 2", "x is not a key; docs/configuration.md"),
        ("a: [1", "can't be read"),
        ("- 1\n- 2", "keys and values"),
        ("seed: 1\nseed: 2", "duplicate"),
        ("seed: ${x}", "x"),
    ],
)
def test_unreadable_file(text, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_absent_file(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file"):
        load_config(tmp_path / "gone.yaml")


def test_empty_sections_and_null_mean_the_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(README_FILE + "rollout:\ntrain_batch_size: null\n".replace("train_batch_size", "mini_batch_size"))
    cfg = load_config(path)
    assert cfg.rollout.temperature == 1.0
    assert cfg.mini_batch_size == 128
    assert load(algorithm={"value_clip": None}).algorithm.value_clip is None  # a value of its own


def test_all_violations_in_one_message():
    text = refusal(
        rollout_batch_size=192, train_batch_size=512, seed="x", tempreature=1.0, total_steps=1, total_epochs=1,
        rollout={"temperature": 0}, critic_model_config={"lora_rank": 1}, dataset=None, reward_weights=[1, 2],
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0] == "8 settings are wrong"
    starts = {line.split()[0] for line in lines[1:]}
    assert starts == {
        "train_batch_size", "seed", "tempreature", "total_steps", "rollout.temperature", "dataset", "reward_weights",
        "critic_model_config.lora_rank",
    }  # fmt: skip


def test_a_wrong_value_is_not_judged_a_second_time_by_the_rules_between_keys():
    text = refusal(rollout_batch_size=-1, train_batch_size=100)  # with the default of 64, 100 would be no multiple
    assert text.startswith("1 setting is wrong")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout_batch_size": 0}, ["rollout_batch_size is 0", "an integer >= 1", "such as"]),
        ({"rollout_batch_size": True}, ["rollout_batch_size is true", "an integer"]),
        ({"rollout_batch_size": "64"}, ["rollout_batch_size is '64'", "an integer"]),
        ({"seed": 1.5}, ["seed is 1.5", "such as 0 or 1"]),
        ({"seed": 2**63}, ["seed is 9223372036854775808: must be an integer >= 0 and <= 9223372036854775807"]),
        ({"kl_target": math.inf}, ["kl_target is inf", "a number > 0 or null"]),
        ({"rollout": {"top_p": 1.5}}, ["rollout.top_p is 1.5", "a number > 0 and <= 1", "such as 1.0 or 0.1"]),
        ({"algorithm": {"name": "qpo"}}, ["algorithm.name is 'qpo'", "one of ppo, grpo, rloo"]),
        ({"algorithm": "grpo"}, ["algorithm is 'grpo'", "a mapping"]),
        ({"reward_weights": [1.0, "a"]}, ["reward_weights[1] is 'a'", "a list, each a number"]),
        ({"dataset": 3}, ["dataset is 3", "a hub name"]),
        ({"dataset": {"low": 3}}, ["dataset is", "needs its name"]),
        ({"reward_fn": 3}, ["reward_fn is 3", "module:function"]),
        ({"dataset": "a" * 300 + ".jsonl"}, ["dataset is 'aaa", "at most 255 bytes"]),
        ({"run_dir": "a\0b"}, ["run_dir is", "NUL"]),
        ({"rollout_batch_size": 10**20}, ["must be an integer >= 1 and <= 1000000000"]),
        (
            {"actor_model_config": {"model_name_or_path": "m", "fsdp_config": {"tensor_parallel_size": 10**7}}},
            ["tensor_parallel_size is 10000000", "<= 4096"],
        ),
        ({"rollout": {"tensor_parallel_size": 10**7}}, ["rollout.tensor_parallel_size is 10000000", "<= 4096"]),
        ({"reward_timeout": 1e10}, ["<= 1e+09 or null", "null: no limit"]),
        ({"rollout": {"top_k": 10**400}}, ["rollout.top_k is", "<= 2147483647"]),
        ({"rollout": {"cache_gib": 1e300}}, ["rollout.cache_gib is 1e+300", "<= 1e+06"]),
        ({"rollout": {"temperature": 1e-300}}, ["rollout.temperature is 1e-300", "a number >= 0.0001"]),
        ({"actor_model_config": {"model_name_or_path": "m", "lora_r": 10**20}}, ["lora_r is", "<= 65536"]),
        ({"actor_model_config": {"model_name_or_path": 3}}, ["model_name_or_path is 3", "a folder"]),
        ({"actor_model_config": {"model_name_or_path": " "}}, ["must not be empty"]),
        (
            {"actor_model_config": {"model_name_or_path": "m", "optimizer": {"betas": [0.9, 1]}}},
            ["betas[1] is 1", "< 1"],
        ),
        (
            {"actor_model_config": {"model_name_or_path": "m", "optimizer": "lion"}},
            ["name is 'lion'", "adamw8bit, sgd"],
        ),
        (
            {"reward_model_config": {"model_name_or_path": "r", "trainable": True}},
            ["trainable is true", "a run of its own (alg"],
        ),
        ({"rollout": {"engine": "tgi"}}, ["rollout.engine is 'tgi'", "one of auto, native, vllm"]),
        ({"rollout": {"engine": "openai"}}, ["rollout.url is missing", "http://127.0.0.1:8000"]),
        ({"rollout": {"url": "http://h:1"}}, ["rollout.engine auto doesn't read it", "openai or sglang"]),
        ({"rollout": {"engine": "sglang", "url": "http://h:1", "model": "m"}}, ["rollout.model is given", "openai"]),
        ({"rollout": {"options": {"swap_space": 1}}}, ["rollout.options is given", "rollout.engine vllm"]),
        (
            {"max_staleness": 2, "hybrid_config": {"reshard_interval": 8}},
            ["max_staleness 7", "hybrid_config.reshard_interval 3"],
        ),
        ({"cluster": {"backend": "slurm"}}, ["cluster.backend is 'slurm'", "one of local, ray"]),
        ({"cluster": {"max_restarts": -1}}, ["cluster.max_restarts is -1", "such as 0 or 1"]),
        ({"cluster": {"heartbeat_seconds": 0}}, ["cluster.heartbeat_seconds is 0", "a number > 0, such as 20.0 or"]),
        ({"device_map": {"actr": "cpu"}}, ["'actr' is no role", "reward_model"]),
    ],
)
def test_message_of_one_violation(values, words):
    text = refusal(**values)
    assert text.startswith("1 setting is wrong")
    for word in words:
        assert word in text


def test_a_gpu_number_is_a_list_of_one():
    assert load(device_map={"actor": 0, "critic": [0]}).device_map == {"actor": [0], "critic": [0]}


def test_missing_parts():
    with pytest.raises(ConfigError) as caught:
        load_config(None)
    for key in ("actor_model_config.model_name_or_path is missing", "dataset is missing", "there is no reward"):
        assert key in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert load_config(None, partial=True).train_batch_size == 64
    with pytest.raises(ConfigError, match="seed is 'x'"):
        load_config(None, partial=True, seed="x")


class Module:
    """Stands for a loaded model: only its parameters make it one."""

    def parameters(self):
        return iter(())


def score(response: str) -> float:
    return float(len(response))


def test_python_objects_pass_through():
    module, data = Module(), [{"prompt": "a"}]
    cfg = load(
        actor_model_config=ModelConfig(model_name_or_path=module, optimizer=OptimizerConfig(lr=1.0)),
        dataset=data, reward_fn=[score, lambda x: 1.0], run_dir=Path("runs") / "x",
    )  # fmt: skip
    assert cfg.actor_model_config.model_name_or_path is module
    assert cfg.actor_model_config.optimizer.lr == 1.0
    assert cfg.dataset is data
    assert cfg.reward_fn[0] is score
    assert cfg.reward_weights == [1.0, 1.0]
    assert cfg.run_dir == "runs/x"


def test_a_home_folder_is_found_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = load(
        actor_model_config={"model_name_or_path": "~/policy"}, reward_model_config={"model_name_or_path": "~/judge"},
        run_dir="~/run", dataset_cache_dir=Path("~"),
        rollout={"engine": "openai", "url": "http://h:1", "weights_dir": "~/shared/w"},
    )  # fmt: skip
    assert (cfg.run_dir, cfg.dataset_cache_dir, cfg.rollout.weights_dir) == (
        "/home/me/run",
        "/home/me",
        "/home/me/shared/w",
    )
    models = cfg.actor_model_config, cfg.reward_model_config
    assert [model.model_name_or_path for model in models] == ["/home/me/policy", "/home/me/judge"]


def test_a_section_merges_only_what_was_set(readme_file):
    cfg = load_config(readme_file, actor_model_config=ModelConfig(lora_r=8))
    assert (cfg.actor_model_config.lora_r, cfg.actor_model_config.use_lora) == (8, True)


ODD = {
    "rollout": {"stop": ["1e-6", "${x}", "\\${y}", "yes", "null", "a: b", "\n", "é"]},
    "run_dir": "runs/1e5",
    "actor_model_config": {"model_name_or_path": "m", "optimizer": {"lr": 3e-5, "betas": (0.0, 0.5)}},
    "columns": {"prompt": "question"},
    "metrics": {"alarms": {"generate/latency_p99": 3}},
    "device_map": {"actor": [0, "2-3"], "critic": "cpu:1"},
}


@pytest.mark.parametrize("values", [{}, {"algorithm": {"name": "grpo"}}, {"total_steps": 3}, ODD])
def test_dump_reads_back_to_an_equal_configuration(values, tmp_path):
    cfg = load(**values)
    path = tmp_path / "config.yaml"
    path.write_text(dump(cfg))
    again = load_config(path)
    assert again == cfg
    assert dump(again) == dump(cfg)


def test_dump_of_python_objects(tmp_path):
    cfg = load(actor_model_config={"model_name_or_path": Module()}, reward_fn=[score, lambda x: 1.0])
    text = dump(cfg)
    assert f"- {__name__}:score" in text
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="pass the object from Python again") as caught:
        load_config(path)
    assert "<Module>" in str(caught.value)
    again = load_config(path, actor_model_config={"model_name_or_path": "m"}, reward_fn=score, reward_weights=None)
    assert again.actor_model_config.model_name_or_path == "m"


def test_one_override_changes_the_micro_batch_of_a_dumped_file(readme_file, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump(load_config(readme_file)))
    cfg = load_config(path, ["micro_batch_size=16"])
    assert (cfg.micro_batch_size, cfg.gradient_accumulation_steps, cfg.mini_batch_size) == (16, 8, 128)


def test_loading_is_light(readme_file):
    code = f"""
import sys
from verl.config.load import dump, load_config, notes
cfg = load_config({str(readme_file)!r}); dump(cfg); notes(cfg)
print([m for m in ("torch", "ray", "transformers", "numpy") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_options_of_a_function_may_have_numbers_for_keys():
    entry = {"name": "m:f", "table": {1: 0.5, 2: 1.0}}
    assert load(reward_fn=entry).reward_fn == [entry]
