"""G19, the configuration's part: prompt + response over the model's limit is an error at start naming all three."""

from __future__ import annotations

import json

import pytest

from tests.config.samples import load, refusal
from verl.config.errors import ConfigError
from verl.config.load import check_context

LENGTHS = {"max_prompt_length": 16, "max_response_length": 16}


@pytest.mark.parametrize(
    "config",
    [{"max_position_embeddings": 24}, {"n_positions": 24}, {"text_config": {"max_position_embeddings": 24}}],
)
def test_model_folder(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(**LENGTHS, actor_model_config={"model_name_or_path": str(tmp_path)})
    assert "max_prompt_length is 16 and max_response_length is 16" in text
    assert "24 positions" in text
    assert "max_prompt_length 8 or max_response_length 8 would fit" in text
    load(max_prompt_length=8, max_response_length=16, actor_model_config={"model_name_or_path": str(tmp_path)})


class Loaded:
    """A loaded module, as far as the rule looks."""

    class config:
        @staticmethod
        def to_dict():
            return {"max_position_embeddings": 24}

    def parameters(self):
        return iter(())


def test_loaded_module():
    assert "24 positions" in refusal(**LENGTHS, actor_model_config={"model_name_or_path": Loaded()})


def test_limit_known_after_loading():
    cfg = load(**LENGTHS)
    check_context(cfg, 32)
    with pytest.raises(ConfigError, match=r"16 and max_response_length is 16: .* 24 positions"):
        check_context(cfg, 24)


def test_each_length_alone_is_over_the_limit():
    with pytest.raises(ConfigError, match="max_prompt_length 4 with max_response_length 4 would fit"):
        check_context(load(**LENGTHS), 8)
