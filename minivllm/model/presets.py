"""Chapter 0: the shapes that `random:<preset>` names, to be filled with weights from a seed.

The tiny ones run in a millisecond and are odd on purpose: head counts that are no powers of two, a
`head_dim` that is not hidden / heads, so that a mix-up of sizes shows as an error. The others have the
true shape of a published model, for work on memory and on GPUs, where the weights do not matter.
"""

from __future__ import annotations

from minivllm.model.config import ModelConfig, RopeConfig

PRESETS: dict[str, ModelConfig] = {
    "tiny-llama": ModelConfig(
        model_type="llama",
        vocab_size=307,
        hidden_size=60,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        max_position_embeddings=1024,
    ),
    "tiny-qwen2": ModelConfig(
        model_type="qwen2",
        vocab_size=311,
        hidden_size=56,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        qkv_bias=True,
        tie_word_embeddings=True,
    ),
    "tiny-qwen3": ModelConfig(
        model_type="qwen3",
        vocab_size=313,
        hidden_size=48,
        intermediate_size=92,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=20,
        max_position_embeddings=1024,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    # https://huggingface.co/Qwen/Qwen3-0.6B
    "qwen3-0.6b": ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope=RopeConfig(rope_theta=1_000_000.0),
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    "llama-3-8b": ModelConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=500_000.0),
    ),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf
    "llama-2-7b": ModelConfig(
        model_type="llama",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        dtype="float16",
    ),
}
