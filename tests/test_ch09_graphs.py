"""Chapter 9: decode steps padded to a recorded size. Here a recording is a run that is done again; that the
Triton path can be recorded at all is shown in `interpreted_ch09.py`, on a tape of operations."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import interpreting
import pytest
import torch

from minivllm.memory.paged import PagedManager
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.model.batch import Batch
from minivllm.model.graphs import DecodeGraphs, graph_sizes
from minivllm.model.loader import load_model


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 9, 13, 32, 33, 63, 64, 65, 100, 256, 257, 1024])
def test_the_sizes_rise_to_max_num_seqs_and_little_is_padding(max_num_seqs):
    sizes = graph_sizes(max_num_seqs)
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    assert sizes == sorted(set(sizes))
    for before, size in pairwise(sizes):
        if before >= 32:
            assert (size - before - 1) / size < 0.2
    assert len(sizes) <= 27


def test_the_sizes_are_those_that_the_text_gives():
    assert graph_sizes(13) == [1, 2, 4, 8, 13]
    assert len(graph_sizes(256)) == 19


class World:
    """Sequences of known tokens in two pools: one read by the plain model, one by the recordings."""

    def __init__(self, max_num_seqs=6, num_blocks=40, block_size=3):
        self.model = load_model("random:tiny-qwen3", dtype="float64", device="cpu", seed=1)
        self.manager = PagedManager(num_blocks, block_size, 1)
        size = self.model.config, num_blocks, block_size, torch.float64
        self.plain, self.store = PagedStore(*size), PagedStore(*size)
        for store in (self.plain, self.store):
            store.kv.fill_(float("nan"))
        self.recorded: list[int] = []
        self.replayed: list[int] = []
        self.graphs = DecodeGraphs(self.model, self.store, max_num_seqs, num_blocks, self.record)

    def record(self, run):
        place = len(self.recorded)
        self.recorded.append(place)

        def replay():
            size = self.graphs.sizes[len(self.graphs.sizes) - 1 - place]
            self.replayed.append(size)
            assert not self.graphs._input.seq_lens[self.num_seqs : size].any(), "padding reads nothing"
            run()

        run()
        return replay

    def step(self, new, sampled=None):
        """Both on the same step: (seq_id, new tokens, tokens in memory); returns their logits."""
        for seq_id, tokens, computed in new:
            self.manager.allocate(seq_id, computed + len(tokens))
        batch, self.num_seqs = PagedBatch.place(Batch.pack(new), self.manager), len(new)
        if sampled is not None:
            batch = PagedBatch(**{**vars(batch), "logits_indices": batch.logits_indices[sampled]})
        with torch.inference_mode():
            return self.model(batch, self.plain), self.graphs(batch, self.store)

    def check(self, new, sampled=None):
        expected, got = self.step(new, sampled)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
        assert torch.equal(self.plain.kv.isnan(), self.store.kv.isnan())
        torch.testing.assert_close(self.store.kv, self.plain.kv, atol=1e-12, rtol=1e-12, equal_nan=True)


def test_recording_writes_nothing_and_is_done_once_for_each_size():
    world = World()
    assert world.store.kv.isnan().all()
    assert len(world.recorded) == len(world.graphs.sizes) == 4


def test_decode_steps_of_any_number_of_sequences_give_the_models_logits():
    """Numbers rise and fall, rows change places, sequences leave: nothing of an earlier step is left over."""
    world, random = World(), Random(2)
    lengths: dict[int, int] = {}
    for seq_id, n in enumerate([4, 1, 9, 3, 2, 6]):
        world.check([(seq_id, [random.randrange(90) for _ in range(n + 1)], 0)])
        lengths[seq_id] = n + 1
    assert world.replayed == []  # prompts of several tokens run as they are
    for num_seqs in (6, 1, 3, 5, 2, 4, 6, 1):
        ids = random.sample(sorted(lengths), num_seqs)
        world.check([(seq_id, [random.randrange(90)], lengths[seq_id]) for seq_id in ids])
        for seq_id in ids:
            lengths[seq_id] += 1
    assert world.replayed == [6, 1, 4, 6, 2, 4, 6, 1]


def test_only_the_rows_that_are_sampled_come_back():
    world = World()
    for seq_id in range(3):
        world.check([(seq_id, [5, 6 + seq_id], 0)])
    world.check([(2, [9], 2), (0, [8], 2), (1, [7], 2)], sampled=[0, 2])
    world.check([(2, [9], 3), (0, [8], 3), (1, [7], 3)], sampled=[])
    assert world.replayed == [4, 4]


def test_the_logits_of_a_step_outlive_the_next():
    world = World()
    _, first = world.step([(0, [3], 0)])
    kept = first.clone()
    world.step([(0, [4], 1)])
    assert torch.equal(first, kept)


def test_what_cannot_be_replayed_runs_as_it_is():
    world = World(max_num_seqs=2)
    world.check([(0, [1, 2], 0), (1, [3], 0)])  # a chunk beside a decode
    world.check([(i, [4], 0) for i in (2, 3, 4)])  # more sequences than were recorded
    world.manager.allocate(0, 3)
    batch = PagedBatch.place(Batch.pack([(0, [7], 2)]), world.manager)
    with torch.inference_mode():
        world.graphs(batch, world.plain)  # another pool than the recorded one
    assert world.replayed == []


def test_the_triton_path_can_be_recorded_and_replayed():
    pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")
    interpreting.run_interpreted("interpreted_ch09.py")
