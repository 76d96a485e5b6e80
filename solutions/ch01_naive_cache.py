# %% [markdown]
# # 1. The naive KV cache: exercises
#
# Five small functions of the engine, each written by you. `course.check` raises until an answer is right and
# names the mistake where it knows it; then the real model runs on your code. A hint, one step at a time:
# `minivllm course hint 1.1`. The text is [chapter 1](../book/ch01_naive_cache.md).
# %%
# %matplotlib inline
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams, course
from minivllm.errors import OutOfMemory
from minivllm.lab import Recorder, draw_film_strip
from minivllm.memory import naive, naive_store, size
from minivllm.memory.naive_store import NaiveStore
from minivllm.memory.store import KVStore, RecomputeStore
from minivllm.model.attention import causal_attention
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.model.loader import load_model
from minivllm.model.presets import PRESETS
from minivllm.model.tokenizer import load_tokenizer

model = load_model("smollm2-135m", dtype="float32", device="cpu")
tokenizer = load_tokenizer("smollm2-135m")
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
llm = LLM(model, tokenizer=tokenizer, cache="naive", max_model_len=256, kv_cache_memory_bytes=2**22)
prompts = ["The capital of France is", "Water boils at", "The largest planet is"]
expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]

# %% [markdown]
# ## 1.1 Bytes a token
#
# What does one token leave in the KV cache, in all layers together? The config has `num_hidden_layers`,
# `hidden_size`, `num_attention_heads`, `num_key_value_heads` and `head_dim`; not all of them matter.
#
#     one layer, 2 KV heads, head_dim 4            key       value
#                                      head 0     x x x x    x x x x
#                                      head 1     x x x x    x x x x       16 numbers
#
# Three such layers keep 48 numbers, and at 16 bits each that is 96 bytes.
# %% [exercise 1.1]
...
# %% [check 1.1]
print(course.check("1.1", kv_bytes_per_token))
for name in ("llama-2-7b", "llama-3-8b", "qwen3-0.6b"):
    print(f"{name:12} {kv_bytes_per_token(PRESETS[name], 16):>9,} bytes a token in float16")
with course.use("1.1", kv_bytes_per_token):  # the engine's budget in slots, by your formula
    mine = LLM(model, tokenizer=tokenizer, cache="naive", max_model_len=256, kv_cache_memory_bytes=2**22)
    num_slots = mine.engine.manager.snapshot().num_slots
    assert num_slots == 2**22 // (4 * model.config.kv_elements_per_token)
print(f"4 MiB are {num_slots} slots of SmolLM2 in float32.")

# %% [markdown]
# ## 1.2 What growing copies
#
# A request has `prompt_len` tokens of prompt and gets `output_len` tokens. The first step puts the prompt's
# rows in memory. Each later step makes a tensor that is longer by one row and copies the old rows into it.
# How many old rows are copied in all? With a prompt of 3 and an output of 4:
#
#     step 1   in memory  p p p              copied 0     gives token 1
#     step 2              p p p 1            copied 3     gives token 2
#     step 3              p p p 1 2          copied 4     gives token 3
#     step 4              p p p 1 2 3        copied 5     gives token 4, which is never put in memory
#                                                   12
#
# A formula is wanted, though a sum is right too.
# %% [exercise 1.2]
...
# %% [check 1.2]
print(course.check("1.2", copied_by_joining))
rows, token = copied_by_joining(1, 2048), size.kv_bytes_per_token(PRESETS["llama-2-7b"], 16)
print(f"One token at a time to 2,048 rows, Llama-2-7B copies {rows:,} rows, {rows * token / 1e12:.1f} TB.")


# %% [markdown]
# ## 1.3 All or nothing
#
# The books of the naive cache: `self._tokens` maps a sequence's id to the tokens it has, `self._held` is
# the sum of them, and `self.can_allocate(seq_id, n)` is written already. With 10 slots:
#
#     allocate(5, 6)     {5: 6}             held 6
#     allocate(2, 3)     {5: 6, 2: 3}       held 9
#     allocate(5, 7)     {5: 7, 2: 3}       held 10     7 in all: one more
#     allocate(2, 4)     OutOfMemory        held 10     and nothing has changed
#     allocate(5, 4)     {5: 7, 2: 3}       held 10     it never shrinks
# %% [exercise 1.3]
class MyManager(naive.NaiveManager):
    """The books, with a method of your own."""

    ...


# %% [check 1.3]
print(course.check("1.3", MyManager))
with course.use("1.3", MyManager):
    recorder = llm.engine.on_step = Recorder(llm.engine.manager)
    outputs = llm.generate(prompts, params, use_tqdm=False)
llm.engine.on_step = None
assert [out.outputs[0].token_ids for out in outputs] == expected
steps = [0, 3, 7]
draw_film_strip([recorder.records[i].snapshot for i in steps], titles=[f"step {i}" for i in steps])


# %% [markdown]
# ## 1.4 A cache that grows
#
# The tensors of the naive cache. `self._kv` maps `(seq_id, layer)` to the pair (keys, values) that the
# sequence has from earlier steps; it is an empty dictionary at first. A batch packs the newest rows of
# several sequences:
#
#     k      [ a a a | b | c c ]          for seq_id, start, end, seq_len in batch:
#     rows     0 1 2   3   4 5                (7, 0, 3, 3), (4, 3, 4, 8), (9, 4, 6, 5)
#
#     kept   (7, layer): nothing yet      now: a a a
#            (4, layer): 7 rows                7 rows, then b
#            (9, layer): 3 rows                3 rows, then c c
#
# Join, keep, attend: `causal_attention(queries, keys, values, scale)` with the scale `q.shape[-1] ** -0.5`.
# Its rows go to the same places of the result. The engine uses the batch's memory again after the step.
# %% [exercise 1.4]
class MyStore(naive_store.NaiveStore):
    """The tensors, with a method of your own."""

    ...


# %% [check 1.4]
print(course.check("1.4", MyStore))
with course.use("1.4", MyStore):  # the real model, on your own attention memory
    outputs = llm.generate(prompts, params, use_tqdm=False)
for out, tokens in zip(outputs, expected, strict=True):
    print(f"{out.prompt!r} -> {out.outputs[0].text!r}")
    assert out.outputs[0].token_ids == tokens

# %% [markdown]
# ## 1.5 Only what memory does not have
#
# The decode loop. One number says where it stands: `num_computed`, how many of the tokens have their keys
# and values in memory. With a prompt of 3 on a store that keeps:
#
#     step     tokens given to the model     num_computed before, after
#     1        p p p                         0, 3
#     2        1                             3, 4
#     3        2                             4, 5
#
# On a store with `keeps_kv = False` each step brings all tokens, and `num_computed` is 0 again. The token
# with the highest logit is `int(model(batch, store).argmax())`.
# %% [exercise 1.5]
...
# %% [check 1.5]
print(course.check("1.5", greedy))
prompt = tokenizer.encode(prompts[0])
with_cache, without = (greedy(model, store, prompt, 8) for store in (NaiveStore(), RecomputeStore()))
assert with_cache == without == expected[0]
print(repr(tokenizer.decode(with_cache)))
