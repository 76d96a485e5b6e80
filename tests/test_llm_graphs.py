"""`LLM` with recorded decode steps gives the tokens of `LLM` without: `enforce_eager` changes no output.

No GPU is needed: a recording is a run that is done again. `interpreted_ch09.py` has recordings proper."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm import LLM, BeamSearchParams, SamplingParams, engine_parts
from minivllm.engine_args import EngineArgs, _has_faster
from minivllm.errors import InvalidOption, OutOfMemory
from minivllm.kernels.c_linear import Panels
from minivllm.kernels.c_rows import MAX_ROW
from minivllm.memory.paged import num_blocks_for
from minivllm.memory.paged_store import PagedStore
from minivllm.model.decoder import Decoder
from minivllm.model.graphs import DecodeGraphs
from minivllm.model.loader import load_model
from minivllm.model.packed import PackedDecoder, products_for
from minivllm.model.presets import PRESETS
from minivllm.model.tokenizer import ByteTokenizer

PRODUCTS = products_for(torch.float32, torch.device("cpu"))
PROMPTS = [[5] * 3, list(range(40, 59)), [7, 8, 9, 10, 11], list(range(40, 71)), [*range(40, 52), 3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(n=2, temperature=0.8, seed=9, max_tokens=6, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.3, ignore_eos=True),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 80},
    "chunks": {"num_blocks": 80, "max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 17},
    "swap and prefixes": {
        "num_blocks": 12,
        "preemption": "swap",
        "swap_space": 2**18,
        "enable_prefix_caching": True,
    },
    "static": {"num_blocks": 80, "scheduler": "static"},
}


class Counted:
    """Makes a recording of a run that is the run itself, and counts how often it is repeated."""

    def __init__(self):
        self.num_replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


def run(model: Decoder, options: dict[str, Any], recorder: Counted | None = None):
    """The tokens of samples and beams, and what preemption has cost."""
    llm = LLM(model, tokenizer=ByteTokenizer(), block_size=5, max_num_seqs=7, max_model_len=64, **options)
    if recorder is not None:
        store = llm.engine.store
        assert isinstance(store, PagedStore)
        llm.engine.forward = DecodeGraphs(model, store, 7, num_blocks_for(64, 5), recorder)
    samples = llm.generate(PROMPTS, PARAMS)
    beams = llm.beam_search(PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=6))
    told = [[list(o.token_ids) for o in output.outputs] for output in [*samples, *beams]]
    return told, llm.preemption_counters.num_preemptions


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_on_and_off_give_the_same_tokens(options):
    model = load_model("random:tiny-qwen2", dtype="float64", device="cpu", seed=3)
    expected, num_preemptions = run(model, options)
    recorder = Counted()
    assert run(model, options, recorder) == (expected, num_preemptions)
    assert recorder.num_replays > 10
    assert (num_preemptions > 0) == (options["num_blocks"] < 20)


def test_on_a_cpu_nothing_is_recorded_and_what_cannot_be_packed_runs_as_it_is():
    for dtype, packs in (("float32", PRODUCTS is not None), ("float64", False)):
        model = load_model("random:tiny-llama", dtype=dtype, device="cpu")
        for enforce_eager in (True, False):
            llm = LLM(model, tokenizer=ByteTokenizer(), enforce_eager=enforce_eager)
            eager = enforce_eager or not packs
            assert llm.args.enforce_eager is eager, "what runs, not what was asked for"
            assert llm.engine.forward is None if eager else isinstance(llm.engine.forward, PackedDecoder)
    for wrong in (None, 1, "no"):
        with pytest.raises(InvalidOption, match=f"enforce_eager={wrong!r}"):
            LLM(model, tokenizer=ByteTokenizer(), enforce_eager=wrong)  # type: ignore[arg-type]


def test_a_device_without_room_for_recordings_is_told_so(monkeypatch):
    """As on a GPU: what the options decide is decided before anything touches the device."""

    def full(*size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = load_model("random:tiny-llama", dtype="float32", device="cpu")
    store = LLM(model, tokenizer=ByteTokenizer()).engine.store
    monkeypatch.setattr(engine_parts, "DecodeGraphs", full)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    args = EngineArgs(block_size=16, max_model_len=64, max_num_seqs=9)
    object.__setattr__(args, "attention", "triton")  # as it is resolved there
    for attention, eager in (("torch", True), (None, True), ("triton", False), ("triton-naive", False)):
        assert _has_faster(model, attention) is not eager
    assert engine_parts._forward(model, store, replace_(args, enforce_eager=True), True) is None
    with pytest.raises(OutOfMemory, match=r"decode steps of 9 sequences.*enforce_eager=True"):
        engine_parts._forward(model, store, args, True)


def replace_(args: EngineArgs, **changes: Any) -> EngineArgs:
    """A copy that nothing is checked of: this machine has no GPU."""
    other = copy(args)
    for name, value in changes.items():
        object.__setattr__(other, name, value)
    return other


@pytest.mark.skipif(not isinstance(PRODUCTS, Panels), reason="there is no C compiler")
def test_rows_that_are_too_long_for_the_kernels_are_pytorchs():
    """A norm and a rotary embedding in C have room for so many numbers; heads may be longer than that."""
    config = PRESETS["tiny-llama"]
    for size, fits in ((64, True), (MAX_ROW, True), (MAX_ROW + 2, False)):
        for name in ("hidden_size", "head_dim"):
            change: Any = {name: size}
            model: Any = SimpleNamespace(config=replace(config, **change))
            assert (engine_parts._rows(model) is not None) is fits
