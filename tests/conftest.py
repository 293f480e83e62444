"""``--engines FILE``: write what the tests found out about rollout engines, see ``tests/engine_table.py``."""

from __future__ import annotations

import gc

import pytest

from tests.engine_table import Collector


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engines", metavar="FILE", help="write what each rollout engine can do, as the tests found it")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Collector(config.getoption("--engines")), "engines")
    gc.disable()  # what is imported and collected stays; to look through it again and again takes seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
