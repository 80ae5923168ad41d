"""Wrong inputs, one of each kind: one sentence that names the key, before weights load, and no file is left."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]

RUNS = {  # kind -> words of `python -m harness`, and what the sentence has to name
    "unknown method": (["method=oracel"], "oracle"),
    "a list for a name": (["method=[snapkv,h2o]"], "method=NAME"),
    "no name": (["-m", "model=random", "method=null"], "method=NAME"),
    "a value that is not there": (["seed=${nowhere}"], "seed names a value that is not there"),
    "no folder behind a flag": (["--config-dir"], "--config-dir= is empty"),
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
    "a method without windows": (
        ["method=tova", "budget=1"],
        "budget=1 gives TOVA 1 rows of prompt and answer, but it needs",
    ),
    "samples of rounds": (["task.samples=2"], "did you mean task.rounds?"),
    "a setting below a group": (["method.codec=tq4"], "codec is a setting of the run, so write codec=tq4"),
    "no number": (["generation.temperature=nan"], "generation.temperature=nan"),
    "no size": (["budget_bytes=lots"], "budget_bytes=lots"),
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
    "no run": ("harness.commands.show", ["{empty}"], "folder"),
    "unknown word": ("harness.commands.list", ["methodss"], "method"),
    "unknown flag": ("harness.commands.doctor", ["--fix"], "--fix"),
    "a server's setting": ("harness.serve", ["slots=0"], "slots=0"),
    "a simulator's setting": ("harness.commands.simulate", ["sessions=0"], "sessions=0"),
    "a method without parameters": ("harness.commands.tune", ["method=full"], "Full"),
    "unknown method of a benchmark": ("harness.bench.__main__", ["layer", "--methods=pqcash"], "pqcache"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_wrong_run_ends_in_one_sentence_before_weights_load(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("harness.models.random.Random.build", refuse)
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
