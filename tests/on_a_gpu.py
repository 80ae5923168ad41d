"""A plugin of pytest (`-p tests.on_a_gpu`): tests of a GPU in bounded time, as `make gpu-check` runs them.

A test that hangs, or that breaks the device for all behind it, ends its process, and pytest-xdist puts another in its
place. What the time does not allow is skipped.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from time import time
from typing import Any

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from harness.config.errors import breaks_device

ONE = 0.2  # of the time: the most that one test may take; none begins in so short a rest
UNTIL = "KV_HARNESS_TESTS_UNTIL"  # when the last test may begin, also for a process that is started later
LEFT_OUT = "CUT OFF: the time was over"
A_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=5.0, help="end after that long")


def pytest_configure(config: pytest.Config) -> None:
    seconds = 60 * config.getoption("minutes")
    os.environ.setdefault(UNTIL, str(time() + (1 - ONE) * seconds))
    config.pluginmanager.register(Bounded(ONE * seconds))


class Bounded:
    """What happens around each test, in the process that runs it."""

    def __init__(self, most_s: float) -> None:
        self.most_s, self.broken = most_s, False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End this process if the test hangs: the clock needs no Python, which a kernel may hold up."""
        said = item.config.stash[fault_handler_stderr_fd_key]  # where no test's output is caught
        faulthandler.dump_traceback_later(self.most_s, exit=True, file=said)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time() > float(os.environ[UNTIL]):
            pytest.skip(LEFT_OUT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        result = yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of its kernels is this test's
        return result

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and breaks_device(call.excinfo.value):
            self.broken = True
            if not A_WORKER:
                item.session.shouldstop = "CUT OFF: the GPU is lost; with pytest-xdist, another process would go on"

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self.broken and A_WORKER:
            os._exit(1)  # what was reported is sent already
