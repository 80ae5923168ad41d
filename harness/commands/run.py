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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.errors import HydraException
from yaml import MarkedYAMLError

from harness.config.catalogue import CONF, ConfigError, config_dirs
from harness.config.compose import (
    SWEEP,
    Composed,
    built,
    compose_all,
    explain,
    read,
    search_path,
    with_own_parameters,
)
from harness.config.errors import one_sentence, sentence
from harness.config.keys import WITHOUT_WORDS, help_text
from harness.config.settings import Settings, settings_of
from harness.results.provenance import git
from harness.results.wandb import publish
from harness.sweeps import begun
from harness.sweeps.sweep import (
    KnownPrompts,
    groups,
    labels,
    launch,
    lost,
    run_jobs,
    with_own_settings,
)
from harness.terminal.notices import (
    complain,
    complain_once,
    lasting_output,
    say,
    say_once,
    tell_of_builds,
    warn,
)
from harness.terminal.progress import forget
from harness.terminal.stopping import Stoppable

if TYPE_CHECKING:
    from harness.jobs.dry_run import Forecasts

COMPLETION = {"-sc", "--shell-completion"}  # words that are about Hydra itself, and no settings
# flags that Hydra answers, and nothing runs
ANSWERED = ("--cfg", "-c", "--info", "-i", "--hydra-help")


@dataclass
class Command:
    """Run one `python -m harness` command line, and hold the runs and failures that came of it."""

    arguments: list[str]
    finished: list[Path] = field(default_factory=list)  # run folders, for the table
    # a job, None for the whole command, and why
    failed: list[tuple[int | None, str]] = field(default_factory=list)
    projects: list[str] = field(default_factory=list)  # of wandb, that get copies of the runs
    labels: list[str] = field(default_factory=list)  # what tells each job from the others
    # why jobs failed, each with the first that did
    reasons: dict[str, int] = field(default_factory=dict)

    def fail(self, message: str) -> None:
        self.failed.append((None, message))
        complain_once(message)

    def complain(self, job: int, reason: str) -> None:
        """Print why the job of this number failed, after its name if there are several jobs. What ends several
        jobs is said once, of the first of them."""
        if self.reasons.setdefault(reason, job) == job:
            complain_once(": ".join(filter(None, (self.labels[job], reason))))

    def run(self) -> None:
        """Run all jobs of the command line, here or through a launcher."""
        if COMPLETION & {*self.arguments}:
            ask_hydra(self.arguments)
            return
        flags, words, launcher = read(self.arguments)
        folders = config_dirs(self.arguments)
        words = [*search_path(folders), *words]
        if any(flag.startswith(ANSWERED) for flag in flags):
            ask_hydra([*flags, *words])
            return
        jobs = compose_all(words, sweep=not {*SWEEP}.isdisjoint(flags))
        jobs = with_own_settings(with_own_parameters(jobs, folders))
        self.labels, together = labels(jobs), groups(jobs)
        known = self.settings_of(jobs)
        asked = [settings.wandb.project for settings in known if not settings.dry_run]
        self.projects += dict.fromkeys(filter(None, asked))
        if launcher and known and not any(settings.dry_run for settings in known):
            root = Path(known[0].results.root)
            try:
                outcomes = launch(together, launcher, root, folders)
            except (HydraException, ValueError):
                raise
            except Exception as error:
                self.fail(
                    f"A worker was lost ({lost(error)}). The same command goes on with what is there."
                )
                return
            for outcome in outcomes:
                for failure in outcome.failures:
                    self.complain(*failure)  # which a worker cannot say here
        else:
            prompts: KnownPrompts = {}
            forecasts: Forecasts = {}
            outcomes = [
                run_jobs(group, prompts, len(jobs), self.complain, forecasts) for group in together
            ]
            if forecasts and len(jobs) > 1:
                from harness.jobs.dry_run import totals

                say(totals(forecasts))
        for outcome in outcomes:
            self.finished += outcome.folders
            self.failed += outcome.failures

    def settings_of(self, jobs: Sequence[Composed]) -> list[Settings]:
        """Return the settings of the jobs that have valid ones. Print what is wrong with the others now, since the
        first job may take hours."""
        known = list[Settings]()
        for number, (job, label) in enumerate(zip(jobs, self.labels, strict=True)):
            try:
                known.append(settings := settings_of(job.config))
                if len(jobs) > 1 and not settings.dry_run:
                    begun.note(job.config, label)
                    built(job.config)
            except ValueError as error:
                self.complain(number, one_sentence(error))
            except Exception:  # its job says it, beside a file with the traceback
                continue
        return known

    def report(self) -> int:
        """Print the table of the finished runs, and after a sweep the jobs that failed, grouped by
        reason. Return the exit code."""
        if self.finished:
            from harness.commands.report import print_report

            folders = list(dict.fromkeys(self.finished))
            print_report(folders, config_dirs(self.arguments))
            for project in self.projects:
                publish(folders, project)
        failed = [(job, reason) for job, reason in self.failed if job is not None]
        if len(self.labels) > 1 and failed:
            by_reason = defaultdict[str, list[str]](list)
            for job, reason in failed:
                by_reason[reason].append(self.labels[job])
            lines = [f"\n{len(dict(failed))} of {len(self.labels)} jobs failed:"]
            lines += [f"  {'; '.join(names)}: {reason}" for reason, names in by_reason.items()]
            (say if self.finished else warn)("\n".join(lines))
        return 1 if self.failed else 0


def ask_hydra(words: Sequence[str]) -> None:
    """Let Hydra print its answer to options of its own (--cfg, --info, -sc)."""
    sys.argv[1:] = words
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(
        lambda config: None
    )()


@lasting_output()
def main() -> int:
    arguments = sys.argv[1:]
    if "--version" in arguments:
        checkout = git()
        changes = " with changes" if checkout["dirty"] else ""
        commit = f", commit {checkout['commit'][:12]}{changes}" if checkout["commit"] else ""
        say(f"kv-harness {version('kv-harness')}{commit}")
        return 0
    if {"-h", "--help"} & set(arguments):
        try:
            say(help_text(arguments, config_dirs(arguments)))
        except ConfigError as error:  # a yaml file of the user's
            complain(sentence(error))
            return 1
        return 0
    if not arguments:
        say(WITHOUT_WORDS)
        return 0
    say_once.cache_clear()
    complain_once.cache_clear()
    tell_of_builds()
    forget()
    # Hydra then raises what it would print, and we can say it in a sentence
    os.environ["HYDRA_FULL_ERROR"] = "1"
    command = Command(arguments)
    with Stoppable(f"to go on: python -m harness {shlex.join(arguments)}") as stop:
        try:
            command.run()
        except HydraException as error:
            command.fail(explain(error))
        except (ValueError, MarkedYAMLError) as error:
            command.fail(sentence(error))
        code = command.report()
    return stop.code or code
