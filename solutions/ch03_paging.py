# %% [markdown]
# # 3. Paging: exercises
#
# Six functions, in the order in which a token meets them: its slot, the pool that has the blocks, the
# manager that gives them to a sequence, the kernel that writes into them and the one that reads them.
# Together they are a paged KV memory. After each check the real model runs on your code: it must give the
# tokens that it gave before.
#
# The chapter explains all that is needed ([text](../book/ch03_paging.md)). Hints: `minivllm course hint
# 3.1`.
# %%
# %matplotlib inline
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams, course, lab
from minivllm.errors import OutOfBlocks
from minivllm.memory import blocks, paged
from minivllm.memory.paged import num_blocks_for
from minivllm.model.attention import causal_attention

print(lab.about())
plain = {"sharing": False, "scheduler": "continuous", "attention": "reference", "enforce_eager": True}
llm = LLM("smollm2-135m", block_size=4, num_blocks=16, max_model_len=64, **plain)
prompts = ["The capital of France is", "Water boils at", "One, two, three, four, five, six, seven,"]
params = SamplingParams(temperature=0, max_tokens=5)


def run():
    """The tokens of each prompt, and the steps with their memory."""
    recorder = llm.engine.on_step = lab.Recorder(llm.engine.manager)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], recorder.records


expected, _ = run()
for prompt, token_ids in zip(prompts, expected, strict=True):
    print(prompt, "->", llm.get_tokenizer().decode(token_ids))
# %% [markdown]
# ## 3.1 From a token to its slot
#
# A sequence's **block table** lists its blocks in the order of its tokens. Token number i stands in block
# `block_table[i // block_size]` at offset `i % block_size`, and a **slot** numbers the places of the whole
# pool: `slot = block_id * block_size + offset`.
#
# ```
# block_size 4, table [7, 2, 5]      tokens  0  1  2  3 | 4  5  6  7 | 8  9
#                                    block   7  7  7  7 | 2  2  2  2 | 5  5
#                                    slot   28 29 30 31 | 8  9 10 11 |20 21
#
# slot_mapping([7, 2, 5], 4, start=6, end=10)  ->  [10, 11, 20, 21]
# ```
#
# Write the function. `end` is not included; the table is read, not changed.
# %% [exercise 3.1]
...
# %% [check 3.1]
print(course.check("3.1", slot_mapping))
with course.use("3.1", slot_mapping):
    token_ids, _ = run()
assert token_ids == expected


# %% [markdown]
# ## 3.2 Hand out blocks
#
# The pool knows numbers only. Its free blocks stand in a queue, `self._free`: an `OrderedDict` whose keys
# are the blocks and whose values are None. Take n blocks from its head, where those stand that have been
# free for longest, so that a freed block keeps its contents as long as possible. **All or nothing**: where
# fewer than n are free, raise `OutOfBlocks` and take none.
#
# ```
# self._free  {3, 0, 4}      allocate(2) -> [3, 0]      left {4}
# self._free  {3, 0, 4}      allocate(4) -> OutOfBlocks left {3, 0, 4}
# ```
# %% [exercise 3.2]
class MyBlockPool(blocks.BlockPool):
    """The pool, with an `allocate` of your own."""

    ...


# %% [check 3.2]
print(course.check("3.2", MyBlockPool))
with course.use("3.2", MyBlockPool):
    token_ids, records = run()
assert token_ids == expected
lab.draw_memory_map(records[-1].snapshot, title="blocks from your pool")


# %% [markdown]
# ## 3.3 Take blocks back
#
# `free(block_ids)` puts blocks at the tail of the queue, in the order given. (The manager gives a
# sequence's blocks last one first, so that the head of a sequence, which others may want, stays longest.)
#
# A block that is given back twice would later be handed to two sequences, and each would overwrite the
# other. So look first: where any of the blocks is free already, is outside 0 to `self.num_blocks` - 1, or
# is named twice, raise `ValueError` and change nothing.
#
# ```
# 6 blocks, self._free {3, 0}     free([5, 1])   -> {3, 0, 5, 1}
#                                 free([5, 3])   -> ValueError, still {3, 0}
#                                 free([5, 5])   -> ValueError, still {3, 0}
# ```
# %% [exercise 3.3]
class MyBlockPool2(blocks.BlockPool):
    """The pool, with a `free` of your own."""

    ...


# %% [check 3.3]
print(course.check("3.3", MyBlockPool2))
with course.use("3.3", MyBlockPool2):
    token_ids, records = run()
assert token_ids == expected
print("all blocks are back:", llm.engine.manager.snapshot().free == 16 * 4)


# %% [markdown]
# ## 3.4 Let a sequence grow
#
# The manager holds each sequence's table and its number of tokens:
#
# ```
# self.block_size            slots in a block
# self.pool                  the BlockPool: allocate(n), num_free_blocks, num_blocks
# self._tables[seq_id]       the block table, a list; a sequence that is new has none yet
# self._num_tokens[seq_id]   tokens that it has room for
# self.num_missing_blocks(seq_id, n)     blocks that it lacks for n tokens in all, 0 where it has enough
# ```
#
# `allocate(seq_id, n)` lets a sequence have n tokens **in all**. A sequence never shrinks: a smaller n
# changes nothing. It takes as many blocks as n tokens need and no more; the boundary is at k x block_size,
# where the last block is just full. Where too few are free, raise `OutOfBlocks` and leave everything as it
# was: no table, no count, no block.
#
# ```
# block_size 4        allocate(0, 3)  1 block         allocate(0, 5)  one more
#                     allocate(0, 4)  none more       allocate(0, 2)  nothing: it keeps its 5 tokens
# ```
# %% [exercise 3.4]
class MyPagedManager(paged.PagedManager):
    """The manager, with an `allocate` of your own."""

    ...


# %% [check 3.4]
print(course.check("3.4", MyPagedManager))
with course.use("3.4", MyPagedManager):
    token_ids, records = run()
assert token_ids == expected
lab.draw_film_strip([records[i].snapshot for i in (0, 2, 4)], titles=["step 0", "step 2", "step 4"])
# %% [markdown]
# ## 3.5 Write keys and values into their slots
#
# ```
# k, v              [num_tokens, num_kv_heads, head_dim]               one row for each new token
# k_cache, v_cache  [num_blocks, num_kv_heads, block_size, head_dim]   views of one layer of the pool
# slot_mapping      [num_tokens]                                       a slot each; -1 is written nowhere
# ```
#
# Two traps. The caches are views with gaps between their blocks, since a block holds all layers: `reshape`
# makes a copy, and what is written into a copy is lost. And in PyTorch the index -1 means the last place,
# here it means no place.
#
# ```
# block_size 4, slot 21     block 5, offset 1:   k_cache[5, :, 1] = k[token]
# ```
#
# With tensors of indices, `k_cache[block, :, offset]` names as many places as `block` has elements.
# %% [exercise 3.5]
...
# %% [check 3.5]
print(course.check("3.5", store_kv))
with course.use("3.5", store_kv):
    token_ids, _ = run()
assert token_ids == expected
# %% [markdown]
# ## 3.6 Attend through the block table
#
# The packed queries of several sequences, and for each sequence a table, a length, and where its queries
# stand:
#
# ```
# q             [num_tokens, num_heads, head_dim]
# block_tables  [num_seqs, max_blocks], rows padded with 0: do not follow that, block 0 is another's
# seq_lens      [num_seqs]       tokens in memory, the new ones included
# query_start   [num_seqs + 1]   sequence i has rows query_start[i] to query_start[i + 1] - 1
# ```
#
# Gather a sequence's keys and values in the order of its table, exactly `seq_lens[i]` of them, and the rest
# is chapter 0's `causal_attention(q, k, v, scale)`: q [query_len, heads, head_dim] and k, v [seq_len,
# kv_heads, head_dim], the queries being the last query_len positions. What stands in the other slots may be
# NaN. A sequence of length 0 gives zeros. Where `out` is given, the result goes there; `max_query_len` and
# `max_seq_len` are for other kernels.
#
# ```
# table [7, 2, 5], seq_len 10, block_size 4
# k_cache[[7, 2, 5]]         [3, kv_heads, 4, head_dim]    three blocks
# ... block and slot joined  [12, kv_heads, head_dim]      12 slots in the order of the tokens
# ... cut                    [10, kv_heads, head_dim]
# ```
# %% [exercise 3.6]
...
# %% [check 3.6]
print(course.check("3.6", paged_attention))
with course.use("3.6", paged_attention):
    token_ids, _ = run()
assert token_ids == expected
