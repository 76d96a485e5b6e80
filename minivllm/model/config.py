"""Chapter 0: the shape of a decoder, read from a Hugging Face `config.json` or set by a preset.

`ModelConfig` is all that the decoder knows of a checkpoint. Field names are those of Hugging Face
configs, so that a `config.json` reads across. What the decoder cannot do is refused here, by name,
before a single weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from minivllm.errors import InvalidModel

FAMILIES = ("llama", "qwen2", "qwen3")
_MOST = {"num_hidden_layers": 4096, "num_attention_heads": 65_536, "head_dim": 65_536}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base, and how it is stretched to longer contexts.

    rope_type: "default", "linear", "llama3" or "yarn". factor: how many times longer the context becomes;
    original_max_position_embeddings: the context trained with. low_freq_factor and high_freq_factor
    ("llama3"): pairs that turn fewer times than the first over that context are slowed by factor, those
    that turn more often than the second are kept. beta_slow and beta_fast: the same two limits of "yarn";
    truncate rounds them to whole pairs. attention_factor, or mscale and mscale_all_dim ("yarn"): a
    factor on cos and sin. freq_factors divides the frequencies one by one (how a GGUF file states
    "llama3"). The fields have their Hugging Face names.
    """

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        optional = ("attention_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings")
        for name in (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            *optional,
        ):
            if name not in optional or getattr(self, name) is not None:
                _positive_number(name, getattr(self, name))
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise InvalidModel(f"Rotary type {self.rope_type!r} needs original_max_position_embeddings.")
        if self.rope_type == "yarn" and not self.rope_theta > 1:
            raise InvalidModel(f"Rotary type 'yarn' needs a rope_theta above 1; it is {self.rope_theta}.")
        if self.rope_type != "default" and self.high_freq_factor <= self.low_freq_factor:
            raise InvalidModel("The model's rotary parameter high_freq_factor must be above low_freq_factor.")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. Sizes count elements, not bytes.

    Raises InvalidModel when sizes contradict each other.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"  # the checkpoint's own
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            _whole_number(name, getattr(self, name))
        _positive_number("rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidModel(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} "
                "key/value heads evenly: num_attention_heads must be a multiple of num_key_value_heads."
            )
        if self.head_dim % 2:
            raise InvalidModel(
                f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even."
            )
        factors = self.rope.freq_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(0 < f < math.inf for f in factors)
        ):
            raise InvalidModel(f"The rotary frequency factors must be {self.head_dim // 2} positive numbers.")

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache: a key and a value for each layer and KV head."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], eos_token_id: int | list[int] | None = None) -> ModelConfig:
        """The shape that a Hugging Face `config.json` (parsed) describes.

        eos_token_id: that of `generation_config.json`, which goes before the config's own.

        Raises InvalidModel for an architecture, activation, attention window or rotary type that the
        decoder does not have, and for a config without a size that it needs.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise InvalidModel(
                f"The model's type is {family!r}. This decoder runs {', '.join(FAMILIES)}: "
                "choose a checkpoint of one of these families."
            )
        _refuse_unsupported(config)

        def size(name: str, default: int | None = None) -> int:
            value = config.get(name)
            return _whole_number(name, default if value is None else value)

        hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
        # hidden / heads is only the default: Qwen3-0.6B has 128, not 1024 / 16
        head_dim = size("head_dim", 128 if family == "qwen3" else hidden_size // num_heads)
        bias = _flag(config, "attention_bias")
        return cls(
            model_type=family,
            vocab_size=size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            num_hidden_layers=size("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_position_embeddings=size("max_position_embeddings"),
            rms_norm_eps=1e-6 if config.get("rms_norm_eps") is None else config["rms_norm_eps"],
            rope=_rope_from_hf(config),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=True if family == "qwen2" else bias,
            o_bias=False if family == "qwen2" else bias,
            mlp_bias=_flag(config, "mlp_bias") and family == "llama",
            qk_norm=family == "qwen3",
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            eos_token_ids=_token_ids(config.get("eos_token_id") if eos_token_id is None else eos_token_id),
        )


def _whole_number(name: str, value: Any) -> int:
    most = _MOST.get(name, 2**31 - 1)  # far above any model; a damaged file may ask for a billion layers
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidModel(f"The model's {name} is {value!r}; it must be a whole number from 1 to {most}.")
    return value


def _positive_number(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-30 < value < 1e30:
        raise InvalidModel(f"The model's {name} is {value!r}; it must be a positive number.")


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise InvalidModel(f"The model's {name} is {value!r}; it must be true or false.")
    return bool(value)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise InvalidModel(
            f"The model's activation is {activation!r}; this decoder has 'silu' (SwiGLU) only."
        )
    layers, full = config.get("num_hidden_layers"), config.get("max_window_layers", 28)
    windowed = bool(config.get("use_sliding_window")) and not (isinstance(layers, int) and full >= layers)
    if windowed or "sliding_attention" in (config.get("layer_types") or ()):
        raise InvalidModel(
            "The model uses sliding-window attention; this decoder attends to the whole context."
        )
    if config.get("quantization_config"):
        raise InvalidModel(
            f"The checkpoint's weights are quantised ({config['quantization_config']}); "
            "take the unquantised checkpoint, or a GGUF file."
        )


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise InvalidModel(
            f"The model's rotary parameters are {given!r}; they must be a table of names and values."
        )
    given = dict(given)
    rope_type = given.pop("rope_type", given.pop("type", None)) or "default"
    if rope_type not in ("default", "linear", "llama3", "yarn"):
        raise InvalidModel(
            f"The model's rotary type is {rope_type!r}; this decoder has default, linear, llama3 and yarn. "
            "A type that turns earlier tokens anew as the context grows would make cached keys wrong."
        )
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise InvalidModel(
            "The model turns only a part of each head (partial_rotary_factor); this decoder turns all."
        )
    given.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if rope_type != "default" and given.get("factor") is None:
        raise InvalidModel(
            f"The model's rotary type {rope_type!r} needs a 'factor', and the config has none."
        )
    original = config.get("original_max_position_embeddings")  # where it stands here, it counts
    if original is not None or given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    for name in ("mscale", "mscale_all_dim"):
        if given.get(name) == 0:  # Transformers takes 0 for "not given"
            del given[name]
    known = {f.name for f in fields(RopeConfig)} - {"freq_factors", "rope_type"}
    return RopeConfig(rope_type=rope_type, **{k: v for k, v in given.items() if k in known and v is not None})


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidModel(f"The model's eos_token_id is {value!r}; it must be a token id or a list of them.")
    return tuple(ids)
