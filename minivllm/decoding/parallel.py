"""Chapter 4: parallel sampling: several continuations of one prompt, which is computed and kept once.

The prompt is computed by one sequence. Its one row of logits gives the first token of every sample, each
drawn with a seed of its own; only then do the branches part. Full blocks of the prompt are shared to the
end; its last block, if filled in part, is copied by all samples but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from minivllm.decoding.branches import Branches
from minivllm.decoding.generate import check_params, check_prompt
from minivllm.decoding.penalties import adjust
from minivllm.decoding.sampler import sample
from minivllm.decoding.stopping import finish_reason
from minivllm.errors import InvalidOption
from minivllm.memory.sharing import SharingManager
from minivllm.memory.sharing_store import SharingStore
from minivllm.model.decoder import Decoder
from minivllm.outputs import SharingReport
from minivllm.params import SamplingParams


@torch.inference_mode()
def parallel_sample(
    model: Decoder,
    store: SharingStore,
    manager: SharingManager,
    prompt: Sequence[int],
    params: SamplingParams,
    seq_id: int = 0,
) -> tuple[list[list[int]], SharingReport]:
    """The token ids of params.n continuations, and what sharing saved. Sample i draws with params.seed + i.

    So it is what `decoding/generate.py` gives with that seed. Raises InvalidPrompt, InvalidOption,
    OutOfBlocks. The memory lets go of all at the end.
    """
    check_prompt(prompt, model.config)
    check_params(params, model.config)
    if params.stop or params.logprobs is not None:
        raise InvalidOption("This loop gives token ids only; for stop and logprobs use LLM.")
    eos, max_tokens = model.config.eos_token_ids, model.config.max_position_embeddings - len(prompt)
    generators = [Random(None if params.seed is None else params.seed + i) for i in range(params.n)]
    outputs: list[list[int]] = [[] for _ in generators]
    # The samples that go on, and the branch that each stands in: at first all in the prompt's.
    running, rows = list(range(params.n)), [0] * params.n
    branches = Branches(model, store, manager, prompt, seq_id)
    try:
        while running:
            own, past = [params] * len(running), [outputs[i] for i in running]
            logits = adjust(branches.step()[rows], own, [prompt] * len(running), past, eos)
            for i, token in zip(running, sample(logits, own, [generators[i] for i in running]), strict=True):
                outputs[i].append(token)
            going = [
                (i, row)
                for i, row in zip(running, rows, strict=True)
                if not finish_reason(outputs[i], params, eos, min(params.max_tokens, max_tokens))
            ]
            branches.become([(row, outputs[i][-1]) for i, row in going])
            running, rows = [i for i, _ in going], list(range(len(going)))
    finally:
        branches.free()
    return outputs, branches.report
