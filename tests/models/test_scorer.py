"""Reward models in training: packed rows score as the plain model does, and as the exported one does later."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.models.zoo import rows
from tests.tiny import EOS, PAD, f_bpe, f_gpt2, f_llama, save
from verl.batch import Batch, Ragged
from verl.checkpoint.export import export, model_files
from verl.checkpoint.store import CheckpointStore
from verl.config.errors import RequestError
from verl.config.model import ModelConfig, OptimizerConfig, RewardModelConfig
from verl.data.pairs import encode_completions
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model, load_scorer
from verl.models.packing import pack, set_attention
from verl.models.policy import Policy
from verl.models.scorer import Scorer
from verl.rewards.base import RewardRow
from verl.rewards.model import RewardModelScorer

SCORES = frozenset({"scores"})
FAMILIES = {
    "llama": f_llama,
    "tied llama": lambda: f_llama(tied=True),
    "gpt2": f_gpt2,
    "qwen3": lambda: tf.Qwen3ForCausalLM(
        tf.Qwen3Config(
            vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        )
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=4, query_pre_attn_scalar=20,
        )
    ),
}  # fmt: skip
LORA = {"use_lora": True, "lora_r": 4}


def scorer(source, seed=0, **options) -> Scorer:
    return Scorer(load_scorer(ModelConfig(model_name_or_path=source, **options), "cpu", torch.float32, seed))


def batch_of(prompts, responses, groups=None) -> Batch:
    out = Batch([str(i) for i in range(len(prompts))])
    out["prompt_ids"], out["response_ids"] = (Ragged.from_rows(ids, torch.int64) for ids in (prompts, responses))
    total = int(out.ragged("response_ids").lengths.sum())
    out["response_mask"] = out.ragged("response_ids").with_values(torch.ones(total, dtype=torch.bool))
    if groups is not None:
        out["group"] = torch.tensor(groups)
    return out


def batch(shared: bool = True) -> Batch:
    """Two pairs."""
    prompts, responses, groups = rows(32)
    return batch_of([*prompts, prompts[2]], [*responses, responses[0]], [*groups, 1] if shared else None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["pair shares its prompt", "prompts apart"])
def test_packed_scores_equal_the_plain_model_s_row_by_row(family, shared):
    ours = scorer(FAMILIES[family]().eval())
    data = batch(shared)
    out = FsdpEngine(ours, OptimizerConfig()).forward(data, [[1, 3], [0, 2]], SCORES, 1.0)["scores"]
    set_attention(ours.lm, "eager")
    ours.lm.config.pad_token_id = None
    assert out.values.dtype == torch.float32
    for p, r, got in zip(data.ragged("prompt_ids").rows(), data.ragged("response_ids").rows(), out.rows(), strict=True):
        for n in range(1, len(r) + 1):
            with torch.no_grad():
                logit = ours.lm(torch.cat([p, r[:n]])[None], use_cache=False).logits.item()
            assert got[n - 1].item() == pytest.approx(logit, abs=1e-5)


def bradley_terry(out, micro):
    """Rows lie in pairs; the last token's score is the row's."""
    lengths = micro.ragged("response_ids").lengths
    last = out["scores"][lengths.cumsum(0) - 1]
    return -torch.nn.functional.logsigmoid(last[0::2] - last[1::2]).sum() / 2, {}


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_a_split_into_micro_batches_changes_no_gradient(options):
    norms = []
    for micro in ([[0, 1, 2, 3]], [[2, 3], [0, 1]]):
        torch.manual_seed(0)  # adapters start at random
        engine = FsdpEngine(scorer(f_llama(), **options), OptimizerConfig(name="sgd", lr=1.0, max_grad_norm=1e9))
        report = engine.update(batch(), micro, bradley_terry, SCORES, 1.0)
        norms.append((report.grad_norm, {n: p.detach().clone() for n, p in engine.module.trainable()}))
    (a, weights_a), (b, weights_b) = norms
    assert a > 0 and a == pytest.approx(b, rel=1e-5)
    assert weights_a.keys() == weights_b.keys()
    for name, weight in weights_a.items():
        torch.testing.assert_close(weight, weights_b[name], atol=1e-5, rtol=1e-4)


def test_ends_keep_the_last_token_and_point_at_the_tokens():
    prompts = Ragged.from_rows([torch.tensor([20, 21]), torch.tensor([20, 21])])
    packed = pack(prompts, Ragged.from_rows([torch.tensor([1, 2, 3]), torch.tensor([4])]), [0, 0], ends=True)
    assert packed.ids.tolist() == [20, 21, 1, 2, 3, 4]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 2]
    assert packed.predict.values.tolist() == [2, 3, 4, 5]


class TestHead:
    def test_is_drawn_small_from_the_seed_alone(self):
        torch.manual_seed(5)
        a = scorer(f_llama(), seed=3)
        torch.rand(7)
        b, other = scorer(f_llama(), seed=3), scorer(f_llama(), seed=4)
        assert torch.equal(a.head.weight, b.head.weight) and not torch.equal(a.head.weight, other.head.weight)
        assert 0 < a.head.weight.abs().max() < 0.2

    def test_a_folder_and_a_module_get_the_same(self, tmp_path):
        before = torch.random.get_rng_state()
        from_folder = scorer(save(tmp_path, f_llama(), f_bpe()), seed=3)
        assert torch.equal(torch.random.get_rng_state(), before)
        from_module = scorer(f_llama(), seed=3)
        theirs = dict(from_folder.shards())
        assert theirs.keys() == dict(from_module.shards()).keys()
        assert all(torch.equal(t, theirs[n]) for n, t in from_module.shards())

    def test_a_loaded_language_model_lends_its_backbone(self):
        lm = f_llama()
        ours = scorer(lm)
        assert ours.lm.model is lm.model and lm.config.architectures != ours.config.architectures
        assert ours.config.num_labels == 1

    def test_beside_adapters_it_is_trained_whole(self):
        ours = scorer(f_llama(), **LORA)
        names = [n for n, _ in ours.trainable()]
        assert all("lora_" in n or "score.modules_to_save" in n for n in names) and "score" in names[-1]
        assert "base_model.model.score.weight" in dict(ours.shards())
        kept = {n: t.detach().clone() for n, t in ours.shards()}
        with torch.no_grad():
            for _, p in ours.trainable():
                p.zero_()
        ours.load(kept)
        assert all(torch.equal(t, kept[n]) for n, t in ours.shards())

    def test_an_existing_one_is_kept(self, tmp_path):
        trained = scorer(f_llama(), seed=9).lm
        folder = save(tmp_path, trained, f_bpe())
        assert torch.equal(scorer(folder).head.weight, trained.score.weight)
        assert torch.equal(scorer(copy.deepcopy(trained)).head.weight, trained.score.weight)


class TestRefused:
    def test_an_architecture_without_the_form(self, tmp_path):
        granite = tf.GraniteForCausalLM(
            tf.GraniteConfig(
                vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
            )
        )
        for source in (granite, save(tmp_path, granite, f_bpe())):
            with pytest.raises(RequestError, match=r"Granite.*no sequence-classification form"):
                scorer(source)

    def test_several_labels(self, tmp_path):
        config = copy.deepcopy(f_llama().config)
        config.num_labels = 3
        two = tf.LlamaForSequenceClassification(config)
        for source in (two, save(tmp_path, two, f_bpe())):
            with pytest.raises(RequestError, match="3 numbers per row"):
                scorer(source)

    def test_a_language_model_s_adapter(self, tmp_path):
        lm = load_model(ModelConfig(model_name_or_path=f_llama(), use_lora=True), "cpu", torch.float32)
        lm.save_pretrained(tmp_path)
        for source in (str(tmp_path), lm):
            with pytest.raises(RequestError, match="merge it"):
                scorer(source)

    def test_a_language_model_scores_nothing(self):
        with pytest.raises(RequestError, match="LlamaForCausalLM is no sequence-classification"):
            Scorer(f_llama())
        with pytest.raises(ValueError, match="logprobs"):
            scorer(f_llama())(None, None, frozenset({"logprobs"}), 1.0)

    def test_a_scorer_is_no_policy(self):
        with pytest.raises(RequestError, match="no output head"):
            Policy(scorer(f_llama()).lm)


TURNS = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ('<eos>' if m['role'] == 'assistant' else '') "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def tokenizer_of(kind):
    if kind == "template that ends turns":
        tokenizer = f_bpe(pad="<eos>")
        tokenizer.chat_template = TURNS
        return tokenizer
    return {
        "plain": lambda: f_bpe(pad=None),
        "bos": lambda: f_bpe(pad="<eos>", bos_post=True),
        "template": lambda: f_bpe(template="plain"),
        "template with bos": lambda: f_bpe(template="bos", bos_post=True, pad="<eos>"),
    }[kind]()


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["plain", "bos", "template", "template with bos", "template that ends turns"])
def test_after_training_and_export_a_text_scores_as_its_ids_did(kind, options, tmp_path):
    tokenizer = tokenizer_of(kind)
    base = save(tmp_path / "base", f_llama(), tokenizer)
    cfg = ModelConfig(model_name_or_path=base, **options)
    ours = scorer(base, **options)
    engine = FsdpEngine(ours, OptimizerConfig(lr=1e-2))
    texts = [("xa", "b"), ("xa", "cab"), ("c", "ab"), ("c", "x")]
    encoded = [encode_completions(tokenizer, prompt, [said]) for prompt, said in texts]
    assert all(said[-1] == EOS for _, said in encoded)
    data = batch_of([prompt for prompt, _ in encoded], [said for _, said in encoded])
    assert engine.update(data, [[0, 1, 2, 3]], bradley_terry, SCORES, 1.0).skipped is None
    scores = engine.forward(data, [[0, 1, 2, 3]], SCORES, 1.0)["scores"]
    trained = [row[-1].item() for row in scores.rows()]

    files = {"hf": model_files(ours.lm, tokenizer, cfg)}
    store = CheckpointStore(tmp_path / "checkpoints")
    out = export(store.save(1, {"actor": dict(engine.shards())}, files), tmp_path / "out")
    scoring = RewardModelScorer(RewardModelConfig(model_name_or_path=str(out), dtype="fp32"), torch.device("cpu"))
    asked = [
        RewardRow(str(i), str(i), "", said, (), (), "stop", {"prompt": prompt})
        for i, (prompt, said) in enumerate(texts)
    ]
    assert [scoring._input(row).ids for row in asked] == [prompt + said for prompt, said in encoded]
    assert scoring.score(asked) == pytest.approx(trained, abs=1e-5)
    cut = RewardRow("c", "c", "", "ca", (), (), "length", {"prompt": "xa"})
    assert scoring._input(cut).ids[-1] != EOS

    plain = AutoModelForSequenceClassification.from_pretrained(out)
    assert plain.config.num_labels == 1 and type(plain) is tf.LlamaForSequenceClassification
    pads = AutoTokenizer.from_pretrained(out).pad_token_id
    assert pads is not None and pads != EOS and pads == plain.config.pad_token_id
    lengths = torch.tensor([len(p) + len(r) for p, r in encoded])
    width = int(lengths.max())
    padded = torch.tensor([[*p, *r, *[pads] * (width - len(p) - len(r))] for p, r in encoded])
    with torch.no_grad():
        theirs = (
            plain.eval()(padded, attention_mask=(torch.arange(width) < lengths[:, None]).long()).logits[:, 0].tolist()
        )
    assert theirs == pytest.approx(trained, abs=1e-5)


def test_an_adapter_goes_on_being_trained_but_scores_only_when_merged(tmp_path):
    base = save(tmp_path / "base", f_llama(), f_bpe())
    ours = scorer(base, **LORA)
    files = {"hf": model_files(ours.lm, f_bpe(), ModelConfig(model_name_or_path=base, **LORA))}
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, {"actor": dict(ours.shards())}, files)
    out = str(export(saved, tmp_path / "out", merge=False))
    again = scorer(out)
    theirs = dict(again.shards())
    assert len(list(again.trainable())) == len(list(ours.trainable()))
    assert all(torch.equal(t, theirs[n]) for n, t in ours.shards())
    with pytest.raises(RequestError, match="merged model"):
        RewardModelScorer(RewardModelConfig(model_name_or_path=out), torch.device("cpu"))


def test_without_a_token_that_ends_no_row_nothing_pads(tmp_path):
    tokenizer = f_bpe(pad="<eos>")
    tokenizer.bos_token = "<eos>"
    ours = scorer(f_llama())
    ours.lm.config.bos_token_id = PAD
    model_files(ours.lm, tokenizer)(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert tf.AutoConfig.from_pretrained(tmp_path).pad_token_id is None
    assert tokenizer.pad_token == "<eos>"
