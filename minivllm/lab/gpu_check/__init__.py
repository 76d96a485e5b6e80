"""Above the chapters: one command that proves and measures the kernels and the engine on a GPU.

    python -m minivllm.lab.gpu_check --out DIR

Its parts, in this order; `--parts` chooses:

    kernels      each kernel against float64, in three dtypes, over shapes, in poisoned memory
    agreement    the engine's tokens with these kernels, beside those that recomputing gives
    decode       one query a sequence: bytes of keys and values a second, as a share of a copy's
    prefill      many queries: beside PyTorch's own attention over memory without blocks
    copy         copies of whole blocks, on the device and to and from pinned memory
    engine       output tokens a second, steps with CUDA graphs and without, Transformers beside it
    notebooks    the numbers of the notebooks of chapters 1 to 3, with the shape of a 7B model
    tuning       what the last kernel chooses, beside what it might choose; as long as there is time

It writes DIR/gpu_check.json after every part, and for each notebook a file of its own. These are kept in
`book/results/`. Each part runs in processes of its own, so that one that crashes or hangs takes nothing else
with it: it is recorded with its error. The exit code is 1 where a part failed or a result was wrong. A speed
below its target is only reported.

Without a GPU the same command runs in miniature and writes DIR/miniature.json, which holds no rate and no
target: its times are those of an interpreter, or of tiny sizes, and say nothing of a GPU. There the Triton
kernels need Triton's interpreter, that is, TRITON_INTERPRET=1 in the environment; without it they are left
out.
"""
