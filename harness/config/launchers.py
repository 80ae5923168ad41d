"""Hydra's launchers: which there are, what each needs, which words of a command line are theirs. Imports none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra.core.override_parser.types import Override

from harness.config.catalogue import CONF, load
from harness.config.plugins import suggestion
from harness.config.settings import SettingsError

BASIC = "basic"  # one job after the other, in this process
LAUNCHER = "hydra/launcher"
PACKAGES = {  # launcher -> its package, and the module that does the work
    "joblib": ("hydra-joblib-launcher", "joblib"),
    "ray": ("hydra-ray-launcher", "ray"),
    "submitit_local": ("hydra-submitit-launcher", "submitit"),
    "submitit_slurm": ("hydra-submitit-launcher", "submitit"),
}


def split(parsed: Sequence[Override], config_dirs: Sequence[Path], sweep: bool) -> tuple[list[Override], list[str]]:
    """All other words, and those that choose a launcher and set it up: none where jobs run in this process."""
    mine = [word for word in parsed if word.key_or_group == LAUNCHER or word.key_or_group.startswith("hydra.launcher.")]
    others = [word for word in parsed if word not in mine]
    names = [str(word.value()) for word in mine if word.key_or_group == LAUNCHER]
    if names:
        _check(names[-1], config_dirs, sweep)
    if names and names[-1] != BASIC:
        return others, [str(word.input_line) for word in mine]
    if lost := [word.input_line for word in mine if word.key_or_group != LAUNCHER]:
        raise SettingsError(f"{lost[0]} sets up a launcher: name it, as in {LAUNCHER}=joblib.")
    return others, []


def _check(name: str, config_dirs: Sequence[Path], sweep: bool) -> None:
    files = {file.stem: file for folder in (CONF, *config_dirs) for file in (folder / LAUNCHER).glob("*.yaml")}
    known = (BASIC, *PACKAGES, *files)
    if name not in known:
        raise SettingsError(f"There is no launcher {name!r}{suggestion(name, known)}")
    if not sweep:
        raise SettingsError(f"{LAUNCHER}={name} starts the workers of a sweep: add -m.")
    package, module = PACKAGES.get(_base(files[name]) if name in files else name, ("", ""))
    if package and not (find_spec(module) and _has_plugin(package)):
        raise SettingsError(f"{LAUNCHER}={name} needs a package that is not installed: pip install {package}.")


def _has_plugin(package: str) -> bool:
    try:
        return find_spec(f"hydra_plugins.{package.replace('-', '_')}") is not None
    except ModuleNotFoundError:  # no plug-in at all
        return False


def _base(file: Path) -> str:
    """The launcher that a yaml changes."""
    return next((name for name in load(file).get("defaults", []) if name in PACKAGES), "")
