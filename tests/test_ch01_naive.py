"""Chapter 1: the naive KV cache gives what recomputing gives, and its books agree with its tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.decoding.generate import generate
from minivllm.decoding.greedy import greedy
from minivllm.errors import OutOfMemory
from minivllm.memory.manager import RecomputeManager, SequenceMemory
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.size import (
    bytes_per_token,
    copied_by_doubling,
    copied_by_joining,
    kv_bytes_per_token,
)
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model
from minivllm.params import SamplingParams


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def tiny(request) -> Decoder:
    return load_model(f"random:{request.param}", dtype="float64", device="cpu", seed=2)


def tokens_of(seed: int, n: int) -> list[int]:
    return torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def recomputed(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits after every prefix, each computed from its first token."""
    return torch.cat(
        [model(Batch.pack([(0, tokens[: i + 1], 0)]), RecomputeStore()) for i in range(len(tokens))]
    )


@torch.inference_mode()
def recomputed_prefixes(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The same in one packed batch, every prefix a sequence of its own."""
    return model(Batch.pack([(i, tokens[: i + 1], 0) for i in range(len(tokens))]), RecomputeStore())


@torch.inference_mode()
def cached(
    model: Decoder, tokens: list[int], cuts: list[int], store: NaiveStore | None = None
) -> dict[int, torch.Tensor]:
    """Logits after each chunk of tokens, cut at these places, by the place."""
    store = store or NaiveStore()
    ends = sorted({*cuts, len(tokens)})
    starts = [0, *ends[:-1]]
    return {e: model(Batch.pack([(4, tokens[s:e], s)]), store)[0] for s, e in zip(starts, ends, strict=True)}


def test_cached_equals_recomputed_at_every_position(tiny):
    tokens = tokens_of(1, 41)
    got = cached(tiny, tokens, list(range(1, 41)))
    torch.testing.assert_close(
        torch.stack(list(got.values())), recomputed(tiny, tokens), atol=1e-11, rtol=1e-11
    )


@given(cuts=st.lists(st.integers(1, 36), max_size=8), seed=st.integers(0, 3))
def test_cutting_a_prompt_into_chunks_in_any_way_changes_nothing(tiny, cuts, seed):
    tokens = tokens_of(seed, 37)
    expected = recomputed_prefixes(tiny, tokens)
    for end, logits in cached(tiny, tokens, cuts).items():
        torch.testing.assert_close(logits, expected[end - 1], atol=1e-11, rtol=1e-11)


def test_sequences_come_and_go_between_steps_and_keep_their_own_memory(tiny):
    """Their place in the batch changes at every step; their id is what counts."""
    tokens = {seq_id: tokens_of(seq_id, 14) for seq_id in (3, 11, 6)}
    expected = {seq_id: recomputed(tiny, t) for seq_id, t in tokens.items()}
    steps = [[(3, 5)], [(11, 4), (3, 1)], [(6, 14), (11, 3), (3, 2)], [(3, 6), (11, 1)], [(11, 6)]]
    store, done = NaiveStore(), dict.fromkeys(tokens, 0)
    for step in steps:
        batch = Batch.pack([(i, tokens[i][done[i] : done[i] + n], done[i]) for i, n in step])
        with torch.inference_mode():
            logits = tiny(batch, store)
        for row, (i, n) in zip(logits, step, strict=True):
            done[i] += n
            torch.testing.assert_close(row, expected[i][done[i] - 1], atol=1e-11, rtol=1e-11)
        if done[6] == 14:
            store.free(6)
    assert done == dict.fromkeys(tokens, 14)


def test_an_id_used_again_starts_from_nothing(tiny):
    store = NaiveStore()
    params = SamplingParams(temperature=0, max_tokens=5)
    first = list(generate(tiny, store, tokens_of(1, 9), params))
    list(generate(tiny, store, tokens_of(2, 9), params))
    assert store.num_bytes() == 0
    assert list(generate(tiny, store, tokens_of(1, 9), params)) == first


def test_generate_gives_the_same_tokens_with_and_without_the_cache(tiny):
    params = SamplingParams(temperature=0, max_tokens=40)
    sampled = SamplingParams(temperature=1.5, seed=3, max_tokens=40)
    for n in (1, 2, 15, 16, 17, 50):
        for p in (params, sampled):
            runs = [
                list(generate(tiny, store, tokens_of(n, n), p)) for store in (RecomputeStore(), NaiveStore())
            ]
            assert runs[0] == runs[1]


def test_the_store_keeps_no_view_of_the_batch(tiny):
    """A view would keep the whole packed batch alive, and change with it."""
    store, layer = NaiveStore(), 0
    heads, kv_heads, dim = (
        tiny.config.num_attention_heads,
        tiny.config.num_key_value_heads,
        tiny.config.head_dim,
    )
    batch = Batch.pack([(0, [1, 2, 3], 0), (1, [4], 0)])
    q, k, v = (torch.randn(4, n, dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    store.attend(layer, q, k, v, batch)
    expected = store.attend(layer, q[:1], k[:1], v[:1], Batch.pack([(1, [5], 1)]))
    other = NaiveStore()
    other.attend(layer, q, k, v, batch)
    saved = q[:1].clone(), k[:1].clone(), v[:1].clone()
    for t in (q, k, v):
        t.fill_(float("nan"))
    torch.testing.assert_close(other.attend(layer, *saved, Batch.pack([(1, [5], 1)])), expected)


def test_the_books_agree_with_the_tensors(tiny):
    bytes_per_token = tiny.config.kv_elements_per_token * 8
    manager, store = NaiveManager(1000, bytes_per_token), NaiveStore()
    for seq_id, n in ((0, 7), (5, 1), (2, 19)):
        manager.allocate(seq_id, n)
        tiny(Batch.pack([(seq_id, tokens_of(seq_id, n), 0)]), store)
        assert store.num_bytes() == manager.snapshot().held_bytes
    manager.free(5)
    store.free(5)
    assert store.num_bytes() == manager.snapshot().held_bytes == 26 * bytes_per_token


@pytest.mark.parametrize(
    ("model", "expected"),
    [("smollm2-135m", 23_040), ("llama-2-7b", 524_288), ("llama-3-8b", 131_072), ("qwen3-0.6b", 114_688)],
)
def test_bytes_a_token_are_the_published_ones(model, expected, request):
    from minivllm.model.presets import PRESETS

    config = PRESETS[model] if model in PRESETS else request.getfixturevalue("smollm2").config
    assert kv_bytes_per_token(config, 16) == expected
    assert config.kv_elements_per_token * 2 == expected


def test_bytes_a_token_of_a_model_are_those_that_its_store_takes(tiny):
    store = NaiveStore()
    tiny(Batch.pack([(0, tokens_of(0, 13), 0)]), store)
    assert store.num_bytes() == 13 * bytes_per_token(tiny)


class CountedStore(NaiveStore):
    """Counts the old rows of layer 1 that each step joins new ones on."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def attend(self, layer, q, k, v, batch):
        if layer == 1:
            self.copied += sum(
                len(self._kv[s.seq_id, 1][0]) for s in batch.slices if (s.seq_id, 1) in self._kv
            )
        return super().attend(layer, q, k, v, batch)


@pytest.mark.parametrize(("prompt_len", "output_len"), [(1, 1), (1, 2), (9, 1), (7, 12), (3, 25)])
def test_joining_copies_what_the_formula_says(tiny, prompt_len, output_len):
    store = CountedStore()
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    list(generate(tiny, store, tokens_of(5, prompt_len), params))
    assert store.copied == copied_by_joining(prompt_len, output_len)


@given(prompt_len=st.integers(1, 50), output_len=st.integers(1, 300))
def test_doubling_copies_as_a_list_does_and_less_than_twice_what_is_in_use(prompt_len, output_len):
    rows, capacity, copied = prompt_len, prompt_len, 0
    for _ in range(output_len - 1):
        if rows == capacity:
            copied, capacity = copied + rows, 2 * capacity
        rows += 1
    assert copied_by_doubling(prompt_len, output_len) == (copied, capacity)
    assert copied < 2 * rows
    assert rows <= capacity < 2 * rows or rows == capacity
    assert copied <= copied_by_joining(prompt_len, output_len)


@pytest.mark.parametrize(
    "prompt_len, output_len, named",
    [(0, 5, "prompt_len=0"), (-1, 3, "prompt_len=-1"), (3, 0, "output_len=0")],
)
def test_doubling_refuses_what_would_have_no_end(prompt_len, output_len, named):
    with pytest.raises(ValueError, match=named):
        copied_by_doubling(prompt_len, output_len)


def test_the_least_loop_gives_the_tokens_of_the_generate_loop_on_every_store(tiny):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for n in (1, 2, 17):
        expected = list(generate(tiny, RecomputeStore(), tokens_of(n, n), params))
        store = NaiveStore()
        assert greedy(tiny, RecomputeStore(), tokens_of(n, n), 9) == expected
        assert greedy(tiny, store, tokens_of(n, n), 9, seq_id=4) == expected
        assert store.num_bytes() == 0
    assert greedy(tiny, NaiveStore(), [5], 0) == []


def test_the_least_loop_lets_go_of_memory_when_the_model_fails(tiny):
    store = NaiveStore()
    with pytest.raises(IndexError):
        greedy(tiny, store, [1, 10**6], 3)
    list(generate(tiny, store, [1, 2], SamplingParams(max_tokens=2)))
    assert store.num_bytes() == 0


class PlainModel:
    """The obvious thing: a dictionary of token counts."""

    def __init__(self, slots: int):
        self.slots = slots
        self.tokens: dict[int, int] = {}

    def fits(self, seq_id: int, n: int) -> bool:
        others = sum(t for i, t in self.tokens.items() if i != seq_id)
        return others + max(n, self.tokens.get(seq_id, 0)) <= self.slots


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "free"]), st.integers(0, 4), st.integers(0, 25)), max_size=40
)


@given(slots=st.integers(0, 40), operations=OPERATIONS)
def test_the_naive_manager_agrees_with_a_plain_model(slots, operations):
    manager, plain = NaiveManager(slots, 3), PlainModel(slots)
    for name, seq_id, n in operations:
        before = manager.snapshot()
        assert manager.can_allocate(seq_id, n) == plain.fits(seq_id, n)
        assert manager.fits_ever(n) == (n <= slots)
        assert manager.snapshot() == before, "a question changes nothing"
        if name == "free":
            manager.free(seq_id)
            plain.tokens.pop(seq_id, None)
        elif plain.fits(seq_id, n):
            manager.allocate(seq_id, n)
            plain.tokens[seq_id] = max(n, plain.tokens.get(seq_id, 0))
        else:
            with pytest.raises(OutOfMemory, match=f"Sequence {seq_id}"):
                manager.allocate(seq_id, n)
            assert manager.snapshot() == before, "a refusal changes nothing"
        manager.check_integrity()
        after = manager.snapshot()
        assert {s.seq_id: (s.held, s.used) for s in after.sequences} == {
            i: (n, n) for i, n in plain.tokens.items()
        }
        assert (after.held + after.free, after.held_bytes) == (slots, 3 * sum(plain.tokens.values()))
    for seq_id in range(5):
        manager.free(seq_id)
    assert manager.snapshot().sequences == ()


def test_the_recompute_manager_holds_nothing_and_takes_everything():
    manager = RecomputeManager(10, 4)
    assert manager.fits_ever(10**9)
    assert manager.can_allocate(0, 10**9)
    manager.allocate(0, 50)
    manager.check_integrity()
    assert (manager.snapshot().held, manager.snapshot().free) == (0, 10)
    manager.free(0)
    assert SequenceMemory(1, 2, 2) not in manager.snapshot().sequences


def test_two_sequences_under_one_id_are_refused_not_mixed(tiny):
    store = NaiveStore()
    params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (generate(tiny, store, tokens_of(i, 5), params, seq_id=3) for i in (1, 2))
    next(first)
    with pytest.raises(ValueError, match="Sequence 3 has 10 tokens in memory; the batch says 5"):
        next(second)


def test_a_store_that_keeps_nothing_refuses_a_part_of_a_sequence(tiny):
    with pytest.raises(ValueError, match="brings 1 of its 5 tokens"):
        tiny(Batch.pack([(0, [1], 4)]), RecomputeStore())


def test_sequences_that_take_turns_on_one_store_do_not_meet(tiny):
    params = SamplingParams(temperature=0, max_tokens=8)
    alone = [list(generate(tiny, NaiveStore(), tokens_of(i, 5), params)) for i in range(3)]
    store = NaiveStore()
    turns = zip(*(generate(tiny, store, tokens_of(i, 5), params, seq_id=i) for i in range(3)), strict=True)
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone
