"""Compiled libraries in the cache: a damaged one is built again, never loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

library = pytest.importorskip("kernels.cpu.ffi.library")
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 123456789; }\n'


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Of a small library in a cache of its own."""
    try:
        library._compiler()
    except ImportError as error:
        pytest.skip(str(error))
    (tmp_path / "small.cpp").write_text(SOURCE)
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    return lambda: int(library._load("small", "").answer())


def test_a_damaged_library_is_built_again(
    answer: Callable[[], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert answer() == 123456789
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    sound = file.read_bytes()
    damaged = tmp_path / "damaged"  # not written in place, where this process has it mapped
    damaged.write_bytes(sound.replace((123456789).to_bytes(4, "little"), (7).to_bytes(4, "little")))
    os.replace(damaged, file)
    assert answer() == 123456789
    assert [one.read_bytes() for one in file.parent.iterdir()] == [sound]
    assert f"{file} is damaged" in caplog.text
