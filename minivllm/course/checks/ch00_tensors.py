"""Above the chapters: the checks of chapter 0: answers that take and give tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.course.checking import CheckFailed


def check_0_2(apply_rotary: Callable[..., Any]) -> None:
    """Every pair against its own turn in the complex plane."""
    generator = torch.Generator().manual_seed(2)
    earlier: list[Tensor] = []
    for num_tokens, num_heads, head_dim, dtype in (
        (1, 1, 2, torch.float64),
        (3, 2, 6, torch.float64),
        (3, 2, 6, torch.float64),  # the same shape, other numbers
        (5, 3, 14, torch.float64),
        (2, 7, 10, torch.float64),
        (4, 3, 8, torch.float32),
    ):
        x = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=dtype)
        angles = torch.rand(num_tokens, 1, head_dim // 2, generator=generator, dtype=dtype) * 6
        cos, sin = 1.1 * angles.cos(), 1.1 * angles.sin()
        half = head_dim // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
        back = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, -sin)
        neighbours = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.complex(cos, sin)
        added = x[..., :half] * cos + x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        expect_close(
            f"apply_rotary of {num_tokens} tokens, {num_heads} heads, head_dim {head_dim}",
            apply_rotary,
            (x, cos, sin),
            expected,
            {
                "this is the result of an earlier call; the shape is the same, the numbers are not": earlier,
                "neighbours (0, 1), (2, 3), ... are paired; here i goes with i + head_dim / 2": [
                    torch.stack((neighbours.real, neighbours.imag), dim=-1).flatten(-2),
                    torch.cat((neighbours.real, neighbours.imag), dim=-1),
                ],
                "the pairs are turned the other way": [torch.cat((back.real, back.imag), dim=-1)],
                "the halves have changed places": [torch.cat((turned.imag, turned.real), dim=-1)],
                "a sign is wrong: a turn takes a cos MINUS b sin": [torch.cat(added, dim=-1)],
                "the numbers of a pair stand beside each other; each belongs back in its own half": [
                    torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)
                ],
            },
        )
        earlier = [expected]


def check_0_3(causal_attention: Callable[..., Any]) -> None:
    """Query by query, head by head, in plain loops; with history and without, groups of any size."""
    for seed, shape in enumerate(
        ((1, 0, 1, 1, 4), (4, 0, 1, 1, 6), (1, 5, 2, 3, 4), (3, 4, 3, 2, 2), (5, 2, 2, 3, 6), (2, 3, 1, 5, 4),
         (2, 0, 3, 1, 8))
    ):  # fmt: skip
        _check_attention(causal_attention, *shape, torch.Generator().manual_seed(seed))
    _check_large_scores(causal_attention)


def _check_attention(
    causal_attention: Callable[..., Any],
    query_len: int,
    history: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    generator: torch.Generator,
) -> None:
    seq_len, heads, scale = query_len + history, kv_heads * group, 0.7
    q, k, v = (
        torch.randn(n, h, head_dim, generator=generator, dtype=torch.float64)
        for n, h in ((query_len, heads), (seq_len, kv_heads), (seq_len, kv_heads))
    )

    def plain(
        sees: Callable[[int], int] = lambda i: history + i + 1,
        kv_head: Callable[[int], int] = lambda h: h // group,
        by: float = scale,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for i in range(query_len):
            for h in range(heads):
                keys, values = k[: sees(i), kv_head(h)], v[: sees(i), kv_head(h)]
                weights = (keys @ q[i, h] * by).exp()
                out[i, h] = weights @ values / weights.sum()
        return out

    expect_close(
        f"causal_attention with query_len {query_len}, seq_len {seq_len}, {heads} heads, {kv_heads} KV heads",
        causal_attention,
        (q, k, v, scale),
        plain(),
        {
            "nothing is masked: a query sees tokens that come after it": [plain(lambda i: seq_len)],
            "query i is taken to stand at position i; before it stands the history": [plain(lambda i: i + 1)],
            "the mask closes the query's own position too": [plain(lambda i: max(1, history + i))],
            "the mask is open for one token too many": [plain(lambda i: min(seq_len, history + i + 2))],
            "the query heads are dealt out in turn; neighbouring query heads share a KV head": [
                plain(kv_head=lambda h: h % kv_heads)
            ],
            "the scores are not scaled": [plain(by=1.0)],
            "the scale is computed anew and the one given is not used": [plain(by=head_dim**-0.5)],
            "the scale is taken twice": [plain(by=scale**2)],
        },
    )


def _check_large_scores(causal_attention: Callable[..., Any]) -> None:
    """Scores from -800 to 800 in float32: exp of them is 0 or inf, and what is masked has the highest."""
    scores = torch.tensor([-800.0, -799.0, -800.0, -799.5, 800.0])
    query_len, seq_len, scale = 3, 5, 0.5
    q = torch.ones(query_len, 1, 2)
    k = torch.stack((scores, scores), dim=-1)[:, None]  # times a query of ones and the scale: the scores
    v = torch.randn(seq_len, 1, 2, generator=torch.Generator().manual_seed(8))
    future = torch.ones(query_len, seq_len, dtype=torch.bool).triu(seq_len - query_len + 1)
    rows = scores.double().expand(query_len, seq_len)

    def weighted(masked: Tensor) -> Tensor:
        return (masked.softmax(dim=-1) @ v[:, 0].double()).float()[:, None]

    expect_close(
        f"causal_attention in float32, query_len {query_len}, seq_len {seq_len}, scores {scores.tolist()}",
        causal_attention,
        (q, k, v, scale),
        weighted(rows.masked_fill(future, -torch.inf)),
        {
            "exp is taken of the scores as they are; take the highest of a row off first, as softmax does": [
                weighted(rows * torch.nan),
            ],
            "what is masked has a score like -50, and a score may be lower; -inf is lower than all": [
                weighted(rows.masked_fill(future, -50.0)),
                weighted(rows - 50.0 * future),
            ],
        },
    )


def expect_close(
    what: str,
    answer: Callable[..., Any],
    arguments: Sequence[Any],
    expected: Tensor,
    mistakes: Mapping[str, Sequence[Tensor]],
) -> None:
    """Call the answer on copies; raises CheckFailed where it changes them, or gives another tensor."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    got = answer(*copies)
    for before, after in zip(arguments, copies, strict=True):
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise CheckFailed(
                f"{what}: an input was changed. Compute a new tensor; the caller needs the old."
            )
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else repr(got)
        raise CheckFailed(f"{what}: expected a tensor of shape {tuple(expected.shape)}, got {shape}.")
    if _close(got, expected) and got.dtype != expected.dtype:
        raise CheckFailed(f"{what}: expected {expected.dtype}, as the inputs are, got {got.dtype}.")
    if _close(got, expected):
        return
    message = f"{what}: expected {_short(expected)}, got {_short(got)}."
    for mistake, would_give in mistakes.items():
        if any(_close(got, wrong) and not _close(wrong, expected) for wrong in would_give):
            message += f" It looks as if {mistake}."
            break
    raise CheckFailed(message)


def _close(a: Tensor, b: Tensor) -> bool:
    rtol, atol = (1e-9, 1e-12) if b.dtype == torch.float64 else (1e-4, 1e-5)
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)


def _short(x: Tensor) -> str:
    values = ", ".join(f"{v:.4g}" for v in x.flatten()[:12].tolist())
    return f"[{values}{', ...' if x.numel() > 12 else ''}]"
