"""Chapter 0: the decoder against Transformers' own classes, in float64, on shapes that are odd on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import hf_config, hf_greedy, hf_twin, random_decoder

from minivllm.decoding.generate import generate
from minivllm.errors import InvalidModel
from minivllm.memory.store import RecomputeStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig, RopeConfig
from minivllm.params import SamplingParams


def shape(family: str, heads: int, kv_heads: int, head_dim: int, **more) -> ModelConfig:
    options: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "max_position_embeddings": 96,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "rope": RopeConfig(rope_theta=1000.0),
    }
    return ModelConfig(
        family, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **(options | more)
    )


SHAPES = [
    shape("llama", 3, 3, 12),
    shape("llama", 6, 3, 10),
    shape("llama", 9, 3, 8, qkv_bias=True, o_bias=True, mlp_bias=True),
    shape("llama", 7, 1, 10, hidden_size=42, tie_word_embeddings=True),
    shape("qwen2", 5, 5, 14),
    shape("qwen2", 6, 2, 4, tie_word_embeddings=True),
    shape("qwen2", 14, 2, 10),
    shape("qwen3", 3, 3, 22),
    shape("qwen3", 10, 5, 16),
    shape("qwen3", 7, 1, 18, tie_word_embeddings=True, qkv_bias=True, o_bias=True),
]


def names(config: ModelConfig) -> str:
    return f"{config.model_type}-{config.num_attention_heads}:{config.num_key_value_heads}:{config.head_dim}"


def all_logits(decoder, tokens: list[int]) -> torch.Tensor:
    """Logits after every prefix of tokens, each prefix a sequence of its own in one packed batch."""
    prefixes = [(i, tokens[: i + 1], 0) for i in range(len(tokens))]
    with torch.inference_mode():
        return decoder(Batch.pack(prefixes), RecomputeStore())


@pytest.mark.parametrize("config", SHAPES, ids=names)
def test_logits_are_those_of_transformers_in_float64(config):
    decoder = random_decoder(config, seed=3)
    tokens = torch.randint(0, config.vocab_size, (23,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = hf_twin(decoder)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(all_logits(decoder, tokens), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("config", SHAPES, ids=names)
def test_greedy_tokens_are_those_of_transformers_generate(config):
    decoder = random_decoder(config, seed=4)
    twin = hf_twin(decoder, exact=False)
    params = SamplingParams(temperature=0, max_tokens=30)
    seen = set()
    for prompt in ([17], [5, 99, 3, 3, 42, 0, 130], [64, 1]):
        got = list(generate(decoder, RecomputeStore(), prompt, params))
        assert got == hf_greedy(twin, prompt, 30)
        seen |= set(got)
    assert len(seen) > 5, "a model that repeats itself would hide mistakes"


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_sequence_has_the_same_logits_alone_and_between_neighbours(row):
    decoder = random_decoder(SHAPES[1], seed=1)
    sequences = [(70, [1, 2, 3, 4, 5], 0), (3, [9], 0), (41, [8, 7], 0)]
    with torch.inference_mode():
        together = decoder(Batch.pack(sequences), RecomputeStore())
        alone = decoder(Batch.pack([sequences[row]]), RecomputeStore())
    torch.testing.assert_close(together[row : row + 1], alone, atol=1e-12, rtol=1e-12)


def test_only_the_rows_asked_for_reach_the_output_layer():
    decoder = random_decoder(SHAPES[0])
    rows = []
    decoder.lm_head.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[0]))
    decoder(Batch.pack([(0, [1, 2, 3, 4], 0), (1, [5, 6], 0)]), RecomputeStore())
    assert rows == [2]


def test_a_packed_batch_says_where_each_sequence_stands():
    batch = Batch.pack([(7, [10, 11, 12, 13, 14], 0), (2, [20], 7), (5, [30, 31], 3)])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 30, 31]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 7, 3, 4]
    assert batch.query_start.tolist() == [0, 5, 6, 8]
    assert batch.seq_lens.tolist() == [5, 8, 5]
    assert batch.logits_indices.tolist() == [4, 5, 7]
    assert [tuple(s) for s in batch] == [(7, 0, 5, 5), (2, 5, 6, 8), (5, 6, 8, 5)]
    assert batch.num_tokens == 8


@pytest.mark.parametrize("sequences", [[(0, [], 0)], [(0, [1], 0), (0, [2], 1)]], ids=["no token", "twice"])
def test_a_batch_that_makes_no_sense_is_refused(sequences):
    with pytest.raises(ValueError, match=r"Sequence 0|twice"):
        Batch.pack(sequences)


ROPES = [
    RopeConfig(rope_theta=10_000.0),
    RopeConfig(rope_theta=500.0, rope_type="linear", factor=3.0),
    RopeConfig(500_000.0, "llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0),
    RopeConfig(10_000.0, "llama3", 32.0, 8192, low_freq_factor=1.5, high_freq_factor=5.0),
    RopeConfig(1_000_000.0, "yarn", 4.0, 24),
    RopeConfig(10_000.0, "yarn", 2.5, 32, beta_fast=20.0, beta_slow=2.0, attention_factor=0.7),
    RopeConfig(10_000.0, "yarn", 40.0, 64, mscale=0.7, mscale_all_dim=1.3, truncate=False),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.rope_type}-{r.factor}")
def test_every_rotary_type_gives_the_logits_of_transformers(rope):
    config = shape("llama", 4, 2, 32, rope=rope)
    decoder = random_decoder(config, seed=9)
    tokens = torch.arange(60).mul(7).remainder(131).tolist()
    with torch.inference_mode():
        expected = hf_twin(decoder)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(all_logits(decoder, tokens), expected, atol=1e-11, rtol=1e-11)
    plain = random_decoder(replace(config, rope=RopeConfig(rope_theta=rope.rope_theta)), seed=9)
    changed = (all_logits(plain, tokens) - expected).abs().max() > 1e-3
    assert changed == (rope.rope_type != "default"), "the test must be able to tell the types apart"


@pytest.mark.parametrize("config", SHAPES, ids=names)
def test_a_config_is_read_as_transformers_writes_it(config):
    assert ModelConfig.from_hf(hf_config(config, dtype="float32").to_dict()) == replace(
        config, dtype="float32", rope=replace(config.rope, original_max_position_embeddings=96)
    )


@pytest.mark.parametrize("rope", ROPES[1:], ids=lambda r: f"{r.rope_type}-{r.factor}")
def test_both_spellings_of_the_rotary_parameters_are_read(rope):
    config = shape("llama", 4, 2, 32, rope=rope)
    written = hf_config(config).to_dict()
    old = {k: v for k, v in written.items() if k != "rope_parameters"}
    scaling = dict(written["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    expected = replace(rope, original_max_position_embeddings=rope.original_max_position_embeddings or 96)
    assert ModelConfig.from_hf(written).rope == ModelConfig.from_hf(old).rope == expected


BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_config_without_head_dim_or_kv_heads_takes_the_usual_ones():
    config = ModelConfig.from_hf(BASE)
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert ModelConfig.from_hf(BASE | {"model_type": "qwen3"}).head_dim == 128


def test_what_stands_as_null_is_not_given():
    nothing = {"head_dim": None, "num_key_value_heads": None, "rms_norm_eps": None, "rope_scaling": None}
    assert ModelConfig.from_hf(BASE | nothing) == ModelConfig.from_hf(BASE)


def test_the_dtype_is_read_in_both_spellings():
    for name in ("dtype", "torch_dtype"):
        assert ModelConfig.from_hf(BASE | {name: "float16"}).dtype == "float16"


def test_a_window_that_no_layer_has_is_no_window():
    assert (
        ModelConfig.from_hf(BASE | {"use_sliding_window": True, "max_window_layers": 2}).num_hidden_layers
        == 2
    )


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_rotary_parameters_count_that_transformers_counts(rope_type):
    """rope_scaling goes before rope_parameters; the original context length at the top level before both."""
    scaling = {
        "rope_type": rope_type,
        "factor": 3.0,
        "rope_theta": 500.0,
        "original_max_position_embeddings": 8,
    }
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {"mscale": 0.0}
    other = {"rope_type": "linear", "factor": 7.0, "rope_theta": 500.0}
    config = BASE | {
        "rope_parameters": other,
        "rope_scaling": scaling,
        "original_max_position_embeddings": 16,
    }
    rope = ModelConfig.from_hf(config).rope
    assert (rope.rope_type, rope.factor, rope.mscale) == (rope_type, 3.0, None)
    assert rope.original_max_position_embeddings == 16


def test_scores_that_overflow_float16_before_they_are_scaled_do_not_become_nan():
    q = torch.full((2, 1, 64), 40.0, dtype=torch.float16)
    assert causal_attention(q, q, q, 64**-0.5).isfinite().all()


def test_stop_tokens_may_be_one_several_or_none():
    assert ModelConfig.from_hf(BASE).eos_token_ids == ()
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_hf(BASE | {"eos_token_id": 7}, [8, 9]).eos_token_ids == (8, 9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"head_dim": 10**9}, "head_dim"),
        ({"vocab_size": 2**62}, "vocab_size"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 1e-320}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2}}, "above 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1, 2]}, "rotary parameters"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
    ids=str,
)
def test_a_config_that_the_decoder_cannot_run_is_refused_by_name(change, named):
    with pytest.raises(InvalidModel, match=named):
        ModelConfig.from_hf(BASE | change)
