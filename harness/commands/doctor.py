"""`python -m harness.doctor`: is this machine fit for a run? Versions, threads, memory, cache, name clashes.

`--model` also lets the embedded model find a needle under Full, and checks the answer: a minute on two cores.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from harness.config.clashes import clashes
from harness.config.errors import as_command
from harness.models import devices
from harness.models.embedded import installed
from harness.models.snapshots import cache_root
from harness.results import provenance
from harness.terminal.arguments import Parser
from harness.terminal.notices import say
from kernels import toolchain
from kernels.temporary import TemporaryFolder

NEEDED = (
    "torch",
    "transformers",
    "hydra-core",
    "gguf",
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "wonderwords",
)
OPTIONAL = ("triton", "wandb", "jieba", "math-verify")
GIB = 2**30


class Check(NamedTuple):
    level: str  # ok, note or bad
    subject: str
    text: str


@as_command()
def main(arguments: Sequence[str] = ()) -> int:
    parser = Parser("doctor", __doc__)
    parser.flag("--model", "let the embedded model find a needle, too")
    options = parser.parse_args(arguments)
    bad = 0
    for check in checks(options.model):
        say(f"{check.level:<5} {check.subject:<13} {check.text}")
        bad += check.level == "bad"
    ready = (
        "Ready." if options.model else "Ready. `--model` also runs a needle with a known answer."
    )
    say(f"\n{bad} problem{'s' * (bad != 1)} to solve." if bad else f"\n{ready}")
    return 1 if bad else 0


def checks(with_model: bool) -> Iterator[Check]:
    for name, version in provenance.versions((*NEEDED, *OPTIONAL)).items():
        if version:
            yield Check("ok", name, version)
        elif name in NEEDED:
            yield Check("bad", name, "missing: run `make setup`")
        else:
            yield Check("note", name, "not installed, and only some features need it")
    if installed():
        yield Check("ok", "smollm2", "embedded model installed")
    else:
        yield Check("bad", "smollm2", "missing: run `make setup`")
    yield from machine()
    for subject, place in (("results", Path("results/runs")), ("cache", cache_root())):
        there = next(
            folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists()
        )
        free = shutil.disk_usage(there).free
        yield Check(
            "note" if free < 2 * GIB else "ok", subject, f"{place}, {free / GIB:.0f} GiB free"
        )
        if not os.access(there, os.W_OK):
            yield Check(
                "bad", subject, f"{there} is not writable: set results.root or KV_HARNESS_CACHE"
            )
    yield from (Check("bad", "names", problem) for problem in clashes())
    if with_model:
        yield _needle()


def machine() -> Iterator[Check]:
    """Yield checks of the CPU, the memory and the GPUs: can torch use them, and can Triton compile
    for them?"""
    import torch  # provenance asks only a torch that is loaded how many threads it uses

    from harness.jobs.machine import free_bytes

    facts = provenance.machine()
    cpus, load = facts["cpus_usable"], facts["load_average"][0]
    yield Check(
        "ok", "cpu", f"{facts['cpu']}, {cpus} usable, torch uses {facts['threads']} threads"
    )
    busy = load > 0.5 * cpus
    yield Check(
        "note" if busy else "ok",
        "load",
        f"{load}" + (": busy, times will not be worth much" if busy else ""),
    )
    free = free_bytes("cpu") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    yield Check("note" if free < 4 * GIB else "ok", "memory", f"{free / GIB:.1f} GiB free")
    if not torch.cuda.is_available():
        if devices.gpu_is_there():
            yield Check(
                "bad",
                "cuda",
                f"a GPU ({devices.driver()}) that torch cannot use: {devices.why_unusable()}",
            )
        else:
            yield Check("note", "cuda", "no device; device=cpu works")
        return
    yield Check("ok", "cuda", f"{devices.driver()}, runtime {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        text = f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / GIB:.0f} GiB"
        yield Check("ok", f"cuda:{number}", text)
    if reason := toolchain.unfit():
        yield Check("bad", "triton", f"kernels run on plain torch: {reason}")
    else:
        yield Check("ok", "triton", f"launchers will be built with {toolchain.compiler()}")


def _needle() -> Check:
    """Run one needle-in-a-haystack example under Full, and check that the output holds the
    answer."""
    from harness.config.compose import built, composed
    from harness.jobs.evaluate import evaluate

    words = ["method=full", "task=niah", "task.lengths=[1024]", "task.depths=[50]", "baseline=off"]
    method, task, model, settings = built(composed(words))
    with TemporaryFolder("kv-doctor-") as folder, redirect_stderr(StringIO()):
        settings.results.root = str(folder)
        [record] = evaluate(method, task, model, settings).records
    answer = repr(record.output.strip())
    if record.score == 1:
        return Check("ok", "model", f"found the needle: {answer}")
    reason = "which it finds with the versions of constraints.txt: install those"
    return Check("bad", "model", f"answered {answer} without the needle, {reason}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
