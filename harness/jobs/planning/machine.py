"""What a machine refuses before anything heavy is imported: neither a model nor a method has a say in it."""

from __future__ import annotations

import os
from pathlib import Path

from harness.config.settings import Settings, SettingsError
from harness.models.devices import check_device
from harness.results.files import unwritable


def check_machine(settings: Settings) -> None:
    """Raises `SettingsError` or `DeviceError` for threads, a device or a folder that this machine has not."""
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise SettingsError(
            f"threads={settings.threads} is too many: this machine has {cpus} CPUs, choose at most {cpus}."
        )
    if settings.device != "auto":
        check_device(settings.device)


def check_results(settings: Settings) -> None:
    """Raises `SettingsError` where no run could be written."""
    if why := unwritable(Path(settings.results.root)):
        raise SettingsError(
            f"results.root={settings.results.root} cannot be written, for {why}: choose another folder."
        )
