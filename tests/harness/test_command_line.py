"""The command line as a user types it: thirty-odd wrong inputs, one sentence each, and the sweep that survives one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.__main__ import main
from tests.fast import MODEL_ARGS, TASK_ARGS

ROOT = Path(__file__).parents[2]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process, with a tiny model unless it names another; exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        named = {argument.partition("=")[0] for argument in arguments}
        model = [] if "model" in named else MODEL_ARGS
        task = [] if "task" in named else [a for a in TASK_ARGS if a.partition("=")[0] not in named]
        root = [] if "results.root" in named else [f"results.root={tmp_path / 'runs'}"]
        monkeypatch.setattr(sys, "argv", ["harness", *model, *task, *root, *arguments])
        code = main()
        out, err = capfd.readouterr()
        return code, out, err

    return run


WRONG = {
    "unknown method": (["method=oracel"], "There is no method 'oracel'; did you mean oracle?"),
    "unknown task": (["task=nia"], "There is no task 'nia'; did you mean niah?"),
    "unknown model": (["model=smolm2"], "There is no model 'smolm2'; did you mean smollm2?"),
    "unknown method in a sweep": (["-m", "method=full,pqcach"], "did you mean pqcache?"),
    "misspelt setting": (["budgt=0.2"], "There is no setting budgt; did you mean budget?"),
    "misspelt method parameter": (["method.sink=3"], "There is no setting method.sink; did you mean method.sinks?"),
    "misspelt task parameter": (["task.lenghts=[400]"], "did you mean task.lengths?"),
    "added parameter": (["+method.mm=3"], "method.mm is no parameter of PQCache"),
    "ill-typed setting": (["seed=abc"], "seed=abc has the wrong type"),
    "ill-typed budget": (["budget=lots"], "budget=lots has the wrong type"),
    "ill-typed method parameter": (["method.m=two"], "method.m=two should be a whole number"),
    "ill-typed task parameter": (["task.lengths=400"], "task.lengths=400 should be a list, each a whole number"),
    "fraction for a whole number": (["batch=1.5"], "batch=1.5 has the wrong type"),
    "budget 0": (["budget=0"], "budget=0 is neither a share of the prompt"),
    "budget -1": (["budget=-1"], "budget=-1 is neither a share of the prompt"),
    "budget 1.5": (["budget=1.5"], "budget=1.5 is neither a share of the prompt"),
    "budget below sinks": (["budget=0.01"], "set budget to at least 33"),
    "m that does not divide": (["method.m=7"], "m=7 does not divide the model's head size"),
    "m of zero": (["method.m=0"], "m=0 must be at least 1"),
    "b out of range": (["method.b=40"], "b=40 must lie in 1..16"),
    "no k-means rounds": (["method.iterations=0"], "iterations=0 must be at least 1"),
    "recent_ratio of 1": (["method.recent_ratio=1"], "recent_ratio=1 leaves nothing to select"),
    "negative sinks": (["method=streaming", "method.sinks=-1"], "sinks=-1 is negative"),
    "unknown choice": (["protocol=contxt"], "protocol=contxt is unknown: choose one of prompt, context"),
    "unknown placement": (["placement=disk"], "placement=disk is unknown"),
    "unknown dtype": (["dtype=int8"], "dtype=int8 is unknown"),
    "no such device": (["device=cuda:7"], "device=cuda:7 is not here"),
    "batch of 0": (["batch=0"], "batch=0 must be at least 1"),
    "negative temperature": (["generation.temperature=-1"], "generation.temperature=-1"),
    "top_p out of range": (["generation.top_p=0"], "generation.top_p=0"),
    "beyond the window": (["model=smollm2", "task.lengths=[9000]"], "more than the model's window of 8192"),
    "too short for anything": (["task.lengths=[40]"], "task.lengths=40 leaves 0 tokens for the haystack"),
    "empty task": (["task.lengths=[]"], "task.lengths=[] must name at least one length"),
    "no depths": (["task.depths=[]"], "must be a number of depths or percents"),
    "repeated length": (["task.lengths=[400,400]"], "two examples"),
    "unknown needle": (["task.needle=sword"], "task.needle='sword' is unknown: choose one of magic_city"),
    "unknown haystack": (["task.haystack=novel"], "haystack='novel' is unknown"),
    "missing haystack": (["task.haystack=essays"], "or use pydoc"),
    "missing data root": (["data.root=/no/such/folder"], "data.root=/no/such/folder is no folder"),
    "unknown shape": (["model.shape=gpt5"], "model.shape=gpt5 is unknown"),
    "too many layers": (["model.layers=99"], "model.layers=99 does not suit tiny"),
    "missing model folder": (["model=hf", "model.name=./no/such/model"], "no/such/model"),
    "folder that is not writable": (["results.root=/proc/nowhere"], "/proc/nowhere"),
    "layer budgets of another model": (["layer_budgets=[0.1,0.2,0.3]"], "layer_budgets names 3 layers"),
    "unequal lengths in a batch": (["batch=4"], "batch=4 needs prompts of equal length"),
    "another launcher": (["-m", "hydra/launcher=joblib", "budget=0.1,0.2"], "hydra/launcher=joblib cannot serve"),
    "no number": (["budget=abc"], "budget=abc has the wrong type: it should be a number or null."),
    "a name like no other": (["method.nope=3"], "no setting method.nope; there is b, cache_block"),
    "broken syntax": (["budget=[1"], "Cannot read"),
}


@pytest.mark.parametrize(("arguments", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_gets_one_sentence(cli: Cli, arguments: list[str], says: str) -> None:
    code, _, err = cli(*arguments)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert says in lines[0]
    assert "Traceback" not in err


def test_in_a_sweep_one_bad_job_is_named_and_the_others_run(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("-m", "method=full,streaming", "budget=0.2,-1")
    assert code == 1
    assert "budget=-1" in err
    statuses = [json.loads(path.read_text())["status"] for path in (tmp_path / "runs").glob("*/run.json")]
    assert statuses == ["complete", "complete"]
    assert "streaming" in out
    assert "20%" in out


def test_methods_that_keep_nothing_on_the_host_are_named(cli: Cli) -> None:
    code, out, err = cli("-m", "method=streaming,pqcache", "placement=host", "baseline=off")
    assert code == 0, err
    assert "placement=device for what keeps nothing there: Streaming." in out


def test_a_table_stands_at_the_end(cli: Cli) -> None:
    code, out, err = cli("method=pqcache", "placement=host")
    assert code == 0, err
    assert all(word in out for word in ("TTFT", "TT2T", "TPOT", "vs full", "KV host", "moved", "pqcache", "full"))


def test_dry_run_loads_no_weights_and_writes_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("harness.models.random.Random.build", refuse)
    code, out, err = cli("dry_run=true")
    assert code == 0, err
    assert "4, of 400 to 400 prompt tokens" in out
    assert "KV cache" in out
    assert not (tmp_path / "runs").exists()


def test_help_answers_quickly_and_without_torch() -> None:
    code = "import sys; import harness.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "harness", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "method: " in done.stdout
    assert time.monotonic() - begin < 60  # a hang, not a speed claim


METHOD = '''"""Keep every second token of the prompt's middle: a newcomer's method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.base import KVLayer, LayerSpec, Method, Request
from methods.layers import EvictLayer


@dataclass(frozen=True, kw_only=True)
class Spread(Method):
    """offset: where the spread begins."""

    offset: int

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        return [SpreadLayer(spec, request, self) for spec in specs]


class SpreadLayer(EvictLayer):
    method: Spread

    def keep(self, budget: int) -> Tensor:
        rows = torch.linspace(self.method.offset, self.store.length - 1, budget).long()
        return rows.expand(self.request.batch, self.spec.num_kv_heads, -1)
'''


def test_a_newcomers_method_in_a_package_of_his_own(tmp_path: Path) -> None:
    """CONTRIBUTING's example, to the letter: one file, one yaml, nothing edited here."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spread.py").write_text(METHOD)
    (tmp_path / "conf" / "method").mkdir(parents=True)
    (tmp_path / "conf" / "method" / "spread.yaml").write_text("_target_: mine.spread.Spread\noffset: 0  # where\n")
    command = [sys.executable, "-m", "harness", "--config-dir", str(tmp_path / "conf"), "method=spread", *MODEL_ARGS]
    command += [*TASK_ARGS, f"results.root={tmp_path / 'runs'}"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(Path.home())}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "spread" in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "harness.list", "method=spread", "--config-dir", str(tmp_path / "conf")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "a newcomer's method" in listed.stdout
    assert "method.offset=0" in listed.stdout
