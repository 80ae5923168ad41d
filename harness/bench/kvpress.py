"""`python -m harness.bench kvpress --python VENV/bin/python`: is what presses keep here what they keep in kvpress?

Every prompt goes, as token ids, through a press here and through the same press in kvpress, which runs in its own
environment (`pip install kvpress`) with the same weights, in fp32 and at the same ratio. All but the prompt's last
token is compressed, since kvpress must be asked something. Compared are the positions that each KV head of each layer
keeps, those that it keeps here when the prompt comes in chunks of 300 tokens, and the greedy answers. Positions that
differ are ties where their scores lie within 1e-5 of the lowest that stays, as a share of it. The last rows do the same
for methods of ours that choose as a press does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch
import yaml
from torch import Tensor

from evals.base import Task
from harness.bench.common import arguments, methods, output
from harness.bench.common.output import Cell
from harness.bridges.kvpress.building import build
from harness.bridges.kvpress.keep import ratio_for
from harness.bridges.kvpress.kvpress import KVPress
from harness.config import plugins
from harness.config.catalogue import CONF
from harness.config.settings import Data, GenerationSettings, Settings
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.job import Job
from harness.jobs.planning.items import Item
from harness.models.base import LoadedModel
from harness.models.embedded import SmolLM2
from harness.terminal.numbers import share
from kernels.temporary import TemporaryFolder
from methods.base import Method

WORKER = Path(__file__).with_name("kvpress_worker.py")
CHUNK = 300
TIE = 1e-5  # of the lowest score that stays
SNAP, EXPECTED = {"name": "SnapKVPress"}, {"name": "ExpectedAttentionPress"}
PRESSES: dict[str, Mapping[str, Any]] = {
    "SnapKV": SNAP,
    "SnapKV(16, 31)": {"name": "SnapKVPress", "window_size": 16, "kernel_size": 31},
    "ExpectedAttention": EXPECTED,
    "TOVA": {"name": "TOVAPress"},
    "StreamingLLM": {"name": "StreamingLLMPress"},
    "KeyDiff": {"name": "KeyDiffPress"},
    "LagKV": {"name": "LagKVPress"},
    "PyramidKV": {"name": "PyramidKVPress"},
    "ChunkKV(SnapKV)": {"name": "ChunkKVPress", "press": SNAP},
    "AdaKV(ExpectedAttention)": {"name": "AdaKVPress", "press": EXPECTED},
    "CriticalKV(SnapKV)": {"name": "CriticalKVPress", "press": SNAP},
    "CriticalAdaKV(SnapKV)": {"name": "CriticalAdaKVPress", "press": SNAP},
    "CUR": {"name": "CURPress"},
    "NonCausalAttn": {"name": "NonCausalAttnPress"},
    "SimLayerKV": {"name": "SimLayerKVPress", "lazy_threshold": 0.9, "n_recent": 256},
}
OURS = {  # a method of ours with the parameters of a press
    "snapkv:window=64,kernel=5,pooling=avg": "SnapKV",
    "snapkv:window=16,kernel=31,pooling=avg": "SnapKV(16, 31)",
    "streaming:sinks=4,positions=original": "StreamingLLM",
}
Kept = list[list[list[int]]]  # positions by layer and KV head, ascending


class Side(NamedTuple):
    """What one side kept of a prompt, and answered."""

    kept: Kept
    text: str


class Peer:
    """kvpress in its own environment."""

    def __init__(self, process: subprocess.Popen[str], eos: Sequence[int]) -> None:
        self.process, self.eos = process, list(eos)

    def run(self, press: Mapping[str, Any], item: Item, kept: int) -> Side:
        """Let it keep about `kept` tokens of a prompt."""
        ids = list(item.prompt.ids)
        asked = {"press": press, "ratio": ratio_for(len(ids) - 1, kept), "new": item.new_tokens, "eos": self.eos}
        answer = self._answer(asked | {"context": ids[:-1], "rest": ids[-1:]})
        return Side(answer["kept"], answer["text"])

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("kvpress has ended: its error stands above. Is it installed beside that --python?")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def peer(python: str, folder: Path, eos: Sequence[int]) -> Iterator[Peer]:
    """Start it in an empty folder: transformers would take ours, `kernels`, for a package of that name."""
    words = [python, "-c", WORKER.read_text(), str(folder), str(torch.get_num_threads())]
    with TemporaryFolder("kv-kvpress-") as empty:
        try:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=empty)
        except OSError as error:
            raise ValueError(
                f"--python {python} cannot be started ({error.strerror}): name one beside kvpress."
            ) from error
        with process:
            yield Peer(process, eos)
            assert process.stdin is not None
            process.stdin.close()


def ours(kv: Attachment, item: Item, loaded: LoadedModel, chunk: int | None = None) -> Side:
    """Keep and answer here; in chunks the answer is left out."""
    engine, prompt = Engine(kv, prefill_chunk=chunk), torch.tensor([item.prompt.ids])
    began, cache = perf_counter(), engine.cache(prompt, item.new_tokens)
    logits = engine.prefill(cache, prompt[:, :-1], whole=True)
    cache.seal()
    kept = positions(cache, prompt.shape[1] - 1)
    if chunk is not None:
        return Side(kept, "")
    answer = engine.complete(
        cache, logits, prompt[:, -1:], began=began, max_new_tokens=item.new_tokens, stops=[_ending(loaded.eos_ids)]
    )
    return Side(kept, str(loaded.tokenizer.decode(answer.tokens[0], skip_special_tokens=True)))


def positions(cache: KVCache, tokens: int) -> Kept:
    """Return where the prompt tokens stood that the layers of a sealed cache hold."""
    return [[[place for place in head if place >= 0] for head in _places(layer, tokens)] for layer in cache.layers]


def _places(layer: Any, tokens: int) -> list[list[int]]:
    kept: Tensor | None = layer.kept_positions()
    return [list(range(tokens))] * layer.spec.num_kv_heads if kept is None else kept[0].tolist()


def _ending(eos: Sequence[int]) -> Any:
    return lambda tokens: "eos" if tokens[-1] in eos else None


def differing(first: Kept, second: Kept) -> int:
    """Count the positions that one of both keeps and the other does not; one in the place of another counts once."""
    pairs = [pair for layers in zip(first, second, strict=True) for pair in zip(*layers, strict=True)]
    return sum(max(len({*one} - {*other}), len({*other} - {*one})) for one, other in pairs)


@contextmanager
def scores_of(method: Method) -> Iterator[list[Tensor]]:
    """Yield the scores [1 G S] that a press gives to the tokens of each layer, as they come; none of a method that
    ranks no tokens by a `score`."""
    scores: list[Tensor] = []
    press_class = type(build(method.press)) if isinstance(method, KVPress) else None
    score = getattr(press_class, "score", None)
    if score is None:
        yield scores
        return

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        scores.append(score(*args, **kwargs))
        return scores[-1].clone()

    with mock.patch.object(press_class, "score", noted):
        yield scores


def ties(first: Kept, second: Kept, scores: Sequence[Tensor]) -> int:
    """Count the differing positions whose scores are as good as equal to the lowest that `first` keeps."""
    count = 0
    for one_layer, other_layer, scored in zip(first, second, scores, strict=False):
        for one, other, score in zip(one_layer, other_layer, scored[0], strict=True):
            apart, lowest = [*{*one} ^ {*other}], score[one].min()
            if apart and bool(((score[apart] - lowest).abs() <= TIE * lowest.abs()).all()):
                count += differing([[one]], [[other]])
    return count


def compared(
    task: Task, item: Item, here: Side, chunked: Side, there: Side, scores: Sequence[Tensor] = ()
) -> dict[str, float]:
    """Hold both sides against each other on one prompt. `scores`: of our side's press, by layer."""
    return {
        "positions": sum(len(head) for layer in there.kept for head in layer),
        "differ": differing(here.kept, there.kept),
        "ties": ties(here.kept, there.kept, scores),
        "differ_in_chunks": differing(chunked.kept, there.kept),
        "equal_answers": float(here.text == there.text),
        "ours": task.score(item.example, here.text).value,
        "kvpress": task.score(item.example, there.text).value,
        "n": 1,
    }


def row_of(label: str, parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Add prompts up; scores are means."""
    sums = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {"press": label, **sums} | {side: sums[side] / len(parts) for side in ("ours", "kvpress")}


TABLE = output.table(
    Cell("press", "press", left=True),
    Cell("positions", "positions"),
    Cell("other ones", "differ"),
    Cell("of them ties", "ties"),
    Cell("other ones in chunks", "differ_in_chunks"),
    Cell("equal answers", lambda row: f"{row['equal_answers']:.0f} of {row['n']}"),
    Cell("ours", "ours", "score", 100),
    Cell("kvpress", "kvpress", "score", 100),
)


def sides(chosen: Sequence[str]) -> Iterator[tuple[str, Method, Mapping[str, Any]]]:
    """Yield a label, our method and kvpress's press of each row."""
    for name in chosen:
        yield name, KVPress(press=dict(PRESSES[name])), PRESSES[name]
    for spec, name in OURS.items():
        if name in chosen:
            yield f"{name}, our method", methods.parsed(spec)[1], PRESSES[name]


def ruler(options: argparse.Namespace) -> Task:
    values = yaml.safe_load((CONF / "task" / "ruler.yaml").read_text(encoding="utf-8"))
    task: Task = plugins.build(
        values | {"tasks": options.tasks, "lengths": [options.length], "samples": options.samples}, "task"
    )
    return task


def parser() -> argparse.ArgumentParser:
    presses = {"nargs": "+", "default": list(PRESSES), "choices": PRESSES}
    tasks = {"tasks": ["niah_single_1", "niah_single_2", "niah_multikey_1"], "length": 512, "samples": 1}
    runs = {"budget": {"type": share, "default": 0.5}, "new": 16, "data_root": None}
    return arguments.parser("kvpress", __doc__, python=None, presses=presses, **tasks, **runs, **arguments.OUT)


def main(options: argparse.Namespace) -> None:
    source, task = SmolLM2(), ruler(options)
    loaded = source.load("fp32", "cpu")
    settings = Settings(data=Data(root=options.data_root), generation=GenerationSettings(max_new_tokens=options.new))
    items = Job.plan(methods.load("full"), task, source, settings).items
    title = (
        f"What presses keep beside kvpress 0.5.5: {len(items)} prompts of RULER ({', '.join(options.tasks)}) with "
        f"{options.length} tokens, {source.identity().name}, fp32, budget {options.budget}"
    )
    report = output.Report("kvpress", title, options, TABLE)
    with peer(options.python, source.folder(), loaded.eos_ids) as there:
        for label, method, press in sides(options.presses):
            if not report.out_of_time(label):
                row = row_of(label, [*_parts(options.budget, task, items, loaded, method, press, there)])
                report.add(
                    row, f"{label}: {row['differ']} of {row['positions']} positions differ, {row['ties']} of them ties"
                )
    report.finish()


def _parts(
    budget: float, task: Task, items: Sequence[Item], loaded: LoadedModel, method: Method, press: Any, there: Peer
) -> Iterator[dict[str, float]]:
    with attached(loaded.model, method, budget=budget) as kv:
        assert kv.budget is not None
        for item in items:
            kept = kv.budget.tokens(len(item.prompt.ids) - 1, 0)
            with scores_of(method) as scores:
                here = ours(kv, item, loaded)
            chunked = ours(kv, item, loaded, CHUNK)
            yield compared(task, item, here, chunked, there.run(press, item, kept), scores)
