"""Chapter 0: tokenizers: the real one out of its GGUF file, kept after the first time, and bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from minivllm.errors import InvalidModelFile, InvalidOption, InvalidPrompt
from minivllm.model import tokenizer as module
from minivllm.model.hub import ModelSource
from minivllm.model.tokenizer import ByteTokenizer, load_tokenizer

TEXTS = [
    "Hello world",
    "  two  spaces\n\ttab",
    "naïve café 東京 🙂🏽",
    "<|im_start|>user\nhi<|im_end|>",
    "x = [i**2 for i in range(10)]",
    "",
]


@pytest.fixture(scope="module")
def straight(smollm2_source):
    """Transformers' tokenizer from the GGUF file itself, with nothing of ours between."""
    from transformers import AutoTokenizer

    path = smollm2_source.path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def test_the_tokenizer_that_is_kept_is_the_one_in_the_gguf_file(straight, smollm2_tokenizer):
    for text in TEXTS:
        ids = smollm2_tokenizer.encode(text)
        assert ids == straight.encode(text)
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert smollm2_tokenizer.decode([1, 19556, 905, 2]) == "Hello world"
    messages = [{"role": "user", "content": "Why?"}]
    expected = straight.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        smollm2_tokenizer.decode(smollm2_tokenizer.apply_chat_template(messages), skip_special_tokens=False)
        == expected
    )


def test_the_tokenizer_that_is_kept_needs_the_transformers_library_for_chats_alone(
    smollm2_source, smollm2_tokenizer
):
    code = (
        "import sys; from minivllm.model.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(smollm2_source.path)!r})\n"
        "assert tokenizer.decode(tokenizer.encode('Hello world')) == 'Hello world'\n"
        "assert 'tokenizers' in sys.modules and 'transformers' not in sys.modules\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'Why?'}])\n"
        "assert 'transformers' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def words(folder, **options):
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "one", "two", "three"])}
    tokenizer = FastTokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **options).save_pretrained(folder)
    return ModelSource(str(folder), "folder", folder)


def test_a_folder_brings_its_own_tokenizer(tmp_path):
    tokenizer = load_tokenizer(words(tmp_path))
    assert tokenizer.encode("two one three four") == [2, 1, 3, 0]
    assert tokenizer.decode([2, 1]) == "two one"


def test_a_model_without_a_chat_template_says_so(tmp_path):
    tokenizer = load_tokenizer(words(tmp_path))
    with pytest.raises(InvalidOption, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "one"}])


PANICS = '{"type": "Precompiled", "precompiled_charsmap": "AAAA"}'


def test_a_tokenizer_that_makes_the_library_panic_is_refused(tmp_path):
    source = words(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": json.loads(PANICS)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidModelFile):
        load_tokenizer(source).encode("one")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{% if %}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"],
    ids=range(4),
)
def test_a_chat_template_that_fails_is_refused(tmp_path, template):
    tokenizer = load_tokenizer(words(tmp_path, chat_template=template))
    with pytest.raises(InvalidModelFile, match="chat template cannot be applied"):
        tokenizer.apply_chat_template([{"role": "user", "content": "one"}])


@pytest.mark.parametrize("damage", ["{", '{"model": 3}', ""], ids=range(3))
def test_a_damaged_tokenizer_is_refused(tmp_path, damage):
    source = words(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(InvalidModelFile, match="no tokenizer that transformers can read"):
        load_tokenizer(source)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(InvalidModelFile, match="comes with its tokenizer"):
        load_tokenizer(ModelSource("x", "folder", tmp_path))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    source = words(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "tokenizer_class": "Evil",
    }
    path.write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(InvalidModelFile):
        load_tokenizer(source)
    assert not (tmp_path / "ran").exists()


class Fake:
    """Stands for a tokenizer that takes long to build."""

    chat_template = None

    def __init__(self, where):
        self.where = where

    def save_pretrained(self, folder):
        from pathlib import Path

        Path(folder).mkdir(parents=True)
        FastTokenizer(WordLevel({"one": 1}, unk_token="one")).save(str(Path(folder, "tokenizer.json")))
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            Path(folder, name).write_text("{}")


@pytest.fixture
def builds(monkeypatch, home, tmp_path):
    """A tiny GGUF file, and a list that grows by one whenever a tokenizer is built from it."""
    import struct

    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    built = []

    def from_pretrained(origin, folder, **options):
        assert "gguf_file" in options, "what is kept is read without it"
        built.append(folder)
        return Fake(folder)

    monkeypatch.setattr(module, "_from_pretrained", from_pretrained)
    return ModelSource("x", "gguf", path), built


def test_a_tokenizer_is_built_once_and_kept(builds, home):
    source, built = builds
    load_tokenizer(source)
    assert load_tokenizer(source).encode("one") == [1]
    assert len(built) == 1
    assert [p.name for p in (home / "tokenizers").iterdir() if p.name.startswith("tmp")] == []


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "kept.json"]
)
@pytest.mark.parametrize("text", ["half", None], ids=["half", "gone"])
def test_a_kept_tokenizer_that_is_damaged_is_made_again(name, text, builds, home):
    """Whichever of its files it is, also one that only chats need."""
    source, built = builds
    load_tokenizer(source)
    file = next((home / "tokenizers").iterdir()) / name
    file.unlink()
    if text is not None:
        file.write_text(text)
    load_tokenizer(source)
    load_tokenizer(source)
    assert len(built) == 2


def test_a_cache_folder_that_cannot_be_written_costs_time_and_nothing_else(builds, home):
    source, built = builds
    home.write_text("a file where the folder should be")
    load_tokenizer(source)
    load_tokenizer(source)
    assert len(built) == 2


def test_bytes_go_there_and_back():
    tokenizer = ByteTokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([72, 105, 300]) == "Hi\N{REPLACEMENT CHARACTER}"
    assert (
        tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]))
        == "user: hi\nassistant: "
    )
    assert isinstance(load_tokenizer("random:tiny-llama"), ByteTokenizer)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]])
def test_what_is_not_text_is_refused(text, smollm2_tokenizer):
    for tokenizer in (ByteTokenizer(), smollm2_tokenizer):
        with pytest.raises(InvalidPrompt, match="must be text"):
            tokenizer.encode(text)


def test_half_a_character_is_no_text(smollm2_tokenizer):
    for tokenizer in (ByteTokenizer(), smollm2_tokenizer):
        with pytest.raises(InvalidPrompt, match="no whole text"):
            tokenizer.encode("a\udcff")
