"""The command line that makes a row again composes to the configuration of its run."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from harness.config.catalogue import GROUPS
from harness.config.compose import built, composed
from harness.reports.rerun import command, spelled
from harness.results.run_folder import StoredRun

WORDS = [
    ["method=pqcache", "budget=0.2", "task=niah"],
    ["method=snapkv_kernel15", "budget=512", "task=ruler", "task.lengths=[512,1024]", "model=random", "seed=7"],
    ["method=full", "task=niah", "task.template='a {context} \"b\" {question}, c: \\\\ d'", "dtype=bf16", "batch=4"],
    ["method=quest", "method.page_size=32", "windows.sinks=8", "dense_layers=[0,1]", "data.root='my data/x=1'"],
    ["method=infinigen_alpha99", "task=longbench", "generation.temperature=0.5", "trace=on"],
]


def stored(words: list[str], presets: bool = True) -> StoredRun:
    """A run as `words` would leave it."""
    config = composed([*words, "graphs=off"])  # as a run on a CPU resolves it
    typed = dict(word.split("=", 1) for word in words)
    named = {kind: typed[kind] for kind in GROUPS if kind in typed}
    return StoredRun(Path(), config, {"presets": named if presets else None}, [], "complete")


def typed_words(run: StoredRun) -> list[str]:
    python, flag, module, *words = shlex.split(command(run))
    assert (python, flag, module) == ("python", "-m", "harness")
    return words


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
@pytest.mark.parametrize("presets", [True, False])
def test_it_composes_to_the_same_configuration(words: list[str], presets: bool) -> None:
    run = stored(words, presets)
    mine, theirs = built(run.config), built(composed(typed_words(run)))
    assert mine[:3] == theirs[:3]
    assert asdict(mine[3]) == asdict(theirs[3]) | {"graphs": "off"}


def test_steps_that_were_not_captured_on_a_gpu_are_so_again() -> None:
    on_a_gpu = {graphs: composed(["device=cuda", f"graphs={graphs}"]) for graphs in ("on", "off")}
    said = {graphs: command(StoredRun(Path(), config, {}, [], "complete")) for graphs, config in on_a_gpu.items()}
    assert "graphs" not in said["on"]
    assert "graphs=off" in said["off"]


def test_only_what_bears_on_the_result_and_is_no_default_is_typed() -> None:
    run = stored(["method=pqcache", "results.root=/elsewhere", "baseline=off"])
    assert typed_words(run) == ["method=pqcache", "task=niah", "model=smollm2"]
    full = stored(["method=full"])
    assert typed_words(replace(full, config=full.config | {"budget": None})) == ["method=full", *typed_words(run)[1:]]


def test_a_plugin_from_outside_needs_its_folder() -> None:
    run = stored(["method=pqcache"])
    config = run.config | {"method": {"_target_": "mine.spread.Spread", "offset": 2}}
    words = ["--config-dir", "DIR", "method=spread", "method.offset=2", "task=niah", "model=smollm2"]
    assert typed_words(replace(run, config=config, info={})) == words


WORDS = (
    "512", "null", "true", "", "a b", 'q"', "back\\", 'x\\"y', "[1]", "{a}", "a,b", "1e3", "$x", "${seed}",
    "\\${oc.env:HOME}\\",
)  # fmt: skip


@pytest.mark.parametrize("value", WORDS)
def test_words_are_read_back_as_words(value: str) -> None:
    assert composed([f"task.prefix={spelled(value)}"])["task"]["prefix"] == value
