"""Notices on stderr: what takes long says so, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.terminal.notices import BUILDING, say_once, tell_of_builds
from kernels.cpu.ffi import library


def test_kernels_that_are_built_are_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        compiler = library._compiler()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    say_once.cache_clear()
    tell_of_builds()
    tell_of_builds()
    for name in ("one", "two"):
        built = library._build(library.SOURCES / "team.cpp", "", name, compiler)
        assert built.is_file()
    assert capfd.readouterr().err == f"note: {BUILDING}.\n"
    built.write_bytes(b"")
    assert library._cached("two") is None
    assert f"{built} is damaged" in capfd.readouterr().err
