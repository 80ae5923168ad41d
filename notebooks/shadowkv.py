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
# # ShadowKV: its two observations and its ablations, from our results
#
# Ours are of the small variants: the embedded model on a CPU, needles in Python's own help. The paper's accuracy tables are
# not in the text at hand; what it says in words or on its page is overlaid in grey. `KV_HARNESS_EXPERIMENTS` names a
# folder with a folder of runs per experiment, as in `notebooks/pqcache.py`.

# %%
import os
from pathlib import Path

import matplotlib.pyplot as plt

from harness.reports.papers import measured_on, our_observation, ours, published

runs = Path(os.environ["KV_HARNESS_EXPERIMENTS"]) if "KV_HARNESS_EXPERIMENTS" in os.environ else None
OURS, PAPER = "#1a59b3", "#999999"


def said_of(result):
    """Model and machine of an observation."""
    machine = result["provenance"]["machine"]["device_name"]
    return f"{result['model']['name']} on {machine}, {result['prompt']['tokens']} tokens"


# %% [markdown]
# ## Observation 1: keys are of low rank before the rotation
#
# The relative error of the best factorisation at ShadowKV's share of the channels (160 of 1024), layer by layer, and the
# share of the channels that holds 99 % of the energy.

# %%
spectrum = our_observation("shadowkv_singular_values", runs)
layers = spectrum["layers"]
figure, (errors, ranks) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for name, label, colour in (
    ("before", "keys before the rotation", OURS),
    ("after", "keys after the rotation", "#c2571a"),
    ("values", "values", "#2e8b57"),
):
    errors.plot([100 * layer[f"error_{name}"] for layer in layers], label=label, color=colour)
    ranks.plot([100 * layer[f"rank_{name}"] / layer["channels"] for layer in layers], label=label, color=colour)
[claim] = [row for row in published("shadowkv_singular_values") if row.value]
ranks.axhline(100 / claim.value, color=PAPER, linestyle="--", label=f"the paper: {claim.value:g} times smaller, in words")
errors.set(xlabel="layer", ylabel="error at the paper's rank (%)", ylim=(0, 100))
ranks.set(xlabel="layer", ylabel="rank for 99 % energy (% of channels)", ylim=(0, 100))
errors.legend(fontsize=8, loc="upper right")
ranks.legend(handles=[line for line in ranks.lines if "paper" in str(line.get_label())], fontsize=8)
figure.suptitle(f"Low rank of keys and values\nours: {said_of(spectrum)}", fontsize=9)

# %% [markdown]
# ## Observation 2: neighbouring keys are alike, but for a few outliers

# %%
cosines = our_observation("shadowkv_chunk_cosines", runs)
layers = cosines["layers"]
figure, (means, outliers) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
means.plot([layer["mean"] for layer in layers], label="mean cosine of a key to its chunk's mean", color=OURS)
means.plot([layer["least"] for layer in layers], label="median of a chunk's least", color="#c2571a")
means.set(xlabel="layer", ylabel="cosine, rotated keys", ylim=(0, 1))
means.legend(fontsize=8)
outliers.bar(range(len(layers)), [100 * layer["outliers"] for layer in layers], color=OURS)
[kept] = [row for row in published("shadowkv_chunk_cosines") if row.value]
outliers.axhline(kept.value, color=PAPER, linestyle="--", label=f"the paper keeps {kept.note} of the tokens ({kept.model})")
outliers.set(xlabel="layer", ylabel=f"chunks below a cosine of {cosines['options']['below']:g} (%)")
outliers.legend(fontsize=8)
figure.suptitle(f"Chunks of {cosines['options']['chunk']} keys\nours: {said_of(cosines)}", fontsize=9)

# %% [markdown]
# ## Ablations: rank, chunk size, outlier chunks
#
# Scores of a handful of needles are coarse; the divergence from Full (KL), and the share of the exact attention weight on
# the tokens that were read, show the effect of each parameter. A diamond marks the paper's setting.

# %%
figure, panels = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
SETTINGS = (("shadowkv_rank", "rank", 30), ("shadowkv_chunk", "chunk", 8), ("shadowkv_outliers", "outlier_share", 0.158))
for column, (experiment, name, usual) in zip(panels.T, SETTINGS, strict=True):
    rows = ours(experiment, runs)
    rows = rows[rows.method == "shadowkv"].sort_values(f"parameters.{name}")
    measures = (("fidelity.kl", 1, "KL to Full (nats)", None), ("fidelity.mass", 100, "attention weight read (%)", 100))
    for axes, (measure, scale, label, top) in zip(column, measures, strict=True):
        axes.plot(rows[f"parameters.{name}"], scale * rows[measure], "o-", color=OURS)
        at = rows[(rows[f"parameters.{name}"] - usual).abs() < 1e-9]
        axes.plot(at[f"parameters.{name}"], scale * at[measure], "D", color="#c2571a", markersize=9)
        axes.set(xlabel=f"method.{name}", ylabel=label, ylim=(0, top))
figure.suptitle(f"ShadowKV's parameters\nours: {measured_on(rows)}, {int(rows.num_examples.min())} prompts and more", fontsize=9)
[row.said for experiment, _, _ in SETTINGS for row in published(experiment)]

# %% [markdown]
# ## RULER, LongBench and needles
#
# The paper's scores are not available. RULER's own table has Full's mean over its 13 tasks for the model; ours is of
# needles with the embedded one.

# %%
rows = ours("shadowkv_ruler", runs)
figure, (scores, full) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
low, high = (100 * (rows["score.mean"] - rows["score.ci95.low"]), 100 * (rows["score.ci95.high"] - rows["score.mean"]))
scores.bar(rows.method, 100 * rows["score.mean"], yerr=[low, high], color=OURS, capsize=4)
scores.set(ylabel="score, 95 % interval", ylim=(0, 100), title=f"ours: {measured_on(rows)}")
table = [row for row in published("shadowkv_ruler") if row.value]
full.plot([int(row.setting.rpartition("=")[2]) for row in table], [row.value for row in table], "*-", color=PAPER)
full.set(xscale="log", xlabel="prompt tokens", ylabel="mean of 13 tasks", ylim=(0, 100), title="RULER's README: Full, Llama-3-8B (Gradient)")
for axes in (scores, full):
    axes.title.set_fontsize(9)

# %% [markdown]
# ## Throughput: the largest batch, and how fast it decodes
#
# The repository's page has tokens per second of all sequences together on an A100-80GB, for Full and ShadowKV. The last panel
# is live: the embedded model, on a CPU that stands for a device of 350 MB; its batches can be compared, its speed cannot. It
# was made by `bench throughput`, which was removed after 6d01b6f8; `bench decode --batch 1 2 4 max` measures the like.

# %%
import re

import pandas as pd

from harness.reports.papers import our_figures

table = []
for row in published("shadowkv_throughput"):
    method, tokens, batch = re.fullmatch(r"method=(\w+) tokens=(\d+) batch=(\d+)", row.setting).groups()
    table.append({"model": row.model, "tokens": int(tokens), "method": method, "batch": int(batch), "tok/s": row.value})
table = pd.DataFrame(table)
live = our_figures("shadowkv", "throughput", runs)
figure, (theirs, here) = plt.subplots(1, 2, figsize=(13, 3.8), layout="constrained", gridspec_kw={"width_ratios": (3, 1)})
names = [f"{row.model}\n{row.tokens // 1024}K {row.method}" for row in table.itertuples()]
theirs.bar(range(len(table)), table["tok/s"], 0.6, color=PAPER, label="the page, A100-80GB")
theirs.set_xticks(range(len(table)), names, rotation=90, fontsize=6)
theirs.set(ylabel="tokens per second, all together")
theirs.legend(fontsize=8)
steps = pd.DataFrame(live["rows"])
for method, group in steps.groupby("method"):
    here.plot(group.batch, group.rate, "o-", label=method)
    end = group[group.ended.notna()].iloc[0]
    here.annotate(f"{end.ended}: {end.batch}\npredicted {end.predicted:g}", (end.batch, end.rate), fontsize=7)
here.set(xlabel="sequences", ylabel="tokens per second", title=f"ours, live: {live['model'].rpartition('/')[2]}, {steps.tokens.iloc[0]} tokens")
here.title.set_fontsize(9)
here.legend(fontsize=8)
table.round(2)
