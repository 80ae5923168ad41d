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
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from harness.reports.compare import comparisons
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
# The needle heat map: score over prompt length and depth, as in the papers.

# %%
def heat(run, axes):
    cells = pd.DataFrame([{"length": r.data["length"], "depth": r.data["depth"], "score": r.score} for r in run.records])
    grid = cells.pivot_table(index="depth", columns="length", values="score")
    axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.index)), grid.index)
    axes.set(title=run.info["method"], xlabel="prompt tokens")


needles = [run for run in runs if run.records and {"length", "depth"} <= run.records[0].data.keys()]
if needles:
    figure, panels = plt.subplots(1, len(needles), figsize=(3.2 * len(needles), 3), squeeze=False, layout="constrained")
    for run, axes in zip(needles, panels[0], strict=True):
        heat(run, axes)
    panels[0][0].set_ylabel("depth of the needle (%)")

# %% [markdown]
# Score against the share of the prompt that was read, beside the published averages of the PQCache paper's setting.

# %%
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for label, group in rows.groupby("method"):
    axes.plot(group["budget.attended.share"], 100 * group["score.mean"], "o", label=label)
axes.set(xlabel="share of the prompt read per step", ylabel="score", ylim=(-3, 103))
axes.legend();

# %%
paper = pd.read_csv("../results/paper/paper_reference.csv")
paper[paper.benchmark.str.contains("LongBench", na=False)][["source", "method", "model", "task", "value"]].head(10)
