"""`harness.check` finds what is wrong with a method, and `harness.new` writes one with which nothing is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness.checks.contract import CHECKS
from harness.checks.trial import Trial
from harness.commands.check import main, outcome
from harness.commands.new import KINDS, written
from harness.commands.new import main as new
from methods.base import AttnInput
from methods.templates.fold import Fold
from methods.templates.lag import Lag, LagKeep
from methods.templates.taper import Taper, TaperRead
from tests.tiny import tiny

Run = Callable[..., tuple[int, str, str]]
BY_NAME = {check.name: check for check in CHECKS}
IN_PLACE = {  # what a user writes at first, and what is wrong
    "the seal": (
        "self.layer.write(rows, v=self._merged(k, v, rows))",
        "v.scatter_(2, rows.unsqueeze(3).expand(*rows.shape, v.shape[3]), self._merged(k, v, rows))",
        "In layer 0 of Mine, the seal changed stored values in place, .*: write with layer.write",
    ),
    "rows of another shape": (
        "v=self._merged(k, v, rows))",
        "v=self._merged(k, v, rows)[:, :, :1])",
        r"In layer 0 of Mine, layer.write was given v of shape \[1, 2, 1, 16\]. Wanted is \[1, 2, \d\d, 16\]",
    ),
    "a step": (
        "self.layer.write(rows, v=self._merged(k, v, rows))",
        "(v if self.layer.closed else v.clone())[:, :, 0] *= 2",
        "In layer 0 of Mine, a step changed stored values in place, .*: write with layer.write",
    ),
    "what others read": (
        "def size(",
        "def observe(self, x):\n        x.v[:, :, :1] *= 2\n        super().observe(x)\n\n    def size(",
        "In layer 0 of Mine, x.v was changed in place, and other methods of a shared prefill and .* fidelity",
    ),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in a folder from which a package `mine` is imported; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def ran(command: Callable[..., int], *words: str) -> tuple[int, str, str]:
        code = command([*words, *["--config-dir", "conf"] * (command is main)])
        return code, *capfd.readouterr()

    yield ran
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def write(kind: str, old: str = "", change: str = "", name: str = "mine") -> None:
    """Write a method of a kind into the working directory, with a change."""
    for path, text in written(kind, name, "mine").items():
        path.parent.mkdir(parents=True, exist_ok=True)
        assert path.suffix == ".yaml" or old in text
        path.write_text(text.replace(old, change) if old else text)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_as_it_stands(kind: str, run: Run) -> None:
    code, out, err = run(new, "method", "my_idea", "--kind", kind)
    assert code == 0, err
    assert "python -m harness.check --config-dir conf method=my_idea" in out
    code, out, err = run(main, "method=my_idea")
    assert code == 0, out + err
    lines = [line for line in out.splitlines() if line.startswith(tuple(BY_NAME))]
    assert len(lines) == len(CHECKS)
    assert sum("  does not apply: it keeps everything on the device" in line for line in lines) == (kind != "selects")


@pytest.mark.parametrize("what", IN_PLACE)
def test_rows_that_are_changed_in_place_are_found(what: str, run: Run) -> None:
    old, change, says = IN_PLACE[what]
    write("merges", old, change)
    code, out, _ = run(main, "method=mine")
    assert code == 1
    assert re.search(says, out), out
    assert "--seed" not in out  # which would change nothing


class Loud(LagKeep):
    def decode(self, x: AttnInput) -> Tensor:
        return 1.5 * super().decode(x)


class Rewritten(LagKeep):
    def observe(self, x: AttnInput) -> None:
        self.store.v[:, :, :1] *= 2


class Divides(LagKeep):
    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * (self.store.k - self.store.k).sum().reciprocal() * 0


class Greedy(LagKeep):
    def size(self, budget: int) -> int:
        return budget + 3


class Excused(LagKeep):
    def size(self, budget: int) -> int:
        self.layer.fallback = "the text asks for more"
        return budget + 3


class Heavy(LagKeep):
    def close(self, evicted: int) -> None:
        self.notes = torch.zeros(5000)


class ByChunk(LagKeep):
    chunks = 0

    def observe(self, x: AttnInput) -> None:
        self.chunks += 1

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * (1 + 0.1 * self.chunks)


class Mixed(LagKeep):
    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) + 0.1 * x.v.mean()


class Undeclared(TaperRead, capturable=True, of_each={}):
    """Its steps use `means`, which its class line does not name."""


class Elsewhere(TaperRead):
    def select(self, q: Tensor, top: int) -> Tensor:
        rows = super().select(q, top)
        return rows if self.layer.far is None else torch.arange(top).expand(rows.shape)


class Later(LagKeep):
    def size(self, budget: int) -> int:
        return budget + 20 * bool(self.layer.evicted)


class Forgetful(LagKeep):
    turns = 0

    def close(self, evicted: int) -> None:
        self.turns += 1

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * (1 + 0.1 * self.turns)


class OwnPrefill(LagKeep):
    seen = False

    def prefill(self, x: AttnInput) -> Tensor:
        self.seen = True
        return super().prefill(x)

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * (1.5 if self.seen else 1)


class Global(LagKeep):
    steps: ClassVar[list[int]] = []

    def decode(self, x: AttnInput) -> Tensor:
        self.steps.append(1)
        return super().decode(x) * (1 + 0.01 * len(self.steps))


class Unwritten(LagKeep):
    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) + 0.1 * torch.empty(1).isnan()


class Wide(LagKeep):
    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x).float()


FLAWS: list[tuple[str, Any, str]] = [  # check, policy, what it says
    ("runs", Divides, "In layer 0, attention came out as NaN or infinite"),
    ("budget 1.0 is Full", Loud, "at token 2.*so a step reads or weighs it otherwise"),
    ("budget 1.0 is Full", Rewritten, "at token 2.*stores other values than the model made"),
    ("budget kept", Excused, "step 1 reads 36, 36, 36 tokens"),
    ("budget kept", Greedy, "step 1 reads 36, 36, 36 tokens of it in the layers, and their budgets are 33, 33, 33"),
    ("bytes as said", Heavy, r"\d+ bytes are on the device, and `cost` says \d+"),
    ("chunks as whole", ByChunk, "in chunks of 19 tokens is answered otherwise at token 2"),
    ("batch as alone", Mixed, "sequence 0 of a batch of 2 is answered otherwise than alone"),
    ("batch as alone", Undeclared, "of_each"),
    ("host as device", Elsewhere, "placement=host answers otherwise"),
    ("further turn", Later, "after the prompt of turn 2, step 1 reads"),
    ("saved and restored", Forgetful, "`state` and `restore`"),
    ("shared prefill", OwnPrefill, "`observe` must gather all that `prefill` does"),
    ("likelihood on as off", Global, "was fed and taken back"),
    ("questions shared as separate", Global, "question 1 on a shared context .* differs in tokens"),
    ("fresh memory", Unwritten, "full of NaN"),
    ("bf16", Wide, "dtype"),
]


def test_every_check_has_a_flaw_that_it_finds() -> None:
    assert {*BY_NAME} == {"runs", "small prompts and budgets", *(name for name, *_ in FLAWS)}


@pytest.mark.parametrize(("name", "policy", "says"), FLAWS, ids=lambda x: getattr(x, "__name__", None))
def test_a_flaw_is_found(name: str, policy: Any, says: str) -> None:
    base: Any = Taper if issubclass(policy, TaperRead) else Lag
    flawed = dataclass(frozen=True, kw_only=True)(type("Flawed", (base,), {"policies": (policy,)}))
    state, why = outcome(BY_NAME[name], Trial(flawed(), tiny("llama")))
    assert state == "failed"
    assert re.search(says, why), why


@pytest.mark.parametrize("least", [21, 30])
def test_windows_that_a_method_does_not_state_are_found(least: int) -> None:
    """It needs 21 tokens at least: of fewer nothing is left to choose, and more are refused for no reason."""
    flawed: Any = dataclass(frozen=True, kw_only=True)(type("Flawed", (Lag,), {"smallest_budget": least - 3}))
    state, why = outcome(BY_NAME["small prompts and budgets"], Trial(flawed(), tiny("llama")))
    assert (state == "failed") == (least == 21), why


def test_prompts_are_as_long_as_the_windows_ask() -> None:
    assert [Trial(method, None).length for method in (Lag(), Lag(lag=64), Taper(), Fold())] == [83, 195, 128, 83]


ERRORS = [  # a change of the method, the words, the exit code, what the last line says
    (("size - sinks - lag)", "size // (sinks - 4))"), ["method=mine"], 1, r"ZeroDivisionError: .*mine.py, line 2\d"),
    (
        ("sinks: int = 4", "sinks: int"),
        ["method=mine", "method.sinks=many"],
        2,
        "method.sinks=many should be a whole number",
    ),
    (
        (
            "    @property\n",
            "    def check_model(self, spec):\n        raise ValueError('sinks=4 needs 64')\n\n    @property\n",
        ),
        ["method=mine"],
        2,
        r"method=mine cannot be checked on the tiny model \(3 layers, .*\), for: method.sinks=4 needs 64",
    ),
    (("", ""), ["method=mine", "budget=0.2"], 2, "budget=0.2 changes nothing for harness.check"),
    (("", ""), ["mine"], 2, "Cannot read 'mine': write method=mine"),
    (("", ""), ["method.lag=8"], 2, "No method is named"),
]


@pytest.mark.parametrize(("change", "words", "code", "says"), ERRORS)
def test_a_method_that_cannot_be_checked_says_why_in_a_sentence(
    change: tuple[str, str], words: list[str], code: int, says: str, run: Run
) -> None:
    write("evicts", *change)
    got, out, err = run(main, *words)
    assert got == code
    assert re.search(says, out + err), out + err
    assert "Traceback" not in out + err


def test_a_yaml_without_a_class_says_what_it_lacks(run: Run) -> None:
    write("evicts")
    Path("conf/method/mine.yaml").write_text("sinks: 4\n")
    code, _, err = run(main, "method=mine")
    assert code == 2
    assert re.search("method._target_=None must name a class", err), err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine", "mine/mine.py is there already"),
        ("snapkv", "snapkv is a method of the harness"),
        ("Mine", "'Mine' cannot name a method"),
        ("none", "none would be the class None"),
        ("class", "'class' cannot name a method"),
        ("a-b.mine2", "'a-b' cannot name a package"),
        ("plan", "plan would be the class Plan, which is taken"),
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(name: str, says: str, run: Run) -> None:
    write("evicts")
    before = Path("mine/mine.py").read_text()
    code, _, err = run(new, "method", name)
    assert code == 2
    assert says in err
    assert sorted(path.name for path in Path().rglob("*.*")) == ["mine.py", "mine.yaml"]
    assert Path("mine/mine.py").read_text() == before
