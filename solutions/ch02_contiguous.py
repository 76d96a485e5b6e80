# %% [markdown]
# # 2. Contiguous preallocation and its waste: exercises
#
# Five pieces of the memory that [chapter 2](../book/ch02_contiguous.md) is about. You write three methods
# of the buddy allocator, the split of what memory is held for, and the copying of a compaction. Each check
# says what it expected and what came; where it knows the mistake, it names it. Then the real model runs on
# your code.
#
# Fill in a cell where it says `raise course.unsolved(...)`, run it, and run the check below it.
# %%
# %matplotlib inline
from collections.abc import Mapping, Sequence

from minivllm import LLM, SamplingParams, course, lab
from minivllm.errors import OutOfMemory
from minivllm.lab.compaction_run import run_and_compact
from minivllm.lab.draw_buddy import draw_buddy, trace_buddy
from minivllm.lab.ladder_workload import TEXT, default_requests
from minivllm.lab.waste import Split
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory import buddy, contiguous_store
from minivllm.memory.contiguous import Move
from minivllm.memory.manager import Snapshot
from minivllm.model.hub import resolve
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import load_tokenizer

source = resolve("smollm2-135m")
model, tokenizer = load_model(source), load_tokenizer(source)


def run(reservation="pow2"):
    """Six requests on the real model in 256 slots: their tokens, and what was recorded."""
    slot = model.config.kv_elements_per_token * model.dtype.itemsize
    llm = LLM(
        model,
        tokenizer=tokenizer,
        cache="contiguous",
        reservation=reservation,
        kv_cache_memory_bytes=256 * slot,
        max_model_len=128,
    )
    recorder = llm.engine.on_step = lab.Recorder(llm.engine.manager)
    requests = default_requests(tokenizer, 6, seed=44)
    prompts = [list(request.token_ids) for request in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=min(r.max_tokens, 10), ignore_eos=True) for r in requests
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], recorder.records


expected, _ = run()
print(lab.about())


# %% [markdown]
# ## 2.1 How long a run is
#
# The buddy allocator hands out runs whose length is a power of two. `run_length(n)` is the length that a
# request of n slots takes: the smallest power of two that is at least n.
#
#     n            0   1   2   3   4   5   8   9   1,025
#     run_length   1   1   2   4   4   8   8  16   2,048
#
# Whole numbers only: a power of two beyond 2^53 has neighbours that floating point cannot tell from it.
# %% [exercise 2.1]
class Runs(buddy.BuddyAllocator):
    """The allocator, with a method of your own."""

    ...


# %% [check 2.1]
print(course.check("2.1", Runs))
with course.use("2.1", Runs):
    tokens, records = run()
assert tokens == expected, "the tokens must stay the same"
print([(s.seq_id, s.reserved, s.held) for s in records[0].snapshot.sequences], "(id, reserved, held)")


# %% [markdown]
# ## 2.2 Split a run
#
# `allocate(n)` takes the shortest free run that is long enough and halves it until it just fits.
#
#     allocate(3) of 16 free slots         0       4       8               16
#                                          [              16              ]
#     too long: halve it                   [       8      |       8       ]
#     too long: halve the left one         [   4   |   4  |       8       ]
#     it fits; keep the left one           [ taken |   4  |       8       ]      returns 0
#
# What you have of `self`:
#
# - `self._free`: length -> the set of the starts of all free runs of that length. A length may be missing,
#   and a set may be empty.
# - `self._held`: start -> length, of every run in use. Note yours here.
# - `self.run_length(n)`, `self.num_free`, `self.largest_free_run`.
#
# Raise `OutOfMemory` where no free run is long enough, and change nothing then.
# %% [exercise 2.2]
class Splitting(buddy.BuddyAllocator):
    """The allocator, with a method of your own."""

    ...


# %% [check 2.2]
print(course.check("2.2", Splitting))
with course.use("2.2", Splitting):
    tokens, records = run()
assert tokens == expected, "the tokens must stay the same"
lab.draw_memory_map(records[0].snapshot, title="The real model's memory, cut up by your allocator")


# %% [markdown]
# ## 2.3 Join buddies
#
# Two runs are buddies when one halving made them. A run of length L begins at a multiple of L, and its
# buddy at `start ^ length`: the bit worth L is set in the start of one of the two and not in the other.
#
#     runs of 4       start   0    4    8   12
#     their buddies           4    0   12    8        4 and 8 are neighbours, and no buddies
#
#     free(4), while 0 and 8 are free:   [ 4 | taken |   8   ]
#     set it free                        [ 4 |   4   |   8   ]
#     its buddy, at 0, is free: join     [     8     |   8   ]
#     the buddy of that, at 8, is free   [         16        ]
#
# `self._held[start]` is the length of the run in use that begins there; one that is not in use raises
# `KeyError`.
# %% [exercise 2.3]
class Joining(buddy.BuddyAllocator):
    """The allocator, with a method of your own."""

    ...


# %% [check 2.3]
print(course.check("2.3", Joining))
with course.use("2.3", Joining):
    picture = draw_buddy(trace_buddy(16, [("A", 3), ("B", 4), ("C", 5), ("A", 0), ("C", 0), ("B", 0)]))
    tokens, records = run()
assert tokens == expected, "the tokens must stay the same"
picture
# %% [markdown]
# ## 2.4 What held slots are held for
#
# Of the slots that a sequence holds, some have a token, some will have one before it ends, and the rest
# never will. Which is which can be said once it is known how many tokens each sequence came to:
#
#     held 16, used 5, final 7      [ 5 used | 2 reserved | 9 waste ]
#     held 16, used 16, final 40    [ 16 used ]                          it will grow, but not in these slots
#
# `snapshot.sequences` has `.seq_id`, `.held` and `.used` of each; `Split(used, reserved, waste)` objects
# can be added.
# %% [exercise 2.4]
...


# %% [check 2.4]
print(course.check("2.4", split_held))
for policy in ("max", "pow2", "oracle"):
    _, records = run(policy)
    final = {s.seq_id: s.used for record in records for s in record.snapshot.sequences}
    parts = sum((split_held(record.snapshot, final) for record in records), start=Split())
    print(f"{policy:7} " + "  ".join(f"{p} {parts.share(p):6.1%}" for p in ("used", "reserved", "waste")))


# %% [markdown]
# ## 2.5 Move runs that overlap
#
# A compaction gives a list of moves: copy the keys and values of `length` tokens from slot `source` on to
# slot `destination` on. In which order does not matter, as if all happened at the same moment. That is the
# difficulty:
#
#     move 8 tokens from 0 to 16, and 8 from 16 to 0
#     [ A A A A A A A A |  free  | B B B B B B B B ]   before
#     [ B B B B B B B B |  free  | A A A A A A A A ]   after
#
# The pool is `self.kv[num_layers, 2, num_slots, num_kv_heads, head_dim]`: every layer has keys and values
# of every slot. Return the number of bytes copied, each counted once.
# %% [exercise 2.5]
class Moving(contiguous_store.ContiguousStore):
    """The store, with a method of your own."""

    ...


# %% [check 2.5]
print(course.check("2.5", Moving))
text = tokenizer.encode(TEXT)
sizes = [(11, 12), (16, 3)] * 4 + [(40, 4)]  # prompt, output: four runs of 32 end early, and leave gaps
crowd = [WorkloadRequest(tuple(text[7 * i : 7 * i + p]), None, o) for i, (p, o) in enumerate(sizes)]
plain = run_and_compact(model, crowd, num_slots=256, after_step=4, compact=False)
with course.use("2.5", Moving):
    compacted = run_and_compact(model, crowd, num_slots=256, after_step=4)
assert compacted.outputs == plain.outputs, "the tokens must stay the same"
print(f"{len(compacted.moves)} runs moved, {compacted.moved_bytes:,} bytes; the tokens are the same")
lab.draw_memory_maps({"before": compacted.before, "after": compacted.after}, columns=2, slots_per_row=64)
