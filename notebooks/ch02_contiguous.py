# %% [markdown]
# # 2. Contiguous preallocation and its waste: lab
#
# The text is [chapter 2](../book/ch02_contiguous.md). Here the reservations are drawn, run on the real
# model, compared with the published figures, and compaction is measured.
# %%
# %matplotlib inline
from minivllm import lab
from minivllm.engine_args import bytes_per_token
from minivllm.lab import paper
from minivllm.lab.compacting import CompactingManager, PackedManager
from minivllm.lab.compaction_run import run_and_compact
from minivllm.lab.draw_buddy import draw_buddy, trace_buddy
from minivllm.lab.draw_waste import draw_waste, waste_parts
from minivllm.lab.ladder import run_ladder
from minivllm.lab.ladder_workload import TEXT, default_requests
from minivllm.lab.waste import split_held
from minivllm.lab.workload import WorkloadRequest
from minivllm.memory.contiguous import RESERVATIONS, ContiguousManager
from minivllm.model.hub import resolve
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import load_tokenizer

scale = lab.scale()
source = resolve(scale.model)
# float32 everywhere: tokens are compared to the last one
model, tokenizer = load_model(source, dtype="float32", device=scale.device), load_tokenizer(source)
print(lab.about())
# %% [markdown]
# ## What a token costs
#
# The model of the PagedAttention paper is OPT-13B in fp16 on a GPU of 40 GB. A token's keys and values are
# 2 x 40 layers x 5,120 numbers x 2 bytes. The table divides the KV memory of the paper's table 1 by that.
# %% [compare table-1]
rows = []
for shape in paper.OPT_SHAPES:
    published = paper.PUBLISHED_TABLE_1[shape.name]
    per_token = shape.bytes_per_token()
    rows.append(
        {
            "model": shape.name,
            "bytes a token": per_token,
            "KV memory, GiB": published["kv_gib"],
            "slots": paper.kv_slots(published["kv_gib"] * 2**30, per_token),
            "published": f"{published['thousand_slots']}K",
        }
    )
print(lab.table(rows))
kib = paper.OPT_13B.bytes_per_token() / 1024
print(f"\nOne token of OPT-13B: {kib:g} KiB. 2,048 tokens: {2048 * kib / 2**20:.2f} GiB.")
low, high = (int(gib * 2**30) // paper.OPT_66B.bytes_per_token() for gib in (20.5, 21.5))
print(f"OPT-66B: 21 is a rounded number; 20.5 to 21.5 GiB are {low:,} to {high:,} slots.")
# %% [markdown]
# ## What a run is held for
#
# Four requests in a memory of 128 slots. Each was given one run of neighbouring slots when it began; the
# policy is `pow2`. A fifth has ended; a sixth waits, and needs a run of 32.
# %%
manager, final = ContiguousManager(128, bytes_per_token=1, max_model_len=64, reservation="pow2"), {}
# prompt, output that will come, output so far
for i, (prompt, output, so_far) in enumerate([(10, 9, 4), (6, 8, 2), (4, 3, 1), (12, 17, 6), (2, 3, 1)]):
    manager.expect(i, prompt, output)
    manager.allocate(i, prompt + so_far)
    final[i] = prompt + output
manager.free(1)  # it has ended, and leaves a gap
parts = waste_parts(manager.snapshot(), final, wanted=32)
# %% [figure run]
#| alt: 128 slots in two rows. Each request's run is cut into slots with a token, slots that a later token
#| fills, slots that the policy asked for and no token fills, and slots that rounding to a power of two added.
#| The free run of 16 is too short for the request that waits.
draw_waste(parts)
# %% [compare parts]
counts = {kind: sum(p.length for p in parts if p.kind == kind) for kind in {p.kind: 0 for p in parts}}
print(lab.table([{"slots": n, "what for": kind, "share": n / 128} for kind, n in counts.items()],
                {"what for": None, "slots": None, "share": ".1%"}))  # fmt: skip
split = split_held(manager.snapshot(), final)
print(f"\nheld {split.held} = {split.used} used + {split.reserved} reserved + {split.waste} never used")
# %% [markdown]
# ## Split and join
#
# The buddy allocator step by step, on 16 slots. The allocator is the engine's; the rows between two calls
# show one halving, or one joining, at a time.
# %% [figure buddy]
#| alt: Rows of 16 slots. Allocating 3 splits 16 into 8 and 8, then 8 into 4 and 4. Allocating 5 takes the
#| other 8. A second 5 is refused although 4 slots are free. Freeing joins two runs of 4, and at the end two
#| of 8.
draw_buddy(
    trace_buddy(16, [("A", 3), ("B", 5), ("C", 5), ("A", 0), ("C", 5), ("B", 0), ("C", 0)]),
)
# %% [markdown]
# ## Three policies
#
# What one request is given, in the paper's setting: the longest context is 2,048. Then requests are put
# into 15,728 slots, in order, until one is refused.
# %% [compare policies]
rows = []
for prompt, output in ((100, 50), (161, 338), (700, 40), (20, 1)):
    row = {"prompt + output": f"{prompt} + {output}"}
    for policy in RESERVATIONS:
        one = ContiguousManager(paper.NUM_SLOTS, 1, paper.MAX_MODEL_LEN, policy)
        one.expect(0, prompt, output)
        one.allocate(0, prompt)
        (sequence,) = one.snapshot().sequences
        row[policy] = f"{sequence.reserved:,} -> {sequence.held:,}"
    rows.append(row)
print("reserved -> held once the allocator has rounded")
print(lab.table(rows))
# %% [compare batch]
lengths = paper.lengths("sharegpt", 500)
rows = []
for policy in RESERVATIONS:
    many, fitted = ContiguousManager(paper.NUM_SLOTS, 1, paper.MAX_MODEL_LEN, policy), 0
    for prompt, output in lengths:
        many.expect(fitted, prompt, output - 1)
        if not many.can_allocate(fitted, prompt):
            break
        many.allocate(fitted, prompt)
        fitted += 1
    state = many.snapshot()
    rows.append(
        {"policy": policy, "requests that fit": fitted, "held": state.held, "free": state.free,
         "longest free run": state.largest_free_run, "prompt tokens": state.used}
    )  # fmt: skip
print(lab.table(rows))
# %% [markdown]
# ## The same requests on the real model
#
# One workload in one memory under the naive cache of chapter 1 and the three policies. Batches are closed
# until their last member ends. On a CPU: 13 passages of English in 512 slots, longest context 128.
# %%
small = scale.device == "cpu"
requests = default_requests(tokenizer, 13, seed=107) if small else scale.requests()
num_slots, max_model_len = (512, 128) if small else (16_384, scale.max_model_len)
budget = num_slots * bytes_per_token(model)
runs = {
    result.rung.name: result
    for result in run_ladder(
        model,
        requests,
        rungs=("naive", "contiguous"),
        kv_cache_memory_bytes=budget,
        max_model_len=max_model_len,
    )
}
# %% [compare same-requests]
rows = []
for name, run in runs.items():
    slots = num_slots * len(run.records)  # all slots of all steps
    rows.append(
        {"scheme": name, "same tokens": run.same_tokens, "at once, most": max(run.in_flight),
         "steps": len(run.records), "held": run.split.held / slots, "used": run.split.used / slots,
         "used of held": run.split.share("used")}
    )  # fmt: skip
shares = dict.fromkeys(("held", "used", "used of held"), ".1%")
print(lab.table(rows, {"scheme": None, "same tokens": None, "at once, most": None, "steps": None, **shares}))
print(
    f"\n{len(requests)} requests, {sum(len(r.outputs[0]) > 0 for r in runs.values())} runs, {num_slots} slots"
)
# %% [code time]
rows = [
    {"scheme": name, "seconds": run.latency["seconds"], "output tok/s": run.latency["tok_s"],
     "ms a step": 1000 * run.latency["seconds"] / len(run.records)}
    for name, run in runs.items()
]  # fmt: skip
print(lab.table(rows, {"scheme": None, "seconds": ".1f", "output tok/s": ".1f", "ms a step": ".0f"}))
# %% [figure maps]
#| alt: Four memory maps of 512 slots, each in its fullest step. Naive holds just its tokens. With max four
#| requests hold everything and use little; with pow2 eight share it, with oracle eleven.
lab.draw_memory_maps(
    {
        f"{name}, {len(run.fullest.step.scheduled)} at once": run.fullest.snapshot
        for name, run in runs.items()
    },
    columns=2,
)
# %% [figure film]
#| alt: Four memory maps over time under pow2. Requests end one by one and leave gaps; nobody is let in until
#| the last member of the batch has ended, then a second batch begins.
records = runs["contiguous-pow2"].records
frames = [records[round(i * (len(records) - 1) / 5)] for i in range(4)]
lab.draw_film_strip(
    [record.snapshot for record in frames],
    titles=[f"pow2, step {record.step.index}" for record in frames],
    columns=2,
)
# %% [widget]
lab.slider(records)
# %% [figure timeline]
#| alt: One row per request over time, with max. Four requests run at once, the others wait in a queue for
#| three more batches.
lab.draw_timeline([record.step for record in runs["contiguous-max"].records])
# %% [figure utilisation]
#| alt: Memory held and used over time with max. Held is high and falls in stairs within each batch; used
#| stays a small part of it.
lab.draw_utilisation(runs["contiguous-max"].records)
# %% [figure throughput]
#| alt: Output tokens a second over time for the four schemes. The more requests run at once, the higher the
#| line and the sooner it ends.
lab.draw_throughput({name: [record.step for record in run.records] for name, run in runs.items()})
# %% [markdown]
# ## Why not compaction
#
# Eight requests fill 256 slots; four of them end early and leave four gaps. A ninth needs more than any
# gap. One compaction moves the runs together, in the middle of the run.
# %%
words = tokenizer.encode(TEXT)
sizes = [(11, 20), (16, 3)] * 4 + [(40, 8)]  # prompt, output
crowd = [WorkloadRequest(tuple(words[7 * i : 7 * i + p]), None, o) for i, (p, o) in enumerate(sizes)]
plain = run_and_compact(model, crowd, num_slots=256, after_step=4, compact=False)
compacted = run_and_compact(model, crowd, num_slots=256, after_step=4)
# %% [figure compaction]
#| alt: Two memory maps of 256 slots. Before, four runs of 32 stand apart with gaps of 32 between them.
#| After, they stand side by side, and 128 slots are free in one run.
lab.draw_memory_maps({"before": compacted.before, "after": compacted.after}, columns=2, slots_per_row=64)
# %% [compare moved]
rows = [
    {"": name, "free slots": s.free, "longest free run": s.largest_free_run}
    for name, s in (("before", compacted.before), ("after", compacted.after))
]
print(lab.table(rows))
tokens = sum(move.length for move in compacted.moves)
print(f"\n{len(compacted.moves)} runs moved, {tokens} tokens, {compacted.moved_bytes:,} bytes")
print("same tokens as without:", "yes" if compacted.outputs == plain.outputs else "NO")
print(f"steps: {plain.num_steps} without, {compacted.num_steps} with")
# %% [code move-time]
move, step = 1e3 * compacted.move_seconds, 1e3 * compacted.step_seconds
print(f"the move {move:.2f} ms, a step {step:.0f} ms: {move / step:.1%}")
# %% [markdown]
# ### What compaction gains
#
# OPT-13B's 15,728 slots under a queue that never empties. `compacting` moves runs together whenever that
# lets a request in. `packed` is a bound: runs as long as what was reserved, never a gap, moved for nothing.
# %%
results = {scheme: paper.simulate(scheme, lengths) for scheme in paper.SCHEMES}
managers = {}
for policy in ("pow2", "oracle"):
    for kind in (CompactingManager, PackedManager):
        name = f"{policy}, {'compacting' if kind is CompactingManager else 'packed'}"
        managers[name] = kind(paper.NUM_SLOTS, 819_200, paper.MAX_MODEL_LEN, policy)
        results[name] = paper.simulate(lambda name=name: managers[name], lengths)
# %% [compare compaction-gain]
order = [
    "max",
    "pow2",
    "pow2, compacting",
    "pow2, packed",
    "oracle",
    "oracle, compacting",
    "oracle, packed",
    "paged",
]
rows = []
for name in order:
    part = results[name].split
    rows.append(
        {"scheme": name, "requests at once": results[name].mean_batch, "tokens": part.tokens,
         "reserved": part.reserved, "asked, unused": part.over_reserved, "rounding": part.rounding,
         "free": part.free}
    )  # fmt: skip
shares = dict.fromkeys(("tokens", "reserved", "asked, unused", "rounding", "free"), ".1%")
print(lab.table(rows, {"scheme": None, "requests at once": ".2f", **shares}))
# %% [markdown]
# ### What compaction costs, for OPT-13B
#
# Computed, not measured: bytes over the memory bandwidth of an A100 of 40 GB, 1,555 GB/s. A copy reads and
# writes; a decode step reads all weights (26 GB) and the keys and values of all tokens at least once. Both
# are lower bounds.
# %% [compare compaction-cost]
BANDWIDTH, WEIGHTS = 1.555e12, 26e9  # bytes/s, bytes
run, mover = results["oracle, compacting"], managers["oracle, compacting"]
kv_bytes = run.split.tokens * paper.NUM_SLOTS * 819_200
step = (WEIGHTS + kv_bytes) / BANDWIDTH
num_steps = (
    sum(output for _, output in lengths) / run.mean_batch
)  # of the whole run, filling and draining too
each = 2 * mover.moved / mover.num_compactions * 819_200 / BANDWIDTH
print(lab.table([
    {"what": "tokens moved by a compaction, mean", "value": f"{mover.moved / mover.num_compactions:,.0f}"},
    {"what": "bytes moved", "value": f"{mover.moved / mover.num_compactions * 819_200 / 1e9:.2f} GB"},
    {"what": "time of a compaction", "value": f"{1e3 * each:.1f} ms"},
    {"what": "time of a decode step", "value": f"{1e3 * step:.1f} ms"},
    {"what": "a compaction, in steps", "value": f"{each / step:.2f}"},
    {"what": "steps between two compactions", "value": f"{num_steps / mover.num_compactions:.0f}"},
    {"what": "share of all time", "value": f"{each * mover.num_compactions / (step * num_steps):.2%}"},
    {"what": "all tokens moved at every step", "value": f"{2 * kv_bytes / BANDWIDTH / step:.0%} of a step"},
]))  # fmt: skip
before, paged = results["oracle"].mean_batch, results["paged"].mean_batch
gains = f"{run.mean_batch / before - 1:+.1%} by compaction, {paged / before - 1:+.0%} by paging"
print(f"\nrequests at once: {gains}")
# %% [markdown]
# ## Figure 2 of the paper
#
# Shares of the KV memory over time. The load is ours and says so: a queue that never empties and synthetic
# lengths with ShareGPT's means (161.31 in, 337.99 out), where the paper has Poisson arrivals of the real
# data. The paper counts the allocator's rounding as external, since it is known before the request runs.
# %% [compare figure-2]
named = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "vLLM"}
parts = ("tokens", "reserved", "internal", "external")
rows, apart = [], []
for scheme, name in named.items():
    published, ours = paper.PUBLISHED_FIGURE_2[scheme], results[scheme].split.figure_2()
    for who, found in ((name, published), ("ours", ours)):
        rows.append({"": who, **{part: found.get(part) for part in parts}})
    apart += [abs(published[part] - ours[part]) for part in published]
print(lab.table(rows, {"": None, **dict.fromkeys(parts, ".1%")}))
right = [results[scheme].split.tokens for scheme in named]
order = "yes" if right == sorted(right) else "NO"
print(f"\nfurthest apart: {100 * max(apart):.1f} points. Same order: {order}")
# %% [figure shares]
#| alt: Stacked bars of the KV memory under Orca Max, Pow2, Oracle and vLLM, each published and ours. Tokens
#| grow from a fifth to nearly all; internal waste dominates Max, external Pow2 and Oracle.
bars = {}
for scheme, name in named.items():
    for who, found in (
        (f"{name}, published", paper.PUBLISHED_FIGURE_2[scheme]),
        (f"{scheme}, ours", results[scheme].split.figure_2()),
    ):
        bars[who] = {part: 100 * share for part, share in found.items()}
lab.draw_bars(bars, unit="share of the KV memory (%)", title="Figure 2", stacked=True, form=".1f")
# %% [markdown]
# ## If the length were known
#
# A request of p prompt and o output tokens, reserved to the slot, holds p + o slots for o steps and uses p
# + o/2 of them on average. Over many requests each counts by what it holds, (p + o) x o.
# %% [compare known-length]
exact = sum(o * (p + o / 2) for p, o in lengths) / sum(o * (p + o) for p, o in lengths)
packed = results["oracle, packed"].split
rows = [
    {"": "one request of the mean lengths, 161 + 338", "used of reserved": (161 + 338 / 2) / (161 + 338)},
    {"": "all requests, by the formula", "used of reserved": exact},
    {"": "all requests, simulated", "used of reserved": packed.tokens / (packed.tokens + packed.reserved)},
]
print(lab.table(rows, {"": None, "used of reserved": ".1%"}))
# %% [markdown]
# ## What utilisation costs in requests
#
# A request needs the same slots for its tokens under every scheme. So the number that runs at once should
# grow as the share of slots with tokens does.
# %% [compare cost]
rows = []
for scheme, name in named.items():
    fig2, fig13 = paper.PUBLISHED_FIGURE_2, paper.PUBLISHED_FIGURE_13["sharegpt"]
    rows.append(
        {"": name, "tokens, published": fig2[scheme]["tokens"],
         "share, times Max": fig2[scheme]["tokens"] / fig2["max"]["tokens"],
         "requests, published": fig13[scheme], "requests, times Max": fig13[scheme] / fig13["max"],
         "ours": results[scheme].mean_batch}
    )  # fmt: skip
form = dict.fromkeys(("share, times Max", "requests, published", "requests, times Max", "ours"), ".2f")
print(lab.table(rows, {"": None, "tokens, published": ".1%", **form}))
left = paper.NUM_SLOTS - 7 * paper.MAX_MODEL_LEN
print(f"\nMax: {paper.NUM_SLOTS:,} // 2,048 = {paper.NUM_SLOTS // 2048}, and {left:,} slots left "
      f"({left / paper.NUM_SLOTS:.2%})")  # fmt: skip
# %% [markdown]
# ## On a GPU
#
# The same cells run with the shape of a 7B model where a GPU is found. What was measured on one is kept
# with its device and date.
# %% [code gpu]
measured = lab.gpu_results("ch02_contiguous")
print("not measured yet" if measured is None else lab.table(sorted(measured.items()), ["what", "value"]))
