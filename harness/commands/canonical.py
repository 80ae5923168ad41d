"""`python -m harness.canonical`: are this machine and its versions right? Six short checks of the embedded model.

Each prints what was expected and what was found, and where it fails, what to do. About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from harness.config.errors import as_command
from harness.models.embedded import SmolLM2, find_gguf
from harness.results import files
from harness.terminal.lasting_output import lasting_output
from harness.terminal.notices import say
from kernels.temporary import TemporaryFolder

if TYPE_CHECKING:
    from harness.canonical_checks.checks import Verdict


@lasting_output()
@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    find_gguf()
    from harness.canonical_checks import checks  # torch and transformers

    with TemporaryFolder("kv-canonical-") as folder:
        subject = checks.CheckedModel(SmolLM2(), folder)
        if options.record:
            files.write_json(checks.EXPECTED, checks.measured(subject))
            say(f"recorded in {checks.EXPECTED}")
            return 0
        return _report(checks.verdicts(subject, checks.expected()))


def _report(verdicts: Iterable[Verdict]) -> int:
    """Prints a line per check as it is done; 1 where one failed."""
    began, failed = perf_counter(), 0
    for one in verdicts:
        say(f"{'PASS' if one.passed else 'FAIL'}  {one.name:<19}  expected {one.expected:<24}  found {one.found}")
        if not one.passed:
            failed += 1
            say(f"      {one.advice}.")
    say(f"\n{failed or 'no'} check{'s' * (failed != 1)} failed, {perf_counter() - began:.0f} s")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.canonical", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what is found as what is expected from now on")
    return parser


if __name__ == "__main__":
    sys.exit(main())
