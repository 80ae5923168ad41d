"""`kv-harness lm-eval run --model kv_harness --model_args model=smollm2,method=pqcache,budget=0.2 --tasks ...`.

lm-evaluation-harness's own command, which then knows a model `kv_harness`: any of our models under any method. What
else stands after `lm-eval` is that project's: `run`, `ls`, `validate` and their options.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from evals.data import data_errors_in_a_sentence
from harness.config.errors import as_command
from harness.config.settings import SettingsError
from harness.terminal.notices import say

MODEL = "kv_harness"


@as_command()
def main() -> None:
    if find_spec("lm_eval") is not None:
        _hand_over()
    elif {"--help", "-h"} & {*sys.argv}:
        say(__doc__ or "")
    else:
        raise SettingsError(
            "lm-evaluation-harness is not installed: run `pip install 'kv-harness[lm-eval]'`."
        )


def _hand_over() -> None:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target="harness.bridges.lm_eval.model:KVHarnessLM")
    sys.argv += _device(sys.argv)
    with data_errors_in_a_sentence():
        cli_evaluate()


def _device(words: Sequence[str]) -> list[str]:
    """Return `--device` with the device that our model will use, if the user did not give one:
    lm-eval would record `cuda:0` otherwise. An empty list if there is nothing to add."""
    from harness.models.devices import choose_device

    ours = any(word.endswith(MODEL) for word in words)
    if not ours or any(word.startswith(("--device", "--config", "-C")) for word in words):
        return []
    named = re.search(r"\bdevice=([\w:]+)", " ".join(words))
    return ["--device", choose_device(named[1] if named else "auto")]


if __name__ == "__main__":
    sys.exit(main())
