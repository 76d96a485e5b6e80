"""The bytes of each step to the paged-attention kernel: the formula against what the interpreter counts."""

from __future__ import annotations

import interpreting
import pytest
from click.testing import CliRunner

from minivllm.errors import InvalidOption
from minivllm.lab.attention_work import Work, least_traffic
from minivllm.lab.kernel_traffic import STEPS, kernel_traffic, main


@pytest.fixture
def triton():
    return pytest.importorskip("triton", reason="Triton is not installed: it is made for Linux")


def test_the_formula_is_what_the_kernels_load_and_store_in_the_interpreter(triton):
    interpreting.run_interpreted("interpreted_traffic.py")


def test_a_decode_step_by_hand(triton):
    """4,096 keys of 256 bytes in 32 heads, or in 8; a key and a value."""
    work = Work((4096,), (1,))
    naive, tiled, grouped, last = (kernel_traffic(name, work) for name in STEPS)
    assert naive.kv == tiled.kv == 4096 * 32 * 2 * 256 == 67_108_864
    assert grouped.kv == last.kv == least_traffic(work).kv == 4096 * 8 * 2 * 256
    assert naive.flops == 4096 * 32 * 128 * 4 == least_traffic(work).flops
    assert grouped.flops == 4 * naive.flops, "16 rows, of which 4 have a head"
    assert naive.out == naive.q == 32 * 256


def test_a_prefill_by_hand(triton):
    work = Work((64,), (64,), num_heads=4, num_kv_heads=2, head_dim=64)
    _, tiled, grouped, last = (kernel_traffic(name, work).kv for name in STEPS)
    assert tiled == (64 * 65 // 2) * 4 * 2 * 128
    assert grouped * 2 == tiled
    assert last == least_traffic(work).kv == 64 * 2 * 2 * 128, "64 queries in one tile"


def test_the_least_is_never_more_than_a_kernel_needs(triton):
    for work in (Work((300, 7), (1, 1)), Work((300, 7), (300, 7)), Work((5000,), (60,), 6, 2, 80, 24, 4)):
        least = least_traffic(work)
        for name in STEPS:
            found = kernel_traffic(name, work)
            assert found.num_bytes >= least.num_bytes
            assert found.flops >= least.flops


@pytest.mark.parametrize(
    "fields, named",
    [
        (((5,), (6,)), "query_lens=\\(6,\\)"),
        (((5,), (0,)), "from 1 query up"),
        (((), ()), "seq_lens=\\(\\)"),
        (((5, 6), (1,)), "needs both"),
        (((5,), (1,), 6, 4), "num_heads=6.*num_kv_heads=4"),
    ],
    ids=["more queries than tokens", "no query", "no sequence", "a length is missing", "heads"],
)
def test_work_that_does_not_fit_together_is_refused(fields, named):
    with pytest.raises(InvalidOption, match=named):
        Work(*fields)


def test_another_name_is_refused():
    with pytest.raises(InvalidOption, match=r"name='torch'.*triton-naive"):
        kernel_traffic("torch", Work((5,), (1,)))


def test_the_command_says_that_it_computes_and_follows_its_options(triton):
    found = CliRunner().invoke(main, ["--bandwidth", "1000", "--num-heads", "8", "--itemsize", "4"])
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("Computed, not measured")
    assert lines[1].startswith("1,000 GB/s")
    assert [line.split()[0] for line in lines[7:12]] == [*STEPS, "least"]
    work = Work((4096,) * 64, (1,) * 64, num_heads=8, itemsize=4)
    milliseconds = kernel_traffic("triton-naive", work).num_bytes / 1e12 * 1e3
    assert f"{milliseconds:.3g}" in lines[7]
    assert lines[7].split()[1] == f"{64 * 8:,}", "a program for each query and head"


def test_a_model_whose_heads_do_not_fit_is_refused_in_a_sentence(triton):
    found = CliRunner().invoke(main, ["--num-heads", "9"])
    assert found.exit_code == 2
    assert "num_heads=9 is not possible" in found.output


def test_without_triton_there_are_no_tiles():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from minivllm import errors\nfrom minivllm.lab.attention_work import Work\n"
        "from minivllm.lab.kernel_traffic import kernel_traffic\n"
        "try:\n    kernel_traffic('triton-naive', Work((5,), (1,)))\n"
        "except errors.InvalidOption as error:\n    print(error)"
    )
    assert "Triton cannot be imported" in interpreting.run("-c", code).stdout
