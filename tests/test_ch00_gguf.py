"""Chapter 0: GGUF files, made here with the gguf package, read whole and read broken."""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from oracle import random_decoder

from minivllm.errors import InvalidModel, InvalidModelFile, WeightMismatch
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig, RopeConfig
from minivllm.model.gguf_file import GGUFFile
from minivllm.model.gguf_weights import gguf_config, hugging_face_name
from minivllm.model.hub import ModelSource
from minivllm.model.loader import load_model

Q = gguf.GGMLQuantizationType
CONFIG = ModelConfig(
    "llama",
    vocab_size=80,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rope=RopeConfig(rope_theta=5000.0, original_max_position_embeddings=128),
    eos_token_ids=(5,),
)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("layers."):
        _, layer, module = name.split(".", 2)
        module, kind = module.rsplit(".", 1)
        return f"blk.{layer}.{NAMES[module]}.{kind}"
    module, kind = name.rsplit(".", 1)
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[module] + f".{kind}"


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key rows of a Llama: halves -> neighbouring pairs."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    decoder,
    kind: Q = Q.F32,
    *,
    settings: dict | None = None,
    extra: dict | None = None,
    alignment: int = 32,
) -> Path:
    config, family = decoder.config, decoder.config.model_type
    writer = gguf.GGUFWriter(path, family)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(5)
    for key, value in (settings or {}).items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    for name, tensor in decoder.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if family == "llama" and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if family == "llama" and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        if array.ndim == 1 or kind == Q.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        else:
            writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path):
    return load_model(ModelSource(str(path), "gguf", path), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    decoder = random_decoder(CONFIG, dtype=torch.float32, seed=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", decoder)


FAMILIES = [
    CONFIG,
    replace(CONFIG, tie_word_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True),
    replace(CONFIG, model_type="qwen2", qkv_bias=True, num_attention_heads=7, num_key_value_heads=1),
    replace(CONFIG, model_type="qwen3", qk_norm=True, tie_word_embeddings=True),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type + ("-bias" if c.o_bias else ""))
def test_a_float_file_gives_back_shape_and_weights_bit_for_bit(config, tmp_path):
    decoder = random_decoder(config, dtype=torch.float32, seed=7)
    loaded = load(write_gguf(tmp_path / "m.gguf", decoder))
    assert replace(loaded.config, rms_norm_eps=config.rms_norm_eps) == config
    expected = decoder.state_dict()
    got = loaded.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda q: q.name
)
def test_each_quantisation_gives_the_values_it_stands_for(kind, tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32, seed=8)
    loaded = load(write_gguf(tmp_path / "m.gguf", decoder, kind)).state_dict()
    for name, tensor in decoder.state_dict().items():
        if tensor.ndim == 1:
            expected = tensor
        else:  # quantised row by row, so that permuting rows before or after is the same
            expected = torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        assert torch.equal(loaded[name], expected), name


def q4_k_block(block: bytes) -> list[float]:
    """256 numbers from a Q4_K block of 144 bytes, as ggml's description of the format has it."""
    d, dmin = (float(x) for x in np.frombuffer(block[:4], np.float16))
    packed, nibbles, out = block[4:16], block[16:], []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for i in range(32):
            byte = nibbles[group // 2 * 32 + i]
            out.append(d * scale * (byte & 15 if group % 2 == 0 else byte >> 4) - dmin * minimum)
    return out


def q6_k_block(block: bytes) -> list[float]:
    """256 numbers from a Q6_K block of 210 bytes."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d, out = float(np.frombuffer(block[208:], np.float16)[0]), []
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        nibble = low[half * 64 + place % 64] >> (4 if place >= 64 else 0) & 15
        top = high[half * 32 + column] >> (2 * quarter) & 3
        out.append(d * int(scales[i // 16]) * ((nibble | top << 4) - 32))
    return out


@pytest.mark.parametrize(("kind", "size", "plain"), [(Q.Q4_K, 144, q4_k_block), (Q.Q6_K, 210, q6_k_block)])
def test_k_quants_are_unpacked_as_their_format_says(kind, size, plain, tmp_path):
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
    for row in raw.reshape(-1, size):
        where = slice(0, 4) if kind == Q.Q4_K else slice(208, 210)
        row[where] = np.frombuffer(
            rng.uniform(0.01, 2, (where.stop - where.start) // 2).astype(np.float16).tobytes(), np.uint8
        )
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "k.gguf").dequantize("w")
    expected = [plain(block.tobytes()) for block in raw.reshape(-1, size)]
    np.testing.assert_allclose(got.ravel(), np.array(expected).ravel(), rtol=1e-5, atol=1e-6)
    assert got.shape == (3, 512)


def test_the_tables_are_those_that_the_gguf_packages_reader_finds(smollm2_source):
    ours, theirs = GGUFFile(smollm2_source.path), gguf.GGUFReader(smollm2_source.path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [(t.name, list(t.shape[::-1]), t.type, t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, t.shape.tolist(), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_rope_factors_of_a_llama_3_file_divide_its_frequencies(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32, seed=2)
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    loaded = load(write_gguf(tmp_path / "m.gguf", decoder, extra={"rope_freqs.weight": factors}))
    torch.testing.assert_close(loaded.inv_freq, decoder.inv_freq / torch.from_numpy(factors))


def test_rope_scaling_is_read(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32, seed=2)
    settings = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    settings |= {"llama.rope.scaling.original_context_length": 32}
    rope = load(write_gguf(tmp_path / "m.gguf", decoder, settings=settings)).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)


def test_rows_that_are_not_put_back_give_other_logits(good):
    """The permutation matters: this model would notice."""
    decoder = load(good)
    batch = Batch.pack([(0, [1, 2, 3, 4, 5, 6], 0)])
    right = decoder(batch, RecomputeStore())
    q = decoder.layers[0].self_attn.q_proj
    q.weight = torch.nn.Parameter(torch.from_numpy(permuted(q.weight.numpy(), 6)), requires_grad=False)
    assert (decoder(batch, RecomputeStore()) - right).abs().max() > 0.1


def test_names_without_a_counterpart_stay_as_they_are():
    assert hugging_face_name("blk.12.attn_q.bias") == "layers.12.self_attn.q_proj.bias"
    for name in ("odd", "blk.0.attn_qkv.weight", "v.blk.0.attn_q.weight", "output", ""):
        assert hugging_face_name(name) == name


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32)
    extra = {
        "blk.0.attn_qkv.weight": np.ones((2, 3), np.float32),
        "blk.7.attn_q.weight": np.ones((4, 4), np.float32),
    }
    with pytest.raises(
        WeightMismatch, match=r"extra: blk\.0\.attn_qkv\.weight \[2, 3\].*layers\.7\.self_attn"
    ):
        load(write_gguf(tmp_path / "extra.gguf", decoder, extra=extra))
    path = write_gguf(tmp_path / "m.gguf", decoder, settings={"llama.unused": 1})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight"))
    with pytest.raises(
        WeightMismatch, match=r"extra: blk\.1\.ffn_xy.*missing: layers\.1\.mlp\.up_proj\.weight \[96, 64\]"
    ):
        load(path)
    path.write_bytes(
        data.replace(
            b"feed_forward_length\x04\0\0\0" + struct.pack("<I", 96),
            b"feed_forward_length\x04\0\0\0" + struct.pack("<I", 64),
        )
    )
    with pytest.raises(
        WeightMismatch,
        match=r"misshapen: layers\.0\.mlp\.gate_proj\.weight is \[96, 64\], expected \[64, 64\]",
    ):
        load(path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scale_linear": 2.0}, "scale_linear"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.logit_scale": 2.0}, "logit_scale"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_have_is_refused(settings, named, tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32)
    with pytest.raises(InvalidModel, match=named):
        load(write_gguf(tmp_path / "m.gguf", decoder, settings=settings))


def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32)
    path = write_gguf(tmp_path / "m.gguf", decoder, settings={"llama.rope.scaling.factor": 4.0})
    assert load(path).config.rope.rope_type == "linear"


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_rope_factors_that_are_no_positive_numbers_are_refused(place, bad, tmp_path):
    factors = np.ones(16, np.float32)
    factors[place] = bad
    decoder = random_decoder(CONFIG, dtype=torch.float32)
    with pytest.raises(InvalidModel, match="16 positive numbers"):
        load(write_gguf(tmp_path / "m.gguf", decoder, extra={"rope_freqs.weight": factors}))


def test_a_size_that_is_no_whole_number_is_refused(good, tmp_path):
    path = tmp_path / "m.gguf"
    for value in (2.5, float("nan"), float("inf")):
        old = b"llama.block_count\x04\0\0\0" + struct.pack("<I", 2)
        assert old in good.read_bytes()
        path.write_bytes(
            good.read_bytes().replace(old, b"llama.block_count\x06\0\0\0" + struct.pack("<f", value))
        )
        with pytest.raises(InvalidModel, match=r"llama\.block_count is .*whole number"):
            load(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InvalidModelFile, match="it is no file"):
        GGUFFile(tmp_path / "pipe.gguf")


def test_a_file_may_align_its_tensors_as_it_likes_and_name_two_stop_tokens(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32, seed=3)
    settings = {"tokenizer.ggml.eot_token_id": 9}
    path = write_gguf(tmp_path / "m.gguf", decoder, settings=settings, alignment=256)
    assert load(path).config.eos_token_ids == (5, 9)
    assert torch.equal(load(path).norm.weight, decoder.norm.weight)


def test_another_architecture_and_a_file_without_a_model_are_refused(good, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(
        good.read_bytes().replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0gemma",
        )
    )
    with pytest.raises(InvalidModel, match="gemma"):
        gguf_config(GGUFFile(path))
    path.write_bytes(good.read_bytes().replace(b"token_embd.weight", b"token_embx.weight"))
    with pytest.raises(InvalidModel, match=r"token_embd\.weight"):
        gguf_config(GGUFFile(path))
    path.write_bytes(good.read_bytes().replace(b"llama.block_count", b"llama.blockxcount"))
    with pytest.raises(InvalidModel, match=r"llama\.block_count is None"):
        gguf_config(GGUFFile(path))


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"GG", "announced"),
        (b"not a model at all, just text", "does not begin"),
        (b"\x80\x02}q\x00.", "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "announced"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "announced"),
        (HEAD + struct.pack("<Q", 2**63), "announced"),
        (HEAD + struct.pack("<Q1sI", 1, b"k", 77), "type 77"),
        (HEAD + struct.pack("<Q1sIQ", 1, b"k", 8, 2**62), "announced"),
        (HEAD + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**61), "announced"),
        (HEAD + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**61), "announced"),
        (HEAD + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"w", 2**31), "dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 7, 999, 0), "type 999"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 7, 2, 0),
            "blocks of 32",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 0, 0, 0),
            "cannot be cut",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"w", 2, 2**62, 2**62, 0, 0),
            "past",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"w", 1, 4, 0, 2**63), "past"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"k", 0, 1), "stands twice"),
    ],
    ids=range(21),
)
def test_a_file_that_is_not_what_it_says_is_refused(content, named, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModelFile, match=named):
        GGUFFile(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.9, 0.9999])
def test_a_file_cut_short_is_refused_wherever_it_was_cut(good, share, tmp_path):
    data = good.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InvalidModelFile, match=r"damaged or cut short|cannot be read"):
        load(path)


@given(place=st.integers(0, 3000), value=st.binary(min_size=1, max_size=8))
def test_damage_in_the_tables_never_raises_anything_but_our_own_errors(good, tmp_path, place, value):
    data = bytearray(good.read_bytes())
    data[place : place + len(value)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(InvalidModel):  # damage to a weight's value, say, cannot be seen
        assert load(path).config.model_type in ("llama", "qwen2", "qwen3")


def test_a_type_that_cannot_be_unpacked_is_named(tmp_path):
    decoder = random_decoder(CONFIG, dtype=torch.float32)
    path = write_gguf(tmp_path / "m.gguf", decoder, extra={"whole": np.arange(4, dtype=np.int32)})
    with pytest.raises(InvalidModelFile, match="'whole' is stored as I32"):
        load(path)
