"""Above the chapters: the checks of chapter 1: a reader's answers against plain models."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from minivllm.course.checking import CheckFailed, expect
from minivllm.course.checks.ch01_attend import check_1_4 as check_1_4
from minivllm.course.checks.ch01_decode import check_1_5 as check_1_5
from minivllm.errors import OutOfMemory
from minivllm.memory.naive import NaiveManager
from minivllm.model.config import ModelConfig

# (exercise, what was changed, as `make gate` prints it) -> why the changed answer is as right as the first
EQUIVALENT: dict[tuple[str, str], str] = {}


def check_1_1(kv_bytes_per_token: Callable[..., Any]) -> None:
    """Shapes in which no two sizes are equal, at 4, 8, 16 and 32 bits."""
    random = Random(11)
    for _ in range(30):
        kv_heads, group = random.choice([1, 2, 3, 5, 8]), random.choice([2, 3, 7])
        heads, layers, head_dim = kv_heads * group, random.randint(5, 90), random.choice([14, 64, 80, 128])
        hidden = heads * random.choice([10, 36, 100])
        config = _config(layers, hidden, heads, kv_heads, head_dim)
        bits = random.choice([4, 8, 16, 32])
        what = (
            f"{layers} layers, hidden_size {hidden}, {heads} query heads, {kv_heads} KV heads, "
            f"head_dim {head_dim}, {bits} bits a number: bytes a token"
        )
        right = 2 * layers * kv_heads * head_dim * bits // 8
        mistakes = {
            "head_dim was taken as hidden_size / num_attention_heads; the config states it": (
                2 * layers * kv_heads * (hidden // heads) * bits // 8,
            ),
            "query heads were counted; only the KV heads leave anything in the cache": (
                2 * layers * heads * head_dim * bits // 8,
                2 * layers * hidden * bits // 8,
            ),
            "bits // 8 came first, and of 4 bits that is 0: multiply first, then // 8": (
                2 * layers * kv_heads * head_dim * (bits // 8),
            ),
            "the factor 2 is missing: a key and a value": (right // 2,),
            "these are bits; a byte has 8 of them": (right * 8,),
            "the layers are missing: each has keys and values of its own": (right // layers,),
        }
        expect(what, kv_bytes_per_token(config, bits), right, mistakes)


def _config(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=311,
        hidden_size=hidden,
        intermediate_size=97,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
    )


def check_1_2(copied_by_joining: Callable[..., Any]) -> None:
    """Small lengths against a sum, row by row; then long ones."""
    random = Random(12)
    cases = [(7, 5), (1, 1), (7, 1), (1, 2), (5, 2)]  # the first tells all mistakes apart
    cases += [(random.randint(2, 40), random.randint(3, 40)) for _ in range(20)]
    for prompt_len, output_len in [*cases, (1000, 3001), (2**20, 1001)]:
        old = [prompt_len + i for i in range(output_len - 1)]
        expect(
            f"copied_by_joining({prompt_len}, {output_len})",
            copied_by_joining(prompt_len, output_len),
            sum(old),
            {
                "one join too many was counted: the last token of the output is never put in memory": (
                    sum(old) + prompt_len + output_len - 1,
                ),
                "the new rows were counted too; they are not copied from the old tensor": (
                    sum(old) + len(old),
                ),
                "the first step was counted as a copy; it has no old rows": (
                    sum(old) + sum(range(prompt_len)),
                    sum(old) + prompt_len,
                ),
                "each join was counted as a copy of the prompt alone; the tensor grows": (
                    prompt_len * len(old),
                ),
                "the prompt's rows were left out; every join copies them too": (sum(range(len(old))),),
                "a join was counted as one row; it copies all rows that are there": (len(old),),
            },
        )


def check_1_3(answer: type[NaiveManager]) -> None:
    """Against a dictionary of token counts, up to a full memory and beyond it."""
    random = Random(13)
    for num_slots in (1, 5, 13, 40):
        manager = answer(num_slots, 3)
        tokens: dict[int, int] = {}
        for _ in range(80):
            seq_id, n = random.choice([3, 11, 6]), random.randint(1, num_slots + 2)
            if random.random() < 0.2:
                manager.free(seq_id)
                tokens.pop(seq_id, None)
                continue
            before, free = tokens.get(seq_id, 0), num_slots - sum(tokens.values())
            what = f"allocate({seq_id}, {n}) with {tokens or 'nothing'} in {num_slots} slots"
            if n - before > free:
                _refused(what, manager, seq_id, n, tokens)
            else:
                got = _allocated(what, manager, seq_id, n)
                expect(f"{what}: returns", got, None)
                tokens[seq_id] = max(before, n)
                _expect_books(what, manager, tokens, before, n, seq_id)


def _allocated(what: str, manager: NaiveManager, seq_id: int, n: int) -> Any:
    try:
        return manager.allocate(seq_id, n)
    except OutOfMemory as error:
        raise CheckFailed(f"{what}: it fits, and was refused: {error}") from error


def _refused(what: str, manager: NaiveManager, seq_id: int, n: int, tokens: dict[int, int]) -> None:
    before = manager.snapshot()
    try:
        manager.allocate(seq_id, n)
    except OutOfMemory:
        if manager.snapshot() != before:
            raise CheckFailed(
                f"{what}: refused, but the books changed to {_books(manager)} before the refusal; "
                "all or nothing."
            ) from None
    else:
        raise CheckFailed(
            f"{what}: expected OutOfMemory, got {_books(manager)}. What cannot be done must be refused."
        )
    _expect_books(what, manager, tokens, 0, 0, seq_id)


def _expect_books(
    what: str, manager: NaiveManager, tokens: dict[int, int], before: int, n: int, seq_id: int
) -> None:
    expect(
        f"{what}: tokens of each sequence",
        _books(manager),
        tokens,
        {
            "the sequence shrank; what it has stays until it is freed": [{**tokens, seq_id: n}],
            "n was added; it is what the sequence is to have in all": [{**tokens, seq_id: before + n}],
        },
    )
    try:
        manager.check_integrity()
    except AssertionError as error:
        raise CheckFailed(
            f"{what}: the tokens are right, but self._held is no longer their sum; "
            "it must grow by what is new."
        ) from error


def _books(manager: NaiveManager) -> dict[int, int]:
    return {s.seq_id: s.held for s in manager.snapshot().sequences}
