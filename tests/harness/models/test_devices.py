"""A GPU that is there and cannot be used is an error, not a run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.models import devices
from harness.models.devices import DeviceError, check_device, choose_device, wait_for

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
def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in (choose_device, check_device):
        with pytest.raises(DeviceError, match="too old"):
            asked("auto" if asked is choose_device else "cuda")
    with pytest.raises(DeviceError, match=r"535\.104\.05.*device=cpu"):
        choose_device("auto")
    assert choose_device("cpu") == check_device("cpu") == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="for CPUs"):
        choose_device("auto")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto") == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "DRIVER", devices.DRIVER / "none")
    monkeypatch.setattr(devices, "NODES", ())
    assert choose_device("auto") == "cpu"


def test_waiting_is_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for name in ("cpu", "cuda:1"):
        wait_for(torch.device(name))
    assert waited == [torch.device("cuda:1")]
