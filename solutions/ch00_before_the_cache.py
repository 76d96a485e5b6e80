# %% [markdown]
# # 0. Before the cache: exercises
#
# Six exercises, from token ids to FLOPs. Each asks for one function; its text tells you all that you need.
# Put your code in the place of the `raise`, run the cell, then the check below it. The check says what it
# expected and what came, and where it knows the mistake, its name. `minivllm course hint 0.1` gives hints
# in three steps.
#
# The model runs without a cache here: each step computes the whole text anew.
# %%
# %matplotlib inline
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams, course
from minivllm.decoding import stopping
from minivllm.decoding.stopping import longest_beginning
from minivllm.lab import table
from minivllm.lab.draw_tokens import draw_attention, draw_sampling
from minivllm.lab.intensity import StepCost, matrix_elements
from minivllm.memory.store import RecomputeStore
from minivllm.model.batch import Batch, SequenceSlice
from minivllm.model.config import ModelConfig
from minivllm.model.presets import PRESETS
from minivllm.model.rope import rotary_table

llm = LLM("smollm2-135m", cache="recompute", dtype="float32", device="cpu", enforce_eager=True)
tokenizer = llm.get_tokenizer()
PROMPTS = ["The capital of France is", "The opposite of hot is"]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
expected = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def tokens_now() -> list[list[int]]:
    """What the engine gives at this moment, with whatever code it has."""
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


# %% [markdown]
# ## 0.1 Pack sequences into one row
#
# A step computes several sequences at once. Their new tokens stand in one row, without padding. Three
# sequences:
#
#     (seq_id, new token ids, tokens in memory)
#     (7, [11, 12, 13], 0)     new: it brings its prompt
#     (4, [21],         6)     6 tokens are in memory, one is new
#     (9, [31, 32],     3)
#
#     row          0   1   2   3   4   5
#     token ids    11  12  13  21  31  32
#     positions    0   1   2   6   3   4
#     slices       (7, 0, 3, 3)  (4, 3, 4, 7)  (9, 4, 6, 5)      (seq_id, start, end, seq_len)
#
# Write `lay_out`, which returns `(token_ids, positions, slices)`: two lists of numbers and a list of
# `SequenceSlice(seq_id, start, end, seq_len)`.
# %% [exercise 0.1]
...
# %% [check 0.1]
print(course.check("0.1", lay_out))
print(lay_out([(7, [11, 12, 13], 0), (4, [21], 6), (9, [31, 32], 3)]))
with course.use("0.1", lay_out):
    assert tokens_now() == expected
    print("The real model, packed by your code, gives the same tokens.")
# %% [markdown]
# ## 0.2 Turn a pair by its angle
#
# RoPE takes the numbers of a head in pairs and turns each pair by an angle that grows with the position.
# Number i goes with number i + head_dim / 2, not with its neighbour:
#
#     head_dim 6     x0  x1  x2 | x3  x4  x5         pairs (x0, x3), (x1, x4), (x2, x5)
#
#     (a, b) turned by the angle t:  (a cos t - b sin t,  b cos t + a sin t)
#
# By a quarter turn (cos 0, sin 1) the pair (1, 2) becomes (-2, 1). `cos` and `sin` have one number for each
# token and pair, `[num_tokens, 1, head_dim / 2]`; `x` is `[num_tokens, num_heads, head_dim]`.
# %% [exercise 0.2]
...
# %% [check 0.2]
print(course.check("0.2", apply_rotary))
head_dim, inv_freq = llm.engine.model.config.head_dim, llm.engine.model.inv_freq
q, k = torch.randn(2, 1, 1, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
turn = {p: rotary_table(torch.tensor([p]), inv_freq, 1.0, torch.float64) for p in (0, 3, 500, 503)}
for key, query in ((0, 3), (500, 503)):
    score = (apply_rotary(q, *turn[query]) * apply_rotary(k, *turn[key])).sum()
    print(f"key at {key}, query at {query}: {score:.4f}")
with course.use("0.2", apply_rotary):
    assert tokens_now() == expected
    print("Only the distance counts, and the real model gives the same tokens.")
# %% [markdown]
# ## 0.3 Causal attention with grouped heads
#
# The queries are the last query_len of seq_len positions: the tokens before them are in memory already.
# With seq_len 5 and query_len 2, query 0 stands at position 3:
#
#     position     0  1  2  3  4
#     query 0      x  x  x  x  .        x: it sees the position
#     query 1      x  x  x  x  x
#
# Each query head uses the KV head of its group; neighbouring query heads share one. With 6 query heads and
# 2 KV heads, query heads 0, 1, 2 use KV head 0, and 3, 4, 5 use KV head 1.
#
# For each query and head: scores = scale times (query . key) over the positions it sees, softmax over them,
# and the sum of the values weighted by that. The package's answer folds the heads of a group into one
# matrix product; yours may repeat the KV heads, or loop.
# %% [exercise 0.3]
...
# %% [check 0.3]
print(course.check("0.3", causal_attention))
with course.use("0.3", causal_attention):
    assert tokens_now() == expected
    print("The real model attends with your code and gives the same tokens.")
# a key of its own for each position, so that the output of a query is its weights
eye = torch.eye(5, dtype=torch.float64)[:, None]
weights = causal_attention(eye[3:], eye, eye, 1.0)[:, 0]
draw_attention(weights.tolist(), [f"position {i}" for i in range(5)], title="Two queries with history")
# %% [markdown]
# ## 0.4 Cut the tail of a distribution
#
# A row of probabilities, from high to low. Three cuts set its tail to 0:
#
#     probability     0.55  0.25  0.12  0.05  0.03
#     min_p=0.2       keep  keep  keep  -     -         at least 0.2 x 0.55
#     top_k=3         keep  keep  keep  -     -         the first three
#     top_p=0.75      keep  keep  -     -     -         what stands before it sums to less than 0.75
#
# top-p comes last and counts on what the others have left: after top_k=2, 0.80 is left, and top_p=0.75
# means 0.60. The first token always stays. What is kept is not scaled up.
#
# `probs` is `[num_seqs, vocab_size]`; each row has its own `top_k`, `top_p` and `min_p`, each `[num_seqs,
# 1]`.
# %% [exercise 0.4]
...
# %% [check 0.4]
print(course.check("0.4", cut_tail))
row = torch.tensor([[0.55, 0.25, 0.12, 0.05, 0.03]], dtype=torch.float64)
cuts = {"top_k=3": (3, 1.0, 0.0), "top_p=0.75": (5, 0.75, 0.0), "min_p=0.2": (5, 1.0, 0.2)}
kept = {name: cut_tail(row, *(torch.tensor([[c]]) for c in cut))[0] for name, cut in cuts.items()}
drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6)
theirs = llm.generate(PROMPTS[0], drawn, use_tqdm=False)[0].outputs[0].text
with course.use("0.4", cut_tail):
    assert llm.generate(PROMPTS[0], drawn, use_tqdm=False)[0].outputs[0].text == theirs
    print("The same seed draws the same text:", repr(theirs))
draw_sampling(
    dict.fromkeys(cuts, row[0].tolist()),
    ["the", "a", "my", "one", "his"],
    kept={name: int((p > 0).sum()) for name, p in kept.items()},
)


# %% [markdown]
# ## 0.5 A stop string over two tokens
#
# A stop string may begin in one piece of text and end in another. What could be its beginning must not be
# shown before it is certain. With the stop string "END":
#
#     piece        text shown       held      returned
#     "The E"      "The "           "E"       None
#     "N"          "The "           "EN"      None
#     "JOY"        "The ENJOY"      ""        None
#     " END."      "The ENJOY "     ""        "END"      the text ends before it; what follows is dropped
#
# Write `add`. `self.stop` has the stop strings, `self.text` what may be shown, `self.held` what is held
# back. `longest_beginning(text, stop)` is given: how many characters at the end of the text could begin a
# stop string.
# %% [exercise 0.5]
class MyStopStrings(stopping.StopStrings):
    """The checker, with a method of your own."""

    ...


# %% [check 0.5]
print(course.check("0.5", MyStopStrings))
checker, rows = MyStopStrings(["END"]), []
for piece in ("The E", "N", "JOY", " END."):
    returned = checker.add(piece)
    rows.append((repr(piece), repr(checker.text), repr(checker.held), repr(returned)))
print(table(rows, ["piece", "text shown", "held", "returned"]))
question = "Question: What is two plus two?\nAnswer: Four.\n\nQuestion: What color is the sky?\nAnswer:"
with course.use("0.5", MyStopStrings):
    output = llm.generate(question, SamplingParams(temperature=0, stop="\n\n"), use_tqdm=False)[0].outputs[0]
assert (output.text, output.finish_reason) == (" Blue.", "stop")
print("The real model stops:", repr(output.text))
# %% [markdown]
# ## 0.6 What a step computes and moves
#
# `work` has (new tokens, tokens in memory) for each sequence of a step. Count, for a decoder of this shape:
#
#     FLOPs    2 for each new token and each element of the layers' matrices: matrix_elements(config)
#              2 for each SEQUENCE and each element of the output matrix, hidden_size x vocab_size
#              4 for each layer, query head, element of head_dim, and pair of a new token and a token of
#                its sequence (2 for the score, 2 for the value); a sequence has new x (new + computed) pairs
#     bytes    the layers' matrices and the output matrix, ONCE for the whole step
#              the keys and values of all tokens, old and new: config.kv_elements_per_token each
#
# Masked pairs count: the attention of this book computes them. A toy: 1 layer, 2 heads of 4, 1 KV head,
# hidden 10, inner 14, vocabulary 17; one sequence with 3 new tokens and 2 in memory; 2 bytes an element.
# Its layer has 10 x 4 x (2 + 2 + 2) + 3 x 10 x 14 = 660 elements. FLOPs: 2 x 3 x 660 + 2 x 170 + 4 x 8 x (3
# x 5) = 4,780. Bytes: 2 x (660 + 170 + 8 x 5) = 1,740. Return `StepCost(flops, num_bytes)`.
# %% [exercise 0.6]
...
# %% [check 0.6]
print(course.check("0.6", step_cost))
print(step_cost(ModelConfig("llama", 17, 10, 14, 1, 2, 1, 4, 99), [(3, 2)], 2))
llama = PRESETS["llama-3-8b"]
steps = {"prefill of 2,048": [(2048, 0)]} | {f"decode, batch {b}": [(1, 1023)] * b for b in (1, 64)}
costs = [(name, step_cost(llama, work, 2)) for name, work in steps.items()]
rows = [(name, c.flops / 1e9, c.num_bytes / 1e9, c.intensity) for name, c in costs]
print(table(rows, {"Llama-3-8B": None, "GFLOP": ",.1f", "GB": ".2f", "FLOP/byte": ",.1f"}))
