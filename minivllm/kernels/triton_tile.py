"""Chapter 8: how large the last attention kernel's tiles are, and how they are compiled.

A tile has BLOCK_M rows, which are queries with their heads, and BLOCK_N columns, which are keys, each of
BLOCK_D numbers. Large tiles read each key for more queries; but a tile lives in registers and shared memory,
and what does not fit there is spilled to memory, which costs more than it brings.

    decode,   a group of 4 heads of 128 numbers   16 rows (4 in use) x 64 keys
    prefill,  the same heads                     128 rows (32 queries) x 64 keys
"""

from __future__ import annotations

import triton


def attention_tile(
    query_len: int, group: int, head_dim: int, itemsize: int, capability: int
) -> dict[str, int]:
    """The tile of one program, and how it is compiled, for sequences of about query_len queries each.

    BLOCK_M rows hold BLOCK_Q queries with their group of heads: at least 16 rows, which is what a matrix
    instruction takes, and at most 128 where that holds the group. From capability 9.0 on (90 here), in tiles
    of 64 rows and more, such an instruction reads keys and values in shared memory. Before, and in 12.0, it
    has them in registers, and there is less shared memory: so a tile of many rows has fewer keys. In float32
    no such instruction is exact, and tiles are smaller still.

    num_stages are shared out among loads that wait for one another: an entry of the block table, then what it
    points to. So 5 stages are two tiles of entries under way, and two of keys and values. maxnreg, the most
    registers of a thread, keeps the compiler from sparing some and spilling to memory. Not tuned yet.
    """
    half = itemsize == 2
    from_shared = 90 <= capability < 120
    dims = max(16, triton.next_power_of_2(head_dim))
    large = dims <= 128 and (from_shared or head_dim == dims)  # the mask of other head_dims takes registers
    most = (128 if large else 64) if half else 16
    rows = max(16, triton.next_power_of_2(group), min(most, triton.next_power_of_2(group * query_len)))
    keys = min(64, 8192 // dims) if half else 16
    if half:
        num_warps = 4 if rows <= 64 and rows * dims <= (8192 if from_shared else 4096) else 8
    else:
        num_warps = max(4, rows // 4, dims // 32)
    return {
        "BLOCK_Q": rows // group,
        "BLOCK_M": rows,
        "BLOCK_N": keys if rows < 64 or from_shared else min(keys, 4096 // dims),
        "BLOCK_D": dims,
        "num_warps": num_warps,
        "num_stages": 5 if half else 3,
        "maxnreg": min(255, 65_536 // (32 * num_warps)),  # 65,536 is what there is for all threads
    }
