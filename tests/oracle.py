"""The oracle of the model tests: the same weights in Transformers' own classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minivllm.model.config import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.model.weights import load_weights, random_weights

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def hf_config(config: ModelConfig, **more: object):
    """The Transformers config of the same shape."""
    known = {
        "default": ["rope_type", "rope_theta"],
        "linear": ["rope_type", "rope_theta", "factor"],
        "llama3": [
            "rope_type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        ],
        "yarn": [
            "rope_type",
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
    }
    rope = {
        k: v for k, v in asdict(config.rope).items() if v is not None and k in known[config.rope.rope_type]
    }
    options = {
        name: getattr(config, name)
        for name in [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "tie_word_embeddings",
        ]
    }
    if config.model_type != "qwen2":
        options["attention_bias"] = config.qkv_bias
    if config.model_type == "llama":
        options["mlp_bias"] = config.mlp_bias
    return CONFIGS[config.model_type](
        rope_parameters=rope, bos_token_id=None, eos_token_id=None, **options, **more
    )


class ExactRMSNorm(torch.nn.Module):
    """RMSNorm in float64: Transformers' own computes it in float32, whatever the model's dtype."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def hf_twin(decoder: Decoder, *, exact: bool = True):
    """Transformers' model with the decoder's weights; exact: with its norms in float64 too."""
    model = AutoModelForCausalLM.from_config(hf_config(decoder.config), attn_implementation="sdpa")
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": tensor
        for name, tensor in decoder.state_dict().items()
    }
    model.load_state_dict(weights)
    model = model.to(decoder.dtype).eval()
    if exact:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, LlamaRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm):
                    setattr(module, name, ExactRMSNorm(child.weight, child.variance_epsilon))
    return model


def random_decoder(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """A decoder of this shape with weights from a seed."""
    decoder = Decoder(config, dtype)
    load_weights(decoder, random_weights(decoder, seed))
    return decoder


@torch.inference_mode()
def hf_greedy(model, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of Transformers' own `generate`, without its stopping early."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class Float64Torch:
    """torch for a module whose float32 is to be float64: Transformers sums beams in float32, whatever the
    model's dtype."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@torch.inference_mode()
def hf_beam_search(
    model,
    prompt: list[int],
    *,
    beam_width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos_token_ids: Sequence[int] = (),
    exact: bool = True,
) -> list[tuple[list[int], float]]:
    """What Transformers' beam search gives, best first: the tokens of each sequence, and its score.

    exact: with sums in float64. A single beam is a beam search too; Transformers alone would take it for
    greedy decoding.
    """
    ids = torch.tensor([prompt], device=model.device)
    with pytest.MonkeyPatch.context() as patch:
        mode = transformers.generation.GenerationMode.BEAM_SEARCH
        patch.setattr(transformers.GenerationConfig, "get_generation_mode", lambda *_: mode)
        if exact:
            patch.setattr(transformers.generation.utils, "torch", Float64Torch())
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=beam_width,
            num_return_sequences=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = zip(out.sequences.tolist(), lengths, out.sequences_scores.tolist(), strict=True)
    return [(row[len(prompt) :][:length], score) for row, length, score in rows]
