"""A small book to build: one chapter with all that a chapter may have, its lab, and the chapter before it."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from pathlib import Path

from nbformat import v4, writes

ROOT = Path(__file__).resolve().parents[2]
PNG = base64.b64encode((ROOT / "book" / "figures" / "ladder-memory.png").read_bytes()).decode()

CHAPTER = r"""# 3. Paging

After this chapter you can explain a [block table](glossary.md#block-table) and why
[Kwon et al., 2023](references.md#kwon-et-al-2023) needed one. It builds on [chapter 2](ch02_sample.md).

## The idea

![A memory map of five rungs.](figures/ladder-memory.png)

A sequence of $n$ tokens has $\lceil n / 16 \rceil$ blocks, and a [slot](glossary.md#slot) is

$$
\text{slot}(i) = 16 \cdot \text{table}[\lfloor i / 16 \rfloor] + i \bmod 16, \qquad 0 \le i < n,
\qquad n_\text{blocks} = \left\lceil \frac{n}{16} \right\rceil
$$

It costs $5, or $6 elsewhere.

A file: src/a_folder_with_a_long_name/another_folder/one_more_folder/a_file_with_a_long_name.cc

`$HOME` and `$PATH` are code. So is
`minivllm.memory.paged_store.PagedKVStore.some_very_long_name_of_a_method`.

## The code

<!-- code: minivllm/memory/blocks.py#BlockPool.allocate -->
```python
def allocate(self, num_blocks: int) -> list[int]:
    return [self._free.popitem(last=False)[0] for _ in range(num_blocks)]  # a comment that makes it long
```

### Measure it

<!-- output: notebooks/ch03_sample.ipynb#table -->
```text
rung               same   KV held  used  later  never  in flight  preempted  and a last column, a wide one
```

| what must hold | what we expect | where it wins | where it loses | the trap in measuring it |
|---|---|---|---|---|
| same tokens | fewer slots | many requests | `few_requests_of_one_length` | timing the first step |

More in [the lab](../notebooks/ch03_sample.ipynb#what-the-table-costs).
The [source](../minivllm/memory/blocks.py).
"""

OTHER = """# 2. Contiguous memory

A [token](glossary.md#token) and its [slot](glossary.md#slot), before [blocks](ch03_sample.md#the-idea).
"""


def lab() -> str:
    """A notebook with outputs of each kind that labs store."""
    code = "# a line\n" + "%matplotlib inline\n" + 'print("a line of output that does not fit " * 4)'
    cells = [
        v4.new_markdown_cell(
            "# Lab 3. Paging\n\nIt belongs to [chapter 3](../book/ch03_sample.md#the-idea)."
        ),
        v4.new_code_cell(
            code,
            execution_count=1,
            outputs=[v4.new_output("stream", name="stdout", text="a line of output that does not fit " * 4)],
        ),
        v4.new_markdown_cell(
            "## What the table costs\n\nOf a [block table](../book/glossary.md#block-table): $2n$."
        ),
        v4.new_code_cell(
            "draw(records)",
            execution_count=2,
            metadata={"mystnb": {"image": {"alt": "A memory map."}}},
            outputs=[
                v4.new_output(
                    "execute_result",
                    execution_count=2,
                    data={"image/png": PNG, "text/plain": "<Figure size 640x480 with 1 Axes>"},
                )
            ],
        ),
        v4.new_code_cell("lab.slider(records)"),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return writes(v4.new_notebook(cells=cells, metadata=about | {"language_info": {"name": "python"}}))


def write_book(root: Path) -> Path:
    """The sources of the sample in this folder, with the real book's frame."""
    ignore = shutil.ignore_patterns("_build", "__pycache__", "ch*", "interview.md")
    shutil.copytree(ROOT / "book", root / "book", ignore=ignore)
    (root / "book" / "ch03_sample.md").write_text(CHAPTER, encoding="utf-8")
    (root / "book" / "ch02_sample.md").write_text(OTHER, encoding="utf-8")
    for name in ("interview", "more"):
        (root / "book" / f"{name}.md").write_text(f"# {name.title()}\n\nSome text.\n", encoding="utf-8")
    (root / "notebooks").mkdir()
    (root / "notebooks" / "ch03_sample.ipynb").write_text(lab(), encoding="utf-8")
    (root / "notebooks" / "README.md").write_text("No page of the site.", encoding="utf-8")
    (root / "minivllm" / "memory").mkdir(parents=True)
    (root / "minivllm" / "memory" / "blocks.py").write_text("BLOCKS = 16\n", encoding="utf-8")
    (root / ".venv").mkdir()
    (root / ".venv" / "page.md").write_text("No page of the site.", encoding="utf-8")
    return root


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Run Sphinx as `make book` does; the site is in book/_build/html."""
    strict = ["-W", "--keep-going", "-n", "-q"]
    command = [sys.executable, "-m", "sphinx", *strict, "-d", "book/_build/doctrees", "-c", "book", ".", SITE]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


SITE = "book/_build/html"
