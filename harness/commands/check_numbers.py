"""`python -m harness.check_numbers headline_8k`: do the numbers of a published row come out on this machine?

Runs ten prompts of the row (+experiment=small/tables/headline_8k) and holds each against its published score and
likelihood (results/published/prompts). Both sides round, so they may lie two roundings apart on average. One is how far
bf16 came from fp32 on these prompts, on that of the recorded CPUs where it came furthest. One prompt's score may turn
over in any case, since two tokens can be equally likely to the last bit. Exit status 1: a number is further off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.config.compose import built, compose_one
from harness.config.errors import as_command
from harness.reports.papers import PUBLISHED
from harness.results.records import StoreError
from harness.results.run_folder import load
from harness.results.summary import cost_of
from harness.terminal.arguments import Parser
from harness.terminal.notices import say, tell_of_builds
from harness.terminal.tables import Column, text_table
from kernels.temporary import TemporaryFolder

if TYPE_CHECKING:
    import pandas as pd

EXACT = "fp32"  # the arithmetic from which the rounding of the others is measured
PROMPT = ["method", "id", "prompt_sha256"]


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("check_numbers", __doc__)
    parser.add_argument("table", metavar="TABLE", help="of which prompts are published")
    parser.overrides("as for python -m harness, such as model.file=PATH")
    arithmetic = f"publish the numbers: {EXACT} for dtype=fp32, else what computes bf16"
    parser.add_argument("--record", metavar="ARITHMETIC", help=arithmetic)
    options = parser.parse_intermixed_args(arguments)
    file = PUBLISHED / "prompts" / f"{options.table}.csv"
    if not (file.is_file() or options.record):
        raise StoreError(f"{file} is not there: name a table of which that folder has prompts")
    here = measured([f"+experiment=small/tables/{options.table}", *options.overrides])
    if options.record:
        named = here.assign(arithmetic=options.record)
        named.to_csv(file, mode="a", header=not file.exists())
        return 0
    import pandas as pd

    by_arithmetic = pd.read_csv(file).groupby("arithmetic", sort=False)
    known = {name: rows.set_index(PROMPT)[here.columns] for name, rows in by_arithmetic}
    exact, row, *more = known.pop(EXACT), *known.values()
    if set(here.index) != set(row.index):
        raise StoreError(
            f"the prompts here are not those of {file}: install the versions of constraints.txt"
        )
    roundings = pd.concat([apart(rounded, exact) for rounded in (row, *more)])
    shown = {
        "published": row.groupby("method").mean(),
        "here": here.groupby("method").mean(),
        "apart": apart(here, row),
        "allowed": 2 * roundings.groupby("method").max(),
    }
    # a score moves by whole prompts, of which a table has few
    shown["allowed"]["score"] = shown["allowed"]["score"].clip(lower=100 / len(exact.loc["full"]))
    columns = [Column("method", "", list(shown["here"].index), left=True)]
    columns += [
        Column(f"{measure}\n{head}", "", [f"{value:.4g}" for value in values[measure]])
        for measure in here
        for head, values in shown.items()
    ]
    say(f"\n{text_table(columns)}\n")
    within = (shown["apart"] <= shown["allowed"]).stack()
    if within.all():
        say("All numbers are those published, up to rounding.")
        return 0
    off = ", ".join(f"{measure} of {method}" for method, measure in within.index[~within])
    say(f"Further off than rounding explains: {off}. Look for an edit, or for other versions.")
    return 1


def measured(words: Sequence[str]) -> pd.DataFrame:
    """Run what the words of a command line describe, and return scores (0 to 100) and negative log-likelihoods (nats
    per token) of the right answers, by method, example and prompt; Full's are among them."""
    import pandas as pd

    from harness.jobs.evaluate import evaluate

    tell_of_builds()
    asked = compose_one(words)
    method, task, model, settings = built(asked.config)
    with TemporaryFolder("kv-numbers-") as folder:  # so that no earlier run answers
        settings.results.root = str(folder)
        run = evaluate(method, task, model, settings, presets=asked.presets)
        assert run.full_folder
        both = {one.info["presets"]["method"]: one for one in (load(run.full_folder), run)}
    rows = [
        (preset, record.id, record.prompt_sha256, 100 * record.score, cost_of(record))
        for preset, one in both.items()
        for record in one.records
    ]
    return pd.DataFrame(rows, columns=[*PROMPT, "score", "NLL"]).set_index(PROMPT).round(6)


def apart(some: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Return how far the numbers of two runs are apart on a prompt: the mean of each method."""
    return (some - others).abs().groupby("method").mean()


if __name__ == "__main__":
    sys.exit(main())
