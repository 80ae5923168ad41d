"""What a user can get wrong on the command line: one sentence that says what to do, before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from harness.commands.list import main as list_main

Cli = Callable[..., tuple[int, str, str]]

WRONG = {
    "unknown method": (["method=oracel"], "There is no method 'oracel'; did you mean oracle?"),
    "unknown task": (["task=nia"], "There is no task 'nia'; did you mean niah?"),
    "unknown model": (["model=smolm2"], "There is no model 'smolm2'; did you mean smollm2?"),
    "unknown method in a sweep": (["-m", "method=full,pqcach"], "did you mean pqcache?"),
    "misspelt setting": (["budgt=0.2"], "There is no setting budgt; did you mean budget?"),
    "misspelt method parameter": (
        ["method.sink=3"],
        "method=pqcache has no parameter sink; did you mean method.sinks?",
    ),
    "misspelt task parameter": (["task.lenghts=[400]"], "did you mean task.lengths?"),
    "added parameter": (["+method.mm=3"], "method=pqcache has no parameter mm; did you mean method.m?"),
    "ill-typed setting": (["seed=abc"], "seed=abc has the wrong type"),
    "group of settings": (
        ["overflow=2048"],
        "overflow=2048 has the wrong type: it holds settings, to be named one by one",
    ),
    "ill-typed budget": (["budget=lots"], "budget=lots has the wrong type"),
    "ill-typed method parameter": (["method.m=two"], "method.m=two should be a whole number"),
    "ill-typed task parameter": (["task.lengths=400"], "each a whole number, as in task.lengths=[400]."),
    "another task's count": (["task.samples=2"], "and wikitext2's); did you mean task.rounds?"),
    "percent": (["budget=20%"], "budget=20% has the wrong type: write 0.2 for 20 %."),
    "all of it in percent": (["budget=100%"], "budget=100% has the wrong type: write 1.0 for 100 %."),
    "more than all": (["budget=200%"], "budget=200% has the wrong type: a share is at most 1.0."),
    "percent of a number": (["batch=50%"], "batch=50% has the wrong type: it should be a whole number."),
    "fraction for a whole number": (["batch=1.5"], "batch=1.5 has the wrong type"),
    "budget 0": (["budget=0"], "budget=0 is neither a share of the prompt"),
    "budget -1": (["budget=-1"], "budget=-1 is neither a share of the prompt"),
    "no budget": (["budget=null"], "budget=null leaves PQCache without a budget: set budget or budget_bytes"),
    "budget 1.5": (["budget=1.5"], "budget=1.5 is neither a share of the prompt"),
    "budget below sinks": (["budget=0.01"], "set budget to at least 33"),
    "m that does not divide": (["method.m=7"], "m=7 does not divide the model's head size"),
    "m of zero": (["method.m=0"], "m=0 must be at least 1"),
    "b out of range": (["method.b=40"], "b=40 must lie in 1..16"),
    "no k-means rounds": (["method.iterations=0"], "iterations=0 must be at least 1"),
    "too much text to calibrate on": (
        ["method=infinigen", "method.calibration_tokens=5000"],
        "method.calibration_tokens=5000 is more than the 4096 tokens of text to calibrate on",
    ),
    "recent_ratio of 1": (["method.recent_ratio=1"], "recent_ratio=1 leaves nothing to select"),
    "negative sinks": (["method=streaming", "method.sinks=-1"], "sinks=-1 is negative"),
    "unknown choice": (["protocol=contxt"], "protocol=contxt is unknown: choose one of prompt, context"),
    "unknown placement": (["placement=tape"], "placement=tape is unknown"),
    "unknown codec": (["codec=int5"], "codec=int5 is unknown: choose null, int8"),
    "group of fp8": (
        ["codec=fp8g64"],
        "codec=fp8g64 is unknown: choose null, int8, int4 or int2, with another group as"
        " in int4g64; fp8, which takes no group.",
    ),
    "no folder for files": (["placement=disk", "disk=nowhere"], "disk=nowhere is not a folder"),
    "unknown dtype": (["dtype=int8"], "dtype=int8 is unknown"),
    "no such device": (["device=cuda:7"], "device=cuda:7 is not available"),
    "batch of 0": (["batch=0"], "batch=0 must be at least 1"),
    "negative temperature": (["generation.temperature=-1"], "generation.temperature=-1"),
    "top_p out of range": (["generation.top_p=0"], "generation.top_p=0"),
    "beyond the window": (["model=smollm2", "task.lengths=[9000]"], "more than the model's window of 8192"),
    "too short for anything": (["task.lengths=[40]"], "task.lengths=40 leaves 0 tokens for the haystack"),
    "empty task": (["task.lengths=[]"], "task.lengths=[] must name at least one length"),
    "no depths": (["task.depths=[]"], "must be a number of depths or percents"),
    "repeated length": (["task.lengths=[400,400]"], "two examples"),
    "number that is none": (["generation.temperature=nan"], "generation.temperature=nan should be a number."),
    "infinite number": (["generation.temperature=inf"], "generation.temperature=inf should be a number."),
    "parameter that is no number": (["method.recent_ratio=nan"], "method.recent_ratio=nan should be a number."),
    "time to live that is none": (["history=store", "store.ttl_s=nan"], "store.ttl_s=nan should be a number or null."),
    "buffer of no size": (
        ["history=store", "store.write_buffer=abc"],
        "store.write_buffer=abc is no size: write bytes",
    ),
    "budget of no size": (["budget_bytes=lots"], "budget_bytes=lots is no size: write bytes, or 128GB"),
    "budget of no bytes": (["budget_bytes=0"], "budget_bytes=0 must be at least 1."),
    "budget in parts of bytes": (
        ["budget_bytes=1.5"],
        "budget_bytes=1.5 has the wrong type: it should be bytes, a size",
    ),
    "seed beyond torch's": (["seed=9223372036854775808"], "seed=9223372036854775808 must be at least 0 and at most"),
    "unknown needle": (["task.needle=sword"], "task.needle='sword' is unknown: choose one of magic_city"),
    "unknown haystack": (["task.haystack=novel"], "haystack='novel' is unknown"),
    "missing haystack": (["task.haystack=essays"], "or use pydoc"),
    "missing data root": (["data.root=/no/such/folder"], "data.root=/no/such/folder is not a folder"),
    "unknown shape": (["model.shape=gpt5"], "model.shape=gpt5 is unknown"),
    "too many layers": (["model.layers=99"], "model.layers=99 does not suit tiny"),
    "missing model folder": (["model=hf", "model.name=./no/such/model"], "no/such/model"),
    "layer budgets of another model": (["layer_budgets=[0.1,0.2,0.3]"], "layer_budgets names 3 layers"),
    "added setting": (["+budgett=0.9"], "There is no setting budgett; did you mean budget?"),
    "setting added by force": (["++seeed=3"], "There is no setting seeed; did you mean seed?"),
    "removed setting": (["~seed"], "~seed would remove a setting: set it instead, as in seed=VALUE."),
    "parameter without its group": (["m=4"], "There is no setting m; did you mean method.m?"),
    "parameter of another method": (
        ["method=streaming", "method.m=2"],
        "method=streaming has no parameter m (pqcache has it); there is positions, sinks.",
    ),
    "parameter of no method in a sweep": (
        ["-m", "method=shadowkv,full", "method.rnk=8,16"],
        "None of shadowkv,full has method.rnk; did you mean method.rank?",
    ),
    "several values without -m": (["budget=0.1,0.2"], "budget=0.1,0.2 names several values: add -m"),
    "interval of a sweep": (["-m", "budget=interval(0,1)"], "has no steps: name the values, as in budget=A,B."),
    "no value": (["budget"], "Cannot read 'budget': write key=value"),
    "empty value": (["budget="], "budget is empty: it should be a number or null."),
    "empty results.root": (["results.root="], "results.root is empty: give it a value, or leave it out."),
    "empty data.root": (["data.root="], "data.root is empty"),
    "empty task.source": (["task=ruler", "task.tasks=[vt]", "task.source="], "task.source is empty"),
    "layer that is not there": (
        ["dense_layers=[99]"],
        "dense_layers=[99] names layer 99, and the model has layers 0 to 1: choose among those.",
    ),
    "layer that is not there, for Full": (["method=full", "dense_layers=[-1]"], "dense_layers=[-1] names layer -1"),
    "layer of a method": (["method=quest", "method.dense_layers=[0,9]"], "method.dense_layers=[0, 9] names layer 9"),
    "layer budget out of range": (["layer_budgets=[0.1,2.5]"], "layer_budgets[1]=2.5 is neither a share"),
    "rank beyond the keys": (
        ["method=shadowkv", "method.rank=100000"],
        "rank=100000 is more than the 32 channels of this model's keys",
    ),
    "r beyond the head": (["method=sparq", "method.r=17"], "r=17 is more than the model's head size 16"),
    "less than a column": (["method=infinigen", "method.partial_ratio=0.01"], "choose at least 0.0625."),
    "more threads than CPUs": (["threads=100000"], "threads=100000 is too many"),
    "top_k of greedy picking": (["generation.top_k=5"], "set generation.temperature above 0 as well."),
    "missing config-dir": (["--config-dir", "/no/such"], "--config-dir /no/such is not a folder"),
    "model without a name": (["model=hf"], "model.name has no default: set it, as in model.name=VALUE."),
    "unknown launcher": (
        ["-m", "hydra/launcher=jobli", "budget=0.1,0.2"],
        "There is no launcher 'jobli'; did you mean joblib?",
    ),
    "launcher without a sweep": (["hydra/launcher=joblib"], "starts the workers of a sweep: add -m."),
    "launcher's words without it": (
        ["-m", "hydra.launcher.n_jobs=2", "budget=0.1,0.2"],
        "hydra.launcher.n_jobs=2 sets up a launcher: name it, as in hydra/launcher=joblib.",
    ),
    "a setting that is gone": (
        ["workers=2"],
        "There is no setting workers any more: set hydra.launcher.n_jobs=N for joblib, "
        "hydra.launcher.array_parallelism=N for SLURM. See CHANGELOG.md.",
    ),
    "folder of Hydra's own": (["-m", "hydra.sweep.dir=x", "budget=0.1,0.2"], "hydra.sweep.dir would set nothing"),
    "no number": (["budget=abc"], "budget=abc has the wrong type: it should be a number or null."),
    "a name like no other": (["method.nope=3"], "method=pqcache has no parameter nope; there is b, cache_block"),
    "method of one's own": (["method=spread"], "needs --config-dir=FOLDER, and its file FOLDER/method/spread.yaml."),
    "no data root": (["task.haystack=essays"], "in the data root (none is set: data.root=FOLDER names one)"),
    "too few bytes": (["budget_bytes=10"], "budget_bytes=10: with placement=device PQCache holds on the device, of "),
    "folder that takes no files": (["placement=disk", "disk=/proc"], "disk=/proc cannot be written ("),
    "launcher's misspelt setting": (
        ["-m", "hydra/launcher=joblib", "hydra.launcher.nope=1", "budget=0.1,0.2"],
        "There is no setting hydra.launcher.nope; there is ",
    ),
    "file of another kind": (
        ["task=ruler", "task.tasks=[vt]", "task.source=/etc/passwd"],
        "task.source: /etc/passwd, line 1",
    ),
    "RULER's lengths that are too short": (
        ["task=ruler", "task.tasks=[vt,niah_single_1,cwe]", "task.lengths=[512]", "task.haystack=pydoc"],
        " on it is sure to), cwe does not fit 512 tokens (from ",
    ),
    "broken syntax": (["budget=[1"], "Cannot read"),
}


# as dry runs, too: what a job is refused for when it is planned, and one for each earlier stage; the others are slow
DRY = (
    "unknown method", "misspelt setting", "budget 1.5", "budget below sinks", "beyond the window", "repeated length",
    "missing model folder", "layer budgets of another model", "unequal lengths in a batch", "rank beyond the keys",
)  # fmt: skip


QUICK = {*DRY, *[*WRONG][::3]}  # tests/wrong_inputs.py types a hundred more


def cases() -> Iterator[ParameterSet]:
    for name in WRONG:
        yield pytest.param(name, [], id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        marks = [] if name in DRY else [pytest.mark.slow]
        yield pytest.param(name, ["dry_run=true"], id=f"{name}, dry run", marks=marks)


@pytest.mark.parametrize(("name", "dry"), cases())
def test_wrong_input_gets_one_sentence_before_weights_are_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, dry: list[str]
) -> None:
    arguments, says = WRONG[name]

    def refuse(*arguments: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("harness.models.random.Random.build", refuse)
    code, _, err = cli(*arguments, *dry)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert says in lines[0]
    assert "Traceback" not in err


def test_a_parameter_that_only_some_methods_have_applies_to_those(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("-m", "method=shadowkv,full", "method.rank=8,16")
    assert code == 0, err
    ran = sorted(folder.name.split("-")[1] for folder in (tmp_path / "runs").glob("niah-*"))
    assert ran == ["full", "shadowkv", "shadowkv"]  # Full does not depend on it, and ran once


@pytest.mark.parametrize("command", [["method=pqcache"], ["-m", "method=full,streaming"]])
def test_a_yaml_with_the_name_of_a_built_in_one_is_refused(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "conf" / "method").mkdir(parents=True)
    file = tmp_path / "conf" / "method" / "pqcache.yaml"
    file.write_text("# Mine.\n_target_: mine.pq.PQ\n")
    code, _, err = cli("--config-dir", str(tmp_path / "conf"), *command)
    assert code == 1
    assert f"{file} has the name of the built-in " in err
    assert "rename yours" in err
    assert list_main(["method", "--config-dir", str(tmp_path / "conf")]) == 2
    file.rename(file.with_name("mine.yaml"))
    (tmp_path / "conf" / "config.yaml").write_text("budget: 0.5\n")
    code, _, err = cli("--config-dir", str(tmp_path / "conf"), *command)
    assert code == 1
    assert "config.yaml would be ignored" in err


def test_a_setting_in_a_yaml_that_nothing_reads_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    overlay = tmp_path / "conf" / "experiment" / "mine.yaml"
    overlay.write_text("# @package _global_\nbudgett: 0.5\n")
    code, _, err = cli("--config-dir", str(tmp_path / "conf"), "+experiment=mine")
    assert code == 1
    assert "budgett" in err


def test_a_folder_that_is_not_writable(cli: Cli) -> None:
    code, _, err = cli("results.root=/proc/nowhere")
    assert code == 1
    assert "cannot write /proc/nowhere" in err


@pytest.mark.parametrize("name", ["more threads than CPUs", "no such device", "no folder for files"])
def test_what_the_machine_lacks_is_said_before_any_plug_in_is_imported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A method brings torch, a model transformers: seconds."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("a plug-in was imported")

    monkeypatch.setattr("harness.config.plugins.build", refuse)
    arguments, says = WRONG[name]
    code, _, err = cli(*arguments)
    assert (code, says in err) == (1, True), err
