"""The decoder: shape, layers, weights, tokenizer, and where they come from (chapter 0)."""
