# %% [markdown]
# # 3. Paging: lab
#
# The lab of [chapter 3](../book/ch03_paging.md): blocks and block tables on a real model. Every number that
# the chapter names is printed here. Tables without times are the same on every machine; times are of the
# machine that the next cell names.
# %%
# %matplotlib inline
import torch

from minivllm import LLM, SamplingParams, lab
from minivllm.decoding.generate import generate
from minivllm.engine_args import EngineArgs, bytes_per_token
from minivllm.errors import OutOfMemory, RequestTooLong
from minivllm.lab import paging_cost, paper
from minivllm.lab.draw_paging import draw_block_tables
from minivllm.lab.ladder import Rung, run_rung
from minivllm.lab.ladder_workload import TEXT
from minivllm.lab.same_tokens import compare_tokens, verdict_of_many
from minivllm.lab.workload import WorkloadRequest
from minivllm.lab.workspace import Workspace
from minivllm.memory.buddy import BuddyAllocator
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.paged import PagedManager, num_blocks_for, slot_mapping
from minivllm.memory.paged_store import PagedBatch, PagedStore
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import load_tokenizer
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.request import Request

print(lab.about())
# %%
scale = lab.scale()
on_gpu = scale.device == "cuda"
model = load_model(scale.model, dtype=scale.dtype, device=scale.device)
tokenizer = load_tokenizer(scale.model)
# %% [markdown]
# ## The loop in a dozen lines
#
# Paged memory without an engine: allocate, pack, place, forward, free. Two prompts of different lengths run
# in one batch; blocks have 4 slots, so that there is something to see. `computed` counts the tokens whose
# keys and values are in memory.
# %%
prompts = ["The capital of France is", "Water boils at"]
tokens = {i: tokenizer.encode(prompt) for i, prompt in enumerate(prompts)}
computed = dict.fromkeys(tokens, 0)
manager = PagedManager(num_blocks=8, block_size=4, bytes_per_token=bytes_per_token(model))
store = PagedStore(model.config, num_blocks=8, block_size=4, dtype=model.dtype, device=model.device)
# %% [code the-loop]
with torch.inference_mode():
    for _ in range(6):
        for i, ids in tokens.items():
            manager.allocate(i, len(ids))  # allocate: most of the blocks are there already
        new = [(i, ids[computed[i] :], computed[i]) for i, ids in tokens.items()]
        batch = PagedBatch.place(Batch.pack(new, model.device), manager)  # pack, place
        logits = model(batch, store)  # forward
        for (i, ids), token in zip(tokens.items(), logits.argmax(dim=-1).tolist(), strict=True):
            computed[i] = len(ids)
            ids.append(token)
# %% [compare loop]
at_the_end = manager.snapshot()
for i in tokens:
    print(f"sequence {i}: {computed[i]} tokens in memory, block table {manager.block_table(i)}")
    manager.free(i)  # free
print(f"after free: {manager.pool.num_free_blocks} of 8 blocks are free")
greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for i, prompt in enumerate(prompts):
    ids = tokenizer.encode(prompt)
    alone = list(generate(model, RecomputeStore(), ids, greedy))
    print(f"{tokenizer.decode(tokens[i])!r}: as chapter 0's loop gives it: {tokens[i] == ids + alone}")
# %% [markdown]
# The same, drawn: each sequence's tokens in order, its block table, and where the blocks lie in the pool.
# Sequence 0 grew into a third block after sequence 1 had come, so its blocks are not neighbours.
# %% [figure table]
#| alt: Two sequences of ten and eight tokens in blocks of four. Arrows lead from each entry of their block
#| tables to a block of the pool; the blocks of one sequence are not neighbours, and the rest of a last block
#| is hatched.
SPACES = str.maketrans({" ": "\N{OPEN BOX}", "\n": "\\n"})
pieces = {i: [tokenizer.decode([t]).translate(SPACES) for t in ids] for i, ids in tokens.items()}
draw_block_tables(at_the_end, texts=pieces)
# %% [markdown]
# A slot is a block and an offset. Token 9 of a sequence with the table [7, 2, 5] and blocks of 4 stands in
# `table[9 // 4]` at offset `9 % 4`:
# %% [compare slots]
print("slots of tokens 0 to 9:", slot_mapping([7, 2, 5], block_size=4, start=0, end=10))
print("slot of token 9:", 5 * 4 + 9 % 4)
# %% [markdown]
# ## The same requests, four memories
#
# One budget, one longest context, one scheduler (a request joins as soon as it gets memory; chapter 6 is
# about that). Only the memory differs: contiguous with chapter 2's three reservations, and paged in blocks
# of 16. The prompts are passages of a text; each request generates exactly as many tokens as it says.
# %% [compare requests]
LENGTHS = [(21, 9), (5, 7), (33, 10), (9, 5), (17, 12), (3, 8)]
LENGTHS += [(40, 6), (12, 10), (26, 4), (7, 11), (30, 8), (14, 7)]
if on_gpu:
    requests, budget, max_model_len = scale.requests(), scale.kv_cache_memory_bytes, scale.max_model_len
else:
    text = tokenizer.encode(TEXT)
    requests = [
        WorkloadRequest(tuple(text[12 * i : 12 * i + prompt_len]), None, output_len)
        for i, (prompt_len, output_len) in enumerate(LENGTHS)
    ]
    budget, max_model_len = 256 * bytes_per_token(model), 64
num_slots = budget // bytes_per_token(model)
need = sum(len(r.token_ids) + r.max_tokens - 1 for r in requests)
print(f"{len(requests)} requests need {need:,} slots at their ends; the memory has {num_slots:,}")
# %%
as_written = {"attention": "reference", "enforce_eager": True}  # no kernels or weights of later chapters
SCHEMES = {
    "contiguous-max": {"cache": "contiguous", "reservation": "max"},
    "contiguous-pow2": {"cache": "contiguous", "reservation": "pow2"},
    "contiguous-oracle": {"cache": "contiguous", "reservation": "oracle"},
    "paged": {"cache": "paged", "block_size": 16, "sharing": False, **as_written},
}
runs = {}
for name, options in SCHEMES.items():
    options = {**options, "scheduler": "continuous"}
    args = EngineArgs(**options, kv_cache_memory_bytes=budget, max_model_len=max_model_len)
    runs[name] = run_rung(model, Rung(name, 3, options), args, requests)
# %% [markdown]
# First the promise: the same tokens. (In half precision, on a GPU, tokens are compared and ties are
# counted.) Then what changed: how many requests ran at once, and what the memory that was held was held
# for. "Later" is reserved for tokens still to come, "never" was held and never used.
# %% [compare fits]
reference = runs["contiguous-max"].outputs
rows = []
for name, run in runs.items():
    pairs = zip(requests, reference, run.outputs, strict=True)
    verdict = verdict_of_many(compare_tokens(model, r.token_ids, a, b) for r, a, b in pairs)
    rows.append(
        {
            "scheme": name,
            "same tokens": verdict,
            "most at once": max(run.in_flight),
            "mean": sum(run.in_flight) / len(run.in_flight),
            "steps": len(run.records),
            "used": run.split.share("used"),
            "later": run.split.share("reserved"),
            "never": run.split.share("waste"),
            "preempted": run.num_preemptions,
        }
    )
print(
    lab.table(rows, {**dict.fromkeys(rows[0]), "mean": ".2f", "used": ".1%", "later": ".1%", "never": ".1%"})
)
# %% [code speed]
times = [
    {
        "scheme": n,
        "seconds": r.latency["seconds"],
        "output tok/s": r.latency["tok_s"],
        "mean TTFT ms": r.latency["ttft_ms"]["mean"],
    }
    for n, r in runs.items()
]
print(lab.about())
print(lab.table(times, {"scheme": None, "seconds": ".1f", "output tok/s": ".1f", "mean TTFT ms": ",.0f"}))
# %% [markdown]
# The four memories, each in the step with the most requests in flight:
# %% [figure maps]
#| alt: Four memory maps of 256 slots. With contiguous-max four requests hold 64 slots each, mostly unused;
#| pow2 and oracle hold six and seven runs; the paged memory holds eight requests in blocks of 16 slots that
#| lie anywhere, each with only the end of its last block unused.
lab.draw_memory_maps({name: run.fullest.snapshot for name, run in runs.items()}, columns=2)
# %% [markdown]
# Two of them over the same steps, side by side. In paged memory a request takes a block when it needs one;
# when it ends, its blocks go back, and any other request can have them, wherever they lie.
# %% [figure film]
#| alt: Contiguous-max on the left and paged memory on the right, in three steps of the same number. On the
#| left four runs stay reserved to their ends; on the right blocks given back by one are taken by another.
chosen = [(name, runs[name].records[step]) for step in (0, 6, 12) for name in ("contiguous-max", "paged")]
titles = [f"{name}, step {record.step.index}" for name, record in chosen]
lab.draw_film_strip([record.snapshot for _, record in chosen], titles=titles, columns=2)
# %% [widget]
records = runs["paged"].records
lab.slider(records)
# %% [figure timeline]
#| alt: One row for each request, over the steps of the paged run. Eight requests start in the first step,
#| and the others wait until blocks are free.
lab.draw_timeline([record.step for record in records], by="step")
# %% [figure utilisation]
#| alt: Bytes held and used of the paged run under the budget, and below it requests running and waiting.
lab.draw_utilisation(records)
# %% [figure throughput]
#| alt: Output tokens per second over time for the four memories.
lab.draw_throughput({name: [record.step for record in run.records] for name, run in runs.items()})
# %% [markdown]
# ## What waste is left
#
# A sequence of n tokens leaves `-n % B` slots of its last block unfilled: 0 to B - 1. If n modulo B is
# spread evenly, the mean is (B - 1) / 2. The expectation is exact where lengths are known, so it is counted
# here over every step of every sequence, for the run above and for 1,000 lengths of each of two workloads.
# These are synthetic: log-normal, with the mean lengths that Kwon et al. (SOSP '23, figure 11) published.
# %% [compare waste]
BLOCK_SIZES = (1, 3, 8, 16, 32, 128)
workloads = {
    "the run above": [(len(r.token_ids), r.max_tokens) for r in requests],
    "Alpaca": paper.lengths("alpaca", 1000),
    "ShareGPT": paper.lengths("sharegpt", 1000),
    "8,192 in, 512 out": [(8192 + i, 512) for i in range(128)],
}
rows = [
    {"block size": size, "(B-1)/2": (size - 1) / 2}
    | {name: paging_cost.unfilled_slots(lengths, size) for name, lengths in workloads.items()}
    for size in BLOCK_SIZES
]
print("Unfilled slots of a sequence, the mean over its life:")
print(lab.table(rows, {"block size": None, "(B-1)/2": ".1f", **dict.fromkeys(workloads, ".2f")}))
measured = sum(s.held - s.used for r in records for s in r.snapshot.sequences)
held_by = sum(len(r.snapshot.sequences) for r in records)
print(f"\nMeasured in the run above, blocks of 16: {measured / held_by:.2f} a sequence and step")
# %% [markdown]
# ## Block size
#
# Utilisation is tokens over slots. It depends on which length is meant: a request that has just come is
# short, and requests with long outputs are there for longer. So there are three figures for Alpaca: at the
# mean length in the middle of a life (19.31 + 58.45 / 2), at the mean length at the end (19.31 + 58.45),
# and counted over all steps of the 1,000 synthetic lengths, which is what a memory sees.
# %% [compare block-sizes]
prompt_len, output_len = paper.PUBLISHED_FIGURE_11["alpaca"]
middle, end = prompt_len + output_len / 2, prompt_len + output_len
rows = [
    {
        "block size": size,
        "Alpaca, mid-life": middle / (middle + (size - 1) / 2),
        "at the end": end / (end + (size - 1) / 2),
        "all steps": paging_cost.used_share(workloads["Alpaca"], size),
        "ShareGPT": paging_cost.used_share(workloads["ShareGPT"], size),
        "8,192 + 512": paging_cost.used_share(workloads["8,192 in, 512 out"], size),
        "table at 2,048": num_blocks_for(2048, size),
    }
    for size in BLOCK_SIZES
]
form = {name: (".1%" if i in range(1, 6) else None) for i, name in enumerate(rows[0])}
print(lab.table(rows, form))
# %% [figure utilisation-by-size]
#| alt: Utilisation by block size for three workloads. With short Alpaca lengths it falls below one half at
#| blocks of 128; at long context it stays above 99 percent.
lab.draw_bars(
    {
        label: {f"B={r['block size']}": r[name] for r in rows}
        for label, name in (("Alpaca", "all steps"), ("ShareGPT", "ShareGPT"), ("8,192 + 512", "8,192 + 512"))
    },
    unit="share of held slots with a token",
    title="Utilisation by block size, all steps counted",
)
# %% [markdown]
# ## What the table costs
#
# In space, almost nothing: an entry is 4 bytes for a block of keys and values. "Per token" is a table with
# an entry for each token, which no one keeps; contiguous memory needs one start address.
# %% [compare table-size]
per_token = bytes_per_token(model)
rows = [
    {
        "tokens": n,
        "contiguous": 1,
        "B=32": num_blocks_for(n, 32),
        "B=16": num_blocks_for(n, 16),
        "per token": n,
        "bytes, B=16": 4 * num_blocks_for(n, 16),
        "of its KV": 4 * num_blocks_for(n, 16) / (n * per_token),
    }
    for n in (10, 78, 499, 2048, 32_768)
]
print(f"Entries of a block table; a token's keys and values are {per_token:,} bytes")
print(lab.table(rows, {**dict.fromkeys(rows[0]), "of its KV": ".6%"}))
# %% [markdown]
# In time, something. One layer's attention for 32 sequences, one new token each, with the same lengths: by
# slices of contiguous memory, and by gathering through block tables. The second copies all keys and values
# before it reads them; a kernel of chapter 8's kind does not, and only looks up addresses.
# %% [code indirection]
batch_of = {"32 x 64": [64] * 32, "32 x 512": [512] * 32, "8 x 2,048": [2048] * 8}
shape = {
    "num_heads": model.config.num_attention_heads,
    "num_kv_heads": model.config.num_key_value_heads,
    "head_dim": model.config.head_dim,
    "dtype": model.dtype,
    "device": model.device,
}
rows = []
for size in (None, *BLOCK_SIZES):
    seconds = {name: paging_cost.time_attention(lengths, size, **shape) for name, lengths in batch_of.items()}
    rows.append({"memory": f"B={size}" if size else "contiguous"} | {n: 1e3 * s for n, s in seconds.items()})
print(lab.about())
print("Milliseconds of one layer's attention:")
print(lab.table(rows, {"memory": None, **dict.fromkeys(batch_of, ".2f")}))
# %% [markdown]
# Attention is a part of a step, so the whole model feels less of it. A step of eight sequences:
# %% [code step]
rows = []
for n in (64, 512):
    slices, gathered = (paging_cost.time_decode(model, [n] * 8, size) for size in (None, 16))
    row = {
        "tokens each": n,
        "contiguous ms": 1e3 * slices,
        "paged ms": 1e3 * gathered,
        "more": gathered / slices - 1,
    }
    rows.append(row)
print(lab.about())
print(lab.table(rows, {"tokens each": None, "contiguous ms": ".1f", "paged ms": ".1f", "more": "+.0%"}))
found = lab.gpu_results("ch03_paging")
print("On a GPU:", "not measured yet" if found is None else f"{found['device']}, {found['date']}: {found}")
# %% [markdown]
# ## The pool is allocated once
#
# One tensor, made at the start. What runs in it moves numbers between lists. The naive cache of chapter 1
# makes new tensors at every step; the pool has the same address and size throughout.
# %% [compare pool]
ids = tokenizer.encode("A pool is")
naive, pool = NaiveStore(), PagedStore(model.config, 4, 16, model.dtype, model.device)
manager = PagedManager(4, 16, per_token)
address, sizes = pool.kv.data_ptr(), []
with torch.inference_mode():
    for step in range(4):
        new = ids if step == 0 else ids[-1:]
        manager.allocate(0, len(ids))
        batch = Batch.pack([(0, new, len(ids) - len(new))], model.device)
        model(batch, naive)
        token = int(model(PagedBatch.place(batch, manager), pool).argmax())
        moved = pool.kv.data_ptr() != address
        sizes.append(
            {
                "step": step,
                "naive bytes": naive.num_bytes(),
                "pool bytes": pool.kv.nbytes,
                "pool moved": moved,
            }
        )
        ids.append(token)
print(lab.table(sizes))
# %% [markdown]
# A block is one contiguous page with all its layers, so copying or swapping it is one copy. The view of one
# layer is strided: it has no flat form, and `reshape` would write into a copy.
# %% [compare layout]
print("kv[blocks, layers, 2, kv_heads, block_size, head_dim] =", list(pool.kv.shape))
print("block 1 is one piece:", pool.kv[1].is_contiguous(), f"of {pool.kv[1].nbytes:,} bytes")
layer = pool.kv[:, 0, 0]
print("one head's slots in a block are one piece:", layer[1, 0].is_contiguous())
print("a layer of all blocks is one piece:", layer.is_contiguous())
print("reshape makes a copy:", layer.reshape(-1).data_ptr() != layer.data_ptr())
# %% [markdown]
# `torch.empty` writes nothing, and no code ever clears a block. So what stands in a slot before its first
# token must not matter. Here every number of the pool is NaN at the start, and once more whenever a block
# is freed; one NaN that is read would spoil the logits.
# %% [compare poison]
few, expected = requests[:3], reference[:3]
num_blocks = 3 * sum(num_blocks_for(len(r.token_ids) + r.max_tokens, 16) for r in few) // 4
plain = {"sharing": False, "scheduler": "continuous", **as_written}  # paging, and nothing that comes later
llm = LLM(
    model, tokenizer=tokenizer, block_size=16, num_blocks=num_blocks, max_model_len=max_model_len, **plain
)
kv, pool = llm.engine.store.kv, llm.engine.manager.pool
kv.fill_(float("nan"))
poisoned = []


def poison_free_blocks(step):
    """NaN into every block that nobody holds, between two steps."""
    free = [block for block in range(num_blocks) if pool.is_free(block)]
    kv[free] = float("nan")
    poisoned.append(len(free))


llm.engine.on_step = poison_free_blocks
params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in few]
outputs = llm.generate([list(r.token_ids) for r in few], params, use_tqdm=False)
print("tokens as before:", [o.outputs[0].token_ids for o in outputs] == expected)
print(f"blocks filled with NaN: {num_blocks} at the start, {sum(poisoned)} in {len(poisoned)} steps")
# %% [markdown]
# ## Why a paged engine still runs out of memory
#
# Paging wastes little. It makes no memory. Six causes, each provoked; each says whether it is an error, a
# wait or a preemption.
#
# **1. More tokens than slots.** A request that would not fit even alone is refused at the door: an error,
# before anything is computed.
# %% [compare cause-1-door]
small = LLM(model, tokenizer=tokenizer, block_size=4, num_blocks=4, watermark=0.0, max_model_len=64, **plain)
try:
    small.generate("The capital of France is", SamplingParams(max_tokens=20))
except RequestTooLong as error:
    print(f"RequestTooLong: {error}")
# %% [markdown]
# Requests that fit alone grow, and together they no longer fit: no error, a preemption. The one that came
# last gives up its blocks and begins again later. Time is lost, and no token changes: they are those of the
# loop above.
# %% [compare cause-1-growth]
recorder = small.engine.on_step = lab.Recorder(small.engine.manager)
outputs = small.generate(prompts, greedy, use_tqdm=False)
for record in recorder.records:
    if record.step.preempted:
        print(f"step {record.step.index}: request {record.step.preempted[0]} is preempted")
print("blocks used, of 4:", [sum(len(s.block_ids) for s in r.snapshot.sequences) for r in recorder.records])
print(
    "tokens as in the loop above:",
    all(o.prompt_token_ids + o.outputs[0].token_ids == tokens[i] for i, o in enumerate(outputs)),
)
# %% [markdown]
# **2. A pool that is too small from the start.** The pool gets what the weights leave. When that is less
# than a block, or a longest request, the engine must refuse to start: an error.
# %% [compare cause-2]
try:
    EngineArgs(kv_cache_memory_bytes=500_000 if not on_gpu else 5_000_000).resolve(model)
except ValueError as error:
    print(f"{type(error).__name__}: {error}")
gpu, weights, token = 16e9, 6.74e9 * 2, 2 * 32 * 32 * 128 * 2  # a 16 GB card, Llama-2-7B in 2 bytes a weight
left = 0.9 * gpu - weights
print(f"Llama-2-7B on 16 GB at 90 %: {left / 1e9:.2f} GB are left, {int(left // token):,} slots for all")
# %% [markdown]
# **3. The unfilled ends of many short sequences.** No error: the next request waits, though most slots are
# empty.
# %% [compare cause-3]
rows = []
for size in (128, 32, 16, 4):
    manager, n = PagedManager(1024 // size, size, per_token), 0
    while manager.can_allocate(n, 20):
        manager.allocate(n, 20)
        n += 1
    rows.append(
        {"block size": size, "sequences of 20 tokens": n, "slots used, of 1,024": manager.snapshot().used}
    )
print(lab.table(rows))
# %% [markdown]
# **4. Memory outside the pool.** A step needs room for activations, and a long prefill needs the most: in
# this engine the attention scores of n new tokens take heads x n x n numbers. Where a device has no room
# for them, the step fails with an error, though blocks are free. A CPU would go on, so the device's limit
# is played here: an operation that makes a tensor of more than 4 MiB is refused. (Kernels such as
# FlashAttention never write the scores out; then logits and the MLP's rows are the largest.)
# %% [compare cause-4]
heads, itemsize = model.config.num_attention_heads, model.dtype.itemsize
rows = []
for n in (64, 128, 256):
    with torch.inference_mode(), Workspace() as workspace:
        model(Batch.pack([(0, [1] * n, 0)], model.device), RecomputeStore())
    rows.append(
        {"prefill": n, "scores, computed": heads * n * n * itemsize, "largest tensor": workspace.largest}
    )
print(lab.table(rows))
llm = LLM(model, tokenizer=tokenizer, num_blocks=64, max_model_len=1024, **plain)
try:
    with Workspace(limit=4 * 2**20):
        llm.generate({"prompt_token_ids": [1] * 512}, SamplingParams(max_tokens=1), use_tqdm=False)
except OutOfMemory as error:
    print(f"OutOfMemory: {error}")
print(f"{llm.engine.manager.pool.num_free_blocks} of 64 blocks are free; the engine goes on:")
print(
    repr(
        llm.generate("Water boils at", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
)
# %% [markdown]
# **5. A watermark.** Blocks are free and a waiting request would fit, but some are kept back for those that
# run: without that, the next step would have to preempt whom this one admitted. No error: a wait.
# %% [compare cause-5]
manager = PagedManager(num_blocks=10, block_size=16, bytes_per_token=per_token)
scheduler = ContinuousScheduler(manager, max_num_seqs=8, watermark=2 * 16)
for i, n in enumerate((7 * 16, 2 * 16)):
    scheduler.add(Request(i, range(n), SamplingParams(max_tokens=9)))
scheduler.schedule()
free, needed = manager.pool.num_free_blocks, num_blocks_for(2 * 16, 16)
print(f"{free} blocks are free; request 1 needs {needed}, and 2 are kept back")
for state, queue in (("running", scheduler.running), ("waiting", scheduler.waiting)):
    print(f"{state}: {[request.request_id for request in queue]}")
# %% [markdown]
# **6. Fragmentation outside.** The pool is one allocation, and it needs one run of addresses. So do the
# workspaces of cause 4. The allocator that hands these out can have enough bytes and no run that is long
# enough. Chapter 2's allocator plays it, on a device of 16 GiB in units of 1 GiB: an error, at start-up or
# in a step.
# %% [compare cause-6]
device = BuddyAllocator(16)
parts = {name: device.allocate(size) for name, size in (("weights", 4), ("another model", 4), ("buffers", 4))}
device.free(parts["another model"])
print(f"{device.num_free} GiB are free, the longest run is {device.largest_free_run}")
try:
    device.allocate(6)
except OutOfMemory as error:
    print(f"OutOfMemory: {error}")
# %% [markdown]
# ## Figure 13 of the paper
#
# Kwon et al. count the requests in a batch for OPT-13B on an A100 of 40 GB, whose KV memory has 15,728
# slots. The scheduler and the managers here are the engine's own; only the model is left out, since a
# memory does not care which tokens come. The lengths are synthetic, with the published means.
#
# Two loads. "Full queue": all requests are there from the start, so some always wait and the memory is as
# full as a scheme can have it. "Paper's rate": Poisson arrivals, 2 requests a second (ShareGPT) and 30
# (Alpaca), as in the paper. A batch then depends on how long a step takes, which the paper does not say; it
# is derived from the paper's own two batches for vLLM. So at this rate the agreement of `paged` is put in,
# and that of the others is not. "Waited" is the share of steps in which a request waited for paged memory.
# %% [compare figure-13]
results, rows, waited = {}, [], {}
for workload, count in (("sharegpt", 600), ("alpaca", 2500)):
    lengths, rate = paper.lengths(workload, count), paper.PUBLISHED_FIGURE_13_RATE[workload]
    results[workload] = {}
    for scheme, published in paper.PUBLISHED_FIGURE_13[workload].items():
        full, paced = paper.simulate(scheme, lengths), paper.simulate(scheme, lengths, rate=rate)
        results[workload][scheme] = full.mean_batch
        waited[workload] = paced.waited
        row = {"workload": workload, "scheme": scheme, "published": published}
        row |= {"full queue": full.mean_batch, "ratio": full.mean_batch / published}
        rows.append(row | {"paper's rate": paced.mean_batch, "its ratio": paced.mean_batch / published})
print(lab.table(rows, {"workload": None, "scheme": None, **dict.fromkeys(list(rows[0])[2:], ".2f")}))
for workload, share in waited.items():
    print(f"{workload}: {share:.0%} of the requests wait for paged memory at the paper's rate")
runs_of_2048, left = divmod(paper.NUM_SLOTS, 2048)
share = f"{left / paper.NUM_SLOTS:.2%}"
print(f"max: {paper.NUM_SLOTS:,} slots are {runs_of_2048} runs of 2,048, and {left:,} left over: {share}")
# %% [figure batches]
#| alt: Mean batched requests, published beside ours, for four ways to hold memory and two workloads. The
#| order is the same in both: max, pow2, oracle, paged.
lab.draw_bars(
    {
        f"{workload}, {scheme}": {
            "published": paper.PUBLISHED_FIGURE_13[workload][scheme],
            "ours, full queue": ours,
        }
        for workload, schemes in results.items()
        for scheme, ours in schemes.items()
    },
    unit="requests in a batch, mean",
    title="Kwon et al., SOSP '23, figure 13, beside ours",
)
# %% [markdown]
# ## Claims
#
# Those of the chapter's table that a cell can decide. The wasted share is one minus the utilisation above.
# %% [compare claims]
claims = [
    ("wasted, B=16, Alpaca, mid-life", 1 - middle / (middle + 7.5)),
    ("wasted, B=16, Alpaca, all steps", 1 - paging_cost.used_share(workloads["Alpaca"], 16)),
    ("wasted, B=16, ShareGPT, all steps", 1 - paging_cost.used_share(workloads["ShareGPT"], 16)),
    ("wasted, B=16, 8,192 in and 512 out", 1 - paging_cost.used_share(workloads["8,192 in, 512 out"], 16)),
    ("utilisation, B=32, Alpaca, mid-life", middle / (middle + 15.5)),
    ("utilisation, B=32, Alpaca, all steps", paging_cost.used_share(workloads["Alpaca"], 32)),
]
print(
    lab.table(
        [{"claim": name, "computed": value} for name, value in claims], {"claim": None, "computed": ".1%"}
    )
)
