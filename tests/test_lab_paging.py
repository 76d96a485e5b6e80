"""What paging wastes and costs, a step's memory beside the pool, and the picture of block tables."""

from __future__ import annotations

import pytest
import torch
from matplotlib.patches import ConnectionPatch

from minivllm.lab.draw_paging import draw_block_tables
from minivllm.lab.paging_cost import time_attention, time_decode, unfilled_slots, used_share
from minivllm.lab.workspace import Workspace
from minivllm.memory.paged import PagedManager
from minivllm.memory.sharing import SharingManager
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model


def test_waste_is_what_a_manager_holds_and_does_not_use_over_every_step():
    lengths = [(5, 4), (1, 1), (9, 13), (3, 7)]
    for block_size in (1, 3, 4, 16):
        manager, unused, used, steps = PagedManager(40, block_size, 1), 0, 0, 0
        for i, (prompt_len, output_len) in enumerate(lengths):
            for n in range(prompt_len, prompt_len + output_len):
                manager.allocate(i, n)
                (memory,) = manager.snapshot().sequences
                unused, used, steps = unused + memory.held - memory.used, used + memory.used, steps + 1
            manager.free(i)
        assert unfilled_slots(lengths, block_size) == pytest.approx(unused / steps)
        assert used_share(lengths, block_size) == pytest.approx(used / (used + unused))


def test_every_length_within_a_block_leaves_half_a_block_but_one_slot():
    assert unfilled_slots([(32, 16)], 16) == 7.5
    assert unfilled_slots([(33, 48)], 3) == 1.0


@pytest.mark.parametrize("block_size", [None, 1, 5])
def test_time_is_measured_with_either_memory(block_size):
    assert time_attention([3, 7, 11], block_size, num_heads=4, num_kv_heads=2, head_dim=6, repeats=1) > 0
    model = load_model("random:tiny-llama", device="cpu")
    assert time_decode(model, [3, 7, 11], block_size, repeats=1) > 0


def test_a_workspace_sees_the_largest_tensor_that_is_made_and_no_view():
    with Workspace() as workspace:
        small = torch.zeros(3, 5)
        large = torch.cat([small, small]).view(5, 6).t()
    assert workspace.largest == large.nbytes == 2 * small.nbytes


def test_a_workspace_refuses_what_is_above_its_limit_as_a_gpu_would():
    model = load_model("random:tiny-llama", device="cpu")
    batch = Batch.pack([(0, list(range(40)), 0)])
    with torch.inference_mode(), Workspace() as workspace:
        model(batch, RecomputeStore())
    with torch.inference_mode(), Workspace(workspace.largest):
        model(batch, RecomputeStore())
    with (
        pytest.raises(torch.OutOfMemoryError, match="the limit is"),
        torch.inference_mode(),
        Workspace(workspace.largest - 1),
    ):
        model(batch, RecomputeStore())


def test_the_picture_of_tables_shows_each_entry_and_each_token_where_it_lies():
    manager = PagedManager(6, 4, 1)
    for seq_id, n in ((3, 4), (8, 5), (3, 6)):
        manager.allocate(seq_id, n)
    texts = {3: ["a", "b", "c", "d", "e", "f"], 8: ["p", "q", "r", "s", "$t"]}
    figure = draw_block_tables(manager.snapshot(), texts=texts, title="tables")
    written = [text.get_text() for text in figure.axes[0].texts]
    for seq_id, tokens in texts.items():
        assert f"seq {seq_id}" in written
        assert all(written.count(token) == 2 for token in tokens), "in order, and in the pool"
    numbers = sorted(int(text) for text in written if text.isdigit())
    assert numbers == sorted([*range(6), *manager.block_table(3), *manager.block_table(8)])
    drawn = draw_block_tables(manager.snapshot()).axes[0].texts
    assert [text.get_text() for text in drawn].count("5") == 3, "positions without texts"


def test_tables_without_a_block_have_no_picture():
    with pytest.raises(ValueError, match="no table to draw"):
        draw_block_tables(PagedManager(3, 4, 1).snapshot())


def test_each_sequence_has_an_arrow_to_a_block_that_it_shares():
    manager = SharingManager(5, 4, 1)
    manager.allocate(3, 7)
    manager.fork(3, 3 + 2**32)
    manager.allocate(3, 8)  # the second block is copied, and holds one token more
    figure = draw_block_tables(manager.snapshot())
    (ax,) = figure.axes
    arrows = [patch for patch in ax.patches if isinstance(patch, ConnectionPatch)]
    assert len(arrows) == 4
    assert len({arrow.xy1 for arrow in arrows}) == 4, "one from every entry of both tables"
    assert len({arrow.xy2 for arrow in arrows}) == 3
    assert {"seq 3", "seq 3.1"} <= {text.get_text() for text in ax.texts}
