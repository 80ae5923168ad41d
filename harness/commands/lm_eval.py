"""`kv-harness lm-eval run --model kv_harness --model_args model=smollm2,method=pqcache,budget=0.2 --tasks ...`.

lm-evaluation-harness's own command, which then knows a model `kv_harness`: any of our models under any method. What
else stands behind `lm-eval` is that project's: `run`, `ls`, `validate` and their options.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

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
        raise SettingsError("lm-evaluation-harness is not installed: run `pip install 'kv-harness[lm-eval]'`.")


def _hand_over() -> None:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target="harness.bridges.lm_eval.model:KVHarnessLM")
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
