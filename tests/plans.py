"""Plans that can be read: a scheduler run without tensors, one word for each part of a step.

0+5 1.1+1 -2 out3 in1 copy1     request 0 computes 5 tokens, answer 1 of request 1 one; request 2 gives
                                way; 3 blocks are swapped out, 1 in, 1 is copied
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from minivllm.params import SamplingParams
from minivllm.scheduling.continuous import ContinuousScheduler
from minivllm.scheduling.plan import SchedulerOutput
from minivllm.scheduling.request import Request


def request(i: int, prompt_len: int, max_tokens: int, n: int = 1, **more) -> Request:
    """A request whose prompt no other has; prompt=...: this one."""
    prompt = more.pop("prompt", None) or [1000 * i + j for j in range(prompt_len)]
    return Request(i, prompt, SamplingParams(n=n, temperature=1, seed=0, max_tokens=max_tokens), **more)


def token_after(tokens: Tokens[int], index: int) -> int:
    """A model: the next token depends on all before it, so that a lost or doubled one shows."""
    return hash((*tokens, index)) % 9973


def words(plan: SchedulerOutput) -> str:
    """A plan in words."""
    found = []
    for part in plan.scheduled:
        branch = f".{part.sequence.index}" if part.request.width > 1 else ""
        found.append(f"{part.request.request_id}{branch}+{part.num_new_tokens}")
    found += [f"-{r.request_id}" for r in plan.preempted]
    moves = {"out": plan.swap_out, "in": plan.swap_in, "copy": plan.block_copies}
    return " ".join(found + [f"{name}{len(pairs)}" for name, pairs in moves.items() if pairs])


def step(scheduler: ContinuousScheduler) -> str:
    """One step, in words."""
    plan = scheduler.schedule()
    samples = [sequence for part in plan.scheduled for sequence in part.samples]
    scheduler.update(plan, {s.seq_id: token_after(s.token_ids, s.index) for s in samples})
    scheduler.manager.check_integrity()
    return words(plan)


def steps(scheduler: ContinuousScheduler) -> list[str]:
    """All steps to the end."""
    found = []
    while scheduler.has_unfinished():
        found.append(step(scheduler))
        assert len(found) < 1000, "it spins"
    return found


def is_right(r: Request) -> bool:
    """Whether all answers are those that each would get alone: no token is lost, none comes twice."""
    for sequence in r.sequences:
        tokens = list(r.prompt_token_ids)
        for _ in range(r.max_tokens):
            tokens.append(token_after(tokens, sequence.index))
        if list(sequence.token_ids) != tokens:
            return False
    return True
