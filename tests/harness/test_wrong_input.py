"""Wrong inputs, one of each kind: one sentence that names the key, before weights load, and no file is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from evals.base import Example, TaskEnv
from evals.niah import Niah
from harness.prompts.prompt_lint import Finding
from tests.harness.conftest import Outside

Cli = Callable[..., tuple[int, str, str]]

RUNS = {  # kind -> words of `python -m harness`, and what the sentence has to name
    "unknown method": (["method=oracel"], "oracle"),
    "a list for a name": (["method=[snapkv,h2o]"], "method=NAME"),
    "no name": (["-m", "model=random", "method=null"], "method=NAME"),
    "a value that is not there": (["seed=${nowhere}"], "seed names a value that is not there"),
    "no folder behind a flag": (["--config-dir"], "--config-dir= is empty"),
    "unknown experiment": (["+experiment=tables/needels"], "did you mean tables/needles?"),
    "unknown setting": (["budgt=0.2"], "budget"),
    "unknown parameter": (["method.sink=3"], "sinks"),
    "parameter as a setting": (["sinks=3"], "method.sinks"),
    "misspelt parameter as a setting": (["page_sise=8"], "did you mean method.page_size?"),
    "parameter of another method": (["method=streaming", "method.m=2"], "method.m"),
    "wrong type": (["seed=abc"], "seed=abc"),
    "one value for a list": (["task.lengths=400"], "task.lengths=[400]"),
    "percent": (["budget=20%"], "0.2"),
    "out of range": (["budget=1.5"], "budget=1.5"),
    "below the method's least": (["budget=20"], "at least 33"),
    "the same behind a dense layer": (["budget=20", "dense_layers=[0]"], "at least 33"),
    "a method without windows": (["method=tova", "budget=1"], "budget=1 gives TOVA 1 rows of prompt and answer"),
    "samples of rounds": (["task.samples=2"], "did you mean task.rounds?"),
    "a setting below a group": (["method.codec=tq4"], "codec is a setting of the run, so write codec=tq4"),
    "no number": (["generation.temperature=nan"], "generation.temperature=nan"),
    "no size": (["store.host=lots"], "store.host=lots"),
    "no budget": (["budget=lots"], "budget=lots should be a number, a size as 64MiB, or null"),
    "no bytes": (["budget=0B"], "budget=0"),
    "the environment's": (["threads=2"], "OMP_NUM_THREADS"),
    "unknown choice": (["protocol=contxt"], "protocol=contxt"),
    "two settings that clash": (["generation.top_k=5"], "generation.temperature"),
    "what the model has not": (["method=shadowkv", "method.rank=100000"], "rank=100000"),
    "a layer that is not there": (["dense_layers=[99]"], "dense_layers=[99]"),
    "a device that is not there": (["device=cuda:7"], "device=cuda:7"),
    "beyond the window": (["model=smollm2", "task.lengths=[9000]"], "8192"),
    "equal examples": (["task.lengths=[400,400]"], "name each value of task.lengths once"),
    "missing data": (["task.haystack=essays"], "data.root"),
    "a file of another kind": (["task=ruler", "task.tasks=[vt]", "task.source=/etc/passwd"], "task.source"),
    "a folder that is not there": (["data.root=/no/such/folder"], "data.root=/no/such/folder"),
    "a folder that takes no files": (["results.root=/proc/nowhere"], "/proc/nowhere"),
    "a model that is not there": (["model=hf", "model.name=./no/such/model"], "no/such/model"),
    "broken syntax": (["budget=[1"], "budget=[1"),
    "empty value": (["results.root="], "results.root"),
    "several values without -m": (["budget=0.1,0.2"], "-m"),
    "no value in a range": (["-m", "seed=range(5,5)"], "seed=range(5,5)"),
    "a setting of Hydra's": (["-m", "+hydra.sweeper.params.seed='1,2'"], "hydra.sweeper.params.seed"),
    "unknown launcher": (["-m", "hydra/launcher=jobli", "budget=0.1,0.2"], "joblib"),
}
COMMANDS = {  # kind -> module, its words, and what the sentence has to name
    "no runs": ("harness.commands.report", ["{empty}"], "results.root"),
    "unknown option": ("harness.commands.report", ["{empty}", "--sort=accuracy"], "accuracy"),
    "no run": ("harness.commands.show", ["{empty}"], "one of the folders in it"),
    "unknown word": ("harness.commands.list", ["methodss"], "method"),
    "unknown flag": ("harness.commands.doctor", ["--fix"], "--fix"),
    "a server's setting": ("harness.serve", ["slots=0"], "slots=0"),
    "a simulator's setting": ("harness.commands.simulate", ["sessions=0"], "sessions=0"),
    "a method without parameters": ("harness.commands.tune", ["method=full"], "Full"),
    "unknown method of a benchmark": ("harness.bench.__main__", ["layer", "--methods=pqcash"], "pqcache"),
}


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("kind", RUNS)
def test_a_wrong_run_ends_in_one_sentence_before_weights_load(cli: Cli, tmp_path: Path, kind: str) -> None:
    words, named = RUNS[kind]
    code, out, err = cli(*words)
    assert code == 1
    assert "Traceback" not in out + err
    (sentence,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert named in sentence
    assert list(tmp_path.glob("runs/*-*")) == []


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_wrong_word_of_another_command_does_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    module, words, named = COMMANDS[kind]
    monkeypatch.chdir(tmp_path)
    try:
        code = import_module(module).main([word.format(empty=tmp_path) for word in words])
    except SystemExit as end:  # of argparse
        code = end.code
    assert code in (1, 2)
    (sentence,) = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert named in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_yaml_with_the_name_of_a_built_in_one_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "conf" / "method").mkdir(parents=True)
    file = tmp_path / "conf" / "method" / "pqcache.yaml"
    file.write_text("# Mine.\n_target_: mine.pq.PQ\n")
    code, _, err = cli("--config-dir", str(tmp_path / "conf"), "method=pqcache")
    assert (code, str(file) in err) == (1, True)


# The command line as a user types it: wrong input in one sentence, and the sweep that survives a bad job.


ROOT = Path(__file__).parents[2]


def test_in_a_sweep_one_bad_job_is_named_and_the_others_run(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("-m", "method=full,streaming", "budget=0.2,-1")
    assert code == 1
    assert err.index("budget=-1") < err.index("job 1/3")  # before the first job, which may take hours
    statuses = [json.loads(path.read_text())["status"] for path in (tmp_path / "runs").glob("*/run.json")]
    assert statuses == ["complete", "complete"]
    assert "20%" in out
    failed, last = out.splitlines()[-2:]
    assert failed.startswith("1 of 3 jobs")
    assert last.startswith("  method=streaming budget=-1: budget=-1 ")


@pytest.mark.parametrize(
    ("words", "jobs", "failed"),
    [
        (["method=streaming", "batch=0"], 1, "batch=0"),
        (["-m", "batch=0", "budget=0.1,0.2"], 2, "batch=0"),
        (["method=streaming", "results.root=/dev/null"], 1, "/dev/null"),
        (
            ["-m", "task=ruler", "task.tasks=[vt]", "task.lengths=[512]", "method=full,streaming", "budget=0.1,0.2"],
            3,
            "vt",
        ),
    ],
)
def test_what_ends_several_jobs_is_said_once(cli: Cli, words: list[str], jobs: int, failed: str) -> None:
    code, out, err = cli(*words)
    first, *others = [line for line in err.splitlines() if not line.startswith("note:")]
    assert (code, out) == (1, "")
    assert first.startswith("error: ")
    assert failed in first
    assert first.startswith("error: method=full: ") == (jobs == 3)
    assert others[1:2] == ([f"{jobs} of {jobs} jobs failed:"] if jobs > 1 else [])
    assert len(others) == (3 if jobs > 1 else 0)
    assert jobs == 1 or others[2].count("; ") >= jobs - 1  # all are named


BROKEN = """from dataclasses import dataclass
from methods.streaming import Streaming
@dataclass(frozen=True, kw_only=True)
class Broken(Streaming):
    when: str
    def at_communication(self, share, head_dim):
        return self
    def check(self, budget, layer=0):
        if self.when == "planned":
            raise KeyError("no such head")
        super().check(budget, layer)
    def start(self, specs, cache):
        raise KeyError("no such head")
"""


class Broken(NamedTuple):
    file: Path
    conf: str  # for --config-dir


@pytest.fixture
def broken(outside: Outside) -> Broken:
    return Broken(*outside("Broken", BROKEN, "sinks: 4\npositions: cache\nwhen: started\n"))


@pytest.mark.parametrize(("shared", "kind"), [("false", "KeyError"), ("true", "KeyError"), ("false", "ValueError")])
def test_a_method_that_raises_fails_its_own_job_alone(
    cli: Cli, tmp_path: Path, broken: Broken, shared: str, kind: str
) -> None:
    """A ValueError is our kind of error, but what it says need not tell its author where to look."""
    broken.file.write_text(BROKEN.replace("KeyError", kind))
    sweep = ["-m", f"--config-dir={broken.conf}", "method=broken,streaming", f"shared_prefill={shared}"]
    code, out, err = cli(*sweep)
    assert code == 1
    [text] = (tmp_path / "runs").glob("*/error.txt")
    assert f"({broken.file}, line 13). The traceback is in {text}." in err
    assert "Traceback" not in err
    assert "in start" in text.read_text()
    assert "streaming" in out
    assert out.splitlines()[-1].startswith("  method=broken: ")


def test_a_method_that_cannot_be_built_fails_its_own_job_alone(cli: Cli, broken: Broken) -> None:
    broken.file.write_text(BROKEN.replace("def check(self, budget, layer=0)", "def __post_init__(self)"))
    code, out, err = cli("-m", f"--config-dir={broken.conf}", "method=broken,streaming", "method.when=planned")
    assert code == 1
    assert "Traceback" not in err
    assert "streaming" in out
    assert out.splitlines()[-1].startswith("  method=broken: ")


@pytest.mark.parametrize("named", [True, False])
def test_a_broken_yaml_is_named_by_file_and_line(cli: Cli, broken: Broken, named: bool) -> None:
    path = Path(broken.conf) / "method" / "broken.yaml"
    path.write_text("_target_: methods.full.Full\n\nsinks: [4\n")
    code, _, err = cli(f"--config-dir={broken.conf}", f"method={'broken' if named else 'full'}", "dry_run=true")
    assert code == int(named)
    assert (f"error: {path}, line 4: " in err) == named


def test_an_error_before_there_is_a_folder_keeps_its_traceback(cli: Cli, tmp_path: Path, broken: Broken) -> None:
    code, _, err = cli(f"--config-dir={broken.conf}", "method=broken", "method.when=planned", "baseline=off")
    assert code == 1
    path = Path(err.rpartition("The traceback is in ")[2].strip().rstrip("."))
    assert "in check" in path.read_text()
    path.unlink()
    assert not (tmp_path / "runs").exists()


def test_a_table_stands_at_the_end(cli: Cli) -> None:
    code, out, err = cli("-m", "method=streaming,pqcache", "placement=host")
    assert code == 0, err
    assert err.count("placement changes nothing") == 1  # for Streaming, which keeps nothing there
    assert all(word in out for word in ("TT2T", "TPOT", "vs Full", "KV host", "moved", "pqcache", "full"))


@pytest.mark.usefixtures("no_weights")
def test_dry_run_loads_no_weights_and_writes_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = iter([30, 7, 512, 8])
    findings = lambda *prompt: [Finding("warning", "cut", f"{next(cuts)} tokens were cut.")]  # noqa: E731
    monkeypatch.setattr("harness.jobs.examples.lint", findings)
    code, out, err = cli("dry_run=true")
    assert code == 0, err
    assert "of 400 to 400" in out
    assert "KV cache" in out
    assert [line.split(": ")[1] for line in out.splitlines() if line.startswith("lint")] == [
        "7 to 512 tokens were cut."
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("dry", ["true", "false"])
def test_a_grid_makes_its_prompts_once(cli: Cli, monkeypatch: pytest.MonkeyPatch, dry: str) -> None:
    made, examples = [], Niah.examples

    def counted(task: Niah, env: TaskEnv) -> Iterator[Example]:
        made.append(task)
        return iter(examples(task, env))

    monkeypatch.setattr(Niah, "examples", counted)
    code, _, err = cli("-m", "method=streaming,h2o", "budget=0.3,0.5", f"dry_run={dry}")
    assert code == 0, err
    assert len(made) == 1


def test_folders_may_have_any_letters(cli: Cli, tmp_path: Path) -> None:
    root, folder = tmp_path / "prüfung #1", tmp_path / "größe, 日本"
    (folder / "method").mkdir(parents=True)
    (folder / "method" / "mine.yaml").write_text("defaults: [streaming]")
    code, out, err = cli(f"--config-dir={folder}", f"results.root={root}", "method=mine", "dry_run=true")
    assert (code, str(root) in out) == (0, True), err


def test_help_and_a_wrong_setting_are_answered_without_torch() -> None:
    code = "import sys; from harness.__main__ import main; print(main()); sys.exit('torch' in sys.modules)"
    for words, named in ((["--help"], "method="), (["budget=1.5"], "budget=1.5")):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert named in done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == str(int("budget=1.5" in words))


ASKED = """import json
from dataclasses import dataclass
from typing import ClassVar
from evals.base import Example, Score, Task
@dataclass(frozen=True)
class Asked(Task):
    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "none"
    file: str
    def examples(self, env):
        READ
            row = json.loads(line)
            yield Example(id=row["id"], group="", context=row["q"], references=("1",), max_new_tokens=1)
    def score(self, example, output):
        return Score(0.0)
"""
ROW = b'{"id": "q%d", "q": "What stands in the long text that nobody reads?"}\n'


@pytest.mark.parametrize(
    ("read", "rows", "says"),
    [
        ("for line in open(self.file):", ROW % 1 + b'{"id": "q2', "{file}, line 2, cannot be read (Unt"),
        ("for line in [open(self.file).read()]:", ROW % 1 + ROW % 2, "{file}, line 2, cannot be read (Extra"),
        ("for line in open(self.file):", ROW % 1 + b'{"id": "\xff"}', "{file}, line 2, cannot be read (it is no utf-8"),
        ("for line in ('{', ):", b"", "'{{', which {task}, line 12 parses, cannot be read (Expecting"),
        (
            "for line in open(self.file):",
            ROW % 1 + ROW % 2 + ROW % 1,
            "Examples 1 and 3 of the task are both called q1: give",
        ),
    ],
)
def test_a_row_that_a_task_from_outside_cannot_read_is_named(
    cli: Cli, tmp_path: Path, outside: Outside, read: str, rows: bytes, says: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows)
    task, conf = outside("Asked", ASKED.replace("READ", read), f"file: {tmp_path}/rows.jsonl\n", "task")
    code, _, err = cli(f"--config-dir={conf}", "task=asked", "method=full", "dry_run=true")
    assert code == 1
    assert says.format(file=tmp_path / "rows.jsonl", task=task) in err
