"""What measures and examines: the comparison of tokens, the ladder's rungs, the doctor."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from minivllm.decoding.generate import generate
from minivllm.errors import InvalidModelFile, InvalidOption, RequestTooLong
from minivllm.lab import doctor, ladder
from minivllm.lab.same_tokens import compare_tokens
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.store import RecomputeStore
from minivllm.model.loader import load_model
from minivllm.params import SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tiny():
    return load_model("random:tiny-llama", dtype="float32", device="cpu", seed=1)


@pytest.fixture(scope="module")
def tokens(tiny):
    return list(generate(tiny, RecomputeStore(), PROMPT, SamplingParams(temperature=0, max_tokens=9)))


def test_equal_tokens_are_the_same(tiny, tokens):
    assert compare_tokens(tiny, PROMPT, tokens, list(tokens)).verdict == "yes"


def test_a_wrong_token_is_no_tie(tiny, tokens):
    wrong = [*tokens[:4], (tokens[4] + 1) % 300, *tokens[5:]]
    comparison = compare_tokens(tiny, PROMPT, tokens, wrong)
    assert comparison.verdict == "NO, from token 5"
    assert comparison.gap > comparison.error > 0


def test_a_run_that_ends_early_is_not_the_same(tiny, tokens):
    assert compare_tokens(tiny, PROMPT, tokens, tokens[:-1]).verdict == "NO, from token 9"


def test_two_tokens_nearer_than_the_error_are_a_tie_and_what_follows_is_still_checked(tiny, tokens):
    """Two rows of the output layer made equal: either token may win, and each leads on to other tokens."""
    model = copy.deepcopy(tiny)
    twin = next(i for i in range(300) if i not in tokens)
    model.lm_head.weight[twin] = model.lm_head.weight[tokens[2]]
    params = SamplingParams(temperature=0, max_tokens=6)
    rest = list(generate(model, RecomputeStore(), [*PROMPT, *tokens[:2], twin], params))
    swapped = [*tokens[:2], twin, *rest]
    assert compare_tokens(model, PROMPT, tokens, swapped).verdict == "tie at token 3"
    assert compare_tokens(model, PROMPT, tokens, swapped[:-1]).verdict.startswith("NO")
    garbage = [*swapped[:-1], (swapped[-1] + 1) % 300]
    assert compare_tokens(model, PROMPT, tokens, garbage).verdict == "NO, from token 9"


@pytest.mark.parametrize("max_tokens", [1022, 5000])
def test_a_workload_longer_than_the_context_is_refused_before_anything_runs(tiny, max_tokens):
    with pytest.raises(RequestTooLong, match=f"max_tokens={max_tokens}"):
        next(ladder.run_ladder(tiny, PROMPT, max_tokens=max_tokens))


def test_a_dtype_too_coarse_to_compare_tokens_is_refused():
    model = load_model("random:tiny-llama", dtype="bfloat16", device="cpu")
    with pytest.raises(InvalidOption, match="bfloat16"):
        next(ladder.run_ladder(model, PROMPT))


class ForgetfulStore(NaiveStore):
    """Loses the oldest key and value: fluent, fast and wrong."""

    def attend(self, layer, q, k, v, batch):
        for key, (keys, values) in self._kv.items():
            if key[1] == layer and len(keys) > 1:
                self._kv[key] = torch.cat((keys[1:2], keys[1:])), torch.cat((values[1:2], values[1:]))
        return super().attend(layer, q, k, v, batch)


def test_the_ladder_tells_a_memory_that_forgets(tiny, monkeypatch):
    broken = ladder.Rung("naive", 1, ladder.RUNGS["naive"].manager, ForgetfulStore)
    monkeypatch.setitem(ladder.RUNGS, "naive", broken)
    results = list(ladder.run_ladder(tiny, list(range(40)), max_tokens=12, lengths=(8,)))
    assert results[0].same_tokens == "(reference)"
    assert results[1].same_tokens.startswith("NO, from token")


def test_each_length_asked_for_is_timed(tiny):
    results = list(ladder.run_ladder(tiny, PROMPT, max_tokens=2, lengths=(1, 2, 33)))
    assert [list(r.step_seconds) for r in results] == [[1, 2, 33]] * 2


def test_the_doctor_finds_nothing_wrong_here(smollm2_source):
    findings = {finding.what: finding for finding in doctor.examine()}
    assert not [f for f in findings.values() if f.status == "fault"]
    assert str(smollm2_source.path) in findings["model file"].found
    assert "right answer" in findings["Triton interpreter"].found
    assert findings["torch"].found == torch.__version__


def test_the_doctor_does_not_download(home):
    finding = doctor._model_file()
    assert (finding.status, home.exists()) == ("note", False)
    assert "minivllm pull" in finding.found


def test_the_doctor_says_when_the_model_file_is_damaged_or_the_folder_is_none(home):
    from minivllm.model import hub

    home.write_text("a file")
    assert "is a file" in doctor._model_file().found
    home.unlink()
    path = home / "models" / hub.DEFAULT_MODEL / hub.SMOLLM2.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF, half of it")
    finding = doctor._model_file()
    assert (finding.status, "damaged" in finding.found) == ("fault", True)
    with pytest.raises(InvalidModelFile):
        hub.find_default()


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (SimpleNamespace(returncode=0, stdout="0.25\n", stderr=""), "wrong answer here (off by 2.5e-01)"),
        (SimpleNamespace(returncode=0, stdout="inf\n", stderr=""), "wrong answer"),
        (SimpleNamespace(returncode=0, stdout="nan\n", stderr=""), "wrong answer"),
        (
            SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no driver\n"),
            "no driver",
        ),
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "no message"),
    ],
    ids=range(5),
)
def test_the_doctor_blames_the_environment_when_the_kernel_fails(monkeypatch, done, said):
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    finding = doctor._interpreter()
    assert finding.status == "fault"
    assert said in finding.found
    assert " here" in finding.found


def test_the_doctor_names_a_package_that_is_missing(monkeypatch):
    assert doctor._package("no-such-package").status == "fault"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        doctor, "version", lambda name: (_ for _ in ()).throw(doctor.PackageNotFoundError(name))
    )
    assert doctor._package("triton").status == "note"
    assert doctor._interpreter().status == "note"
