"""Above the chapters: the checks of chapter 0: a reader's answers against plain models."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from minivllm.course.checking import CheckFailed, expect
from minivllm.course.checks.ch00_decoding import check_0_4, check_0_5
from minivllm.course.checks.ch00_tensors import check_0_2, check_0_3
from minivllm.lab.intensity import StepCost
from minivllm.model.batch import SequenceSlice
from minivllm.model.config import ModelConfig

__all__ = ["EQUIVALENT", "check_0_1", "check_0_2", "check_0_3", "check_0_4", "check_0_5", "check_0_6"]

# (exercise, what was changed, as the gate prints it) -> why the changed answer is as right as the first
EQUIVALENT: dict[tuple[str, str], str] = {
    ("0.3", "line 18: 'query_len > 1', change 1"): "a lone query sees everything: the mask closes nothing",
    ("0.3", "line 18: '1', change 2"): "the same: with query_len 1 the mask closes nothing",
    ("0.4", "line 9: '-1', change 1"): "of two axes, 1 and -1 are the same",
    ("0.4", "line 11: '-1', change 1"): "of two axes, 1 and -1 are the same",
    ("0.4", "line 12: '-1', change 1"): "of two axes, 1 and -1 are the same",
    ("0.5", "line 14: '0', change 2"): "a slice that ends one beyond the text ends with the text",
    ("0.5", "line 17: 'return None', change 1"): "None for None",
}


def check_0_1(lay_out: Callable[..., Any]) -> None:
    """Sequences of any length, with any number of tokens in memory, under ids in any order."""
    random = Random(1)
    for num_seqs in (3, 1, 2, 5, 7):
        for _ in range(8):
            ids = random.sample(range(50), num_seqs)
            sequences = [
                (i, [random.randrange(100, 999) for _ in range(random.randint(1, 6))], random.randint(0, 9))
                for i in ids
            ]
            _check_row(lay_out, sequences)


def _check_row(lay_out: Callable[..., Any], sequences: list[tuple[int, list[int], int]]) -> None:
    tokens = [token for _, new, _ in sequences for token in new]
    ends = [sum(len(new) for _, new, _ in sequences[: i + 1]) for i in range(len(sequences))]
    spans = [(end - len(new), end) for end, (_, new, _) in zip(ends, sequences, strict=True)]
    what = f"lay_out({sequences})"
    given = [(i, list(new), computed) for i, new, computed in sequences]
    got = lay_out(given)
    if given != sequences:
        raise CheckFailed(f"{what}: an input was changed to {given}. Copy what you add to.")
    if not isinstance(got, tuple) or len(got) != 3:
        raise CheckFailed(f"{what}: expected (token ids, positions, slices), got {got!r}.")
    for name, numbers in (("token ids", got[0]), ("positions", got[1])):
        if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
            raise CheckFailed(f"the {name} of {what}: expected a list of ints, got {numbers!r}.")
    if not isinstance(got[2], list):
        raise CheckFailed(f"the slices of {what}: expected a list, got {got[2]!r}.")
    expect(f"the token ids of {what}", got[0], tokens)
    expect(
        f"the positions of {what}",
        got[1],
        [computed + j for _, new, computed in sequences for j in range(len(new))],
        {
            "the tokens that are in memory already are not counted": (
                [j for _, new, _ in sequences for j in range(len(new))],
            ),
            "positions go on over the row; each sequence counts its own": (
                list(range(len(tokens))),
                [
                    row + computed
                    for (_, _, computed), (start, end) in zip(sequences, spans, strict=True)
                    for row in range(start, end)
                ],
            ),
            "positions count from 1; the first token stands at 0": (
                [computed + j + 1 for _, new, computed in sequences for j in range(len(new))],
            ),
        },
    )
    parts = list(zip(sequences, spans, strict=True))

    def slices(part: Callable[..., tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        return [part(i, start, end, len(new), computed) for (i, new, computed), (start, end) in parts]

    expect(
        f"the slices (seq_id, start, end, seq_len) of {what}",
        [tuple(s) for s in got[2]],
        slices(lambda i, start, end, new, computed: (i, start, end, computed + new)),
        {
            "seq_len counts the new tokens alone; those in memory belong to the sequence too": (
                slices(lambda i, start, end, new, computed: (i, start, end, new)),
            ),
            "seq_len counts the tokens in memory alone; the new ones belong to the sequence too": (
                slices(lambda i, start, end, new, computed: (i, start, end, computed)),
            ),
            "start and end are positions in the sequence, and rows of the batch are wanted": (
                slices(lambda i, start, end, new, computed: (i, computed, computed + new, computed + new)),
            ),
            "the last row is taken for the end; the end is not included": (
                slices(lambda i, start, end, new, computed: (i, start, end - 1, computed + new)),
            ),
            "the place in the batch is taken for the sequence's id": (
                [
                    (n, start, end, computed + len(new))
                    for n, ((_, new, computed), (start, end)) in enumerate(parts)
                ],
            ),
        },
    )
    if not all(isinstance(s, SequenceSlice) for s in got[2]):
        raise CheckFailed(f"the slices of {what}: expected SequenceSlice, got {got[2]!r}.")
    if not all(type(n) is int for s in got[2] for n in s):
        raise CheckFailed(f"the slices of {what}: expected ints, got {got[2]!r}.")


def check_0_6(step_cost: Callable[..., Any]) -> None:
    """Shapes in which no two sizes are equal, counted layer by layer and token by token."""
    random = Random(6)
    for layers, heads, kv_heads, head_dim, hidden, inner, vocab in (
        (1, 2, 1, 4, 10, 14, 17),
        (3, 6, 2, 10, 28, 52, 101),
        (2, 15, 5, 6, 34, 44, 67),
    ):
        config = ModelConfig("llama", vocab, hidden, inner, layers, heads, kv_heads, head_dim, 999)
        for num_seqs in (1, 2, 5):
            for size in (2, 4):
                work = [(random.choice([1, 1, 3, 8]), random.choice([0, 4, 21])) for _ in range(num_seqs)]
                _check_cost(step_cost, config, work, size)


def _check_cost(
    step_cost: Callable[..., Any], config: ModelConfig, work: list[tuple[int, int]], size: int
) -> None:
    c = config
    layer = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    layer += 3 * c.hidden_size * c.intermediate_size
    matrices, output = c.num_hidden_layers * layer, c.hidden_size * c.vocab_size

    def flops(
        outputs: int = len(work), width: int = c.num_attention_heads * c.head_dim, by: int = 4, old: int = 1
    ) -> int:
        total = 2 * outputs * output
        for new, computed in work:
            for _ in range(new):
                total += 2 * matrices + by * c.num_hidden_layers * width * (new + old * computed)
        return total

    new_tokens = sum(new for new, _ in work)
    tokens = new_tokens + sum(computed for _, computed in work)
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    what = f"step_cost({config}, {work}, {size})"
    given = list(work)
    got = step_cost(config, given, size)
    if given != work:
        raise CheckFailed(f"{what}: work was changed to {given}; the caller needs it as it was.")
    if not isinstance(got, StepCost):
        raise CheckFailed(f"{what}: expected a StepCost, got {got!r}.")
    expect(
        f"flops of {what}",
        got.flops,
        flops(),
        {
            "every token goes through the output matrix; only the last of each sequence does": (
                flops(outputs=new_tokens),
            ),
            "the output matrix is used once; each sequence's last token needs it": (flops(outputs=1),),
            "the output matrix is left out": (flops(outputs=0),),
            "a multiplication and its addition are counted as one; they are two": (flops() // 2,),
            "attention looks at the new tokens alone; those in memory belong to the sequence too": (
                flops(old=0),
            ),
            "attention is counted by KV heads; every query head computes scores of its own": (
                flops(width=c.num_key_value_heads * c.head_dim),
            ),
            "hidden_size stands where heads x head_dim is meant; they need not be equal": (
                flops(width=c.hidden_size),
            ),
            "attention is two products, scores and values, each of 2 FLOPs": (flops(by=2),),
            "attention is left out": (flops(by=0),),
        },
    )

    def num_bytes(weights: int = matrices + output, of: int = tokens, each: int = kv) -> int:
        return size * (weights + of * each)

    expect(
        f"num_bytes of {what}",
        got.num_bytes,
        num_bytes(),
        {
            "the weights are read for each sequence; a step reads them once for all": (
                num_bytes(len(work) * (matrices + output)),
                num_bytes(len(work) * matrices + output),
            ),
            "the weights are read for each token; a step reads them once for all": (
                num_bytes(new_tokens * (matrices + output)),
            ),
            "keys and values of the new tokens are left out; they are written": (
                num_bytes(of=tokens - new_tokens),
            ),
            "keys and values in memory are left out; a step reads them": (num_bytes(of=new_tokens),),
            "keys and values are left out": (num_bytes(of=0),),
            "the output matrix is left out": (num_bytes(matrices),),
            "elements are counted, and bytes are wanted": (num_bytes() // size,),
        },
    )
