"""Chapter 8: the Triton kernels compiled for GPUs that are not here; `test_ch08_compiled.py` runs it.

A few configurations, in which the pairs of values meet that may matter; with the mark `full` every three.
"""

from __future__ import annotations

import re
from itertools import combinations, cycle, product
from typing import Any

import pytest
from covering import Config, covering

from minivllm.kernels import triton_attention
from minivllm.lab.ahead_of_time import Compiled
from minivllm.lab.kernel_calls import KERNELS, MOVES, STEPS, Configuration, compiled
from minivllm.lab.kernel_resources import MULTIPROCESSORS

AXES: dict[str, list[Any]] = {
    "dtype": ["float16", "bfloat16", "float32"],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [1, 8, 16, 32, 128],
    "step": list(STEPS),
    "capability": list(MULTIPROCESSORS),
}
GROUPS = [1, 2, 3, 4, 5, 6, 7, 8]
MORE = {"head_dim": [16, 20, 192], "block_size": [24]}
MORE_GROUPS = [16, 17, 64]
OTHERS = [name for name in KERNELS if name != "triton"]
SHARED_OF_SMALL_GPUS = 99 * 1024  # 8.6, 8.9 and 12.0 have the tiles of 8.0, and this much shared memory
STRIDES = ("k_block", "v_block", "k_cache_block", "v_cache_block", "source_block", "target_block")
ON_TENSOR_CORES = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


def everything_goes(config: Config) -> bool:
    return True


def few() -> list[Config]:
    """Of the last kernel every pair of values but head_dim with block size, and each group in decode and not
    in decode; of each other kernel each value, in each capability and each dtype."""
    configs = covering(AXES, everything_goes, apart=[{"head_dim", "block_size"}])
    for decoding in (True, False):
        chosen = [config for config in configs if config["step"].startswith("decode") == decoding]
        for config, group in zip(chosen, cycle(GROUPS), strict=False):
            config.update(group=group, kernel="triton")
    others = {"kernel": OTHERS, **AXES, "group": GROUPS}
    together = [{"kernel", "capability"}, {"kernel", "dtype"}]
    apart = [set(pair) for pair in combinations(others, 2) if set(pair) not in together]
    return configs + covering(others, everything_goes, apart=apart)


def full() -> list[Config]:
    """Every three values together, of the last kernel; every two, of the others."""
    axes = {**AXES, "group": GROUPS + MORE_GROUPS}
    axes |= {name: [*AXES[name], *MORE[name]] for name in MORE}
    last = covering({"kernel": ["triton"], **axes}, everything_goes, strength=3)
    return last + covering({"kernel": OTHERS, **axes}, everything_goes)


def named(config: Config) -> str:
    about = [config[name] for name in ("kernel", "dtype", "head_dim", "block_size", "group", "step")]
    return "-".join(map(str, [f"sm{config['capability']}", *about])).replace(" ", "_")


FEW, FULL = few(), full()


def check(config: Config) -> None:
    kernels = compiled(Configuration(**config))
    assert [kernel.kernel for kernel in kernels].count("combine_kernel") == len(kernels) - 1
    for kernel in kernels:
        check_resources(kernel, config)
        check_addresses(kernel)
    if config["kernel"] not in MOVES:
        check_products(kernels[0], config)
    if config["kernel"] == "triton" and config["dtype"] != "float32":
        check_loads(kernels[0], config)


def check_resources(kernel: Compiled, config: Config) -> None:
    has = MULTIPROCESSORS[config["capability"]]
    assert kernel.spilled == 0
    assert 0 < kernel.registers <= 255
    assert kernel.shared <= has.shared_of_program
    if config["capability"] == 80 and config["group"] <= 32:
        assert kernel.shared <= SHARED_OF_SMALL_GPUS
    assert kernel.tensor_columns <= has.tensor_columns


def check_addresses(kernel: Compiled) -> None:
    """From one block to another it may be more than 2**31 numbers: such a stride has 64 bits before it is
    multiplied."""
    for stride in STRIDES:
        lines = [line for line in kernel.ttir.splitlines() if re.search(rf"%{stride}\b", line)]
        for line in lines[1:]:  # the first declares it
            assert f"arith.extsi %{stride} : i32 to i64" in line


def check_products(kernel: Compiled, config: Config) -> None:
    """In half precision a product of tiles is made by the tensor cores. They have no float32: what they take
    for it, TF32, is rounded."""
    has_products = "tt.dot " in kernel.ttir
    assert has_products == (config["kernel"] in ("triton", "triton-grouped"))
    found = set(ON_TENSOR_CORES.findall(kernel.ptx))
    assert bool(found) == (has_products and config["dtype"] != "float32")
    assert "tf32" not in kernel.ptx
    if config["kernel"] == "triton" and config["step"] == "prefill" and config["dtype"] != "float32":
        assert found == {{80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[config["capability"]]}


def check_loads(kernel: Compiled, config: Config) -> None:
    """Two tiles of keys and of values at least are under way, in the loop that masks nothing and in the one
    that does; and 16 bytes come at a time, but for the entries of the block table, 4. For that a row must be
    known to be a multiple of 16 numbers: that is what Triton asks of a stride. In a tile of 16 numbers a row
    there is not that much for each thread."""
    if config["head_dim"] < 64:
        return
    buffers = re.findall(
        r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:bf16|f16)\b", kernel.ttgir
    )
    assert len(buffers) == 4
    assert all(int(tiles) >= 2 for tiles in buffers)
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x(\d+)", kernel.ptx)
    assert set(copied) == {"4", "10"}


@pytest.mark.parametrize("config", FEW, ids=map(named, FEW))
def test_a_kernel_compiles_to_what_it_should_be(config):
    check(config)


@pytest.mark.full
@pytest.mark.parametrize("config", FULL, ids=map(named, FULL))
def test_every_kind_of_kernel_compiles_to_what_it_should_be(config):
    check(config)


def test_the_few_show_every_value_and_the_pairs_that_matter():
    last = [config for config in FEW if config["kernel"] == "triton"]
    for first, second in combinations(AXES, 2):
        if {first, second} != {"head_dim", "block_size"}:
            met = {(config[first], config[second]) for config in last}
            assert met == set(product(AXES[first], AXES[second])), (first, second)
    met = {(config["group"], config["step"].startswith("decode")) for config in last}
    assert met == set(product(GROUPS, (True, False)))
    for name in ("dtype", "capability"):
        assert {(config["kernel"], config[name]) for config in FEW} == set(product(KERNELS, AXES[name])), name
    assert len(FEW) <= 40


def test_a_tile_that_is_too_large_is_seen_to_spill(monkeypatch):
    tile = {"BLOCK_Q": 128, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 128, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(triton_attention, "attention_tile", lambda *_: tile)
    kernel, *_ = compiled(Configuration("triton", "float16", 128, 16, 1, "prefill", 80))
    assert kernel.registers == 255
    assert kernel.spilled > 100
