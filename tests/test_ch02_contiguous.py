"""Chapter 2: reservations, what they waste, and contiguous memory against the naive cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import InvalidOption, OutOfMemory
from minivllm.memory.contiguous import RESERVATIONS, ContiguousManager
from minivllm.memory.contiguous_store import ContiguousBatch, ContiguousStore
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model

POLICIES = list(RESERVATIONS)


@pytest.mark.parametrize(
    ("policy", "reserved", "held"), [("max", 2048, 2048), ("pow2", 164, 256), ("oracle", 150, 256)]
)
def test_the_policies_reserve_what_the_module_says(policy, reserved, held):
    manager = ContiguousManager(4096, 1, 2048, policy)
    manager.expect(0, 100, 50)
    manager.allocate(0, 100)
    (found,) = manager.snapshot().sequences
    assert (found.reserved, found.held, found.used) == (reserved, held, 100)


def test_nothing_is_reserved_beyond_the_longest_context():
    manager = ContiguousManager(8192, 1, 2048, "pow2")
    manager.expect(0, 100, 1100)  # 100 + 2,048 would need a run of 4,096
    manager.allocate(0, 100)
    (found,) = manager.snapshot().sequences
    assert (found.reserved, found.held) == (2048, 2048)


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidOption, match=r"reservation='best'.*max, pow2, oracle"):
        ContiguousManager(16, 1, 16, "best")


SEQUENCE = st.tuples(st.integers(1, 20), st.integers(1, 12))
STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "grow", "free", "compact"]), st.integers(0, 5), SEQUENCE), max_size=40
)


@given(policy=st.sampled_from(POLICIES), num_slots=st.integers(1, 150), steps=STEPS)
def test_the_books_balance_whatever_comes(policy, num_slots, steps):
    manager, running = ContiguousManager(num_slots, 2, 32, policy), {}
    for what, seq_id, (prompt_len, output_len) in steps:
        before = manager.snapshot()
        if what == "start" and seq_id not in running and manager.fits_ever(prompt_len + output_len):
            manager.expect(seq_id, prompt_len, output_len)
            if manager.can_allocate(seq_id, prompt_len):
                assert manager.snapshot() == before, "a question changes nothing"
                manager.allocate(seq_id, prompt_len)
                running[seq_id] = [prompt_len, prompt_len + output_len]
            else:
                with pytest.raises(OutOfMemory, match="free run"):
                    manager.allocate(seq_id, prompt_len)
                assert manager.snapshot() == before, "a refusal changes nothing"
                assert running, "what fits ever fits alone"
        elif what == "grow" and seq_id in running:
            while running[seq_id][0] < running[seq_id][1]:
                running[seq_id][0] += 1
                assert manager.can_allocate(seq_id, running[seq_id][0]), "what is reserved can be had"
                manager.allocate(seq_id, running[seq_id][0])
        elif what == "free":
            manager.free(seq_id)
            running.pop(seq_id, None)
        elif what == "compact":
            manager.compact()
            after = manager.snapshot()
            assert {s.seq_id: (s.held, s.used) for s in after.sequences} == {
                s.seq_id: (s.held, s.used) for s in before.sequences
            }
            assert after.largest_free_run >= before.largest_free_run
        manager.check_integrity()
        assert {s.seq_id: s.used for s in manager.snapshot().sequences} == {
            i: n for i, (n, _) in running.items()
        }
    for seq_id in range(6):
        manager.free(seq_id)
    assert manager.snapshot().free == num_slots


def test_a_sequence_that_outgrows_its_reservation_is_refused():
    manager = ContiguousManager(64, 1, 32, "oracle")
    manager.expect(0, 5, 3)
    manager.allocate(0, 8)
    with pytest.raises(OutOfMemory, match="Sequence 0 has 8 slots reserved; 9 tokens"):
        manager.allocate(0, 9)
    assert manager.snapshot().used == 8
    with pytest.raises(ValueError, match="Sequence 0 has its run already"):
        manager.expect(0, 5, 9)


def test_what_a_reservation_wastes_can_be_read_off():
    """Three of eight runs are in use. Five are free, and at most two of them can be joined."""
    manager = ContiguousManager(64, 1, 8, "max")
    for i in range(8):
        manager.allocate(i, 3)
    for i in (1, 2, 4, 5, 7):
        manager.free(i)
    snapshot = manager.snapshot()
    assert (snapshot.held, snapshot.used, snapshot.free) == (24, 9, 40)
    assert snapshot.largest_free_run == 16
    moves = manager.compact()
    assert manager.snapshot().largest_free_run == 32
    assert [(m.source, m.destination, m.length) for m in moves] == [(24, 8, 3), (48, 16, 3)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_contiguous_memory_gives_the_logits_of_the_naive_cache(model, policy):
    """Sequences come and go, one compaction in the middle, and every slot not in use is NaN."""
    decoder = load_model(f"random:{model}", dtype="float64", device="cpu", seed=2)
    bytes_per_token = decoder.config.kv_elements_per_token * 8
    manager, naive = ContiguousManager(200, bytes_per_token, 32, policy), NaiveStore()
    store = ContiguousStore(decoder.config, 200, torch.float64)
    store.kv.fill_(float("nan"))
    generator = torch.Generator().manual_seed(1)
    lengths = [30, 9, 17, 30, 5]
    tokens = [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]
    done, running, moved = [0] * 5, [0, 1, 2], 0
    for step in range(40):
        pieces = []
        for i in running:
            count = min((3, 1, 8)[(step + i) % 3], lengths[i] - done[i])
            if done[i] == 0:
                manager.expect(i, count, lengths[i] - count)
            manager.allocate(i, done[i] + count)
            pieces.append((i, tokens[i][done[i] : done[i] + count], done[i]))
            done[i] += count
        batch = Batch.pack(pieces)
        with torch.inference_mode():
            expected = decoder(batch, naive)
            got = decoder(ContiguousBatch.place(batch, manager), store)
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
        for i in [i for i in running if done[i] == lengths[i]]:
            manager.free(i)
            running.remove(i)
            running += [i for i in (3, 4) if done[i] == 0 and i not in running][:1]
        if step == 3:
            moves = manager.compact()
            moved = store.move(moves)
            assert moved == sum(m.length for m in moves) * bytes_per_token
        manager.check_integrity()
        if not running:
            break
    assert done == lengths
    assert moved > 0, "the compaction must have moved something to be a test"
    assert manager.snapshot().free == 200


def test_a_batch_without_places_is_refused():
    decoder = load_model("random:tiny-llama", device="cpu")
    with pytest.raises(TypeError, match="ContiguousBatch"):
        decoder(Batch.pack([(0, [1], 0)]), ContiguousStore(decoder.config, 8))
