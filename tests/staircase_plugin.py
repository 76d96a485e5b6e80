"""A pytest plugin: run tests as a reader who has come to chapter N, with nothing later to be had.

python -m pytest -p staircase_plugin --chapter 1 tests/test_ch01_*.py
"""

from __future__ import annotations

import importlib.abc
import sys

from staircase import ABOVE, chapters


class LaterChapterError(ImportError):
    """A module of a later chapter was asked for."""


class NothingLater(importlib.abc.MetaPathFinder):
    """Refuses every module of the package that a later chapter brings."""

    def __init__(self, chapter: int):
        self.chapter, self.of = chapter, chapters()

    def find_spec(self, fullname, path=None, target=None):
        if self.of.get(fullname, -1) > self.chapter:
            raise LaterChapterError(f"{fullname} is not there yet in chapter {self.chapter}")
        return None


def pytest_addoption(parser):
    parser.addoption("--chapter", type=int, default=ABOVE)


def pytest_configure(config):
    from hypothesis import settings

    settings.register_profile("staircase", max_examples=3, deadline=None)
    settings.load_profile("staircase")
    sys.meta_path.insert(0, NothingLater(config.getoption("--chapter")))


def pytest_collection_modifyitems(config, items):
    """The real model takes long and imports nothing that the tiny ones do not; so does the compiler."""
    slow = [item for item in items if {"smollm2_source", "compiler"} & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
