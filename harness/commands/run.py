"""`python -m harness method=pqcache task=niah`: the command line. Hydra composes, everything below takes plain values.

A job that fails prints one sentence, the other jobs of a sweep go on, and the exit code is 1 at the end. The traceback
of an error that nobody foresaw is in a file that the sentence names.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from yaml import MarkedYAMLError

from harness.config.catalogue import CONF, GROUPS, ConfigError, config_dirs
from harness.config.compose import tell_hydra_the_schema
from harness.config.errors import sentence
from harness.config.hydra_errors import explain
from harness.config.keys import WITHOUT_WORDS, help_text
from harness.config.overrides import Overrides, read
from harness.config.settings import Settings, SettingsError, settings_of
from harness.config.words import SWEEP, asks_hydra
from harness.jobs.planning.planner import Planner
from harness.sweeps.group import JobGroup
from harness.sweeps.jobs import JobConfig, distinct, groups, with_own_stores
from harness.sweeps.ledger import Sweep
from harness.sweeps.worker import work_here
from harness.terminal.lasting_output import lasting_output
from harness.terminal.notices import complain, complain_once, say, say_once, tell_of_builds, warn
from harness.terminal.progress import forget
from harness.terminal.stopping import Stoppable
from harness.trackers.session import Copies
from kernels.temporary import TemporaryFolder

NAMED = 3  # failed jobs, at the end


class Failure(NamedTuple):
    """`job`: its number; None for the whole command. `label`: what tells it from the others."""

    job: int | None
    label: str
    reason: str


@dataclass
class Command:
    """What was typed and what came of it."""

    arguments: list[str]
    jobs: int = 1
    finished: list[Path] = field(default_factory=list)  # run folders, for the table
    failed: list[Failure] = field(default_factory=list)
    ledger: Path | None = None  # its root: where harness.status looks
    copies: Copies = field(default_factory=Copies)

    @property
    def line(self) -> str:
        return f"python -m harness {shlex.join(self.arguments)}"

    def fail(self, message: str) -> None:
        self.failed.append(Failure(None, "", message))
        complain_once(message)

    def run(self) -> None:
        """Everything but the table."""
        if asks_hydra(self.arguments):
            compose(self.arguments)
            return
        words = read(self.arguments)
        jobs = compose(words.words)
        known = [settings for job in jobs if (settings := _settings(job))]
        if words.launcher == [] and any(settings.workers for settings in known):
            raise SettingsError("workers needs a launcher that starts them: add -m hydra/launcher=joblib.")
        self.copies.open(known)
        is_sweep = len(jobs) > 1 or bool(set(SWEEP) & set(self.arguments))
        if is_sweep and known and not any(settings.dry_run for settings in known):
            self._sweep(jobs, words, Path(known[0].results.root))
        else:
            self._run_here(jobs, words)

    def _run_here(self, jobs: Sequence[JobConfig], words: Overrides) -> None:
        """A single command, or one that writes nothing: without a ledger."""
        planner, labels, self.jobs = Planner(), _labels(jobs), len(jobs)
        for numbers in groups(jobs):
            group = JobGroup([jobs[number] for number in numbers], words.partial, planner)
            group.run()
            self.finished += group.folders
            for trouble in group.troubles:
                number = numbers[trouble.place or 0]
                self.failed.append(Failure(number, labels[number], trouble.sentence))

    def _sweep(self, jobs: Sequence[JobConfig], words: Overrides, root: Path) -> None:
        if words.launcher:
            from harness.sweeps.launch import check, launch

            check(words.launcher, config_dirs(self.arguments))
        self.jobs, self.ledger = len(jobs), root
        sweep = Sweep.create(root, jobs, words.partial)
        if words.launcher:
            session = launch(sweep, self.line, words.launcher, config_dirs(self.arguments))
        else:
            session = work_here(sweep, self.line)
        labels = _labels(jobs)
        for number, end in session.ends():
            if end["status"] == "done":
                self.finished += [root / end[key] for key in ("full", "folder") if end[key]]
                continue
            self.failed.append(Failure(number, labels[number], end["reason"]))
        if words.launcher:  # a worker cannot say it here
            for line in self._reasons():
                complain_once(f"{line}.")

    def report(self) -> int:
        """Prints the table at the end; the exit code."""
        if self.finished:
            from harness.commands.report import print_report

            print_report(list(dict.fromkeys(self.finished)))
            self.copies.publish(list(dict.fromkeys(self.finished)))
        jobs_failed = any(one.job is not None for one in self.failed)
        if jobs_failed and (self.finished or self.jobs > 1):
            (say if self.finished else warn)(self._failures())
        return 1 if self.failed else 0

    def _failures(self) -> str:
        """What the table above it says nothing of, in a line; without a table the reasons stand right above."""
        count = f"{len({one.job for one in self.failed})} of {self.jobs} jobs" if self.jobs > 1 else "the job"
        where = f"`python -m harness.status {self.ledger}` shows why" if self.ledger else "see above"
        if not self.finished:
            return f"\n{count} failed; {where}."
        reasons = [shorten(line, 160, placeholder=" ...") for line in self._reasons()]
        more = [f"{len(reasons) - NAMED} more"] * (len(reasons) > NAMED)
        return f"\n{count} failed: {'; '.join([*reasons[:NAMED], *more])}; {where}."

    def _reasons(self) -> list[str]:
        """Each once, behind the first of the jobs that failed for it and the number of the others."""
        jobs = defaultdict[str, list[str]](list)
        for one in self.failed:
            jobs[one.reason].append(one.label)
        named = {why: f"{one} and {len(more)} more" if more else one for why, (one, *more) in jobs.items()}
        return [f"{who}: {why.rstrip('.')}" if who else why.rstrip(".") for why, who in named.items()]


def compose(words: Sequence[str]) -> list[JobConfig]:
    """Every job that the words name. Hydra's own questions (--cfg, --info, -sc) it answers; they name none."""
    jobs = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def collect(config: DictConfig) -> None:
        plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        about = HydraConfig.get()
        presets = {kind: name for kind in GROUPS if (name := about.runtime.choices.get(kind))}
        jobs.append(JobConfig(plain, presets, list(about.overrides.task)))

    with TemporaryFolder("kv-hydra-") as folder:
        sys.argv[1:] = words if asks_hydra(words) else [*words, f"hydra.sweep.dir='{folder}'"]
        collect()
    return with_own_stores(jobs)


def _labels(jobs: Sequence[JobConfig]) -> list[str]:
    """What tells each job from the others; a single one needs no name."""
    return [" ".join(words) for words in distinct(jobs)] if len(jobs) > 1 else [""]


def _settings(job: JobConfig) -> Settings | None:
    """None where they are wrong: the job says so once it runs, and the others go on."""
    try:
        return settings_of(job.config)
    except ValueError:
        return None


def _version() -> str:
    from importlib.metadata import version

    from harness.results.provenance import git

    known = git()
    commit = f", commit {known['commit'][:12]}{' with changes' if known['dirty'] else ''}" if known["commit"] else ""
    return f"kv-harness {version('kv-harness')}{commit}"


def _help(arguments: Sequence[str]) -> int:
    try:
        say(help_text(arguments, config_dirs(arguments)))
    except ConfigError as error:  # a yaml file of the user's
        complain(sentence(error))
        return 1
    return 0


@lasting_output()
def main() -> int:
    arguments = sys.argv[1:]
    if "--version" in arguments:
        say(_version())
        return 0
    if {"-h", "--help"} & set(arguments):
        return _help(arguments)
    if not arguments:
        say(WITHOUT_WORDS)
        return 0
    say_once.cache_clear()
    complain_once.cache_clear()
    tell_of_builds()
    forget()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print, and we can say it in a sentence
    tell_hydra_the_schema()
    command = Command(arguments)
    with Stoppable(f"to go on: {command.line}") as stop:
        try:
            command.run()
        except HydraException as error:
            command.fail(explain(error))
        except (ValueError, MarkedYAMLError) as error:
            command.fail(sentence(error))
        code = command.report()
    return stop.code or code
