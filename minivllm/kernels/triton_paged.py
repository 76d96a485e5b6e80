"""Chapter 8: the Triton kernels under the names of the reference: `store_kv` and `paged_attention`."""

from minivllm.kernels.triton_attention import paged_attention
from minivllm.kernels.triton_store import store_kv

__all__ = ["paged_attention", "store_kv"]
