"""What the tests share: the real model, loaded once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from minivllm.model import loader
from minivllm.model.decoder import Decoder
from minivllm.model.hub import ModelSource, resolve
from minivllm.model.loader import load_model
from minivllm.model.tokenizer import Tokenizer, load_tokenizer

# They need a browser and the built book: make test-book names them.
collect_ignore = ["book_site"]

if "PYTEST_XDIST_WORKER" in os.environ:  # for the kernels that a test starts: see `threads`
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """All threads for the real model when this process has the machine to itself, else one: tiny models have
    less work than waking a second thread is, and threads of two processes hold each other up."""
    all_threads = torch.get_num_threads()
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(all_threads if alone and "smollm2" in request.fixturenames else 1)
    yield
    torch.set_num_threads(all_threads)


@pytest.fixture(autouse=True)
def float32_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """dtype="auto" is float32 on every CPU, so that tokens and figures are the same on each."""
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: False)


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """The default model's file, downloaded at first use."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_source: ModelSource) -> Decoder:
    """The default model in float32 on the CPU."""
    return load_model(smollm2_source, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_source: ModelSource) -> Tokenizer:
    """The default model's tokenizer."""
    return load_tokenizer(smollm2_source)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the test's own."""
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
