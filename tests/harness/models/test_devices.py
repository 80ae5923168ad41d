"""A GPU that is there and cannot be used is an error, not a run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.models import devices
from harness.models.devices import DeviceError, check_device, choose_device

OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: ...\n"


@pytest.fixture
def old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU torch cannot use."""
    (tmp_path / "version").write_text(OLD)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update.")

    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("old_driver")
def test_auto_stops_where_a_gpu_cannot_be_used() -> None:
    with pytest.raises(DeviceError) as error:
        choose_device("auto")
    said = str(error.value)
    assert "driver 535.104.05" in said
    assert "wants CUDA 13.0;" in said
    assert "device=cpu runs without" in said
    assert choose_device("cpu") == check_device("cpu") == "cpu"
    with pytest.raises(DeviceError, match="too old"):
        check_device("cuda")


@pytest.mark.usefixtures("old_driver")
def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built for CPUs"):
        choose_device("auto")


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_has_hidden_are_not_missed(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto") == "cpu"


def test_without_a_gpu_auto_is_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("DRIVER", "NODES"):
        monkeypatch.setattr(devices, name, tmp_path / "none" if name == "DRIVER" else ())
    assert choose_device("auto") == "cpu"
