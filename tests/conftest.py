"""Fixtures: tiny random models of every supported architecture, fp32 on the CPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.results import provenance
from harness.terminal.notices import say_once

# tiny tensors: a second thread costs more than it does, many times more on a busy machine
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; its kernels run on the CPU where a test asks

with suppress(ImportError):  # a bare GPU machine has none
    import hypothesis

    # no test may depend on how busy the machine is
    hypothesis.settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("untimed")

SHARED = Path(os.environ.get("KV_HARNESS_SHARED", Path(__file__).parents[1] / ".." / "shared")).resolve()


def pytest_report_header() -> str:
    return f"inputs drawn from seed {os.environ.get('KV_HARNESS_TEST_SEED', '0')} (KV_HARNESS_TEST_SEED)"


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection of garbage, which several tests ask for, looks at the rest alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A killed process loses nothing without it, and a busy disk takes long. Crashes are tested in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _provenance_is_looked_up_once() -> Iterator[None]:
    """No test in this process changes the sources, the commit or what is installed; each run would look again."""
    with pytest.MonkeyPatch.context() as patch:
        for look in (provenance.source_hash, provenance.git, provenance.versions):
            patch.setattr(provenance, look.__name__, cache(look))
        yield


@pytest.fixture(scope="session", autouse=True)
def _yaml_is_parsed_once() -> Iterator[None]:
    """Hydra reads the same files for each command line, with a parser written in Python."""
    try:
        import yaml
        from omegaconf import OmegaConf
        from omegaconf._utils import get_yaml_loader
    except ImportError:  # a bare GPU machine has none
        yield
        return
    really = OmegaConf.load

    @cache
    def parsed(text: str) -> Any:
        return yaml.load(text, Loader=get_yaml_loader())

    def load(file: Any) -> Any:
        if not hasattr(file, "read"):
            return really(file)
        text = file.read()
        with suppress(yaml.YAMLError):
            return OmegaConf.create({} if parsed(text) is None else parsed(text))
        file.seek(0)
        return really(file)  # whose error names the file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
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
def _nothing_said_before() -> None:
    """What one test was told once, another is told as well."""
    say_once.cache_clear()
