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

# %% [markdown]
# ## Figures 14 to 17: latency, live and small
#
# How many times as fast a step is as FlexGen's, which is Full with all rows on the host: live with the embedded model on a
# CPU, whose rows cross a link of 100 MB/s by arithmetic, beside the paper's "up to 3.0 times". Made by `bench latency` and
# `link=...`, which were removed after 6d01b6f8; the files name their command. The link is that slow so that FlexGen waits for
# its rows about as many times a step's computing as on the paper's machine; the last line says how many. Each layer waits for
# its rows, as in the paper's commands. `infinigen_alpha99` fetches a fifth in every step; `infinigen` what alpha=5 leaves of
# that, which the last panel shows. The largest batch is figure 14. UVM and INT4 are not offered here, and 16b would need
# embedded models of several sizes.

# %%
import re

import pandas as pd

from harness.reports.papers import our_figures

SHOWN = (("h2o", "#8e44ad"), ("infinigen_alpha99", "#2e8b57"), ("infinigen", "#1a59b3"))


def live(name):
    """The rows of a benchmark without FlexGen's own, with which the others are compared."""
    return pd.DataFrame(our_figures("infinigen", name, runs)["rows"]).dropna(subset="tpot_s_ratio")


def drawn(axes, rows, x, label, colour):
    """Medians with their intervals, against a column."""
    rows = rows.sort_values(x)
    points = [(middle, middle - low, high - middle) for middle, low, high in rows.tpot_s_ratio]
    middle, *reach = zip(*points, strict=True)
    axes.errorbar(rows[x], middle, reach, fmt="o-", color=colour, label=label)


sides = {name: live(name) for name in ("batches", "prompts", "parameters")}
figure, panels = plt.subplots(1, 5, figsize=(21, 3.8), layout="constrained")
for name, colour in SHOWN:
    for axes, side, x in ((panels[0], "batches", "batch"), (panels[1], "prompts", "tokens")):
        drawn(axes, sides[side][sides[side].method == name], x, name, colour)
for axes, parameter, usual in ((panels[2], "alpha", 5), (panels[3], "partial_ratio", 0.2)):
    found = [re.fullmatch(rf"infinigen(:{parameter}=(.+))?", name) for name in sides["parameters"].method]
    rows = sides["parameters"].assign(x=[float(match[2] or usual) if match else None for match in found])
    drawn(axes, rows.dropna(subset="x"), "x", "infinigen", "#1a59b3")
[most] = [row for row in published("infinigen_fig14") if row.value]
TITLES = (("14, 15: batches", "sequences"), ("16a: prompts", "prompt tokens"), ("17a: alpha", "alpha"), ("17b: partial ratio", "partial ratio"))
for axes, (title, label) in zip(panels, TITLES, strict=False):
    axes.axhline(most.value, color="#999999", linestyle=":", label="the paper, at most")
    axes.set(title=title, xlabel=label, yscale="log", ylim=(0.8, 60))
    axes.set_yticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
    axes.legend(fontsize=7, loc="lower right")
panels[0].set(ylabel="FlexGen's step / it")
fetched = alpha[alpha.method == "infinigen"].sort_values("parameters.alpha")
panels[4].plot(fetched["parameters.alpha"], 100 * fetched["budget.attended.share"], "D-", color="#c2571a")
panels[4].set(title="17a: what alpha leaves", xlabel="alpha", ylabel="prompt tokens read (%)", ylim=(0, None))
figure.suptitle("Figures 14 to 17 as ratios: SmolLM2-135M, bf16, a CPU over a link by arithmetic", fontsize=9)
full = sides["batches"][sides["batches"].method == "full"]
waits = {int(row.batch): round(row.tpot_s_ratio[0] - 1, 1) for row in full.itertuples()}
[*(row.said for number in range(14, 18) for row in published(f"infinigen_fig{number}")), f"FlexGen waits, in steps of Full's computing, by batch: {waits}"]
