"""Chapter 0: tensors out of a Hugging Face folder: one safetensors file, or several with an index.

safetensors holds plain numbers behind a JSON header, so nothing in it can run. Files of pickled
weights (.bin, .pt) can run any code when they are opened; they are refused, never opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.errors import InvalidModel, InvalidModelFile, WeightMismatch

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidModelFile for a file that is missing or anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise InvalidModelFile(f"{path} holds {type(content).__name__}; a JSON object is expected.")
    return content


def safetensors_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of all weight files in a folder, one tensor in memory at a time.

    Raises InvalidModelFile for a damaged file, InvalidModel for a folder without safetensors,
    WeightMismatch for a tensor that the index places in a file that lacks it.
    """
    single = (folder / _SINGLE).exists() or not (folder / _INDEX).exists()
    placed = {_SINGLE: None} if single else _index(folder)
    if single and not (folder / _SINGLE).exists():
        pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        why = (
            f"Weights in pickle ({', '.join(pickled)}) can run code and are never opened. " if pickled else ""
        )
        raise InvalidModel(
            f"{folder} has neither {_SINGLE} nor {_INDEX}. {why}Take a checkpoint in safetensors."
        )
    for file_name, names in placed.items():
        try:
            with safe_open(folder / file_name, framework="pt") as file:
                here = set(file.keys())
                if missing := sorted((names or set()) - here):
                    raise WeightMismatch(
                        f"{folder / file_name} lacks {missing[0]!r}, which {_INDEX} places there."
                    )
                for name in sorted(here):
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, InvalidModel):
                raise
            raise InvalidModelFile(
                f"{folder / file_name} cannot be read as safetensors: {error}. Download or copy it again."
            ) from error


def _index(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors it must hold. A file name may not lead out of the folder."""
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidModelFile(f"{folder / _INDEX} has no 'weight_map' from tensor names to file names.")
    placed: dict[str, set[str] | None] = {}
    for tensor_name, file_name in weight_map.items():
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise InvalidModelFile(
                f"{folder / _INDEX} names {file_name!r}; a .safetensors file in the folder is needed."
            )
        names = placed.setdefault(file_name, set())
        assert names is not None
        names.add(tensor_name)
    return placed
