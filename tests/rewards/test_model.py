from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from tests import tiny
from tests.rewards.rows import make_rows
from verl.config.errors import RequestError, RewardError
from verl.config.model import RewardModelConfig
from verl.models.scorer import ROWS
from verl.rewards.base import RewardRow, Rewards
from verl.rewards.model import RewardModelScorer

CPU = torch.device("cpu")
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "what", "is", "blue", "red"]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
SETTINGS: Any = {"dtype": "fp32"}


def word_tokenizer(limit: int = 64) -> PreTrainedTokenizerFast:
    """One id per word; pairs as ``[CLS] question [SEP] answer [SEP]`` with token types 0 and 1."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_max_length=limit, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def built(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
    return model.eval()


def deberta(labels: int = 1) -> Any:
    return built(
        DebertaV2Config(
            vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, relative_attention=True, pos_att_type=["c2p", "p2c"], type_vocab_size=2,
            position_biased_input=False, num_labels=labels,
        )
    )  # fmt: skip


def llama(pad: int | None = None) -> Any:
    return built(
        LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, num_labels=1, pad_token_id=pad, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return built(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64, num_labels=1))


def scorer(model: Any, tokenizer: Any, **settings: Any) -> RewardModelScorer:
    return RewardModelScorer(RewardModelConfig(model_name_or_path=model, **SETTINGS, **settings), CPU, tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return tiny.save(tmp_path, deberta(), word_tokenizer())


def test_a_deberta_folder_scores_question_and_answer_as_a_pair(folder: str) -> None:
    ours = scorer(folder, None)
    assert not any(p.requires_grad for p in ours.model.parameters()) and not ours.model.training
    rows = make_rows(["blue", "red is blue", ""], prompt="what is a")
    tokenizer, model = word_tokenizer(), AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        expected = [
            model(**tokenizer(r.fields["prompt"], r.response, return_tensors="pt")).logits.item() for r in rows[:2]
        ]
        empty = torch.tensor([[1, 12, 13, 4, 2, 2]])  # an empty answer is still a pair
        types = torch.tensor([[0, 0, 0, 0, 0, 1]])
        expected.append(model(input_ids=empty, token_type_ids=types).logits.item())
    assert ours.score(rows) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3


def test_messages_are_joined_plainly_for_a_model_without_template(folder: str) -> None:
    ours = scorer(folder, None)
    plain, listed = make_rows(["blue"], prompt="what is a")[0], make_rows(["blue"])[0]
    listed.fields["prompt"] = [{"role": "system", "content": "what"}, {"role": "user", "content": "is a"}]
    assert ours.score([plain]) == ours.score([listed])


def test_control_words_in_an_answer_stay_words(folder: str) -> None:
    ours = scorer(folder, None)
    assert ours._input(make_rows(["a [SEP] b"], prompt="c")[0]).ids.count(2) == 2


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        (deberta, word_tokenizer),
        (llama, lambda: tiny.f_bpe(pad=None)),
        (llama, lambda: tiny.f_bpe(pad="<eos>", bos_post=True)),
        (lambda: llama(pad=2), lambda: tiny.f_bpe(pad="<eos>", template="plain")),
        (lambda: llama(pad=0), lambda: tiny.f_bpe(template="bos", bos_post=True)),
        (gpt2, lambda: tiny.f_bpe(pad=None)),
    ],
    ids=["deberta", "llama-no-pad", "llama-pad-is-eos", "llama-template", "llama-bos", "gpt2-no-pad"],
)
def test_a_score_does_not_depend_on_batch_neighbours(model: Any, tokenizer: Any) -> None:
    words = ["a", "b c", "a b c a b c a b", "c", "a a a a a a a a a a a a", "x<eos>", "<eos>"]
    rows = make_rows(words, prompt="a b")
    ours = scorer(model(), tokenizer(), micro_batch_size=4)
    alone = [ours.score([row])[0] for row in rows]
    assert ours.score(rows) == pytest.approx(alone, abs=1e-5)
    assert ours.score(rows[::-1]) == pytest.approx(alone[::-1], abs=1e-5)
    assert len({round(value, 4) for value in alone}) == len(rows)


def test_a_decoder_is_scored_at_its_last_token_even_when_that_is_the_pad_id() -> None:
    model, tokenizer = llama(pad=2), tiny.f_bpe(pad="<eos>")
    ours = scorer(model, tokenizer)
    row = make_rows(["x<eos>"], prompt="a")[0]
    ids = torch.tensor([[4, 3, 2]])
    with torch.no_grad():
        expected = model.score(model.model(ids).last_hidden_state)[0, -1].item()
    assert ours.score([row, *make_rows(["xxxxx"])])[0] == pytest.approx(expected, abs=1e-5)
    assert model.config.pad_token_id == 2


def test_a_chat_template_gets_messages_and_bos_once() -> None:
    ours = scorer(llama(), tiny.f_bpe(template="bos", bos_post=True))
    row = make_rows(["b"], prompt="xa")[0]
    assert ours._input(row).ids == [1, 8, 11, 3, 4, 12, 4, 11, 5, 12]  # <bos> u:xa newline a:b newline


def test_an_answer_goes_on_from_the_prompt_s_open_message() -> None:
    row = make_rows(["b"])[0]
    row.fields["prompt"] = [{"role": "user", "content": "xa"}, {"role": "assistant", "content": "c"}]
    ours = scorer(llama(), tiny.f_bpe(template="bos", bos_post=True))
    assert ours._input(row).ids == [1, 8, 11, 3, 4, 12, 4, 11, 6, 5, 12]  # <bos> u:xa newline a:cb newline
    ours.model.config.reward_rows = ROWS
    assert ours._input(row).ids == [1, 8, 11, 3, 4, 12, 4, 11, 6, 5, 12, 2]


def test_an_encoder_with_shifted_positions_reaches_its_limit() -> None:
    config = RobertaConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=18, type_vocab_size=1, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    tokenizer = word_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    ours = scorer(built(config), tokenizer)
    assert ours.max_length == 17
    rows = make_rows(["a b", "c " * 40], prompt="d " * 30)
    values, cut = ours.evaluate(rows)
    assert cut == 2 and values == pytest.approx([ours.score([row])[0] for row in rows], abs=1e-5)


def test_too_long_rows_lose_the_questions_start_first_and_are_counted(folder: str) -> None:
    ours = scorer(folder, None, max_length=9)
    ids = [ours._input(row).ids for row in make_rows(["a b", "a b c d", "a b c d e f g h"], prompt="what is blue red")]
    words = [" ".join((SPECIAL + WORDS)[i] for i in row) for row in ids]
    assert words == [
        "[CLS] what is blue red [SEP] a b [SEP]",
        "[CLS] blue red [SEP] a b c d [SEP]",
        "[CLS] [SEP] a b c d e f [SEP]",
    ]
    with Rewards([ours]) as rewards:
        assert rewards.has_model and rewards.names == ["reward_model"]
        scores = rewards.score(make_rows(["a b", "a b c d"], prompt="what is blue red"))
    assert scores.counts["truncated"] == 1 and all(isinstance(total, float) for total in scores.totals)
    with pytest.raises(RewardError, match=r"row p0/0 has 11 tokens, max_length is 9"):
        scorer(folder, None, max_length=9, overlong="error").score(make_rows(["a b c d"], prompt="what is blue red"))


def test_a_dialogue_keeps_bos_and_its_end() -> None:
    ours = scorer(llama(), tiny.f_bpe(template="bos", bos_post=True), max_length=6)
    entry = ours._input(make_rows(["b"], prompt="xaxaxa")[0])
    assert entry.ids == [1, 12, 4, 11, 5, 12] and entry.cut  # <bos>, then newline a:b newline


def test_what_is_no_reward_model_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(RequestError, match=r"gives 2 numbers per row \(num_labels\)"):
        scorer(tiny.save(tmp_path / "two", deberta(labels=2), word_tokenizer()), None)
    with pytest.raises(RequestError, match="max_length 65 is over the model's own limit 64"):
        scorer(folder, None, max_length=65)
    with pytest.raises(RequestError, match="can't load '/no/such/folder'"):
        scorer("/no/such/folder", None)
    language_model = tiny.f_llama()
    language_model.config.num_labels = 1
    with pytest.raises(RequestError, match=r"holds no weights for score.weight: not a reward model"):
        scorer(tiny.save(tmp_path / "lm", language_model, tiny.f_bpe()), None)


def test_a_loaded_module_finds_its_own_tokenizer(folder: str) -> None:
    rows = make_rows(["blue"], prompt="what is a")
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert scorer(loaded, None).score(rows) == scorer(folder, None).score(rows)
    with pytest.raises(RequestError, match="names no tokenizer"):
        scorer(deberta(), None)


def test_a_nan_of_the_model_names_the_row(folder: str) -> None:
    ours = scorer(folder, None)
    rows = make_rows(["blue", "red"], prompt="what is a")
    with torch.no_grad():
        ours.model.classifier.bias.fill_(torch.nan)
    with pytest.raises(RewardError, match=r"reward model: row 0 \(p0/0\) returned nan"):
        Rewards([ours]).score(rows)
    assert Rewards([ours], failure="drop").score(rows).counts["dropped"] == 2


def test_several_models_stand_where_they_are_named(folder: str) -> None:
    from verl.config.load import load_config
    from verl.rewards.base import build_rewards

    rows = make_rows(["a b c d", "red"], prompt="what is blue red")
    name: dict[str, Any] = SETTINGS | {"name": "reward_model", "model_name_or_path": folder}
    cfg = load_config(
        None, partial=True, reward_fn=[name | {"as": "short", "max_length": 9}, len, name],
        reward_weights=[1.0, 10.0, 100.0, 1000.0], reward_model_config=SETTINGS | {"model_name_or_path": folder},
    )  # fmt: skip
    with build_rewards(cfg, CPU) as rewards:
        scores = rewards.score(rows)
        rewards._models["short"].model.classifier.bias.data.fill_(torch.nan)
        with pytest.raises(RewardError, match=r"reward model 'short': row 0 \(p0/0\) returned nan"):
            rewards.score(rows)
    whole, short = scorer(folder, None), scorer(folder, None, max_length=9)
    expected = {
        "short": short.score(rows), "len": [7.0, 3.0], "reward_model": whole.score(rows),
        "reward_model_2": whole.score(rows),
    }  # fmt: skip
    assert list(scores.per_reward) == list(expected)
    for key, values in expected.items():
        assert scores.per_reward[key] == pytest.approx(values, abs=1e-5)
    assert scores.counts["truncated"] == 1
    weighted = zip([1, 10, 100, 1000], expected.values(), strict=True)
    assert scores.totals[0] == pytest.approx(sum(w * values[0] for w, values in weighted), rel=1e-5)


def test_model_and_functions_add() -> None:
    rows: list[RewardRow] = make_rows(["blue", "red is"], prompt="what is a")
    ours = scorer(deberta(), word_tokenizer())
    with Rewards([len, ours], weights=[2.0, 0.5]) as rewards:
        expected = [2 * len(r.response) + 0.5 * value for r, value in zip(rows, ours.score(rows), strict=True)]
        assert rewards.score(rows).totals == pytest.approx(expected)
