"""Fixtures: tiny random models of every supported architecture, fp32 on the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from harness.terminal.notices import say_once
from kernels import ops
from tests.once import look_up_once

# tiny tensors: a second thread costs more than it does, many times more on a busy machine
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; its kernels run on the CPU where a test asks

with suppress(ImportError):  # a bare GPU machine has none
    import hypothesis

    # no test may depend on how busy the machine is, nor draw other examples than it drew yesterday
    hypothesis.settings.register_profile(
        "repeatable", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("repeatable")

SHARED = Path(os.environ.get("KV_HARNESS_SHARED", Path(__file__).parents[1] / ".." / "shared")).resolve()


def pytest_report_header() -> str:
    return f"inputs drawn from seed {os.environ.get('KV_HARNESS_TEST_SEED', '0')} (KV_HARNESS_TEST_SEED)"


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage, which several tests ask for, looks at the rest alone."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test, so that no worker waits for it at the end."""
    items.sort(key=lambda item: not item.name.startswith("test_every_kernel_compiles"))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A killed process loses nothing without it, and a busy disk takes long. Crashes are tested in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _looked_up_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        look_up_once(patch)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; tests that need it skip without it."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set KV_HARNESS_SHARED to a folder that holds data/)")
    return folder


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.default_generator.manual_seed(0)
    if CUDA:  # where there is no device, torch would note a stack trace of the call for each kind of them
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _usual_backends() -> None:
    """A job's order of backends is its process's until the next one loads."""
    ops.prefer({})


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    """What one test was told once, another is told as well."""
    say_once.cache_clear()
