"""Which runs a paper shows, in which order and under which names; what a wrong choice is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.catalogue import ConfigError, Entry, entries
from harness.reports.choice import Choice, Chosen, choose
from harness.reports.compare import comparisons
from harness.results.records import StoreError
from harness.results.run_folder import find, load
from tests.fake_records import records, rewrite, write_run

SNAPKV = "methods.snapkv.SnapKV"


def write(root: Path, method: str = "full", budget: Any = None, /, **changes: Any) -> Path:
    presets = {"method": method, "task": "niah", "model": "smollm2"}
    return write_run(root, records([1.0, 0.0]), method, budget=budget, facts={"presets": presets}, **changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path)
    for budget in (0.1, 0.2):
        write(tmp_path, "streaming", budget)
        write(tmp_path, "snapkv", budget, method={"_target_": SNAPKV, "kernel": 7})
    write(tmp_path, "snapkv", 0.2, method={"_target_": SNAPKV, "kernel": 15})
    return tmp_path


def chosen(root: Path, config_dirs: tuple[Path, ...] = (), **choice: Any) -> list[Chosen]:
    return choose(comparisons([load(run) for run in find([root])]), Choice(**choice), config_dirs)


def rows(root: Path, **choice: Any) -> list[str]:
    return [f"{one.method} {one.budget}".strip() for one in chosen(root, **choice)]


def test_all_that_was_run_has_proper_names_full_first_and_budgets_in_order(root: Path) -> None:
    assert rows(root) == [
        "Full", "SnapKV (kernel=15) 20%", "SnapKV (kernel=7) 10%", "SnapKV (kernel=7) 20%", "StreamingLLM 10%",
        "StreamingLLM 20%",
    ]  # fmt: skip


def test_rows_come_as_chosen_by_preset_label_and_budget(root: Path) -> None:
    shown = rows(root, methods=["streaming", "snapkv kernel=7 20%", "full"], budgets=[0.2, "10%"])
    assert shown == ["StreamingLLM 20%", "StreamingLLM 10%", "SnapKV (kernel=7) 20%", "Full"]
    names = {"snapkv": "Ours", "snapkv kernel=15": "Best", "streaming": "Best"}
    assert rows(root, budgets=[0.2], names=names)[1:] == [
        "Best [snapkv kernel=15] 20%",
        "Ours (kernel=7) 20%",
        "Best [streaming] 20%",
    ]


def test_a_method_has_one_name_in_all_tables_and_tables_of_a_task_keep_theirs(root: Path) -> None:
    longer = {"task": {"_target_": "evals.niah.Niah", "lengths": [2048]}}
    write(root, "snapkv", 0.2, method={"_target_": SNAPKV, "kernel": 7}, **longer)
    write(root, model={"name": "org/Other", "revision": None}, dtype="bf16")
    shown = {(one.model, one.task, one.method, one.budget) for one in chosen(root, budgets=[0.2])}
    niah = "Needle in a haystack"
    assert ("tiny", f"{niah} (lengths=[2048])", "SnapKV (kernel=7)", "20%") in shown
    assert ("tiny", f"{niah} (lengths=[1024])", "SnapKV (kernel=15)", "20%") in shown
    assert {one for one in shown if one[0] == "Other"} == {("Other", f"{niah} (lengths=[1024])", "Full", "")}
    one = chosen(root, models=["org/Other"], tasks=["niah"], names={"Other": "A", "niah": "Needles"})
    assert [(row.model, row.task) for row in one] == [("A", "Needles (lengths=[1024])")]


@pytest.mark.parametrize(
    ("models", "revisions", "shown"),
    [
        ([{"name": "a/T"}, {"name": "b/T"}], "xx", ["T (name=a/T)", "T (name=b/T)"]),
        (
            [{"name": "T", "adapter": "a/lora"}, {"name": "T", "adapter": "b/lora"}],
            "xy",
            ["T with lora (adapter=a/lora)", "T with lora (adapter=b/lora)"],
        ),
        (
            [{"name": "T", "rope": None}, {"name": "T", "rope": {"rope_type": "yarn", "factor": 4}}],
            "xy",
            ["T", "T (rope={rope_type: yarn,factor: 4})"],
        ),
        ([{"name": "T"}] * 2, "xy", ["T (revision=x)", "T (revision=y)"]),
    ],
)
def test_models_of_one_name_have_places_and_names_of_their_own(
    tmp_path: Path, models: Any, revisions: str, shown: list[str]
) -> None:
    for model, revision in zip(models, revisions, strict=True):
        for task in ("Niah", "Ruler"):
            folder = write(
                tmp_path / f"{len(list(tmp_path.iterdir()))}", model=model, task={"_target_": f"evals.{task}"}
            )
            rewrite(folder, presets={"task": task, "model": "hf"}, identity={"model_revision": revision})
    found = chosen(tmp_path)
    assert [(one.places[0], one.model, one.task) for one in found] == [
        (place, model, task) for place, model in enumerate(shown) for task in ("Niah", "Ruler")
    ]


def test_the_name_of_an_adapter_chooses_the_model_with_it(tmp_path: Path) -> None:
    for number, model in enumerate([{"name": "T"}, {"name": "T", "adapter": "a/lora"}]):
        write(tmp_path / str(number), model=model)
    assert [one.model for one in chosen(tmp_path, models=["lora"])] == ["T with lora"]
    assert [one.model for one in chosen(tmp_path, models=["T"])] == ["T"]


def test_budgets_that_a_report_writes_alike_are_printed_as_they_were_typed(tmp_path: Path) -> None:
    for budget in ("1536MiB", "1540MiB", "2048MiB"):
        write(tmp_path, "snapkv", budget, method={"_target_": SNAPKV})
    assert rows(tmp_path) == ["SnapKV 1536MiB", "SnapKV 1540MiB", "SnapKV 2.00 GiB"]
    assert rows(tmp_path, budgets=["1540MiB"], names={"1540MiB": "more"}) == ["SnapKV more"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"methods": ["snapk"]}, "methods: snapk is in no run; did you mean snapkv?"),
        ({"budgets": [0.3]}, "budgets: 0.3 is in no run; there is 10%, 20%"),
        ({"models": ["Llama"]}, "models: Llama is in no run; there is smollm2, tiny"),
        ({"methods": ["streaming"], "budgets": ["20%"], "tasks": ["ruler"]}, "tasks: ruler is in no run"),
    ],
)
def test_a_name_that_no_run_has_is_refused_with_those_there_are(root: Path, choice: Any, said: str) -> None:
    with pytest.raises(StoreError) as error:
        chosen(root, **choice)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: [full]", "there is no key method; did you mean methods?"),
        ("methods: full", "methods"),
        ("[full]", "holds no keys with values"),
        ("like: snapk", "like: snapk is no layout"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        Choice.read(tmp_path / "a.yaml")
    assert said in str(error.value)
    assert str(tmp_path / "a.yaml") in str(error.value)


def test_a_preset_has_its_bases_name_and_what_it_changes_unless_its_card_has_a_name(tmp_path: Path) -> None:
    known = {name: entry.facts()["name"] for name, entry in entries("method").items()}
    assert known["snapkv_kernel15"] == "SnapKV (kernel=15)"
    assert known["press_lagkv"] == "LagKV (kvpress)"
    assert known["streaming"] == "StreamingLLM"
    mine = tmp_path / "method" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("# Mine: keeps what I like.\n_target_: a.B\n")
    assert Entry("mine", mine).called() == ("Mine", [])
    write(tmp_path / "runs", "mine", 0.1, method={"_target_": "a.B"})
    assert [one.method for one in chosen(tmp_path / "runs", (tmp_path,))] == ["Mine"]
    assert [one.method for one in chosen(tmp_path / "runs")] == ["mine"]
