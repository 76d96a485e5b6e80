"""Above the chapters: pictures of what happens to one token: whom it attends to, and what it is drawn from.

As in `draw.py`, every picture is a pure function of plain numbers onto a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm.lab.draw import HATCH, LINE

# isort: split
# Below draw.py, which says what to do where matplotlib is missing.
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

KEPT, CUT = "#0072B2", "#DDDDDD"


def draw_attention(
    weights: Sequence[Sequence[float]], tokens: Sequence[str], *, title: str = "Attention"
) -> Figure:
    """One head's attention: a row for each new token, a column for each token of the sequence.

    weights [query_len][seq_len], each row summing to 1; tokens: the sequence's pieces of text, of which the
    last query_len are new. A place that the causal mask closes is hatched.
    """
    query_len, seq_len = len(weights), len(tokens)
    if any(len(row) != seq_len for row in weights) or not 1 <= query_len <= seq_len:
        raise ValueError(f"{query_len} rows of weights do not fit {seq_len} tokens.")
    figure = Figure((7, 0.42 * query_len + 1.7), dpi=100, layout="constrained")
    ax = figure.subplots()
    for i, row in enumerate(weights):
        own = seq_len - query_len + i
        for j, weight in enumerate(row):
            if j > own:
                box = Rectangle(
                    (j, i), 1, 1, facecolor="white", edgecolor="#BBBBBB", hatch=HATCH, linewidth=0
                )
                box.set_gid("future")
                ax.add_patch(box)
                continue
            shade = 1 - 0.85 * min(1.0, weight)  # white to the blue of Okabe and Ito
            colour = (shade, 0.45 + 0.55 * shade, 0.7 + 0.3 * shade)
            box = Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=1)
            box.set_gid("weight")
            ax.add_patch(box)
            dark = weight > 0.55
            ax.text(j + 0.5, i + 0.5, f"{weight:.2f}", ha="center", va="center_baseline", fontsize=8,
                    color="white" if dark else "black")  # fmt: skip
    labels = [repr(token)[1:-1] for token in tokens]
    ax.set(xlim=(0, seq_len), ylim=(query_len, 0))
    ax.set_xticks([j + 0.5 for j in range(seq_len)], labels, fontsize=9, parse_math=False)
    ax.set_yticks(
        [i + 0.5 for i in range(query_len)], labels[seq_len - query_len :], fontsize=9, parse_math=False
    )
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set_ylabel("query: the token that looks", fontsize=9)
    ax.set_xlabel("key: the token that is looked at", fontsize=9)
    ax.xaxis.set_label_position("top")
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=11, fontweight="bold", loc="left")
    closed = Patch(facecolor="white", edgecolor="#BBBBBB", hatch=HATCH, label="later than the query: closed")
    figure.legend(handles=[closed], loc="outside lower center", frameon=False, fontsize=9)
    return figure


def draw_sampling(
    settings: Mapping[str, Sequence[float]], tokens: Sequence[str], *, kept: Mapping[str, int] | None = None
) -> Figure:
    """What a token is drawn from under several settings, side by side.

    settings: name -> probabilities of the tokens, from the likeliest on; tokens: their text. kept: name ->
    how many of them a setting keeps (all, where it has no entry); the others are drawn grey and hatched.
    """
    if not settings or any(len(probs) != len(tokens) for probs in settings.values()):
        raise ValueError(f"Each setting needs a probability for each of the {len(tokens)} tokens.")
    columns = min(3, len(settings))
    down = -(-len(settings) // columns)
    figure = Figure((9, down * (0.24 * len(tokens) + 0.75) + 0.4), dpi=100, layout="constrained")
    axes = figure.subplots(down, columns, squeeze=False, sharex=True, sharey=True).ravel()
    labels = [repr(token)[1:-1] for token in tokens]
    most = max(max(probs) for probs in settings.values())
    for ax, (name, probs) in zip(axes, settings.items(), strict=False):
        keep = (kept or {}).get(name, len(probs))
        for i, p in enumerate(probs):
            cut = i >= keep
            bar = ax.barh(i, p, height=0.8, facecolor=CUT if cut else KEPT, edgecolor=LINE, linewidth=0.5,
                          hatch=HATCH if cut else None)  # fmt: skip
            bar[0].set_gid("cut" if cut else "kept")
            share = f"{p:.0%}" if p >= 0.0995 else f"{p:.1%}"
            ax.text(p + 0.01 * most, i, "cut" if cut else share, va="center", fontsize=8)
        ax.set_title(name, fontsize=9, fontweight="bold", loc="left")
        ax.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
        ax.tick_params(length=0, labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlim(0, 1.2 * most)
        ax.set_ylim(len(labels) - 0.5, -0.5)
    for ax in axes[len(settings) :]:
        ax.set_axis_off()
    figure.supxlabel("probability", fontsize=9)
    return figure
