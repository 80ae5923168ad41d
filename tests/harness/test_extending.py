"""docs/extending.md: the plug-ins on the page, written into a package of their own, run from the command line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.commands.new import written as begun
from harness.engine.cache import KVCache
from methods.pqcache import PQCache
from methods.snapkv import SnapKV
from tests import forks
from tests.fast import MODEL, MODEL_ARGS, TASK_ARGS
from tests.forks import Forked
from tests.tiny import prompt, tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`((?:mine|conf)/\S+)`:\n\n```\w+\n(.*?)^```", PAGE, re.M | re.S))
SPREAD = FILES["mine/spread.py"], FILES["conf/method/spread.yaml"]
TIER, CODEC = re.findall(r"^```python\n(from methods\.tiers\.\w+ import .*?)^```", PAGE, re.M | re.S)  # table lines
NO_DEFAULT = SPREAD[0].replace("offset: int = 0", "offset: int"), SPREAD[1]
BARE = SPREAD[0], "_target_: mine.spread.Spread\n"
Cli = Callable[..., tuple[int, str, str]]


def written(folder: Path, files: Mapping[Any, str]) -> Path:
    for place, text in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, importable."""
    monkeypatch.syspath_prepend(str(written(tmp_path, FILES)))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_page_names_the_files_it_shows() -> None:
    (tree,) = re.findall(r"^```\n(mine/.*?)^```", PAGE, re.M | re.S)
    assert sorted(tree.split()) == sorted(FILES)


@pytest.mark.parametrize("files", [SPREAD, NO_DEFAULT, BARE], ids=["as printed", "no default in Python", "bare yaml"])
def test_a_method(tmp_path: Path, files: tuple[str, str]) -> None:
    """In a process of its own: nothing of this one helps it."""
    written(tmp_path, {"mine/spread.py": files[0], "conf/method/spread.yaml": files[1]})
    folder = ["--config-dir", str(tmp_path / "conf")]
    words = ["method=spread", "method.offset=3", *MODEL_ARGS, *TASK_ARGS, f"results.root={tmp_path / 'runs'}"]
    run = Forked(forks.module, "harness", *folder, *words, path=[tmp_path])
    assert run.wait() == 0, run.err
    assert "spread" in run.out
    listed = Forked(forks.module, "harness.list", "method=spread", *folder, path=[tmp_path])
    assert listed.wait() == 0, listed.err
    assert "a newcomer's method" in listed.out
    assert ("method.offset=0" in listed.out) == ("offset" in files[1])


def test_a_method_that_selects(cli: Cli, package: Path) -> None:
    """It keeps its budget to the token, over all layers."""
    written(package, begun("selects", "taper", "mine"))
    settings = [f"results.root={package / 'runs'}", f"--config-dir={package / 'conf'}"]
    code, _, err = cli("method=taper", "placement=host", "budget=0.25", *MODEL_ARGS, *TASK_ARGS, *settings)
    assert code == 0, err
    [run] = [json.loads(file.read_text()) for file in package.glob("runs/*taper*/summary.json")]
    assert run["budget"]["attended"]["share"] == 0.25


def test_an_ability(package: Path) -> None:
    """It acts at the first seal alone, also on a copy and what a store hands over, in a batch as alone, and is refused
    by name."""
    from mine.quiet import Quiet

    from harness import Engine, RunningBatch, attached

    def sinks(cache: KVCache) -> Tensor:
        return torch.stack([layer.store.v[:, :, :5] for layer in cache.layers])

    model, ids = tiny("llama"), prompt(60)
    found, answers = {}, {}
    with torch.inference_mode():
        for given in ((), (Quiet(0.5),)):
            with attached(model, SnapKV(window=8), budget=1.0, abilities=given) as kv:
                answers[given] = Engine(kv).generate(ids, max_new_tokens=6).tokens
                cache, again = kv.cache(capacity=90), kv.cache(capacity=90)
                model(ids, past_key_values=cache)
                cache.seal()
                again.refill(cache.contents())
                found[given] = sinks(cache).clone()
                for one in (cache, again, deepcopy(cache)):
                    one.open_turn()
                    model(prompt(9, seed=1), past_key_values=one)
                    one.seal()
                    assert torch.equal(sinks(one), found[given])
        with attached(model, SnapKV(window=8), budget=1.0, abilities=(Quiet(0.5),)) as kv:
            engine = Engine(kv)
            batch = RunningBatch(engine)
            for length in (60, 40):
                engine.join(batch, prompt(length), max_new_tokens=6)
            ended = [slot.out.tokens for _ in range(6) for slot in batch.step()]
    (plain, quiet), (answer, quieter) = found.values(), answers.values()
    assert torch.equal(quiet[:, :, :, :4], plain[:, :, :, :4] / 2)
    assert torch.equal(quiet[:, :, :, 4:], plain[:, :, :, 4:])
    assert quieter != answer
    assert quieter in ended
    refused = pytest.raises(ValueError, match=r"PQCache cannot have Quiet\(.*its rows must stay")
    with refused, attached(model, PQCache(), budget=0.5, abilities=(Quiet(),)):
        pass


def test_a_task(cli: Cli, package: Path) -> None:
    small = ["task.accounts=12", "task.samples=2", "budget=0.5"]
    code, out, err = cli(f"--config-dir={package / 'conf'}", "method=pqcache", "task=ledger", *small)
    assert code == 0, err
    assert "right balance" in out
    lines = [line for file in package.glob("runs/*/examples.jsonl") for line in file.read_text().splitlines()]
    assert [json.loads(line)["group"] for line in lines] == ["ledger/12"] * 4  # Full's, too


def test_a_task_scores_the_answer(package: Path) -> None:
    from mine.ledger import Ledger

    from evals.base import TaskEnv

    class Text:
        fingerprint = "words"

    (example,) = Ledger(samples=1).examples(TaskEnv(text=Text(), seed=1))
    assert f"holds {example.references[0]} dollars" in example.context
    assert Ledger().score(example, f"It holds {example.references[0]}.").value == 1
    assert Ledger().score(example, "It is empty.").value == 0


@pytest.mark.parametrize("name", ["my-llama", "tiny-granite"])
def test_a_model(cli: Cli, package: Path, name: str) -> None:
    if name == "my-llama":
        loaded = MODEL.load("fp32", "cpu")
        for part in (loaded.model, loaded.tokenizer):
            part.save_pretrained(package / "models" / name)
    code, out, err = cli(f"--config-dir={package / 'conf'}", "method=pqcache", f"model={name}", *TASK_ARGS)
    assert code == 0, err
    assert "pqcache" in out
    assert "full" in out


def with_line(line: str, *commands: tuple[str, ...]) -> None:
    """Commands, once the line is in its table."""
    forks.script(line)
    for module, *words in commands:
        with pytest.raises(SystemExit) as end:
            forks.module(module, *words)
        assert not end.value.code, words


def test_a_tier(tmp_path: Path) -> None:
    """Its bytes are in record, summary, table, page and cost."""
    written(tmp_path, {"mine/shared.py": FILES["mine/shared.py"]})
    runs, page = tmp_path / "runs", tmp_path / "page"
    words = ["method=pqcache", "placement=shared", "budget_rule=moved_bytes", "budget=0.1"]
    commands = [
        ("harness", *words, *MODEL_ARGS, *TASK_ARGS, f"results.root={runs}"),
        ("harness.report", str(runs), "--details", "--html", str(page)),
    ]
    made = Forked(with_line, TIER, *commands, path=[tmp_path])
    assert made.wait() == 0, made.err
    [folder] = [path.parent for path in runs.glob("*-pqcache-*/summary.json")]
    record, *_ = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
    assert record["kv_shared_bytes"] > 0 == record["kv_host_bytes"]
    assert record["moved_bytes_per_step"] > 0
    assert json.loads((folder / "summary.json").read_text())["memory"]["kv_shared_bytes"] >= record["kv_shared_bytes"]
    heads = [line for line in made.out.splitlines() if line.startswith("method ")]
    assert sum("KV dev" in line for line in heads) == sum("KV shared" in line for line in heads) == 2  # both tables
    assert "KV host" not in made.out
    assert "M: shared memory of a CPU" in made.out
    assert "the same in memory that other processes may map" in (page / "index.html").read_text()
    alone = Forked(forks.module, "harness.report", str(runs))  # of a tier that this process does not know
    assert alone.wait() == 0, alone.err
    assert "KV shared" not in alone.out


def test_a_codec(tmp_path: Path) -> None:
    written(tmp_path, {"mine/float8.py": FILES["mine/float8.py"]})
    held = {}
    for codec in ("e4m3", "null"):
        words = ["method=pqcache", f"codec={codec}", "placement=host", "budget=0.2", "baseline=off"]
        root = tmp_path / codec
        command = ("harness", *words, *MODEL_ARGS, *TASK_ARGS, f"results.root={root}")
        made = Forked(with_line, CODEC, command, path=[tmp_path])
        assert made.wait() == 0, made.err
        [file] = root.glob("*/summary.json")
        held[codec] = json.loads(file.read_text())["memory"]["kv_host_bytes"]
    assert held["null"] == 4 * held["e4m3"] > 0  # of fp32
    unknown = Forked(forks.module, "harness", "method=pqcache", "codec=e4m3")
    assert unknown.wait() != 0
    assert "codec=e4m3 is unknown" in unknown.err
