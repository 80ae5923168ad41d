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
# # InfiniGen: accuracy against cache size, partial ratio and alpha, from our results
#
# Ours are of the small variants: the embedded model on a CPU, needles in Python's own help. The paper's numbers are not in
# the text at hand, so nothing is overlaid; a diamond marks its setting. `KV_HARNESS_EXPERIMENTS` names a folder with a
# folder of runs per experiment, as in `notebooks/pqcache.py`.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt

from harness.reports.papers import measured_on, ours, published

runs = Path(os.environ["KV_HARNESS_EXPERIMENTS"]) if "KV_HARNESS_EXPERIMENTS" in os.environ else None
MEASURES = (("score.mean", 100, "score"), ("fidelity.mass", 100, "attention weight read (%)"), ("fidelity.kl", 1, "KL to Full (nats)"))


def told(figure, what, rows):
    """What is ours, and of which model and machine."""
    figure.suptitle(f"{what}\nours: {measured_on(rows)}, {int(rows.num_examples.min())} prompts", fontsize=9)


# %% [markdown]
# ## Accuracy against the size of the cache
#
# InfiniGen without its margin (`infinigen_alpha99`), so that the budget alone limits it, beside H2O. The first two layers
# read everything, as in the paper: the share that was really read stands on the axis.

# %%
rows = ours("infinigen_cache_size", runs)
figure, panels = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
for axes, (measure, scale, label) in zip(panels, MEASURES, strict=True):
    for method, group in rows[rows.method != "full"].sort_values("budget.attended.share").groupby("method"):
        axes.plot(100 * group["budget.attended.share"], scale * group[measure], "o-", label=method)
        if measure == "score.mean":
            band = (100 * group["score.ci95.low"], 100 * group["score.ci95.high"])
            axes.fill_between(100 * group["budget.attended.share"], *band, alpha=0.15)
    axes.set(xlabel="prompt tokens read (%)", ylabel=label)
panels[0].set(ylabel="score, 95 % intervals shaded")
panels[0].axhline(100 * rows[rows.method == "full"]["score.mean"].iloc[0], color="black", linestyle="--", linewidth=0.8, label="full")
panels[0].legend(fontsize=8)
panels[2].set(yscale="log")
told(figure, "Relative cache size", rows)
[row.said for row in published("infinigen_cache_size")]

# %% [markdown]
# ## The share of a key's columns that the guess looks at, and the margin alpha
#
# With a small alpha few tokens come within the margin, so little is read: the last panel shows what a larger one costs.

# %%
ratio, alpha = ours("infinigen_partial_ratio", runs), ours("infinigen_alpha", runs)
figure, panels = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
for place, (rows, name, usual) in enumerate(((ratio, "partial_ratio", 0.2), (alpha, "alpha", 5.0))):
    rows = rows[rows.method == "infinigen"].sort_values(f"parameters.{name}")
    paper = rows[rows[f"parameters.{name}"] == usual]
    for axes, (measure, scale, label) in zip(panels[2 * place :], (MEASURES[2], ("budget.attended.share", 100, "prompt tokens read (%)")), strict=False):
        axes.plot(rows[f"parameters.{name}"], scale * rows[measure], "o-")
        axes.plot(paper[f"parameters.{name}"], scale * paper[measure], "D", color="#c2571a", markersize=9)
        axes.set(xlabel=f"method.{name}", ylabel=label, ylim=(0, None))
told(figure, "Partial ratio and alpha", ratio)
[row.said for name in ("infinigen_partial_ratio", "infinigen_alpha") for row in published(name)]

# %% [markdown]
# ## A host pool with room for a share of the tokens
#
# What is evicted is gone. FIFO drops the oldest token, LRU the one that was fetched longest ago, counter the one that was
# fetched least.

# %%
rows = ours("infinigen_pool", runs)
rows = rows[rows.method == "infinigen"]
free = rows[rows["parameters.pool_capacity"].isna()]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for axes, (measure, scale, label) in zip(panels, (MEASURES[1], MEASURES[2]), strict=True):
    for policy, group in rows.dropna(subset=["parameters.pool_capacity"]).groupby("parameters.pool_policy"):
        group = group.sort_values("parameters.pool_capacity")
        axes.plot(100 * group["parameters.pool_capacity"], scale * group[measure], "o-", label=policy)
    axes.axhline(scale * free[measure].iloc[0], color="black", linestyle="--", linewidth=0.8, label="no limit")
    axes.set(xlabel="tokens that the pool holds (%)", ylabel=label)
panels[0].legend(fontsize=8)
told(figure, "Pool policies", rows)
[row.said for row in published("infinigen_pool")]
