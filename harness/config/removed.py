"""Names that earlier versions had, each with what to do instead. CHANGELOG.md lists them, too."""

from __future__ import annotations

COMMANDS = {
    "bands": "compare Full with the tables in results/published",
    "bench history": "see results/published/cachedattention/history.json, or time turns of a run with history=store",
    "bench kvpress": "use `make test-official KVPRESS=python`",
    "bench overflow": "see results/published/cachedattention/overflow.json",
    "bench overlap": "see results/published/cachedattention/overlap.json",
    "canonical": "use `python -m harness doctor --model`",
    "explain": "use `python -m harness show RUN` and the report",
}
KEYS = {
    "workers": "set hydra.launcher.n_jobs=N for joblib, hydra.launcher.array_parallelism=N for SLURM",
    "triage": "leave it out; `python -m harness show RUN` shows the outputs, fidelity=N what the steps miss",
}
