"""`python -m harness.lint task=ruler model=smollm2 [--show N]`: look at the prompts, run no model.

Errors stop a run, warnings go into its record: BOS twice, special tokens inside the text, an
answer prefix in the wrong place, tokens cut, prompts beyond the window, prompts too short for a method.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.config.catalogue import flatten
from harness.config.compose import built, composed
from harness.config.errors import as_command
from harness.config.settings import Settings
from harness.jobs.planning.checks import check_budget, check_fit, check_overflow, check_turns
from harness.jobs.planning.effective import (
    budget_of,
    effective,
    method_of,
    with_contexts,
    without_effect,
    without_effect_here,
)
from harness.jobs.planning.examples import PreparedExample, prepare
from harness.terminal.arguments import typed
from harness.terminal.notices import say, warn
from methods.base import Budget, Method

OF_RUNS = (  # keys, or what they begin with
    "threads", "batch", "prefill_chunk", "baseline", "warmup", "shared_prefill", "trace", "graphs",
    "backends", "overlap",
    "dry_run", "results", "wandb",
    "generation.temperature", "generation.top", "generation.force_length",
)  # fmt: skip


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.show < 0:
        parser.error(f"--show {options.show} should be a number of prompts, from 0 on")
    return _lint(options.overrides, options.config_dir, options.show)


def _lint(overrides: Sequence[str], config_dirs: Sequence[Path], shown: int) -> int:
    method, task, model, wanted = built(composed(overrides, config_dirs))
    task.require(wanted.data.folder())
    info = model.describe()
    method = method_of(wanted, method, info)
    check_fit(wanted, method, info)
    settings = effective(wanted, method, info)
    items = prepare(task, model, settings, strict=False)
    for words in (*without_effect(wanted, method), *without_effect_here(settings, task, items), *_of_runs(wanted)):
        warn(f"note: {words}")
    for item in items[:shown]:
        say(f"--- {item.example.id}\n{_marked(item)}\n")
    lengths = [len(item.prompt.ids) for item in items]
    say(f"{len(items)} prompts of {min(lengths)} to {max(lengths)} tokens; {info.name} takes {info.limit}")
    check_turns(items, with_contexts(settings, items))
    check_overflow(items, task, settings, info.limit)
    budget = budget_of(settings, method, info)
    check_budget(items, method, budget, settings)
    whole = list(_read_whole(items, method, budget, settings.protocol, info.num_whole_layers))
    if whole:
        say(f"warning: {len(whole)} of {len(items)} prompts, first {whole[0]}")
    kinds = Counter((f.level, f.code) for item in items for f in item.findings)
    first = {(f.level, f.code): (item, f) for item in reversed(items) for f in item.findings}
    for (level, code), count in sorted(kinds.items()):
        item, finding = first[level, code]
        say(f"{level}: {count} of {len(items)} prompts, first {item.example.id}: {finding.message}")
    if not kinds and not whole:
        say("nothing found")
    return int(any(level == "error" for level, _ in kinds))


def _read_whole(
    items: Sequence[PreparedExample], method: Method, budget: Budget | None, protocol: str, layers: int
) -> Iterator[str]:
    """Yield the prompts that the method reads whole though the budget does not cover them, each with the reason."""
    ruled = [] if budget is None else [layer for layer in range(layers) if layer not in budget.dense_layers]
    if budget is None or not ruled:
        return
    for item in items:
        sealed = item.sealed(protocol)[0]
        tokens = budget.tokens(sealed, ruled[0])
        if tokens < sealed and method.reads_all(sealed, tokens):
            yield f"{item.example.id}: {method.whole_because(sealed, tokens)}"


def _of_runs(wanted: Settings) -> Iterator[str]:
    """Settings that are not at their defaults, and about what happens behind the prompts."""
    given, usual = flatten(asdict(wanted)), flatten(asdict(Settings()))
    if names := sorted(key for key in given if key.startswith(OF_RUNS) and given[key] != usual[key]):
        yield f"{' and '.join(names)} {'change' if len(names) > 1 else 'changes'} nothing here: lint runs no model"


def _marked(item: PreparedExample) -> str:
    """The whole prompt, with the place where protocol=context seals and the expected answers; then further turns."""
    context_end = item.prompt.text.rfind(item.example.question) if item.example.question else -1
    text = item.prompt.text
    if context_end > 0:
        text = f"{text[:context_end]}<<context ends>>{text[context_end:]}"
    turns = [text, *(turn.prompt.text for turn in item.further)]
    expected = [
        f"\n>>> expects {list(example.references)}, {turn.new_tokens} new tokens at most"
        for turn, example in zip(item.turns, item.example.turns, strict=True)
    ]
    return "\n".join(map("".join, zip(turns, expected, strict=True)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.lint", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for python -m harness")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N prompts whole")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="more yaml files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
