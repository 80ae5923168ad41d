"""Every fenced block of README, CONTRIBUTING and docs/: Python runs, and a command is one that would start.

Commands are not run here, for they take minutes, data or a GPU. The shell expands a block as a reader's would, with
recorders in place of the programs; each recorded call is then checked by the parser it is for, and what `python -m
harness` was given is composed and built, for every value of a sweep.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.cachedattention.serving.plan import points as serve_points
from harness.cachedattention.simulation.scenario import scenarios
from harness.config.catalogue import experiments
from harness.config.compose import built, composed, read_search
from harness.models import embedded
from harness.models.random import Random
from harness.terminal.arguments import Parser
from tests import forks
from tests.forks import Forked
from tests.quick import slow_if

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = "```"
PROGRAMS = ("python", "make", "pip", "hf", "eval", "kv-harness")  # what the first word of a command may be
ELSEWHERE = {  # what nothing here can check, and why
    "pip": "installs from an index",
    "python -m venv": "makes another environment",
    "python -m jupyter": "is a program of others; test_notebooks.py runs the notebooks",
    "kvpress-env/bin/pip": "installs from an index",
}
NEWCOMERS = ("spread", "fold", "ledger", "my-llama", "tiny-granite", "e4m3")  # test_extending.py runs them


class CodeBlock(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def kind(self) -> str:
        """python, yaml, latex, text (a drawing), commands, or output: what a command prints, and file contents."""
        if self.language:
            return self.language
        return "commands" if any(_is_command(line) for line in self.text.splitlines()) else "output"


def _is_command(line: str) -> bool:
    words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
    return bool(words) and (words[0] in PROGRAMS or "/bin/" in words[0]) and not line[0].isspace()


def blocks() -> list[CodeBlock]:
    found = []
    for page in PAGES:
        lines, start = page.read_text(encoding="utf-8").splitlines(), None
        for number, line in enumerate(lines):
            if line.startswith(FENCE):
                if start is not None:
                    language = lines[start].removeprefix(FENCE).strip()
                    found.append(CodeBlock(page, start + 1, language, "\n".join(lines[start + 1 : number])))
                start = number if start is None else None
    return found


BLOCKS = blocks()


def of_kind(kind: str, few: bool = False) -> pytest.MarkDecorator:
    """Take the blocks of a kind. `few`: those of the README and one in eight of the others; the rest are slow."""
    chosen = [block for block in BLOCKS if block.kind == kind]
    quick = {id(block) for block in chosen if block.page.name == "README.md"} | {id(block) for block in chosen[::8]}
    params = slow_if(lambda block: few and id(block) not in quick, chosen)
    return pytest.mark.parametrize("block", params, ids=[f"{b.page.name}:{b.line}" for b in chosen])


def test_no_block_is_left_out() -> None:
    fences = sum(line.startswith(FENCE) for page in PAGES for line in page.read_text(encoding="utf-8").splitlines())
    assert 2 * len(BLOCKS) == fences
    assert {block.kind for block in BLOCKS} <= {"python", "yaml", "commands", "output", "text", "latex"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w./-])(?:harness|methods|evals|kernels|conf|tests|docs)/[\w./-]+\.[a-z]+\b", text)
    own = re.findall(r"^`(\S+)`:$", text, re.M)  # files that the page itself brings
    assert [name for name in named if name not in own and not (ROOT / name).is_file()] == []


@of_kind("python")
def test_python_runs(block: CodeBlock) -> None:
    """With a tiny model in place of the embedded one."""
    if "kvpress" in block.text and find_spec("kvpress") is None:
        pytest.skip("needs kvpress: `make setup` installs it")
    ran = Forked(with_a_tiny_model, block.text)
    assert ran.wait() == 0, ran.err


def with_a_tiny_model(text: str) -> None:
    embedded.SmolLM2 = lambda: Random(shape="tiny", layers=2)  # type: ignore[assignment, misc]
    forks.script(text)


@of_kind("commands", few=True)
def test_commands_would_start(block: CodeBlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(block.text, tmp_path)
    assert calls
    (tmp_path / "DATA").mkdir()  # what the pages call the reader's folder of data sets
    monkeypatch.chdir(tmp_path)
    for call in calls:
        check(call)


def recorded(text: str, folder: Path) -> list[list[str]]:
    """The argument lists of the programs that `text`, as a shell script, calls."""
    log = folder / "calls"
    writer = f"#!{sys.executable}\nimport json, sys\nopen({str(log)!r}, 'a').write(json.dumps(sys.argv) + '\\n')\n"
    places = re.findall(r"\S+/bin/\w+", text)
    for name in [*(f"bin/{program}" for program in PROGRAMS if program != "eval"), *places]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(writer)
        (folder / name).chmod(0o755)
    # the variables of one block hold in the next ones of its page
    script = f"set -e\n{shared_variables(text)}\n{text}"
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [[place.removeprefix(f"{folder}/bin/").removeprefix("./"), *words] for place, *words in calls]


def shared_variables(text: str) -> str:
    """Assignments in the blocks of the same page before `text`."""
    page = next(block.page for block in BLOCKS if block.text == text)
    before = [block.text for block in BLOCKS[: [b.text for b in BLOCKS].index(text)] if block.page == page]
    return "\n".join(re.findall(r"^[A-Z]+=(?:\"[^\"]*\"|\S+)$", "\n".join(before), re.M))


def check(call: Sequence[str]) -> None:
    line = shlex.join(call)
    newcomer = any(word.endswith(f"={name}") for word in call for name in NEWCOMERS)
    if newcomer or any(line.startswith(start) for start in ELSEWHERE):
        return
    if call[0] == "make":
        targets = [word for word in call[1:] if "=" not in word]
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert targets
        assert set(targets) <= set(known), line
    elif call[0] == "hf":
        check_download(line)
    elif call[:2] == ["python", "-m"]:
        check_module(call[2], list(call[3:]))
    else:
        assert call[0] == "kv-harness", line
        check_module("harness", list(call[1:]))


def check_download(line: str) -> None:
    """The revision is the one that a task reads."""
    (revision,) = re.findall(r"--revision (\w+)", line)
    sources = [*(ROOT / "conf" / "task").glob("*.yaml"), *(ROOT / "evals").rglob("*.py")]
    assert any(revision in source.read_text(encoding="utf-8") for source in sources), line


def check_lm_eval(words: list[str]) -> None:
    """Check the keys of a run among the arguments of our model; its own are parameters of `KVHarnessLM`."""
    pytest.importorskip("lm_eval")
    from harness.bridges.lm_eval.model import KVHarnessLM

    own = signature(KVHarnessLM.__init__).parameters
    for flag, given in pairwise(words):
        if flag == "--model_args":
            built(composed([word for word in given.split(",") if word.partition("=")[0] not in own]))


def check_module(module: str, words: list[str]) -> None:
    if words[:1] == ["lm-eval"]:
        check_lm_eval(words)
    elif module == "harness":
        if not {"-sc", "--help", "--version"} & set(words):
            check_run(words)
    elif module == "harness.list":
        assert import_module(module).main(words) == 0
    elif module == "harness.bench":
        here = ["cpu" if word == "cuda" else word for word in words]  # a parser looks for the device
        import_module(f"{module}.{here[0]}").parser().parse_args(here[1:])
    elif module == "harness.serve":
        options = options_of(module, words)
        for point in serve_points(options.overrides):
            built(composed(point.words))
    elif module == "harness.doctor":
        assert set(words) <= {"--model"}
    elif module == "harness.tune":
        built(composed(read_search([word for word in words if "=" in word]).words))
    else:
        options = options_of(module, words)
        if module == "harness.simulate":
            assert list(scenarios(options.overrides))


class _Parsed(BaseException):
    """The options of a command line were read; the command itself does not run."""


def options_of(module: str, words: list[str]) -> Namespace:
    def parsed(parser: Parser, arguments: list[str]) -> None:
        raise _Parsed(ArgumentParser.parse_intermixed_args(parser, arguments))

    with patch.multiple(Parser, parse_args=parsed, parse_intermixed_args=parsed), pytest.raises(_Parsed) as stopped:
        import_module(module).main(words)
    options: Namespace = stopped.value.args[0]
    return options


def check_run(words: list[str]) -> None:
    """Every value of a sweep at least once."""
    overrides = [word for word in words if not word.startswith("-")]
    for point in points(overrides, sweep="-m" in words):
        built(composed(point))


def points(overrides: Sequence[str], sweep: bool) -> list[list[str]]:
    if not sweep:
        return [list(overrides)]
    named = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("experiment=")]
    grids = [f"{key}={values}" for name in named for key, values in experiments()[name].grid.items()]
    values = [
        _values(word) for word in (*grids, *overrides) if not word.startswith(("hydra/launcher", "hydra.launcher"))
    ]
    assert max(map(len, values)) > 1, "a sweep of one job"
    return [[each[i % len(each)] for each in values] for i in range(max(map(len, values)))]


def _values(word: str) -> list[str]:
    override = OverridesParser.create().parse_override(word)
    key = word.partition("=")[0]
    return [f"{key}={one}" for one in override.sweep_string_iterator()] if override.is_sweep_override() else [word]


# The documentation as a site: it builds, every page is in its menu, and a broken link fails the build.


pytest.importorskip("material", reason="needs mkdocs-material: pip install '.[docs]'")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's documents, to be changed."""
    for name in ("docs", "results/published", "results/paper"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=folder, env=dict(os.environ, NO_COLOR="1"), capture_output=True, text=True)


def test_the_site_builds(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    pages = [copy / "README.md", copy / "CONTRIBUTING.md", *(copy / "docs").glob("*.md")]
    for page in pages:
        place = page.relative_to(copy).with_suffix("")
        assert (copy / "build" / "site" / ("" if place.name == "README" else place) / "index.html").is_file()
    assert (copy / "build" / "site" / "docs" / "img" / "headline.png").is_file()
    leaderboard = (copy / "build" / "site" / "leaderboard.html").read_text()
    assert all(
        f'data-table="{path.stem}"' in leaderboard for path in (copy / "results/published/tables").glob("*k.csv")
    )
    assert 'href="leaderboard.html"' in (copy / "build" / "site" / "index.html").read_text()
