"""Chapter 0: the decoder: token ids in, one row of logits per sequence out.

One class serves the Llama, Qwen2 and Qwen3 families: they differ in biases, in a norm on queries and
keys, and in sizes, all of which the config states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.memory.store import KVStore
from minivllm.model.batch import Batch
from minivllm.model.config import ModelConfig
from minivllm.model.layers import MLP, Attention, Embedding, Linear, RMSNorm
from minivllm.model.rope import inverse_frequencies, rotary_table


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each on a normed copy and added back to the row."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, store: KVStore) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, batch, store)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model over a packed batch; what it remembers is the store's affair.

    Built without weights (on PyTorch's meta device); `model/weights.py` puts them in.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ):
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        with torch.device("meta"):
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        inv_freq, self.rotary_factor = inverse_frequencies(config.rope, config.head_dim)
        self.inv_freq = inv_freq.to(
            device
        )  # a plain attribute: as a buffer it would be cast with the weights

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """Logits [len(batch.logits_indices), vocab_size] in the model's dtype."""
        x = self.embed_tokens(batch.token_ids)
        rotary = rotary_table(batch.positions, self.inv_freq, self.rotary_factor, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, batch, store)
        return self.lm_head(self.norm(x[batch.logits_indices]))
