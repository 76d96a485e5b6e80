"""Above the chapters: the transformers library's continuous batching on weights from a seed.

That library cannot make these weights, so they are written to a folder for it, and gone afterwards.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.lab.bench.options import BenchOptions
from minivllm.lab.bench.transformers_continuous import ENGINE, run
from minivllm.lab.gpu_check.here import Here, Row
from minivllm.lab.workload import WorkloadRequest
from minivllm.model.decoder import Decoder

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def transformers_rate(model: Decoder, work: Sequence[WorkloadRequest], here: Here, seconds: float) -> Row:
    """Its output tokens a second, from its first token to its last, or until so many seconds are over.

    A run that was cut short has not had its end, in which few requests are left: so its rate is too high
    rather than too low. The row says whether it was. Raises MinivllmError where nothing came in that time,
    and what the library raises.
    """
    came: list[float] = []  # when each token came
    faults: list[BaseException] = []
    dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        save_for_transformers(model, Path(folder))
        options = BenchOptions(folder, dtype, here.device, max_num_seqs=len(work))

        def work_through() -> None:
            try:
                run(work, options, lambda done, total: came.append(time.perf_counter()))
            except BaseException as error:
                faults.append(error)

        thread = Thread(target=work_through, daemon=True)  # it may hang: then it ends with the process
        thread.start()
        thread.join(seconds)
        complete = not thread.is_alive()
    if faults:
        raise faults[0]
    if len(came) < 2:
        raise MinivllmError(f"The transformers library gave no second token in {seconds:.0f} s.")
    num_tokens, took = len(came), came[-1] - came[0]
    row: Row = {"engine": ENGINE, "graphs": None, "requests": len(work), "output_tokens": num_tokens}
    return {**row, "complete": complete, **here.timing(took, tok_s=(num_tokens - 1) / took)}


def save_for_transformers(model: Decoder, folder: Path) -> None:
    """A Hugging Face folder with the weights and the shape of a decoder of this project."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = model.config
    options: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
    if config.model_type != "qwen2":
        options["attention_bias"] = config.qkv_bias
    if config.model_type == "llama":
        options["mlp_bias"] = config.mlp_bias
    rope = {k: v for k, v in asdict(config.rope).items() if k in ("rope_type", "rope_theta")}
    AutoConfig.for_model(
        config.model_type, rope_parameters=rope, bos_token_id=None, eos_token_id=None, **options
    ).save_pretrained(folder)
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
