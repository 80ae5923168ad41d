"""What a machine refuses before anything heavy is imported: neither a model nor a method has a say in it."""

from __future__ import annotations

import os
from pathlib import Path

from harness.config.settings import Settings, SettingsError
from harness.models.devices import check_device
from harness.results.files import unwritable
from kernels.temporary import TemporaryFolder
from methods.tiers.tier import TIERS


def check_machine(settings: Settings) -> None:
    """Raises `SettingsError` or `DeviceError` for threads, a device or a folder that this machine has not."""
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise SettingsError(
            f"threads={settings.threads} is too many: this machine has {cpus} CPUs, choose at most {cpus}."
        )
    _check_disk(settings)
    if settings.device != "auto":
        check_device(settings.device)


def _check_disk(settings: Settings) -> None:
    folder = settings.disk_folder()
    if folder is not None and TIERS[settings.placement].in_files:
        try:
            TemporaryFolder("kv-rows-", folder).remove()
        except OSError as error:
            raise SettingsError(
                f"disk={folder} cannot be written ({error.strerror}): free some space there, or name another folder."
            ) from error


def check_results(settings: Settings) -> None:
    """Raises `SettingsError` where no run could be written."""
    if why := unwritable(Path(settings.results.root)):
        raise SettingsError(
            f"results.root={settings.results.root} cannot be written, for {why}: choose another folder."
        )
