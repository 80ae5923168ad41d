# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a method, from zero to a Pareto plot
#
# The idea: keep one bit of every channel of every key, its sign. That is 1/16 of the keys' bytes, and enough to guess which
# tokens a query looks for: channels that agree in sign with the query add its weight, the others take it off. Only the
# best tokens' keys and values are then read.
#
# With the embedded model this takes about ten minutes on two cores. `KV_HARNESS_TINY=1` makes it seconds: random weights,
# to see that it runs.

# %%
import os
import tempfile
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch

from evals.niah import Niah
from harness.config.settings import Results, Settings
from harness.jobs.job import Job
from harness.jobs.evaluate import evaluate_together
from harness.models.embedded import SmolLM2
from harness.models.random import Random
from harness.reports.pictures.scores import front
from kernels import ops
from methods.base import Method, Plan
from methods.full import Full
from methods.layers import Layer, Select
from methods.oracle import Oracle
from methods.streaming import Streaming

# %% [markdown]
# ## The method
#
# A method is a frozen dataclass: its fields are its parameters. `start` makes one layer per model layer and gives it
# policies. With a `Select` it keeps all keys and values and reads a choice per step; three functions say which: how the
# budget is spent, what is prepared once the prompt is complete, and what is chosen for a query.


# %%
@dataclass(frozen=True, kw_only=True)
class SignKeys(Method):
    """centred: signs of what differs from the mean key. sinks, local: first and last tokens that are always read."""

    centred: bool = True
    sinks: int = 4
    local: float = 0.25  # share of the rest of the budget

    @property
    def smallest_budget(self):
        return self.sinks + 1

    def start(self, specs, cache):
        return [Layer(spec, cache, self, SignRead()) for spec in specs]


class SignRead(Select):
    def split(self, budget):
        local = int(self.method.local * (budget - self.method.sinks))
        return Plan(self.method.sinks, local, budget - self.method.sinks - local)

    def index(self, keys):
        mean = keys.mean(2, keepdim=True) if self.method.centred else 0
        self.signs = (keys > mean).to(torch.int8)  # [B G M D], a byte per bit here; a kernel would pack them

    def select(self, q, top):
        grouped = q.view(*self.signs.shape[:2], self.spec.group, -1)  # [B G g D]
        logits = grouped @ (2 * self.signs - 1).to(q.dtype).mT  # [B G g M]
        return ops.top_k((logits * self.spec.scale).softmax(-1).sum(2), top)


# %% [markdown]
# That is all. Budgets, offloading, memory, traffic, recall, resume and tables come with the layer and the harness.
#
# ## The task
#
# Needles in a text. What is written in a notebook is no part of a run's identity (code in a file is), so an edited method
# would find its old answers: the results go to a fresh folder.

# %%
tiny = bool(os.environ.get("KV_HARNESS_TINY"))
if tiny:
    model = Random(shape="tiny", layers=2, tokenizer_name="bytes")
    task = Niah(lengths=[300], depths=2, max_new_tokens=6, template="{context}\n\n{question}")
else:
    model = SmolLM2()
    task = Niah(lengths=[1024], depths=5, rounds=2)
budgets = [0.1, 0.3] if tiny else [0.05, 0.1, 0.2, 0.4]
settings = Settings(shared_prefill=True, results=Results(root=tempfile.mkdtemp()))


def run(methods, budgets):
    """Runs of each method at each budget; all share one prefill per prompt."""
    jobs = [
        Job.plan(method, task, model, Settings(**{**vars(settings), "budget": budget}), presets={"method": name})
        for name, method in methods.items()
        for budget in budgets
    ]
    return evaluate_together(jobs)


# %% [markdown]
# ## First check: with everything in its budget it is Full
#
# The same tokens, not just the same score. A method that fails here drops, doubles or misplaces something.

# %%
whole = run({"full": Full(), "sign_keys": SignKeys()}, [1.0])
tokens = {made.summary["presets"]["method"]: [record.tokens for record in made.records] for made in whole}
assert tokens["sign_keys"] == tokens["full"]

# %% [markdown]
# ## Beside Full, Oracle and StreamingLLM
#
# Oracle chooses by the exact weights: what it loses, no better index would win back. StreamingLLM chooses nothing.

# %%
oracle = Oracle(sinks=4, recent_ratio=0.25)
methods = {"full": Full(), "oracle": oracle, "streaming": Streaming(), "sign_keys": SignKeys()}
made = run(methods, budgets)
rows = [one.summary for one in made]
for row in rows:
    low, high = row["score"]["ci95"]
    read = row["budget"]["attended"]["share"]
    name = row["presets"]["method"]
    print(f"{name:10} reads {100 * read:5.1f} %: {100 * row['score']['mean']:5.1f} [{100 * low:.0f}, {100 * high:.0f}]")

# %% [markdown]
# ## Pareto plot
#
# A point is on the front if no other reads less and scores as well. With few examples the intervals overlap: the front says
# where to look, not what is proved.

# %%
points = [(row["budget"]["attended"]["share"], row["score"]["mean"]) for row in rows]
best = sorted(front(points), key=lambda place: points[place])
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name in methods:
    own = sorted((*points[i], *row["score"]["ci95"]) for i, row in enumerate(rows) if row["presets"]["method"] == name)
    read, score, low, high = zip(*own)
    drawn = axes.plot(read, score, "o-", label=name)
    axes.vlines(read, low, high, color=drawn[0].get_color(), alpha=0.3, linewidth=2)
axes.plot(*zip(*(points[place] for place in best)), "k--", linewidth=1, label="Pareto front", zorder=0)
axes.set(xlabel="share of the prompt read per step", ylabel=f"{task.metric}, 95 % interval", ylim=(-0.03, 1.03))
axes.legend();

# %% [markdown]
# ## What next
#
# - Why it loses what it loses: `fidelity=8` compares every eighth step with exact attention.
# - Whether `centred` and `local` are right: `python -m harness.tune` ([Tuning](../docs/experiments.md#tuning-a-method)).
# - To keep it: the class into a file of its own, a yaml beside it ([Add your own](../docs/extending.md)). `python -m harness
#   method=sign_keys` then runs it, and `python -m harness.check` holds it to its budget and its bytes.
