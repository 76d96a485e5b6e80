# %% [markdown]
# # 1. The naive KV cache: lab
#
# The laboratory of [chapter 1](../book/ch01_naive_cache.md). It runs SmolLM2-135M in float32 on a plain CPU
# . Tables and tokens are the same on every machine; times are this machine's.
# %%
# %matplotlib inline
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache

from minivllm import LLM, SamplingParams, lab
from minivllm.decoding.greedy import greedy
from minivllm.lab.bench.hf_model import load_hf_model
from minivllm.lab.draw_lines import draw_lines
from minivllm.lab.intensity import step_cost
from minivllm.lab.ladder import run_ladder
from minivllm.lab.ladder_workload import TEXT, default_requests
from minivllm.lab.step_time import time_step
from minivllm.lab.watched_store import WatchedStore
from minivllm.memory.naive import NaiveManager
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.size import (
    bytes_per_token,
    copied_by_doubling,
    copied_by_joining,
    kv_bytes_per_token,
)
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch
from minivllm.model.decoder import Decoder
from minivllm.model.hub import resolve
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS
from minivllm.model.tokenizer import load_tokenizer

model = load_model("smollm2-135m", dtype="float32", device="cpu")
tokenizer = load_tokenizer("smollm2-135m")
MIB, GIB, GB = 2**20, 2**30, 10**9
print(lab.about())

# %% [markdown]
# ## Why a key can be kept
#
# A store sees every key on its way into attention, so it can note them. One token of ten is changed, and the
# keys are compared with those from before: `#` marks a position whose key is another one now.
# %% [compare what-depends]


class NotingStore(RecomputeStore):
    """Keeps nothing for attention, and notes the keys and values of every layer."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def attend(self, layer, q, k, v, batch):
        self.keys[layer], self.values[layer] = k.clone(), v.clone()
        return super().attend(layer, q, k, v, batch)


@torch.inference_mode()
def keys_and_values(decoder, tokens):
    """[2, layers, tokens, KV heads, head_dim] of a sequence computed in one step."""
    store = NotingStore()
    decoder(Batch.pack([(0, tokens, 0)]), store)
    return torch.stack([torch.stack(list(part.values())) for part in (store.keys, store.values)])


tiny = load_model("random:tiny-llama", dtype="float64", device="cpu", seed=2)
tokens = list(range(40, 50))
before = keys_and_values(tiny, tokens)[0]
print("changed   keys that change in")
print("token     layer 0     layers 1 and 2")
for place in range(len(tokens)):
    changed = keys_and_values(tiny, [*tokens[:place], 7, *tokens[place + 1 :]])[0]
    differs = (changed - before).abs().amax(dim=(2, 3)) > 1e-11
    marks = ["".join("#" if each else "." for each in layer) for layer in differs]
    assert marks[1] == marks[2]
    print(f"{place:5d}     {marks[0]}  {marks[1]}")

# %% [markdown]
# Nothing to the left of the changed token ever moves. So the keys and values of a prefix are the same
# whatever comes after it. The same on the real model, whose float32 rounds in another order when the batch
# is longer:
# %% [compare prefix]
prompt = tokenizer.encode("A language model writes one token at a time. For each new token it looks back")
first, second = (
    tokenizer.encode(text) for text in (" at every token before it.", " and forgets everything!")
)
alone = keys_and_values(model, prompt)
rows = []
for name, more in (("one continuation", first), ("another", second)):
    longer = keys_and_values(model, prompt + more)
    error = (longer[:, :, : len(prompt)] - alone).abs().max() / alone.abs().max()
    rows.append((name, len(prompt), len(more), "yes" if error < 1e-5 else "NO"))
print(lab.table(rows, ["prompt, then", "tokens", "more tokens", "the same keys and values to 1e-5"]))

# %% [markdown]
# ## What recomputing costs
#
# Counted first. Without a cache, step after step computes the whole sequence: 1 + 2 + ... + n tokens. FLOPs
# are derived from the model's shape, and the derivation is held against PyTorch's own count of what it
# multiplied.
# %% [compare flops-counted]
with torch.inference_mode():
    rows = []
    for name, new, old in (("first step, 19 tokens", 19, 0), ("one token after 18", 1, 18)):
        store = NaiveStore()
        if old:
            tiny(Batch.pack([(0, list(range(old)), 0)]), store)
        with FlopCounterMode(display=False) as counter:
            tiny(Batch.pack([(0, list(range(new)), old)]), store)
        rows.append((name, step_cost(tiny.config, [(new, old)], 8).flops, counter.get_total_flops()))
print(lab.table(rows, ["tiny-llama", "FLOPs derived", "FLOPs counted by PyTorch"]))

# %% [compare recompute-cost]
rows = []
for n in (16, 64, 256, 1024, 4096):
    whole, one = (step_cost(model.config, [work], 4).flops for work in ((n, 0), (1, n - 1)))
    attention = (
        4 * model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim * n
    )
    rows.append((n, n * (n + 1) // 2, n, whole / 1e9, one / 1e9, whole / one, attention / one))
columns = {
    "n": None,
    "tokens in all, recompute": None,
    "with cache": None,
    "GFLOP of step n, recompute": ".2f",
    "cache": ".3f",
    "ratio": ".0f",
    "attention's share": ".0%",
}
print(lab.table(rows, columns))

# %% [markdown]
# ## The time of a token by its position
#
# Then measured. On a GPU the same cells take the shape of Llama-2-7B.
# %% [code step-times]
scale = lab.scale()
timed = model if scale.device == "cpu" else load_model(scale.model, dtype=scale.dtype, device=scale.device)
text = tokenizer.encode(TEXT)[:200] if timed is model else list(range(200))
lengths = (1, 32, 64, 128, 192, 256) if timed is model else (1, 128, 256, 512, 1024, 2048)
time_step(timed, RecomputeStore, text, 64)  # the first steps are slow, whatever they compute
seconds = {
    name: [(n, time_step(timed, store, text, n)) for n in lengths]
    for name, store in (("recompute", RecomputeStore), ("naive cache", NaiveStore))
}
rows = [
    (n, 1000 * slow, 1000 * fast, slow / fast)
    for (n, slow), (_, fast) in zip(seconds["recompute"], seconds["naive cache"], strict=True)
]
columns = {"position": None, "recompute, ms a token": ".1f", "naive cache, ms a token": ".1f", "ratio": ".1f"}
print(lab.table(rows, columns))
print(f"{scale.model} in {scale.dtype} on {lab.about()}")
if lab.gpu_results("ch01_step_time") is None:
    print("On a GPU: not measured yet.")

# %% [figure step-time]
#| alt: Time of one token against its position. Recomputing rises in proportion to the position; with the
#| naive cache the curve is almost flat.
draw_lines(
    {name: {n: 1000 * s for n, s in points} for name, points in seconds.items()},
    xlabel="position of the token",
    ylabel="ms for this token",
    title=f"One more token, {scale.model}",
)

# %% [markdown]
# ## The same tokens
#
# In float64 the logits agree to rounding at every one of 41 positions.
# %% [compare logits]
rows = []
with torch.inference_mode():
    for name in ("tiny-llama", "tiny-qwen2", "tiny-qwen3"):
        decoder = load_model(f"random:{name}", dtype="float64", device="cpu", seed=2)
        tokens = [(37 * i * i + 11) % 300 for i in range(41)]
        store, differences = NaiveStore(), []
        for i, token in enumerate(tokens):
            cached = decoder(Batch.pack([(0, [token], i)]), store)
            whole = decoder(Batch.pack([(0, tokens[: i + 1], 0)]), RecomputeStore())
            differences.append((cached - whole).abs().max().item())
        config = decoder.config
        heads = f"{config.num_attention_heads} over {config.num_key_value_heads}"
        rows.append((name, heads, len(tokens), "yes" if max(differences) < 1e-11 else "NO"))
print(lab.table(rows, ["float64", "query heads over KV heads", "positions", "logits equal to 1e-11"]))

# %% [markdown]
# The real model, four ways: the loop of this chapter on two stores, the engine, and `generate()` of the
# Transformers library with the same weights.
# %% [compare tokens]
question = tokenizer.encode("The capital of France is")
with redirect_stderr(StringIO()):  # progress bars
    hf = load_hf_model(resolve("smollm2-135m"), torch.float32, torch.device("cpu"))
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
llm = LLM(model, tokenizer=tokenizer, cache="naive", max_model_len=512, kv_cache_memory_bytes=64 * MIB)
with torch.inference_mode():
    from_hf = hf.generate(torch.tensor([question]), max_new_tokens=16, return_dict_in_generate=True)
found = {
    "recompute": greedy(model, RecomputeStore(), question, 16),
    "naive cache": greedy(model, NaiveStore(), question, 16),
    "engine, naive cache": llm.generate({"prompt_token_ids": question}, params, use_tqdm=False)[0]
    .outputs[0]
    .token_ids,
    "transformers, generate()": from_hf.sequences[0, len(question) :].tolist(),
}
for name, output in found.items():
    print(f"{name:26} {output == found['recompute']!s:6}{tokenizer.decode(output)!r}")

# %% [markdown]
# ## Bytes a token
#
# Two (key and value) x layers x KV heads x head_dim x bytes of a number. The shapes are those of the
# published configs; the weights are counted from the shapes, in float16 as well.
# %% [compare bytes]
llama_2, llama_3, qwen_3 = (PRESETS[name] for name in ("llama-2-7b", "llama-3-8b", "qwen3-0.6b"))
llama_3_70b = replace(
    llama_3, num_hidden_layers=80, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64
)
opt = replace(llama_2, num_hidden_layers=40, hidden_size=5120, num_attention_heads=40, num_key_value_heads=40)
configs = {
    "Llama-2-7B": llama_2,
    "Llama-3-8B": llama_3,
    "Llama-3-70B": llama_3_70b,
    "OPT-13B": opt,  # only for its keys and values; its other layers are unlike Llama's
    "Qwen3-0.6B": qwen_3,
    "SmolLM2-135M": model.config,
}
rows = [
    (
        name,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        kv_bytes_per_token(c, 16),
        kv_bytes_per_token(c, 16) * 2048 / GIB,
    )
    for name, c in configs.items()
]
names = ["fp16", "layers", "query heads", "KV heads", "head_dim", "bytes a token", "GiB for 2,048 tokens"]
print(lab.table(rows, names))

# %% [markdown]
# OPT's weights, counted by hand: the embedding, 2,050 positions, and in each layer four square matrices,
# two of the MLP, their biases and two norms with biases.
# %% [compare fits]


def num_parameters(config):
    """Of a Llama or Qwen3; the output matrix counts only where it is not the embedding again."""
    decoder = Decoder(config)  # without weights, so it takes no memory
    tied = decoder.lm_head.weight.numel() if config.tie_word_embeddings else 0
    return sum(p.numel() for p in decoder.parameters()) - tied


h, ffn = 5120, 20_480
opt_layer = 4 * (h * h + h) + 2 * h * ffn + ffn + h + 4 * h
weights = {name: 2 * num_parameters(c) for name, c in configs.items()}
weights["OPT-13B"] = 2 * (50_272 * h + 2050 * h + 40 * opt_layer + 2 * h)
rows = []
for name, c in configs.items():
    row = [name, weights[name] / GB]
    for memory in (24 * GB, 80 * GB):
        for n in (2048, 4096):
            left = memory - weights[name]
            row.append(left // (n * kv_bytes_per_token(c, 16)) if left > 0 else None)
    rows.append(row)
names = {"fp16": None, "weights, GB": ".2f"}
names |= dict.fromkeys(["24 GB, 2,048 each", "24 GB, 4,096 each", "80 GB, 2,048 each", "80 GB, 4,096 each"])
print(lab.table(rows, names))

# %% [markdown]
# ## Fewer heads to keep
#
# Grouped-query attention lets several query heads share a key and a value. What the same models would keep if
# every query head had its own:
# %% [compare gqa]
rows, bars = [], {}
for name, c in configs.items():
    full = kv_bytes_per_token(replace(c, num_key_value_heads=c.num_attention_heads), 16)
    shared = kv_bytes_per_token(c, 16)
    many = [40 * GB // (4096 * size) for size in (full, shared)]
    rows.append((name, c.num_attention_heads // c.num_key_value_heads, full, shared, *many))
    bars[name] = {"every query head its own": full / 1024, "as it is": shared / 1024}
names = ["fp16", "query heads a KV head", "bytes, each its own", "bytes, as it is"]
names += ["40 GB, 4,096 each, each its own", "as it is"]
print(lab.table(rows, names))

# %% [figure gqa-bars]
#| alt: KiB of keys and values a token for six models, with a KV head for every query head and as they are.
#| GQA divides Llama-3-70B's 2,560 KiB by eight and Llama-3-8B's 512 KiB by four; Llama-2-7B and OPT-13B
#| have no GQA.
lab.draw_bars(bars, unit="KiB a token, fp16", title="What a token leaves in the KV cache", form=",.4g")

# %% [markdown]
# ## What growing copies
#
# `torch.cat` makes a longer tensor and copies the old one. A watched store reads the bytes off the operations
# that run; beside them what the formulas say.
# %% [compare copied]
size, layers = bytes_per_token(model), model.config.num_hidden_layers
rows = []
for prompt_len, output_len in ((1, 32), (32, 17), (96, 9)):
    watched = WatchedStore(NaiveStore())
    greedy(model, watched, text[:prompt_len], output_len)
    n = prompt_len + output_len - 1
    derived = copied_by_joining(prompt_len, output_len) * size
    most = n * size + (n - 1) * size // layers
    assert (watched.copied_bytes, watched.most_bytes) == (derived, most)
    rows.append((prompt_len, output_len, watched.copied_bytes, derived, n * size, watched.most_bytes, most))
names = [
    "prompt",
    "output",
    "copied, bytes",
    "by formula",
    "kept at the end",
    "most at once",
    "most, by formula",
]
print(lab.table(rows, names))

# %% [markdown]
# At the fullest moment one layer has its old and its new tensor side by side; the other layers have one each.
# The cache of a sequence, kept in one tensor for all layers, would stand there twice.
#
# Joining copies as many rows as the square of the length, doubling fewer than twice the rows in use:
# %% [compare doubling]
rows = []
for n in (100, 300, 1025, 3000, 10_000):
    copied, held = copied_by_doubling(1, n)
    rows.append((n, copied_by_joining(1, n), copied, held, 1 - n / held))
columns = {
    "tokens": None,
    "rows copied by joining": None,
    "by doubling": None,
    "rows held by doubling": None,
    "of them empty": ".0%",
}
print(lab.table(rows, columns))

# %% [figure copies]
#| alt: Rows copied until a sequence has n tokens, on logarithmic axes. Joining rises twice as steeply as
#| doubling, which stays near the number of tokens.
sizes = [24 * 2**i for i in range(10)]
draw_lines(
    {
        "joining: n(n-1)/2": {n: copied_by_joining(1, n) for n in sizes},
        "doubling: fewer than 2n": {n: copied_by_doubling(1, n)[0] for n in sizes},
    },
    xlabel="tokens n, one joined on at a time",
    ylabel="rows copied in all",
    title="What growing copies",
    log="xy",
)

# %% [markdown]
# Is it much? Bytes that one decode step moves for Llama-2-7B in fp16, sequences of 2,048 tokens: the
# weights are read once for all sequences, attention reads each sequence's cache, and joining reads it and
# writes it again.
# %% [compare traffic]
one = 2048 * kv_bytes_per_token(llama_2, 16)
rows = []
for num_seqs in (1, 8, 32):
    read, joined = num_seqs * one, 2 * num_seqs * one
    share = joined / (weights["Llama-2-7B"] + read + joined)
    rows.append((num_seqs, weights["Llama-2-7B"] / GB, read / GB, joined / GB, share))
columns = {
    "sequences": None,
    "weights, GB": ".1f",
    "attention reads, GB": ".1f",
    "joining reads and writes, GB": ".1f",
    "joining's share": ".0%",
}
print(lab.table(rows, columns))

# %% [code join-time]
rows = []
for n, step_seconds in seconds["naive cache"][2:]:
    shape = (n, timed.config.num_key_value_heads, timed.config.head_dim)
    kept = [torch.zeros(shape, dtype=timed.dtype, device=timed.device) for _ in range(2 * layers)]
    new = torch.zeros((1, *shape[1:]), dtype=timed.dtype, device=timed.device)
    tries = []
    for _ in range(5):
        start = time.perf_counter()
        for old in kept:
            torch.cat((old, new))
        if timed.device.type == "cuda":
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - start)
    rows.append((n, 1000 * min(tries), 1000 * step_seconds, min(tries) / step_seconds))
columns = {"tokens": None, "joining alone, ms": ".2f", "the whole step, ms": ".1f", "share": ".1%"}
print(lab.table(rows, columns))

# %% [markdown]
# ## The two halves
#
# The books (`NaiveManager`, integers) and the tensors (`NaiveStore`) meet in ids and token counts alone.
# Driven by hand, side by side:
# %% [compare books]
manager, store = NaiveManager(num_slots=40, bytes_per_token=bytes_per_token(tiny)), NaiveStore()
rows = []


def note(what):
    snapshot = manager.snapshot()
    kept = {s.seq_id: s.held for s in snapshot.sequences}
    rows.append((what, str(kept), snapshot.free, snapshot.held_bytes, store.num_bytes()))


with torch.inference_mode():
    for seq_id, n, computed in ((5, 17, 0), (2, 9, 0), (5, 1, 17)):
        manager.allocate(seq_id, computed + n)
        tiny(Batch.pack([(seq_id, list(range(n)), computed)]), store)
        note(f"sequence {seq_id} brings {n}")
    print("Room for 20 of sequence 8?", manager.can_allocate(8, 20))
    manager.free(5)
    store.free(5)
    note("sequence 5 ends")
print(lab.table(rows, ["", "tokens held", "free slots", "bytes by the books", "bytes of the tensors"]))
code = (
    "import sys; sys.modules['torch'] = None; import minivllm.memory.naive; print('Books without torch: yes')"
)
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())

# %% [markdown]
# ## A row is not an id
#
# Memory is keyed by a sequence's id, not by its row in the batch. Two prompts of one length run together;
# then the first ends and the second moves up. A store keyed by the row gives it the other's past. Nothing
# fails, and the text is fluent.
# %% [compare wrong-row]


class RowStore(NaiveStore):
    """Keyed by the row of the batch: the mistake."""

    def attend(self, layer, q, k, v, batch):
        slices = tuple(s._replace(seq_id=row) for row, s in enumerate(batch))
        return super().attend(layer, q, k, v, replace(batch, slices=slices))


@torch.inference_mode()
def the_first_leaves(store, prompts, together=1, alone=14):
    """The second sequence's tokens: some beside the first, the others without it."""
    tokens, done = {i: list(p) for i, p in enumerate(prompts)}, {0: 0, 1: 0}
    for step in range(together + alone):
        running = (0, 1) if step < together else (1,)
        logits = model(Batch.pack([(i, tokens[i][done[i] :], done[i]) for i in running]), store)
        for i, row in zip(running, logits, strict=True):
            done[i] = len(tokens[i])
            tokens[i].append(int(row.argmax()))
    return tokens[1][len(prompts[1]) :]


pair = [
    tokenizer.encode(text)
    for text in ("My favourite animal is the dog, because", "In the far north the winter is")
]
pair = [prompt[: min(map(len, pair))] for prompt in pair]
print(f"prompts {[tokenizer.decode(prompt) for prompt in pair]}")
for name, kind in (("by id", NaiveStore), ("by row", RowStore)):
    print(f"{name:7}{tokenizer.decode(the_first_leaves(kind(), pair))!r}")

# %% [markdown]
# ## The memory, step by step
#
# Four requests, passages of real text, all there at once, on the engine: first with `recompute`, then with
# the naive cache. Neighbouring runs differ in the memory alone.
# %% [compare runs]
requests = default_requests(tokenizer, 4)
recompute, naive = run_ladder(
    model, requests, rungs=("recompute", "naive"), kv_cache_memory_bytes=128 * size, max_model_len=256
)
rows = [
    (
        run.rung.name,
        run.same_tokens,
        len(run.records),
        sum(s.num_new_tokens for r in run.records for s in r.step.scheduled),
        max(r.snapshot.held for r in run.records),
        max(r.snapshot.held_bytes for r in run.records) / MIB,
        run.split.share("used"),
    )
    for run in (recompute, naive)
]
columns = {
    "memory": None,
    "the same tokens": None,
    "steps": None,
    "tokens computed": None,
    "most slots held": None,
    "MiB": ".1f",
    "of them used": ".0%",
}
print(lab.table(rows, columns))

# %% [code runs-time]
rows = [
    (run.rung.name, run.latency["seconds"], run.latency["tok_s"], run.latency["tpot_ms"]["mean"])
    for run in (recompute, naive)
]
print(lab.table(rows, {"memory": None, "seconds": ".2f", "tokens/s": ".1f", "TPOT, ms": ".0f"}))

# %% [figure map]
#| alt: Four memory maps of the naive cache over the steps of the run. Each sequence holds exactly the slots
#| that its tokens use and grows by one at each step; nothing is held in reserve; sequences that have ended
#| leave free slots.
last = len(naive.records) - 1
chosen = [0, last // 2, last // 2 + 1, last]
lab.draw_film_strip([naive.records[i].snapshot for i in chosen], titles=[f"step {i}" for i in chosen])

# %% [widget]
lab.slider(naive.records)

# %% [figure timeline]
#| alt: The steps of the naive run. Each request prefills its prompt once, then takes part with one token a
#| step; the requests end one after the other.
lab.draw_timeline([record.step for record in naive.records], by="step")

# %% [figure utilisation]
#| alt: KV memory held and used over the run with the naive cache: the two are equal at every step.
lab.draw_utilisation(naive.records)

# %% [figure throughput]
#| alt: Output tokens over time for recompute and for the naive cache: the same tokens, sooner with the cache.
lab.draw_throughput({run.rung.name: [record.step for record in run.records] for run in (recompute, naive)})

# %% [markdown]
# ## What `generate()` keeps
#
# The default cache of the Transformers library grows by joining, as ours does; its static cache is made
# once, as long as the call may get. Neither takes the model's longest context.
# %% [compare generate]
inputs = torch.tensor([question])
rows = []
for kind in (None, "static"):
    with torch.inference_mode():
        out = hf.generate(
            inputs,
            max_new_tokens=9,
            cache_implementation=kind,
            return_dict_in_generate=True,
            disable_compile=True,
        )
    cache = next(value for value in out.values() if isinstance(value, Cache))
    length = cache.layers[0].keys.shape[-2]
    rows.append((type(cache).__name__, len(question), 9, length, hf.config.max_position_embeddings))
names = ["cache", "prompt", "output", "rows that its tensors have", "the model's longest context"]
print(lab.table(rows, names))

# %% [markdown]
# ## Beside the paper
#
# Kwon et al. (2023) say of OPT-13B in fp16: a token takes 800 KB, and 2,048 tokens up to 1.6 GB. Both must
# come out to the digits that are printed; KB means KiB there.
# %% [compare paper]
token = kv_bytes_per_token(opt, 16)
rows = [
    ("one token, KiB", 800.0, token / 1024, "exact"),
    ("2,048 tokens, GiB", 1.6, 2048 * token / GIB, "to one decimal"),
]
print(lab.table(rows, {"OPT-13B, fp16": None, "paper": ".1f", "ours": ".2f", "tolerance": None}))
