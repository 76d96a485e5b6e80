"""Chapter 0: Hugging Face folders, whole and broken, and weights from a seed."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from oracle import hf_twin, random_decoder
from safetensors.torch import load_file, save_file

from minivllm.errors import InvalidModel, InvalidModelFile, InvalidOption, ModelNotFound, WeightMismatch
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS
from minivllm.model.weights import load_weights, random_weights

FAMILIES = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_folder(folder: Path, preset: str = "tiny-llama", **options) -> Decoder:
    """A checkpoint as Transformers itself writes it; the decoder that it was made from."""
    decoder = random_decoder(PRESETS[preset], dtype=torch.float32, seed=6)
    hf_twin(decoder, exact=False).save_pretrained(folder, **options)
    return decoder


def load(folder: Path, **options) -> Decoder:
    return load_model(folder, **({"dtype": "float32", "device": "cpu"} | options))


def same_weights(a: Decoder, b: Decoder) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_folder(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_folder_that_transformers_wrote_is_read_bit_for_bit(preset, tmp_path):
    decoder = save_folder(tmp_path, preset)
    assert same_weights(load(tmp_path), decoder)


@pytest.mark.parametrize("preset", FAMILIES)
def test_a_sharded_folder_is_read_bit_for_bit(preset, tmp_path):
    decoder = save_folder(tmp_path, preset, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same_weights(load(tmp_path), decoder)


def test_generation_config_says_where_to_stop(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    assert load(folder).config.eos_token_ids == (11, 12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(folder, dtype):
    decoder = load(folder, dtype=dtype)
    assert {t.dtype for t in decoder.state_dict().values()} == {getattr(torch, dtype)}
    logits = decoder(Batch.pack([(0, [1, 2, 3], 0)]), RecomputeStore())
    assert logits.dtype == getattr(torch, dtype)
    assert logits.isfinite().all()


def test_half_precision_is_near_full_precision(folder):
    batch = Batch.pack([(0, list(range(1, 40)), 0)])
    exact = load(folder, dtype="float64")(batch, RecomputeStore())
    for dtype, most in (("float32", 1e-4), ("float16", 0.1), ("bfloat16", 0.8)):
        assert (load(folder, dtype=dtype)(batch, RecomputeStore()).double() - exact).abs().max() < most


def test_tied_weights_are_one_tensor():
    decoder = load_model("random:tiny-qwen3", device="cpu")
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()


def rewrite(folder: Path, change) -> None:
    """Change the dictionary of tensors in the folder's one file."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: norm\.weight \[60\]"),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight \[307, 60\]"),
        (
            lambda t: t.update({"model.layers.0.odd": torch.ones(2, 3)}),
            r"extra: model\.layers\.0\.odd \[2, 3\]",
        ),
        (
            lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}),
            r"extra: model\.layers\.9\.",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(59)}),
            r"norm\.weight is \[59\], expected \[60\]",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(60, 28)}),
            r"misshapen: model\.layers\.1\.self_attn\.k_proj\.weight is \[60, 28\], expected \[28, 60\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(60, dtype=torch.int32)}),
            r"not floating-point: model\.norm\.weight is torch\.int32",
        ),
        (lambda t: [t.pop(name) for name in list(t)[4:]], r"missing.*and \d+ more"),
    ],
    ids=range(8),
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, named):
    rewrite(folder, change)
    with pytest.raises(WeightMismatch, match=named):
        load(folder)


def test_old_rotary_tensors_are_passed_over(tmp_path):
    decoder = save_folder(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}))
    assert same_weights(load(tmp_path), decoder)


def test_an_output_layer_in_the_file_of_a_tied_model_is_used_as_transformers_uses_it(tmp_path):
    save_folder(tmp_path, "tiny-qwen3")
    other = torch.randn(313, 48)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": other}))
    assert torch.equal(load(tmp_path).lm_head.weight, other)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(3)}))
    with pytest.raises(WeightMismatch, match=r"misshapen: lm_head\.weight"):
        load(tmp_path)


def test_one_whole_file_goes_before_an_index(tmp_path):
    decoder = save_folder(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"odd": "gone.safetensors"}}))
    assert same_weights(load(tmp_path), decoder)


def test_a_tensor_that_comes_twice_is_named():
    decoder = Decoder(PRESETS["tiny-llama"])
    with pytest.raises(WeightMismatch, match=r"double: model\.norm\.weight"):
        load_weights(decoder, [*random_weights(decoder, 0), ("model.norm.weight", torch.ones(60))])


def test_a_refused_load_leaves_the_decoder_as_it_was():
    decoder = random_decoder(PRESETS["tiny-llama"], dtype=torch.float32, seed=1)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    with pytest.raises(WeightMismatch):
        load_weights(decoder, list(random_weights(decoder, 2))[:-1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())


def header_of(data: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def lie(name: str, key: str, value: object):
    def change(data: bytes) -> bytes:
        header, body = header_of(data)
        header[name][key] = value
        return with_header(header, body)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"just text, no weights",
        lambda data: pickle.dumps({"model.norm.weight": [1.0]}),
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"more",
        lambda data: struct.pack("<Q", 2**62) + data[8:],
        lambda data: struct.pack("<Q", 5) + data[8:],
        lie("model.norm.weight", "shape", [61]),
        lie("model.norm.weight", "shape", [2**40, 2**40]),
        lie("model.norm.weight", "shape", [-60]),
        lie("model.norm.weight", "data_offsets", [0, 2**50]),
        lie("model.norm.weight", "data_offsets", [240, 0]),
        lie("model.norm.weight", "dtype", "F77"),
    ],
    ids=range(14),
)
def test_a_file_that_is_not_what_it_says_is_refused(folder, change):
    path = folder / SINGLE
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidModelFile, match=r"model\.safetensors cannot be read as safetensors"):
        load(folder)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(__file__).parent / "bomb-went-off",))


def test_pickled_weights_are_never_opened(folder):
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InvalidModel, match=r"pytorch_model\.bin.*never opened"):
        load(folder)
    assert not (Path(__file__).parent / "bomb-went-off").exists()


def test_a_folder_without_weights_says_what_is_expected(folder):
    (folder / SINGLE).unlink()
    with pytest.raises(InvalidModel, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"', "\0", "[" * 100_000], ids=range(6))
def test_a_config_that_is_no_json_object_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(InvalidModelFile, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({}, "weight_map"),
        ({"weight_map": ["a"]}, "weight_map"),
        ({"weight_map": {"model.norm.weight": 3}}, "weight_map"),
        ({"weight_map": {"model.norm.weight": "../model.safetensors"}}, r"\.\./model"),
        ({"weight_map": {"model.norm.weight": "/etc/passwd"}}, "passwd"),
        ({"weight_map": {"model.norm.weight": "weights.bin"}}, r"weights\.bin"),
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, r"gone\.safetensors cannot be read"),
        ({"weight_map": {"odd": "shard.safetensors"}}, r"lacks 'odd'"),
    ],
    ids=range(8),
)
def test_an_index_that_lies_is_refused(folder, index, named):
    (folder / SINGLE).rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match=named):
        load(folder)


def test_a_shard_that_is_missing_is_named(tmp_path):
    save_folder(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InvalidModelFile, match=shard.name):
        load(tmp_path)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (load_model("random:tiny-qwen2", device="cpu", seed=s) for s in (3, 3, 4))
    assert same_weights(first, again)
    for name, tensor in first.state_dict().items():
        assert not torch.equal(tensor, other.state_dict()[name]), name
        assert tensor.unique().numel() > 0.9 * tensor.numel(), f"{name} repeats its values"


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3-8b", "llama-2-7b"])
def test_the_large_presets_have_the_true_number_of_parameters(preset):
    decoder = Decoder(PRESETS[preset])  # on the meta device: no memory is taken
    names = set(decoder.state_dict())
    if PRESETS[preset].tie_word_embeddings:
        names -= {"lm_head.weight"}
    count = sum(decoder.state_dict()[name].numel() for name in names)
    assert (
        count == {"qwen3-0.6b": 596_049_920, "llama-3-8b": 8_030_261_248, "llama-2-7b": 6_738_415_616}[preset]
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "float"}, "dtype='float'"),
        ({"dtype": torch.float32}, "dtype="),
        ({"dtype": None}, "dtype=None"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "device='meta'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": 3.5}, "device=3.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "a"}, "seed='a'"),
        ({"seed": 2**31}, "seed="),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_had_is_refused_by_name(options, named):
    with pytest.raises(InvalidOption, match=named):
        load_model("random:tiny-llama", **options)


def test_an_unknown_model_is_refused_with_what_works():
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        load_model("smolm2")
    with pytest.raises(ModelNotFound, match="tiny-llama"):
        load_model("random:tiny-lama")
