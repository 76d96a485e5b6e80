"""From logits to tokens: the sampler and the generate loop (chapter 0)."""
