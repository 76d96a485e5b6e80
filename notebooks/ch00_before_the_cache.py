# %% [markdown]
# # 0. Before the cache: lab
#
# The cells of this notebook compute every number of [the chapter](../book/ch00_before_the_cache.md). They
# run the real engine and the real model. On a machine with a GPU, the cells that measure speed take the
# shape of a 7B model instead.
# %%
# %matplotlib inline
import math
import time
from collections import Counter
from dataclasses import replace

import ipywidgets
import torch
from torch.utils.flop_counter import FlopCounterMode

from minivllm import LLM, SamplingParams, lab
from minivllm.decoding.generate import generate
from minivllm.decoding.sampler import cut_tail, sampling_distribution
from minivllm.decoding.stopping import StopStrings
from minivllm.lab.draw_lines import draw_lines
from minivllm.lab.draw_tokens import draw_attention, draw_sampling
from minivllm.lab.intensity import matrix_elements, step_cost
from minivllm.lab.step_time import time_step, time_work
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS
from minivllm.model.rope import apply_rotary, rotary_table

print(lab.about())
# %%
scale = lab.scale()
llm = LLM("smollm2-135m", cache="recompute", dtype="float32", device="cpu")
model, tokenizer = llm.engine.model, llm.get_tokenizer()
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["The capital of France is", "Once upon a time, there was a", "The opposite of hot is"]


def forward(token_ids):
    """Logits for the token after these, float32 [vocab_size]."""
    with torch.inference_mode():
        return model(Batch.pack([(0, token_ids, 0)]), RecomputeStore())[0]


started = time.perf_counter()
forward(tokenizer.encode(PROMPTS[0]))
first_call_seconds = time.perf_counter() - started
# %% [markdown]
# ## From text to logits
#
# A tokenizer cuts the text into pieces that it knows and gives each its number.
# %% [compare tokens]
ids = tokenizer.encode(PROMPTS[0])
print(
    lab.table(
        [(i, t, repr(tokenizer.decode([t]))) for i, t in enumerate(ids)],
        {"position": None, "token id": "d", "text": None},
    )
)
# %% [markdown]
# The decoder gives one number, a *logit*, for each of its 49,152 tokens. The softmax turns them into
# probabilities.
# %% [compare logits]
probs, order = forward(ids).double().softmax(-1).sort(descending=True)
rows = [(repr(tokenizer.decode([int(t)])), p.item()) for p, t in zip(probs[:6], order[:6], strict=True)]
print(lab.table(rows, {"next token": None, "probability": ".1%"}))
print(f"{len(probs):,} tokens in all; the {int((probs.cumsum(0) < 0.9).sum()) + 1} likeliest sum to 90 %.")
# %% [markdown]
# ## One token after another
#
# The loop: logits, a token, the token goes to the end of the text, and again. Without a cache each step
# computes the whole text anew.
# %% [compare loop]
rows, text = [], list(ids)
for step in range(6):
    token = int(forward(text).argmax())
    rows.append((step + 1, len(text), repr(tokenizer.decode([token]))))
    text.append(token)
print(lab.table(rows, ["step", "tokens computed", "token chosen"]))
print(sum(row[1] for row in rows), "tokens computed for", len(rows), "tokens of text")
# %% [markdown]
# `generate`, `LLM` and the three lines above are the same loop.
# %% [compare same]
alone = [list(generate(model, RecomputeStore(), tokenizer.encode(p), GREEDY)) for p in PROMPTS]
counted = llm.engine.on_step = lab.Recorder(llm.engine.manager)
together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
llm.engine.on_step = None
for prompt, a, b in zip(PROMPTS, alone, together, strict=True):
    print(f"{prompt!r:33} alone = in one row with the others: {list(a) == list(b)}")
steps_alone = sum(map(len, alone))
print(f"{steps_alone} steps one after the other, {len(counted.records)} steps together")
assert alone[0][:6] == text[len(ids) :]
# %% [markdown]
# ## Attention and its mask
#
# What the last token of each row looks at, in head 8 of layer 11. Keys and queries are caught on their way
# into the store.


# %%
class Watching(RecomputeStore):
    """Keeps the last queries and keys of each layer, to look at."""

    def __init__(self):
        self.seen = {}

    def attend(self, layer, q, k, v, batch):
        self.seen[layer] = q, k
        return super().attend(layer, q, k, v, batch)


watching = Watching()
with torch.inference_mode():
    model(Batch.pack([(0, ids, 0)]), watching)


def attention_weights(layer, head):
    q, k = watching.seen[layer]
    group = q.shape[1] // k.shape[1]  # 9 query heads share 3 KV heads
    scores = q[:, head] @ k[:, head // group].T * q.shape[-1] ** -0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


# %% [figure attention]
#| alt: Attention weights of one head over "The capital of France is". What lies above the diagonal is
#| hatched: closed by the mask. The last row, "is", puts 0.40 on "France" and 0.30 on "capital".
draw_attention(
    attention_weights(11, 8).tolist(),
    [tokenizer.decode([i]) for i in ids],
    title="Layer 11, query head 8 (KV head 2)",
)
# %% [markdown]
# RoPE turns queries and keys by their position. The dot product of a turned query with a turned key depends
# on the distance between them alone:
# %% [compare rope]
q, k = torch.randn(2, 1, model.config.head_dim, generator=torch.Generator().manual_seed(0)).double()


def score(query_position, key_position):
    turned = []
    for x, position in ((q, query_position), (k, key_position)):
        cos, sin = rotary_table(torch.tensor([position]), model.inv_freq, 1.0, torch.float64)
        turned.append(apply_rotary(x[None], cos, sin)[0, 0])
    return float(turned[0] @ turned[1])


rows = [(d, *(round(score(start + d, start), 2) for start in (0, 10, 500))) for d in (0, 1, 7, 100)]
print(lab.table(rows, {"distance": None, "key at 0": ".2f", "key at 10": ".2f", "key at 500": ".2f"}))
# %% [markdown]
# ## Several sequences in one row
#
# Three sequences: the first brings its prompt; two others have tokens in memory and bring one and two.
# %% [compare pack]
batch = Batch.pack([(7, [11, 12, 13, 14, 15], 0), (4, [21], 7), (9, [31, 32], 3)])
for name in ("token_ids", "positions", "query_start", "seq_lens", "logits_indices"):
    print(f"{name:15}{getattr(batch, name).tolist()}")
for s in batch:
    print(s)
# %% [markdown]
# The three prompts from above, as the engine ran them together: in every step, each request computes all
# its tokens again.
# %% [figure timeline]
#| alt: Three requests over twelve steps: the first computes the prompts, each later one everything again.
lab.draw_timeline([record.step for record in counted.records], by="step")
# %% [markdown]
# ## From logits to a token
#
# Temperature bends the distribution; top-k, top-p and min-p cut off its tail.
# %%
story = tokenizer.encode(PROMPTS[1])
story_logits = forward(story)
SHOWN = 8


def distribution(**params):
    """Probabilities from high to low as they are drawn from, scaled to sum to 1, and how many are left."""
    probs, order = sampling_distribution(story_logits[None], [SamplingParams(**params)])
    return probs[0] / probs[0].sum(), int((probs[0] > 0).sum()), order[0]


# %% [figure sampling]
#| alt: Six panels, the eight likeliest next tokens after "Once upon a time, there was a": at temperature 0.5
#| the first has 23 %, at 1 it has 6 %, at 2 under 1 %; top_k=4 keeps the first four, top_p=0.2 and min_p=0.5
#| keep five, and the rest is cut.
SETTINGS = {
    "temperature=0.5": {"temperature": 0.5},
    "temperature=1": {},
    "temperature=2": {"temperature": 2.0},
    "top_k=4": {"top_k": 4},
    "top_p=0.2": {"top_p": 0.2},
    "min_p=0.5": {"min_p": 0.5},
}
plain, _, names = distribution()
found = {name: distribution(**params) for name, params in SETTINGS.items()}
bars = {
    name: [p if p > 0 else q for p, q in zip(probs[:SHOWN].tolist(), plain[:SHOWN].tolist(), strict=True)]
    for name, (probs, _, _) in found.items()
}
draw_sampling(
    bars,
    [tokenizer.decode([int(t)]) for t in names[:SHOWN]],
    kept={name: left for name, (_, left, _) in found.items()},
)
# %% [compare cuts]
SETTINGS |= {
    "temperature=2, top_p=0.9": {"temperature": 2.0, "top_p": 0.9},
    "temperature=2, min_p=0.1": {"temperature": 2.0, "min_p": 0.1},
}
rows = []
for name, params in SETTINGS.items():
    probs, left, _ = distribution(**params)
    rows.append((name, None if set(params) == {"temperature"} or not params else left, probs[0].item()))
print(
    lab.table(
        rows,
        {
            "setting": None,
            "tokens left": lambda n: f"{n:,}" if n < 1000 else f"about {round(n, -2):,}",
            "the likeliest has": ".1%",
        },
    )
)
# %% [markdown]
# The line of the sampler's docstring, in numbers: four probabilities, three cuts, each alone.
# %% [compare tail]
row = torch.tensor([[0.55, 0.25, 0.12, 0.05, 0.03]], dtype=torch.float64)
off = {"top_k": 5, "top_p": 1.0, "min_p": 0.0}
for cut in ({"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.2}, {"top_k": 2, "top_p": 0.75}):
    given = [torch.tensor([[value]], dtype=torch.float64) for value in (off | cut).values()]
    print(f"{cut!s:28}{cut_tail(row, *given)[0].tolist()}")


# %% [markdown]
# Move the temperature:
# %% [widget]
def at(temperature):
    probs = distribution(temperature=temperature)[0][:SHOWN].tolist()
    return draw_sampling(
        {f"temperature={temperature:.1f}": probs}, [tokenizer.decode([int(t)]) for t in names[:SHOWN]]
    )


ipywidgets.interactive(at, temperature=ipywidgets.FloatSlider(1.0, min=0.1, max=3.0, step=0.1))
# %% [markdown]
# A seed belongs to a request: its tokens stay the same whatever runs beside it.
# %% [compare seeds]
seeded = [SamplingParams(seed=seed, max_tokens=6) for seed in (1, 2)]
lone = llm.generate(PROMPTS[1], seeded[0], use_tqdm=False)[0].outputs[0].text
first, second = (o.outputs[0].text for o in llm.generate([PROMPTS[1]] * 2, seeded, use_tqdm=False))
print(f"seed 1 alone        {lone!r}\nseed 1 beside another {first!r}\nseed 2              {second!r}")
assert lone == first
# %% [markdown]
# ## When to stop
#
# The stop string is two line breaks; the model writes them as two tokens. The first may be the beginning of
# the stop string, so it is held back.
# %% [compare stop]
question = "Question: What is two plus two?\nAnswer: Four.\n\nQuestion: What color is the sky?\nAnswer:"
checker, rows = StopStrings(["\n\n"]), []
for token in generate(model, RecomputeStore(), tokenizer.encode(question), SamplingParams(temperature=0)):
    piece = tokenizer.decode([token])
    stopped = checker.add(piece)
    rows.append((repr(piece), repr(checker.text), repr(checker.held), repr(stopped) if stopped else ""))
    if stopped:
        break
print(lab.table(rows, ["token", "text shown", "held back", "stop"]))
# %% [markdown]
# ## What recomputing costs
#
# To generate n tokens after a prompt of p, step i computes p + i tokens: n p + n (n - 1) / 2 in all. If the
# keys and values of earlier tokens are kept, the prompt is computed once and each token but the last once:
# p + n - 1.


# %% [compare recompute]
def computed(p, n):
    return n * p + n * (n - 1) // 2


rows = [
    (p, n, computed(p, n), p + n - 1, computed(p, n) / (p + n - 1))
    for p, n in ((5, 1), (5, 12), (100, 100), (100, 1000), (1000, 1000))
]
columns = {"prompt": None, "output": None, "computed anew": None, "if kept": None, "times": ".1f"}
print(lab.table(rows, columns))
by_request = Counter()
for record in counted.records:
    for request in record.step.scheduled:
        by_request[request.request_id] += request.num_new_tokens
lengths = [(len(tokenizer.encode(p)), len(a)) for p, a in zip(PROMPTS, alone, strict=True)]
print(
    "the engine computed",
    sorted(by_request.values()),
    "tokens; the formula says",
    sorted(computed(p, n) for p, n in lengths),
)
# %% [markdown]
# In FLOPs, for Llama-3-8B's shape and a prompt of 100 tokens, counted step by step:
# %% [compare recompute-flops]
LLAMA = PRESETS["llama-3-8b"]
rows = []
for n in (10, 100, 1000):
    anew = sum(step_cost(LLAMA, [(100 + i, 0)], 2).flops for i in range(n))
    kept = step_cost(LLAMA, [(100, 0)], 2).flops
    kept += sum(step_cost(LLAMA, [(1, 100 + i)], 2).flops for i in range(n - 1))
    rows.append((n, anew / 1e12, kept / 1e12, anew / kept))
print(lab.table(rows, {"output": None, "TFLOP anew": ",.1f", "TFLOP if kept": ",.1f", "times": ".1f"}))
# %% [markdown]
# The same on this machine: the time of one more token, by the length of the text before it. "Kept" borrows
# the store of chapter 1.
# %% [code step-time]
big = model if scale.device == "cpu" else load_model(scale.model, dtype=scale.dtype, device=scale.device)
LENGTHS = (16, 32, 64, 128, 256) if scale.device == "cpu" else (128, 256, 512, 1024, 2048)
anew = {n: 1e3 * time_step(big, RecomputeStore, ids, n, repeats=1) for n in LENGTHS}
kept = {n: 1e3 * time_step(big, NaiveStore, ids, n, repeats=3) for n in LENGTHS}
print(
    lab.table(
        [(n, anew[n], kept[n], anew[n] / kept[n]) for n in LENGTHS],
        {"tokens before": None, "ms, anew": ".1f", "ms, kept": ".1f", "times": ".1f"},
    )
)
# %% [figure growth]
#| alt: Time of one more token by the length of the text: recomputing grows with the length, with keys and
#| values kept it hardly does.
draw_lines(
    {"computed anew": anew, "keys and values kept": kept},
    xlabel="tokens before",
    ylabel="ms for one more token",
    title="One more token",
)
# %% [markdown]
# ## What a step computes and moves
#
# `step_cost` counts from the shape of a model. PyTorch counts the same FLOPs while the model runs:
# %% [compare count]
work = [(5, 0), (1, 7), (2, 3)]  # (new tokens, tokens already in memory), as in the batch above
store = NaiveStore()
with torch.no_grad():
    model(Batch.pack([(4, [5] * 7, 0), (9, [5] * 3, 0)]), store)
    with FlopCounterMode(display=False) as counter:
        model(batch, store)
print(f"counted by torch {counter.get_total_flops():,}")
print(f"step_cost        {step_cost(model.config, work, 4).flops:,}")
# %% [compare intensity]
WORK = {
    "prefill of 1": [(1, 0)],
    "prefill of 128": [(128, 0)],
    "prefill of 2,048": [(2048, 0)],
    "decode, batch 1": [(1, 1023)],
    "decode, batch 8": [(1, 1023)] * 8,
    "decode, batch 64": [(1, 1023)] * 64,
    "decode, batch 256": [(1, 1023)] * 256,
}
COLUMNS = {"step": None, "GFLOP": ",.1f", "GB moved": ",.2f", "FLOP/byte": ",.1f"}


def points(config, size, steps=WORK):
    """What each step computes and moves, with numbers of so many bytes."""
    costs = {name: step_cost(config, work, size) for name, work in steps.items()}
    return {name: lab.Point(name, cost.flops, cost.num_bytes) for name, cost in costs.items()}


llama = points(LLAMA, 2)
for name, found in (("SmolLM2-135M, float32", points(model.config, 4)), ("Llama-3-8B, bfloat16", llama)):
    print(f"{name} (decode with 1,024 tokens of context)")
    print(lab.table([(s, p.flops / 1e9, p.num_bytes / 1e9, p.intensity) for s, p in found.items()], COLUMNS))
    print()
# %% [markdown]
# ## The roofline
#
# A machine computes so many FLOPs a second and moves so many bytes. A step takes at least the longer of the
# two jobs. The published peaks of three GPUs, and the least time they allow Llama-3-8B in bfloat16:
# %% [compare limits]
H100 = lab.PEAKS["H100 SXM"]
print(
    lab.table(
        [
            (gpu, p.flops_per_second / 1e12, p.bytes_per_second / 1e12, p.ridge)
            for gpu, p in lab.PEAKS.items()
        ],
        {"GPU": None, "TFLOP/s": ".1f", "TB/s": ".2f", "ridge, FLOP/byte": ".0f"},
    )
)
rows = []
for step, point in llama.items():
    row = {"step": step, "FLOP/byte": point.intensity}
    for gpu, peaks in lab.PEAKS.items():
        bound = "compute" if point.intensity > peaks.ridge else "memory"
        row[gpu.split()[0]] = f"{1e3 * peaks.least_seconds(point):6.2f} ms, {bound}"
    rows.append(row | {"FLOP/s used, H100": H100.roof(point.intensity) / H100.flops_per_second})
print()
print(
    lab.table(
        rows,
        {
            "step": None,
            "FLOP/byte": ",.1f",
            "A100": None,
            "H100": None,
            "H200": None,
            "FLOP/s used, H100": ".1%",
        },
    )
)
# %% [markdown]
# This machine, measured: its peaks, and real steps of the real model under them.
# %% [code machine]
machine = lab.measure_machine()
size = torch.empty(0, dtype=big.dtype).element_size()
CONTEXT = 32 if scale.device == "cpu" else 1024
PREFILLS = (8, 32, 128) if scale.device == "cpu" else (128, 512, 2048)
STEPS = {f"prefill of {n}": [(n, 0)] for n in PREFILLS}
BATCHES = (1, 2, 4, 8, 16) if scale.device == "cpu" else (1, 4, 16, 64)
STEPS |= {f"decode, batch {b}": [(1, CONTEXT)] * b for b in BATCHES}
seconds = {name: time_work(big, work, repeats=2) for name, work in STEPS.items()}
measured = points(big.config, size, STEPS)
print(
    f"{machine.name}: {machine.flops_per_second / 1e9:,.0f} GFLOP/s and "
    f"{machine.bytes_per_second / 1e9:,.1f} GB/s in {machine.dtype}, ridge at {machine.ridge:.1f} FLOP/byte"
)
rows = []
for name, point in measured.items():
    least = machine.least_seconds(point)
    rows.append((name, point.intensity, 1e3 * least, 1e3 * seconds[name], least / seconds[name]))
columns = {"FLOP/byte": ".1f", "least ms": ".1f", "measured ms": ".1f", "of the roof": ".0%"}
print(lab.table(rows, {"step": None} | columns))
# %% [figure roofline]
#| alt: The roofline of this machine with measured steps: decode at batch 1 lies far left, under the slope;
#| prefill and larger batches lie further right.
lab.draw_roofline(machine, [replace(point, seconds=seconds[name]) for name, point in measured.items()])
# %% [markdown]
# The same for Llama-3-8B on an H100: where its steps lie is counted; how near to the roof a real engine
# comes is not measured yet.
# %% [figure roofline-h100]
#| alt: Roofline of an H100 by its published peaks. Decode at batch 1 lies at 1 FLOP per byte, at batch 64 at
#| 42, both on the slope; prefill of 128 is left of the ridge at 295, prefill of 2,048 far right of it.
others = [peaks for gpu, peaks in lab.PEAKS.items() if gpu != "H100 SXM"]
lab.draw_roofline(H100, [p for s, p in llama.items() if s != "prefill of 1"], others=others)
# %% [markdown]
# ## Why serving is a memory problem
#
# One decode step reads the weights once, for all sequences of the batch. So the more sequences share it,
# the more tokens a second come out, up to the batch that memory can hold. Llama-3-8B in bfloat16 on one
# H100, of whose memory 90 % is used; the speed is the roofline's, which no engine beats.
# %% [compare batch]
MEMORY = 80e9  # bytes of an H100, as published
parameters = matrix_elements(LLAMA) + 2 * LLAMA.hidden_size * LLAMA.vocab_size
room = 0.9 * MEMORY - 2 * parameters
print(
    f"weights {2 * parameters / 1e9:.1f} GB, {room / 1e9:.1f} GB left for keys and values, "
    f"{2 * LLAMA.kv_elements_per_token:,} bytes a token"
)


def tokens_per_second(batch_size, context):
    cost = step_cost(LLAMA, [(1, context - 1)] * batch_size, 2)
    return batch_size / H100.least_seconds(lab.Point("", cost.flops, cost.num_bytes))


rows = []
for context in (512, 2048, 8192):
    each = 2 * LLAMA.kv_elements_per_token * context
    most = int(room // each)
    at_most = tokens_per_second(most, context)
    rows.append(
        (
            context,
            each / 1e6,
            most,
            at_most,
            at_most / tokens_per_second(1, context),
            step_cost(LLAMA, [(1, context - 1)] * most, 2).intensity,
        )
    )
print(
    lab.table(
        rows,
        {
            "context": None,
            "MB a sequence": ".0f",
            "fit": None,
            "tokens/s at most": ",.0f",
            "times batch 1": ".0f",
            "FLOP/byte": ".0f",
        },
    )
)
# %% [figure batch-roof]
#| alt: Tokens per second that the roofline allows, by batch size, at contexts of 512, 2,048 and 8,192 tokens.
#| Each line rises almost in proportion, bends, and ends where memory is full: earlier for longer contexts.
lines = {}
for context, _, most, *_ in rows:
    sizes = [*(2**i for i in range(11) if 2**i < most), most]
    lines[f"context {context:,}"] = {b: tokens_per_second(b, context) for b in sizes}
draw_lines(
    lines,
    xlabel="sequences in the batch (a line ends where memory is full)",
    log="xy",
    ylabel="tokens/s at most",
    title="Llama-3-8B on one H100, by the roofline",
)
# %% [markdown]
# The same effect, measured here: one step of decode with more and more sequences.
# %% [code batch-time]
rows = []
for b in BATCHES:
    t = seconds[f"decode, batch {b}"]
    rows.append((b, 1e3 * t, b / t, b / t * seconds["decode, batch 1"]))
print(lab.table(rows, {"batch": None, "ms a step": ".1f", "tokens/s": ".1f", "times batch 1": ".1f"}))
# %% [markdown]
# ## Claims
#
# **"FLOPs per token are about 2 x parameters."** The FLOPs of one decoded token, as a multiple of that, by
# its context; and the context at which attention computes as much as all matrices.


# %% [compare two-parameters]
def parameter_count(config):
    embedding = config.hidden_size * config.vocab_size
    return matrix_elements(config) + embedding * (1 if config.tie_word_embeddings else 2)


CONTEXTS = (1, 1024, 8192, 32768, 131072)
SHAPES = {"SmolLM2-135M": model.config, "Llama-3-8B": LLAMA, "Llama-2-7B": PRESETS["llama-2-7b"]}
rows = []
for name, config in SHAPES.items():
    n = parameter_count(config)
    multiples = [step_cost(config, [(1, c - 1)], 2).flops / (2 * n) for c in CONTEXTS]
    matrices = matrix_elements(config) + config.hidden_size * config.vocab_size
    equal = matrices / (2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim)
    rows.append((name, n / 1e6, *multiples, round(equal)))
columns = {"model": None, "million parameters": ",.1f"} | {f"{c:,}": ".2f" for c in CONTEXTS}
print(lab.table(rows, columns | {"equal at": None}))
# %% [markdown]
# In a prefill only the last token meets the output matrix, so 2 x parameters counts too much there:
# %% [compare two-parameters-prefill]
rows = []
for name, config in (("SmolLM2-135M", model.config), ("Llama-3-8B", LLAMA)):
    for n in (128, 2048):
        rows.append((name, n, step_cost(config, [(n, 0)], 2).flops / (2 * parameter_count(config) * n)))
print(lab.table(rows, {"model": None, "prompt": None, "FLOPs / (2 x parameters x tokens)": ".2f"}))
# %% [markdown]
# **"The first token is slow because the model must warm up."** The first call in this process, the same
# call again, and calls with longer prompts after that.
# %% [code first-token]
rows = [("first call of the process", len(ids), 1e3 * first_call_seconds)]
rows += [("warm", n, 1e3 * time_work(model, [(n, 0)], repeats=2)) for n in (len(ids), 32, 128)]
rows += [("one more token after 128, kept", 1, 1e3 * time_work(model, [(1, 128)], repeats=2))]
print(lab.table(rows, {"call": None, "tokens computed": None, "ms": ".1f"}))
# %% [markdown]
# **"Decode is compute bound."** The two jobs of a step at batch 1, and what a GPU with the same FLOP/s and
# faster memory gains:
# %% [compare decode-bound]
one = llama["decode, batch 1"]
moving, computing = one.num_bytes / H100.bytes_per_second, one.flops / H100.flops_per_second
print(
    "Llama-3-8B, decode at batch 1 on an H100:",
    f"moving {1e3 * moving:.2f} ms, computing {1e3 * computing:.3f} ms",
)
for step in ("decode, batch 1", "decode, batch 256", "prefill of 2,048"):
    times = [lab.PEAKS[gpu].least_seconds(llama[step]) for gpu in ("H100 SXM", "H200 SXM")]
    print(f"{step:18} H200 against H100, by the roofline: {times[0] / times[1]:.2f} times as fast")
group = LLAMA.num_attention_heads // LLAMA.num_key_value_heads
print(f"attention alone, any batch: {4 * group} FLOPs for each 4 bytes of keys and values: {group} FLOP/byte")
# %% [markdown]
# **"At a batch of about 300, decode becomes compute bound on an H100."** The larger the batch, the less the
# weights count, and the more the keys and values that each sequence reads for itself: the intensity has a
# limit.
# %% [compare decode-limit]
rows = []
for context in (64, 256, 512, 1024, 4096):
    alone, none = step_cost(LLAMA, [(1, context - 1)], 2), step_cost(LLAMA, [], 2)
    each = alone.num_bytes - none.num_bytes  # keys and values of one sequence
    spare = alone.flops - H100.ridge * each  # what a sequence computes beyond reading its own
    rows.append(
        (
            context,
            alone.flops / each,
            math.ceil(H100.ridge * none.num_bytes / spare) if spare > 0 else "never",
        )
    )
print(lab.table(rows, {"context": None, "FLOP/byte at most": ",.0f", "compute bound from batch": None}))
# %% [markdown]
# **"Temperature 0 gives the same text every time."** A row computed alone and the same row computed beside
# others: the sums are the same, their order need not be.
# %% [code rounding]
rows = [tokenizer.encode(p) for p in PROMPTS]
with torch.inference_mode():
    row_of_three = model(Batch.pack([(i, row, 0) for i, row in enumerate(rows)]), RecomputeStore())
for prompt, row, packed in zip(PROMPTS, rows, row_of_three, strict=True):
    lone = forward(row)
    best, next_best = lone.topk(2).values.tolist()
    print(
        f"{prompt!r:33} logits differ by at most {(lone - packed).abs().max():.1e}; "
        f"the two best are {best - next_best:.2f} apart"
    )
