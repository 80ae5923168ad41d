"""`python -m harness method=pqcache task=niah`: the command line. Hydra composes, everything below takes plain values.

A job that fails prints one sentence, the other jobs of a sweep go on, and the exit code is 1 at the end. The traceback
of an error that nobody foresaw is in a file that the sentence names.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from yaml import MarkedYAMLError

from harness.config.catalogue import CONF, GROUPS, ConfigError, config_dirs
from harness.config.errors import explain, sentence, told
from harness.config.keys import help_text
from harness.config.overrides import Overrides, asks_hydra, read
from harness.config.settings import RunConfig, Settings
from harness.jobs.progress import forget, numbered
from harness.terminal.notices import say_once

if TYPE_CHECKING:
    from harness.jobs.job import Evaluation

INTERRUPTED = 130
_finished: list[Path] = []  # run folders of this command, for the table at the end
_failed: list[str] = []
_on_device: list[str] = []  # methods for which placement=host was asked in vain
_projects: dict[str, str | None] = {}  # of Weights & Biases, with the mode of its client
_read: list[Overrides] = []  # the command line's words, once they are checked
_together: list[tuple[Any, Any, Any, Settings, dict[str, str]]] = []  # jobs that wait for a shared prefill


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(config: DictConfig) -> None:
    try:
        jobs = _read[0].jobs
        with numbered(HydraConfig.get().job.num + 1 if jobs > 1 else 1, jobs):
            _job(config)
    except Exception as error:
        _fail(told(error))


def _job(config: DictConfig) -> None:
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    from harness.config import plugins
    from harness.config.settings import refuse_unknown, settings_of

    settings = settings_of(plain)
    refuse_unknown(plain)
    partial = _read[0].partial
    task = plugins.build(plain["task"], "task", partial["task"])
    task.require(settings.data.folder())  # before torch is imported
    method, model = (plugins.build(plain[kind], kind, partial[kind]) for kind in ("method", "model"))
    if settings.placement == "host" and not method.offloads and type(method).__name__ not in _on_device:
        _on_device.append(type(method).__name__)
    if settings.results.wandb and settings.results.wandb not in _projects:
        from harness.jobs.tracking import mode_now

        _projects[settings.results.wandb] = mode_now()
    if settings.dry_run:
        from harness.jobs.dry_run import show

        show(method, task, model, settings)
        return
    if settings.shared_prefill:
        _together.append((method, task, model, settings, _presets()))
        return
    from harness.jobs.run import evaluate

    _finish(evaluate(method, task, model, settings, presets=_presets()))


def _finish(made: Evaluation) -> None:
    _finished.extend(folder for folder in (made.full_folder, made.folder) if folder and folder not in _finished)


def _presets() -> dict[str, str]:
    """The yaml files that were chosen, by their names on the command line."""
    chosen = HydraConfig.get().runtime.choices
    return {kind: chosen[kind] for kind in GROUPS if chosen.get(kind)}


def _run_together() -> None:
    from harness.jobs.run import Wanted, evaluate_together

    for made in evaluate_together([Wanted(*job) for job in _together], lambda error: _fail(told(error))):
        _finish(made)


def _publish() -> None:
    from harness.jobs.tracking import publish
    from harness.results.files import read_json, read_yaml

    for project, mode in _projects.items():
        for folder in _finished:
            try:
                publish(project, folder, read_yaml(folder / "config.yaml"), read_json(folder / "summary.json"), mode)
            except Exception as error:  # the run is complete whatever becomes of its copy
                say_once(f"{folder.name} was not sent to Weights & Biases: {told(error).rstrip('.')}")


def _fail(message: str) -> None:
    _failed.append(message)
    print(f"error: {message}", file=sys.stderr)


def _version() -> str:
    from importlib.metadata import version

    from harness.results.provenance import git

    known = git()
    commit = f", commit {known['commit'][:12]}{' with changes' if known['dirty'] else ''}" if known["commit"] else ""
    return f"kv-harness {version('kv-harness')}{commit}"


def _help(arguments: list[str]) -> int:
    try:
        print(help_text(arguments, config_dirs(arguments)), flush=True)
    except BrokenPipeError:  # `| head`; what Python writes on its way out goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ConfigError as error:  # a yaml file of the user's
        _fail(sentence(error))
        return 1
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    if "--version" in arguments:
        print(_version())
        return 0
    if {"-h", "--help"} & set(arguments):
        return _help(arguments)
    say_once.cache_clear()
    _finished.clear()
    _failed.clear()
    _on_device.clear()
    _projects.clear()
    _together.clear()
    forget()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print, and we can say it in a sentence
    ConfigStore.instance().store("schema", RunConfig)
    try:
        if not asks_hydra(arguments):
            _read[:] = [read(arguments)]
            sys.argv[1:] = _read[0].words
        compose_and_run()
        if _together:
            _run_together()
    except KeyboardInterrupt:
        print(f"\ninterrupted; to go on: python -m harness {shlex.join(arguments)}", file=sys.stderr)
        return INTERRUPTED
    except HydraException as error:
        _fail(explain(error))
    except (ValueError, MarkedYAMLError) as error:
        _fail(sentence(error))
    if _on_device:
        print(f"note: placement=host is placement=device for what keeps nothing there: {', '.join(_on_device)}.")
    if _finished:
        from harness.report import print_report

        print_report(_finished)
        _publish()
    if len(_failed) > 1:
        print(f"{len(_failed)} jobs failed, see above.", file=sys.stderr)
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
