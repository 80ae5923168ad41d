"""`python -m harness.check --config-dir conf method=mine`: does a method keep its contract?

It runs on a tiny model with random weights, in seconds: under budget 1.0 as Full, in chunks, in a batch, from the host,
in further turns, saved and restored, beside likelihoods and other questions, and with its budget and bytes measured.
One line per check; what fails says what that means and where to look, and the exit status is 1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.compose import compose_one, words_of
from harness.config.errors import as_command, one_sentence, own_line, sentence
from harness.config.plugins import build, describe, naming
from harness.config.settings import SettingsError
from harness.models.random import Random
from harness.terminal.arguments import Parser, natural
from harness.terminal.notices import say, tell_of_builds

if TYPE_CHECKING:
    from harness.checks.contract import Check
    from harness.checks.trial import Trial
    from methods.base import Method

OK, FAILED, NOT_APPLICABLE = "ok", "failed", "does not apply"


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("check", __doc__)
    parser.overrides("method=NAME, and its parameters as method.PARAMETER=VALUE", "+")
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="draws other prompts (default: 0)"
    )
    parser.config_dirs()
    options = parser.parse_intermixed_args(arguments)
    name, method = _asked(options.overrides, options.config_dir)
    warnings.simplefilter("ignore")  # of prompts that are read whole, which is asked for here
    tell_of_builds()

    import torch

    from harness.checks.contract import CHECKS
    from harness.checks.trial import BUDGET, Trial
    from harness.engine.hf import layer_specs

    torch.set_num_threads(1)  # on tiny tensors a second one costs more than it does
    model = Random(shape="tiny", tokenizer_name="bytes").load("fp32", "cpu").model
    specs = layer_specs(model)
    shape = (
        f"{len(specs)} layers, {specs[0].num_heads} query heads, {specs[0].num_kv_heads} KV heads of "
        f"{specs[0].head_dim} channels"
    )
    try:
        with naming("method", describe(method)):
            method.refuse_model(specs)
            method.require_known(specs)
    except ValueError as error:
        raise SettingsError(
            f"method={name} cannot be checked on the tiny model ({shape}), for: {sentence(error)}"
        ) from error
    trial = Trial(method, model, seed=options.seed)
    say(
        f"method={name} on a tiny model with random weights ({shape}), prompts of about {trial.length} tokens,"
    )
    say(f"budget={BUDGET} where a line says no other\n")
    states = list[str]()
    for check in CHECKS:
        state, why = outcome(check, trial)
        say(
            f"{check.name:<{max(len(one.name) for one in CHECKS)}}  {state}{f': {why}' * bool(why)}"
        )
        states.append(state)
        if state == FAILED and check is CHECKS[0]:
            break
    counts = [f"{states.count(x)} {x}" for x in (OK, FAILED, NOT_APPLICABLE) if x in states]
    left = len(CHECKS) - len(states)
    counts += [f"{left} not made, for none can be before the first is ok"] * bool(left)
    say(f"\n{', '.join(counts)}")
    if FAILED in states[1:]:
        say("What two tokens or rows of nearly equal weight explain passes with --seed 1.")
    return int(FAILED in states)


def outcome(check: Check, trial: Trial) -> tuple[str, str]:
    """Make one check. Return its outcome in a word, and what there is to say of it."""
    from harness.checks.trial import Broken, DoesNotApply

    try:
        check.run(trial)
        return OK, ""
    except DoesNotApply as reason:
        return NOT_APPLICABLE, str(reason)
    except Broken as fault:
        seen = str(fault)
    except Exception as error:
        seen, line = one_sentence(error), own_line(error)
        seen += "" if line is None or line in seen else f" ({line})"
    means = f" {check.means[0].upper()}{check.means[1:]}." if check.means else ""
    return FAILED, f"{seen.rstrip('.')}.{means}"


def _asked(words: Sequence[str], config_dirs: Sequence[Path]) -> tuple[str, Method]:
    """Return the method that the words of the command line name, and its name."""
    keys = words_of(words)
    if bare := next((word for word in words if "=" not in word), None):
        raise SettingsError(f"Cannot read {bare!r}: write method={bare}.")
    for key, value in keys.items():
        if key.partition(".")[0] != "method":
            raise SettingsError(
                f"{key}={value} changes nothing for harness.check, which reads method=NAME and "
                "method.PARAMETER=VALUE: leave it out."
            )
    if "method" not in keys:
        raise SettingsError("No method is named: write method=NAME.")
    asked = compose_one(words, config_dirs)
    method: Method = build(asked.config["method"], "method")
    return asked.presets["method"], method


if __name__ == "__main__":
    sys.exit(main())
