"""Names that earlier versions had, each with what to do instead. CHANGELOG.md lists them, too."""

from __future__ import annotations

COMMANDS = {
    "bands": "compare Full with the tables in results/published",
    "bench calibrate": "every benchmark measures the machine's limits first",
    "bench fit": "measure with `python -m harness.bench decode` on the machine",
    "bench history": "see results/published/cachedattention/history.json, or time turns of a run with history=store",
    "bench kvpress": "use `make test-official KVPRESS=python`",
    "bench latency": "use `python -m harness.bench decode --batch 1 4`, which has TTFT and TT2T",
    "bench overflow": "see results/published/cachedattention/overflow.json",
    "bench overlap": "see results/published/cachedattention/overlap.json",
    "bench replay": "measure with `python -m harness.bench decode` on the machine",
    "bench throughput": "use `python -m harness.bench decode --batch 1 2 4 max`",
    "canonical": "use `python -m harness doctor --model`",
    "plan": "use dry_run=true or `python -m harness.bench decode --batch 1 2 4 max` for the batch that fits",
    "explain": "use `python -m harness show RUN` and the report",
}
_ALWAYS = "leave it out"
KEYS = {
    "disk_link": "leave it out; on a CPU what crosses no bus takes no time, and a GPU's bus is measured",
    "link": "leave it out; on a CPU what crosses no bus takes no time, and a GPU's bus is measured",
    "disk": "set the environment variable TMPDIR to the folder for placement=disk",
    "layer_budgets": "use a method with budgets of its own per layer, such as pyramidkv, or dense_layers",
    "memory_check": f"{_ALWAYS}: what does not fit is always refused before it loads",
    "progress": f"{_ALWAYS}: send stderr elsewhere, as with 2> log.txt",
    "reuse_steps": "pass it to `attached` in Python",
    "store.block_tokens": f"{_ALWAYS}: blocks have 256 tokens",
    "store.copies": _ALWAYS,
    "store.durable": _ALWAYS,
    "store.io_threads": f"{_ALWAYS}: two threads read",
    "store.lost": f"{_ALWAYS}: lost turns are counted, and the table names them",
    "store.reserve": _ALWAYS,
    "store.write_buffer": f"{_ALWAYS}: 256 MB may wait to be written",
    "wandb.entity": "set the environment variable WANDB_ENTITY",
    "workers": "set hydra.launcher.n_jobs=N for joblib, hydra.launcher.array_parallelism=N for SLURM",
    "triage": "leave it out; `python -m harness show RUN` shows the outputs, fidelity=N what the steps miss",
}
