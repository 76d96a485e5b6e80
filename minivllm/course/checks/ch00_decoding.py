"""Above the chapters: the checks of chapter 0: from probabilities to a token, from tokens to a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from minivllm.course.checking import expect
from minivllm.course.checks.ch00_tensors import expect_close
from minivllm.decoding.stopping import StopStrings


def check_0_4(cut_tail: Callable[..., Any]) -> None:
    """One row and one cut; then several rows, each with cuts of its own, against a loop over a list."""
    for row, top_k, top_p, min_p in (
        ([0.5, 0.25, 0.25], 3, 0.7, 0.0),
        ([0.3, 0.2, 0.2, 0.2, 0.1], 2, 1.0, 0.0),  # equals on both sides of the cut
        ([0.5, 0.375, 0.125], 3, 1.0, 0.5),
    ):
        _check_cuts(cut_tail, [row], [top_k], [top_p], [min_p])
    random = Random(4)
    for num_seqs, vocab in ((4, 7), (3, 5), (5, 11), (2, 2), (3, 3), (6, 13)):
        rows = []
        for _ in range(num_seqs):
            weights = sorted((random.random() ** 3 for _ in range(vocab)), reverse=True)
            rows.append([w / sum(weights) for w in weights])
        k = [random.randint(1, vocab) for _ in rows]
        p = [random.choice([1.0, 0.05, round(random.uniform(0.2, 0.95), 2)]) for _ in rows]
        m = [random.choice([0.0, round(random.uniform(0.01, 0.6), 2)]) for _ in rows]
        _check_cuts(cut_tail, rows, k, p, m)
    # on the line itself, in numbers that are exact: a token of min_p times the first stays; one before which
    # exactly top_p stands is cut
    _check_cuts(
        cut_tail,
        [[0.5, 0.25, 0.125, 0.125], [0.5, 0.25, 0.125, 0.125], [0.5, 0.25, 0.125, 0.125]],
        [4, 4, 2],
        [1.0, 0.75, 1.0],
        [0.5, 0.0, 0.0],
    )
    _check_cuts(cut_tail, [[0.5, 0.25, 0.25, 0.0], [0.75, 0.25, 0.0, 0.0]], [4, 4], [0.5, 1.0], [0.0, 0.0])


def _check_cuts(
    cut_tail: Callable[..., Any],
    rows: list[list[float]],
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
) -> None:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    probs = torch.tensor(rows, dtype=torch.float64)
    arguments = probs, column(top_k), column(top_p), column(min_p)

    def each(row: Callable[..., list[float]]) -> Tensor:
        return torch.tensor(
            [row(*given) for given in zip(rows, top_k, top_p, min_p, strict=True)], dtype=torch.float64
        )

    logs = [[-math.log(p) if p else 99.0 for p in row] for row in rows]
    by_logs = [
        [p if sum(log[:i]) < cut else 0.0 for i, p in enumerate(_cut(row, k, 1.0, m))]
        for row, log, k, cut, m in zip(rows, logs, top_k, top_p, min_p, strict=True)
    ]
    expect_close(
        f"cut_tail of {[[round(p, 3) for p in row] for row in rows]} with top_k={top_k}, top_p={top_p}, "
        f"min_p={min_p}",
        cut_tail,
        arguments,
        each(_cut),
        {
            "log-probabilities are summed up; top-p sums up probabilities": [
                torch.tensor(by_logs, dtype=torch.float64)
            ],
            "top-p compares with top_p of the whole row, not of what top-k and min-p have left": [
                each(lambda row, k, p, m: _cut(row, k, p, m, of_whole=True))
            ],
            "min_p is taken for a probability; it is a share of the first token's": [
                each(lambda row, k, p, m: _cut(row, k, p, m, relative=False))
            ],
            "the token that crosses top_p is cut too, as by cumsum <= top_p, and so at times the first; what "
            "stands BEFORE a token is compared": [
                each(lambda row, k, p, m: _cut(row, k, p, m, with_itself=True)),
                each(lambda row, k, p, m: _cut(row, k, p, m, with_itself=True, strict=False)),
            ],
            "what is kept is scaled up to sum to 1; it must stay as it is": [
                each(lambda row, k, p, m: [x / sum(_cut(row, k, p, m)) for x in _cut(row, k, p, m)])
            ],
            "min-p does nothing": [each(lambda row, k, p, m: _cut(row, k, p, 0.0))],
            "top-k does nothing": [each(lambda row, k, p, m: _cut(row, len(row), p, m))],
            "top-p does nothing": [each(lambda row, k, p, m: _cut(row, k, 1.0, m))],
            "top-k keeps all that equal the last; it keeps the first top_k, in the order of the row": [
                each(lambda row, k, p, m: _cut(row, sum(x >= row[k - 1] for x in row), p, m))
            ],
            "top-k keeps one token too many": [each(lambda row, k, p, m: _cut(row, k + 1, p, m))],
            "what stands exactly on a line is treated the other way": [
                each(lambda row, k, p, m: _cut(row, k, p, m, strict=False)),
                each(lambda row, k, p, m: _cut(row, k, p, m + 1e-12)),
            ],
            "all rows are cut as the first one asks": [
                each(lambda row, k, p, m: _cut(row, top_k[0], top_p[0], min_p[0]))
            ],
        },
    )


def _cut(
    row: list[float],
    k: int,
    p: float,
    m: float,
    *,
    with_itself: bool = False,
    of_whole: bool = False,
    relative: bool = True,
    strict: bool = True,
) -> list[float]:
    """One row, cut in a plain loop; the options are mistakes."""
    left = [x if i < k and x >= (m * row[0] if relative else m) else 0.0 for i, x in enumerate(row)]
    line = p * (sum(row) if of_whole else sum(left))
    kept = []
    for i, x in enumerate(left):
        before = sum(left[: i + 1] if with_itself else left[:i])
        kept.append(x if before < line or (not strict and before == line) else 0.0)
    return kept


def check_0_5(answer: type[StopStrings]) -> None:
    """Texts cut into pieces in every way that a short text has, and held to a search of the whole."""
    cases = [
        (("ab",), "xxabyy"),
        (("aab",), "xaaab"),
        (("</s>", "</"), "a</b</s>"),
        (("abc", "bc", "b"), "xabxcb"),
        (("END", "N"), "xENDx"),
        (("aba",), "ababab"),
        (("\n\n",), "Paris.\n\nThe"),
        ((), "plain"),
        (("zz",), "zaz"),
        (("ab", "abab"), "yababab"),
        (("bcd", "abx"), "aabcab"),
        (("ab", "za"), "xzab"),
    ]
    random = Random(5)
    for stop, text in cases:
        cuts = [random.sample(range(1, len(text)), random.randint(0, len(text) - 1)) for _ in range(12)]
        for cut in [[], list(range(1, len(text))), *cuts]:
            ends = [*sorted(cut), len(text)]
            pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            _check_pieces(answer, stop, pieces)
            _check_pieces(answer, stop, ["", *(p for piece in pieces for p in (piece, ""))])
    _check_held(answer)
    for before, pieces in ((["ab", "xa"], ["b", "ab"]), (["a"], ["b", "aab"]), (["abab"], ["ba", "ba"])):
        _check_pieces(answer, ("ab",), pieces, before)


def _check_held(answer: type[StopStrings]) -> None:
    """A piece with may_stop=False comes while text is held: that text is shown before it."""
    mine = answer(("ab",))
    what = "StopStrings(['ab']).add('xa').add('b', may_stop=False)"
    mine.add("xa")
    expect(f"what {what} returns", mine.add("b", may_stop=False), None)
    expect(
        f"(text, held) after {what}",
        (mine.text, mine.held),
        ("xab", ""),
        {
            "what was held comes after the new piece, or is lost; it came first": [
                ("xb", "a"),
                ("xba", ""),
                ("xb", ""),
            ]
        },
    )


def _check_pieces(
    answer: type[StopStrings], stop: tuple[str, ...], pieces: list[str], before: Sequence[str] = ()
) -> None:
    mine = answer(stop)
    what = f"StopStrings({list(stop)})"
    for piece in before:
        what += f".add({piece!r}, may_stop=False)"
        expect(f"what {what} returns", mine.add(piece, may_stop=False), None)
        expect(
            f"(text, held) after {what}",
            (mine.text, mine.held),
            ("".join(before[: before.index(piece) + 1]), ""),
            {"text is held back although nothing may stop": [(mine.text, mine.held)] if mine.held else []},
        )
    start, come = len("".join(before)), "".join(before)
    for number, piece in enumerate(pieces):
        come += piece
        found = min(((at, len(s), s) for s in stop if (at := come.find(s, start)) >= 0), default=None)
        what += f".add({piece!r})"
        alone = [s for s in stop if s in piece]
        others = [s for s in stop if s in come[start:] and found and s != found[2]]
        expect(
            f"what {what} returns",
            mine.add(piece),
            found[2] if found else None,
            {
                "only the new piece is searched; a stop string may begin in an earlier one": (
                    [None, *alone] if found and number and found[2] not in alone else []
                ),
                "another stop string begins before this one, or is shorter": others,
                "what came while nothing could stop is searched too": stop if before else [],
            },
        )
        longest = max((n for n in range(len(come) - start + 1) if _could_begin(come, n, stop)), default=0)
        held = 0 if found else longest
        shown = come[: found[0]] if found else come[: len(come) - held]
        expect(
            f"(text, held) after {what}",
            (mine.text, mine.held),
            (shown, "" if found else come[len(come) - held :]),
            {
                "the stop string, or what follows it, is shown": [
                    (mine.text, mine.held)
                    if found and len(mine.text) > len(shown) and mine.text in (come, shown + found[2])
                    else ()
                ],
                "an empty piece lets go of what is held; it decides nothing": [
                    (mine.text, mine.held) if not piece and not found and len(mine.text) > len(shown) else ()
                ],
                "text is shown that may be the beginning of a stop string": [
                    (mine.text, mine.held) if not found and len(mine.text) > len(shown) else ()
                ],
                "more is held back than could begin a stop string": [
                    (mine.text, mine.held) if not found and len(mine.text) < len(shown) else ()
                ],
                "what was held back is lost": [(shown[len(come) - len(piece) :], mine.held)] if found else [],
            },
        )
        if found:
            return


def _could_begin(text: str, n: int, stop: Sequence[str]) -> bool:
    return n == 0 or any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stop)
