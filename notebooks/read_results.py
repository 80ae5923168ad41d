# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Read results
#
# Every table and figure comes from the lines of `examples.jsonl`; no run is needed to make another one.
# `KV_HARNESS_RUNS` names the folder, `results/runs` without it (`make demo` fills that).

# %%
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd

from harness.reports.choice import Choice, choose
from harness.reports.compare import comparisons
from harness.reports.pictures.figures import Look
from harness.reports.pictures.kinds import of_paper
from harness.results.run_folder import find, load

root = Path(os.environ.get("KV_HARNESS_RUNS", "../results/runs"))
runs = [load(folder) for folder in find([root])]
tables = comparisons(runs)
[table.title for table in tables]

# %% [markdown]
# One row per run: the summaries, which `docs/results.md` explains.

# %%
rows = pd.json_normalize([entry.summary | {"label": entry.title} for table in tables for entry in table.entries])
rows[["label", "score.mean", "budget.attended.share", "ttft_s.p50", "tpot_s.p50", "memory.kv_device_bytes", "num_examples"]]

# %% [markdown]
# The figures of `python -m harness.report --figure`, here in the width of a page. `Choice` says which rows they show, as a file
# of `--paper` does. First the needle heat map: score over prompt length and depth, as in the papers.

# %%
chosen = choose(tables, Choice())
look = Look(width="double")
of_paper("needles", chosen, look)

# %% [markdown]
# Score against the share of the prompt that was read and against time, then the published averages of the PQCache paper's setting.

# %%
of_paper("frontier", chosen, replace(look, costs=["read", "tpot"]))

# %%
paper = pd.read_csv("../results/paper/paper_reference.csv")
paper[paper.benchmark.str.contains("LongBench", na=False)][["source", "method", "model", "task", "value"]].head(10)
