"""What the notebooks share: where they run, tables, results kept from a GPU."""

from __future__ import annotations

import getpass
import json
import pkgutil
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm import lab
from minivllm.engine_args import bytes_per_token
from minivllm.errors import InvalidOption, InvalidResultFile
from minivllm.lab import here
from minivllm.model.decoder import Decoder
from minivllm.model.presets import PRESETS

# --- where it runs ---


def test_about_names_device_versions_and_date_on_one_line_and_not_the_computer():
    line = lab.about()
    assert re.search(r", torch 2\.\S+, Python 3\.\d+\.\d+, minivllm \d\S*, 20\d\d-\d\d-\d\d$", line)
    if not torch.cuda.is_available():
        assert re.match(r"CPU .+, \d+ threads", line)
    assert "\n" not in line
    assert "/" not in line
    assert socket.gethostname() not in line
    assert getpass.getuser() not in line


def test_on_a_gpu_about_has_its_name_and_not_the_processors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert re.match(r"NVIDIA H200, torch 2\.", lab.about())


def test_the_scale_of_a_cpu_has_room_for_four_whole_requests(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scale = lab.scale()
    assert (scale.model, scale.dtype, scale.device) == ("smollm2-135m", "float32", "cpu")
    assert scale.kv_cache_memory_bytes == 4 * scale.max_model_len * 23_040 * 2  # twice the bytes of float16
    assert scale.num_requests > 4


def test_the_scale_of_a_gpu_has_room_for_eight_whole_requests(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    scale = lab.scale()
    config = PRESETS[scale.model.removeprefix("random:")]
    model = Decoder(config, getattr(torch, scale.dtype), torch.device("meta"))
    assert scale.device == "cuda"
    assert scale.kv_cache_memory_bytes == 8 * scale.max_model_len * bytes_per_token(model)
    assert scale.max_model_len <= config.max_position_embeddings
    assert scale.vocab_size == config.vocab_size


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "cuda"])
def test_the_requests_of_a_scale_fit_its_model_and_come_from_a_seed(on_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    scale = lab.scale()
    requests = scale.requests(seed=3)
    assert requests == lab.scale().requests(seed=3) != scale.requests(seed=4)
    assert len(requests) == scale.num_requests
    for request in requests:
        assert max(request.token_ids) < scale.vocab_size
        assert len(request.token_ids) + request.max_tokens <= scale.max_model_len


def test_no_module_hides_a_name_that_the_lab_gives_out():
    """An imported submodule becomes an attribute of its package, before any name that is looked up."""
    assert not {module.name for module in pkgutil.iter_modules(lab.__path__)} & set(lab.__all__)
    assert len(lab.__all__) == len(set(lab.__all__))


# --- results kept from a GPU ---

RESULT = {"device": "NVIDIA H200", "date": "2026-11-02", "tok_s": 1234.5}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A book/results of its own, found from a folder below; the package lies elsewhere."""
    folder, below = tmp_path / "book" / "results", tmp_path / "notebooks"
    folder.mkdir(parents=True)
    below.mkdir()
    monkeypatch.setattr(here.minivllm, "__file__", str(tmp_path / "lib" / "minivllm" / "__init__.py"))
    monkeypatch.chdir(below)
    return folder


def test_results_are_found_from_a_folder_below_the_clone(results):
    (results / "decode.json").write_text(json.dumps(RESULT))
    assert lab.gpu_results("decode") == RESULT
    assert lab.gpu_results("prefill") is None


def test_results_of_the_packages_own_clone_come_before_those_of_the_current_folder(results, monkeypatch):
    (results / "decode.json").write_text(json.dumps(RESULT))
    own = results.parent.parent / "lib" / "book" / "results"
    own.mkdir(parents=True)
    assert lab.gpu_results("decode") is None
    (own / "decode.json").write_text(json.dumps({**RESULT, "tok_s": 7}))
    assert lab.gpu_results("decode") == {**RESULT, "tok_s": 7}


def test_without_a_book_there_are_no_results(results):
    results.rmdir()
    assert lab.gpu_results("decode") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read: Expecting value"),
        ('{"device": "NVIDIA', "cannot be read: Unterminated string"),
        ('{"device": "A", "date": "B", "tok_s": NaN}', "cannot be read: NaN is no number"),
        ("\udcff", "cannot be read: .*utf-8"),
        ("[" * 100_000, "cannot be read: .*recursion"),
        ("[1, 2]", "must hold one JSON object, and holds a list"),
        ('{"date": "2026-11-02", "tok_s": 3}', "does not say its device"),
        ('{"device": "NVIDIA H200", "date": " "}', "does not say its date"),
        ('{"device": 5, "date": "2026-11-02"}', "does not say its device"),
    ],
    ids=["empty", "cut", "nan", "bytes", "deep", "list", "no-device", "no-date", "number"],
)
def test_a_damaged_file_of_results_is_refused_by_its_name_and_without_a_path(text, reason, results):
    (results / "decode.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(InvalidResultFile, match=rf"^book/results/decode\.json.*{reason}") as caught:
        lab.gpu_results("decode")
    assert str(results) not in str(caught.value)


def test_a_folder_in_place_of_a_file_of_results_is_refused(results):
    (results / "decode.json").mkdir()
    with pytest.raises(InvalidResultFile, match=r"book/results/decode\.json cannot be read: Is a directory"):
        lab.gpu_results("decode")


@pytest.mark.parametrize("name", ["", "../decode", "a/b", "decode.json", "Decode", None, 3], ids=str)
def test_what_is_no_name_of_results_is_refused(name, results):
    with pytest.raises(InvalidOption, match="must be the name of a file in book/results"):
        lab.gpu_results(name)


def test_every_result_that_the_book_keeps_can_be_read():
    folder = Path(__file__).parents[1] / "book" / "results"
    for path in folder.glob("*.json"):
        assert lab.gpu_results(path.stem), path.name


# --- tables ---


def test_a_table_of_mappings_has_a_head_and_numbers_to_the_right():
    rows: list[dict[str, object]] = [
        {"scheme": "contiguous", "slots": 1024, "share": 0.2041},
        {"scheme": "paged", "slots": 96, "share": 0.963},
    ]
    text = """\
scheme      slots  share
----------  -----  -----
contiguous  1,024  20.4%
paged          96  96.3%"""
    forms = {"scheme": None, "slots": None, "share": ".1%"}
    assert lab.table(rows, forms) == text
    assert lab.table([tuple(row.values()) for row in rows], forms) == text


def test_a_table_of_sequences_without_columns_has_no_head_and_no_spaces_at_the_end():
    assert lab.table([("a", 7, "x"), ("bcd", 12_345, "yz")]) == "a         7  x\nbcd  12,345  yz"


def test_columns_choose_and_order_and_a_missing_value_is_a_dash():
    rows: list[dict[str, object]] = [{"b": True, "a": 1}, {"a": None, "b": False}, {"b": True}]
    assert lab.table(rows, ["a", "b"]) == "a  b\n-  ---\n1  yes\n-  no\n-  yes"
    assert lab.table(rows).splitlines()[0] == "b    a", "in the order in which they come"
    assert lab.table([], ["a", "b"]) == "a  b\n-  -"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.204, 0.963], ["0.204", "0.963"]),
        ([15728.5, 7.0], ["15,728.50", "7.00"]),
        ([30.42, 132.44], ["30.4", "132.4"]),
        ([9.806, 0.0], ["9.81", "0.00"]),
        ([0.0012, 12.3], ["0.00120", "12.30000"]),
        ([1e-9, 1.0], ["0.000000", "1.000000"]),
        ([0.0, float("nan"), float("inf")], ["0.0", "nan", "inf"]),
        ([1.5, 3], ["1.50", "3"]),
    ],
    ids=["shares", "thousands", "hundreds", "ones", "far-apart", "too-small", "none-finite", "mixed"],
)
def test_decimals_are_those_that_a_column_needs(values, expected):
    assert [line.strip() for line in lab.table([[v] for v in values]).splitlines()] == expected


def test_a_form_may_be_a_function_and_numbers_of_numpy_are_numbers():
    rows = [{"n": np.int64(2048), "x": np.float32(0.5)}]
    text = lab.table(rows, {"n": lambda n: f"{n // 1024} KiB", "x": "+.3f"})
    assert text == "    n       x\n-----  ------\n2 KiB  +0.500"


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([(1, 2), (3,)], None, "Row 2 has 1 values, and there are 2 columns"),
        ([(1, 2)], ["a"], "Row 1 has 2 values, and there are 1 columns"),
        ([{"a": 1, "b": 2}], ["a"], "Row 1 has 'b', which is no column; the columns are a"),
        (["ab"], None, "Row 1 is 'ab': it must be a mapping or a sequence"),
        ([5], ["a"], "Row 1 is 5"),
        ([(1,)], "a", "columns='a' is not possible"),
        ([(1, 2)], ["a", "a"], "give different names"),
        ([(1,)], [], "one at least"),
        ([], None, "A table needs a row"),
        ([{"a": 1}], {"a": ".q"}, "Column 'a': 1 has no form '.q'"),
        ([{"a": "x\ny"}], None, "Column 'a' has a value of several lines"),
    ],
    ids=["short", "long", "unknown", "text", "number", "str", "twice", "none", "empty", "form", "lines"],
)
def test_what_is_no_table_is_refused(rows, columns, message):
    with pytest.raises(InvalidOption, match=re.escape(message)):
        lab.table(rows, columns)
