"""The cost of a step is what the model computes and holds; pictures of tokens and lines show their data."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from minivllm.lab.draw_lines import draw_lines
from minivllm.lab.draw_tokens import draw_attention, draw_sampling
from minivllm.lab.intensity import matrix_elements, step_cost
from minivllm.lab.step_time import time_work
from minivllm.memory.naive_store import NaiveStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS

TINY = [name for name in PRESETS if name.startswith("tiny")]


@pytest.mark.parametrize("name", TINY)
def test_flops_are_those_that_torch_counts_while_the_model_runs(name):
    model, random = load_model(f"random:{name}", device="cpu"), Random(7)
    store, done = NaiveStore(), dict.fromkeys(range(5), 0)
    for _ in range(4):
        members = random.sample(sorted(done), random.randint(1, 5))
        work = [(random.choice([1, 1, 2, 9]), done[i]) for i in members]
        batch = Batch.pack([(i, [3] * new, old) for i, (new, old) in zip(members, work, strict=True)])
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(batch, store)
        assert step_cost(model.config, work, 4).flops == counter.get_total_flops()
        done |= {i: old + new for i, (new, old) in zip(members, work, strict=True)}


@pytest.mark.parametrize("name", TINY)
def test_bytes_are_those_of_the_matrices_and_of_the_keys_and_values_held(name):
    model = load_model(f"random:{name}", device="cpu")
    store = NaiveStore()
    lengths = (5, 1, 8)
    with torch.no_grad():
        model(Batch.pack([(i, [2] * n, 0) for i, n in enumerate(lengths)]), store)
    layers = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    matrices = layers + model.lm_head.weight.numel()
    cost = step_cost(model.config, [(1, n - 1) for n in lengths], 4)
    assert cost.num_bytes == 4 * matrices + store.num_bytes()
    assert cost.intensity == cost.flops / cost.num_bytes
    assert matrix_elements(model.config) == layers


@pytest.mark.parametrize("work", [[(7, 0)], [(1, 5), (1, 3)], [(4, 0), (2, 6)]], ids=str)
def test_the_time_of_a_step_is_taken_of_that_work(work):
    model, seen = load_model("random:tiny-llama", device="cpu"), []
    hook = model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        assert time_work(model, work, repeats=2) > 0
    finally:
        hook.remove()
    steps = seen[-3:]
    assert [[s.end - s.start for s in batch] for batch in steps] == [[new for new, _ in work]] * 3
    before = [[s.seq_len - (s.end - s.start) for s in batch] for batch in steps]
    assert before == [[old + i * new if old else 0 for new, old in work] for i in range(3)]


def ids(figure: Figure) -> list[str]:
    return [str(artist.get_gid()) for artist in figure.axes[0].get_children() if artist.get_gid()]


def test_attention_closes_what_is_later_than_the_query():
    figure = draw_attention([[0.25, 0.75, 0.0], [0.5, 0.3, 0.2]], ["a", " $b$", "\n"])
    assert [ids(figure).count(kind) for kind in ("weight", "future")] == [5, 1]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [" $b$", "\\n"]
    figure.canvas.draw()
    with pytest.raises(ValueError, match="do not fit"):
        draw_attention([[1.0]], ["a", "b"])


def test_a_token_that_is_cut_is_drawn_as_cut():
    figure = draw_sampling(
        {"all": [0.6, 0.3, 0.1], "two": [0.6, 0.3, 0.1]}, ["a", "$", "\n"], kept={"two": 2}
    )
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["all", "two"]
    drawn = [[bar.get_gid() for bar in axes.patches] for axes in figure.axes]
    assert drawn == [["kept"] * 3, ["kept", "kept", "cut"]]
    figure.canvas.draw()
    with pytest.raises(ValueError, match="probability for each"):
        draw_sampling({"one": [1.0]}, ["a", "b"])


def test_lines_have_their_points_in_order_and_marks_their_text():
    figure = draw_lines({"a": {4: 1, 2: 3}, "b": {2: 5}}, xlabel="x", ylabel="y", log="xy", marks={"end": 3})
    axes = figure.axes[0]
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines[:2]] == [[2, 4], [2]]
    assert axes.texts[0].get_text() == "end"
    figure.canvas.draw()
    wrongs: list[dict[str, dict[float, float]]] = [{}, {"a": {}}, {str(i): {1: 1} for i in range(7)}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="lines"):
            draw_lines(wrong, xlabel="", ylabel="")
