"""Chapter 8: the Triton kernels: against the reference in the interpreter, refused where they cannot run. The
interpreter is on or off for a whole process: so it has its own."""

from __future__ import annotations

import sys
from itertools import product

import interpreting
import pytest
import torch

NOT_HERE = "Triton is not installed: it is made for Linux"


@pytest.fixture
def triton():
    return pytest.importorskip("triton", reason=NOT_HERE)


def test_the_kernels_in_the_interpreter_do_what_the_reference_does(triton):
    interpreting.run_interpreted("interpreted_ch08.py")


def refusal(code: str, **environment: str) -> str:
    """What the InvalidOption says that the code raises in a process of its own."""
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    caught = "except InvalidOption as error:\n    print(error)"
    script = f"from minivllm.errors import InvalidOption\ntry:\n{indented}\n{caught}"
    done = interpreting.run("-c", script, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cpu_without_the_interpreter_is_refused_and_nothing_turns_it_on(triton):
    said = refusal(
        "import os\nfrom minivllm import kernels\ntry:\n    kernels.get('triton')\n"
        "finally:\n    assert 'TRITON_INTERPRET' not in os.environ"
    )
    assert "attention='triton' is not possible: it needs a GPU" in said
    assert "attention='torch'" in said
    assert "TRITON_INTERPRET=1" in said


def test_a_step_to_the_last_kernel_is_refused_by_its_own_name(triton):
    said = refusal("from minivllm import kernels\nkernels.get('triton-tiled')")
    assert "attention='triton-tiled' is not possible: it needs a GPU" in said


def test_an_interpreter_that_is_turned_on_after_tritons_import_is_too_late(triton):
    late = "import os, triton\nos.environ['TRITON_INTERPRET'] = '1'\nfrom minivllm import kernels\n"
    assert "it needs a GPU" in refusal(late + "kernels.get('triton')")


def test_without_triton_the_refusal_says_so():
    said = refusal(
        "import sys; sys.modules['triton'] = None\nfrom minivllm import kernels\nkernels.get('triton')"
    )
    assert "Triton cannot be imported" in said
    assert "attention='torch'" in said


def test_the_reference_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None\nfrom minivllm import kernels\nkernels.get('torch')"
    done = interpreting.run("-c", code)
    assert done.returncode == 0, done.stderr


class Launches:
    """Stands for a kernel, and keeps the grid of each launch."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **constants: None


def test_a_launch_reads_nothing_back_from_the_device(triton, monkeypatch):
    """On the meta device there is nothing to be read: whatever asked for a value would raise."""
    from minivllm.kernels import triton_attention, triton_store

    launches = Launches()
    monkeypatch.setattr(triton_attention, "capability", lambda device: 90)
    for module, name in ((triton_attention, "paged_attention_kernel"), (triton_store, "store_kv_kernel")):
        monkeypatch.setattr(module, name, launches)
    with torch.device("meta"):
        q, k, cache = torch.empty(70, 6, 64), torch.empty(70, 2, 64), torch.empty(9, 2, 16, 64)
        tables, lengths = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        starts, slots = torch.empty(6, dtype=torch.int32), torch.empty(70, dtype=torch.int64)
    triton_store.store_kv(k, k, cache, cache, slots)
    triton_attention.paged_attention(q, cache, cache, tables, lengths, starts, 1.0)
    assert len(launches.grids) == 2
    assert launches.grids[0] == (70, 1)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 17, 64])
@pytest.mark.parametrize("query_len", [1, 2, 100, 8192])
def test_a_tile_holds_whole_groups_and_is_one_that_triton_can_have(triton, group, query_len):
    from minivllm.kernels.triton_attention import attention_tile

    for head_dim, itemsize, capability in product((1, 14, 64, 80, 256), (2, 4), (80, 90, 100, 120)):
        tile = attention_tile(query_len, group, head_dim, itemsize, capability)
        assert tile["BLOCK_Q"] >= 1
        assert tile["BLOCK_Q"] * group <= tile["BLOCK_M"]
        assert tile["BLOCK_D"] >= head_dim
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"):
            assert tile[name] >= 16
            assert tile[name].bit_count() == 1


def test_this_process_never_had_the_interpreter():
    """The others would see it: a kernel of the package would be interpreted until the process ends."""
    limits = sys.modules.get("minivllm.kernels.triton_limits")
    assert limits is None or not limits.INTERPRETED


def estimate(num_programs: int, num_tiles: int, num_multiprocessors: int) -> tuple[int, int]:
    """With the chosen count of parts: the time, as it was estimated for the choice, and the waves."""
    from minivllm.kernels import triton_split

    splits = triton_split.choose_num_splits(num_programs, num_tiles, num_multiprocessors)
    waves = -(-num_programs * splits // (num_multiprocessors * triton_split.PROGRAMS_EACH))
    combine = triton_split.COMBINE if splits > 1 else 0
    return waves * (-(-num_tiles // splits) + triton_split.START) + combine, waves


def test_few_sequences_are_split_many_or_short_ones_are_not(triton):
    from minivllm.kernels.triton_split import MAX_SPLITS, choose_num_splits

    assert choose_num_splits(8, 512, 132) > 20  # one sequence, 8 heads, 32k tokens, an H200
    assert choose_num_splits(512, 64, 132) == 1  # 64 sequences of 4k tokens: two full waves as it is
    assert choose_num_splits(8, 4, 132) == 1  # 256 tokens
    assert choose_num_splits(8, 0, 132) == choose_num_splits(8, 1, 132) == 1
    assert choose_num_splits(1, 10**6, 132) <= MAX_SPLITS


def test_the_estimate_has_no_cliff(triton):
    """A tile more costs at most a tile in each wave, and what counts as good enough, at every length."""
    from minivllm.kernels.triton_split import GOOD_ENOUGH

    for num_programs in (1, 8, 64, 100, 264, 265, 512, 2048):
        unsplit_waves = -(-num_programs // 264)
        before, waves = estimate(num_programs, 1, 132)
        for num_tiles in range(2, 700):
            limit = (before + waves) * GOOD_ENOUGH
            before, waves = estimate(num_programs, num_tiles, 132)
            assert before <= min(limit, unsplit_waves * (num_tiles + 1))


def test_the_fastest_is_triton_on_a_gpu_that_can_have_it_and_not_elsewhere(monkeypatch):
    from minivllm import kernels
    from minivllm.errors import InvalidOption

    def check(name, dtype, device, head_dim, group):
        if dtype == torch.float64:
            raise InvalidOption("no such kernel")

    monkeypatch.setattr(kernels, "check_model", check)
    assert kernels.fastest(torch.float16, torch.device("cuda", 1), 64, 3) == "triton"
    assert kernels.fastest(torch.float64, torch.device("cuda"), 64, 3) == "torch"
    assert kernels.fastest(torch.float16, torch.device("cpu"), 64, 3) in ("c", "torch")


def test_a_gpu_that_is_too_old_for_the_tiles_is_refused_by_its_capability(triton, monkeypatch):
    from minivllm.errors import InvalidOption
    from minivllm.kernels import triton_limits

    device = torch.device("cuda")
    monkeypatch.setattr(triton_limits, "capability", lambda device: 80)
    triton_limits.check_device(device)
    monkeypatch.setattr(triton_limits, "capability", lambda device: 75)
    with pytest.raises(InvalidOption, match=r"compute capability is 7\.5: 8\.0 or more.*attention='torch'"):
        triton_limits.check_device(device)
