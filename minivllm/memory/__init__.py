"""KV memory: the part that decides on integers, and the part that holds tensors (from chapter 0 on)."""
