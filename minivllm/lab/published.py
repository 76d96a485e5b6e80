"""Above the chapters: figures that others have published, to print beside ours, each with its source.

All are of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP '23 (arXiv 2309.06180). Its baselines are Orca's scheduler with three ways to reserve memory; they go
here by our names: "max" is Orca (Max), "pow2" Orca (Pow2), "oracle" Orca (Oracle), "paged" vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.errors import InvalidOption

SOURCE = "Kwon et al., SOSP '23, arXiv 2309.06180"
SCHEMES = ("max", "pow2", "oracle", "paged")
MAX_MODEL_LEN = 2048  # the longest context of OPT

# Table 1: GiB for the KV cache (the paper writes GB), and the thousands of slots in it.
PUBLISHED_TABLE_1 = {
    "OPT-13B": {"kv_gib": 12, "thousand_slots": 15.7},
    "OPT-66B": {"kv_gib": 21, "thousand_slots": 9.7},
    "OPT-175B": {"kv_gib": 264, "thousand_slots": 60.1},
}

# Figure 2: shares of the KV memory, means over the runs of section 6.2. "external" is there "external
# fragmentation & others". For vLLM the tokens' share alone is printed.
PUBLISHED_FIGURE_2 = {
    "max": {"tokens": 0.204, "reserved": 0.133, "internal": 0.573, "external": 0.089},
    "pow2": {"tokens": 0.268, "reserved": 0.179, "internal": 0.136, "external": 0.416},
    "oracle": {"tokens": 0.382, "reserved": 0.252, "internal": 0.0, "external": 0.366},
    "paged": {"tokens": 0.963},
}

# Figure 11: mean tokens of (prompt, output).
PUBLISHED_FIGURE_11 = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}

# Figure 13: requests in a batch, the mean, with OPT-13B on an A100 of 40 GB; and how many arrived a second.
PUBLISHED_FIGURE_13 = {
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
PUBLISHED_FIGURE_13_RATE = {"sharegpt": 2.0, "alpaca": 30.0}


@dataclass(frozen=True)
class OptShape:
    """What of an OPT model sets the size of its keys and values: every head has its own, all of one layer
    are hidden_size numbers. (Zhang et al., 2022, arXiv 2205.01068, table 1.)"""

    name: str
    num_layers: int
    hidden_size: int

    def bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Bytes of one token's keys and values; 2 bytes a number is fp16."""
        return 2 * self.num_layers * self.hidden_size * bytes_per_number


OPT_13B = OptShape("OPT-13B", num_layers=40, hidden_size=5120)
OPT_66B = OptShape("OPT-66B", num_layers=64, hidden_size=9216)
OPT_175B = OptShape("OPT-175B", num_layers=96, hidden_size=12288)
OPT_SHAPES = (OPT_13B, OPT_66B, OPT_175B)


def kv_slots(kv_bytes: int, bytes_per_token: int) -> int:
    """Slots, room for one token each, in so many bytes: a part of a slot holds no token.

    Raises InvalidOption.
    """
    check_int("kv_bytes", kv_bytes, 0)
    check_int("bytes_per_token", bytes_per_token, 1)
    return kv_bytes // bytes_per_token


def check_int(name: str, value: Any, least: int) -> None:
    """Raises InvalidOption for what is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidOption(
            f"{name}={value!r} is not possible: it must be a whole number of at least {least}."
        )


NUM_SLOTS = kv_slots(12 * 2**30, OPT_13B.bytes_per_token())  # 15,728: OPT-13B on an A100 of 40 GB
