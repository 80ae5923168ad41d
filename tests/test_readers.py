"""Every reader of data and every field that it uses, with every JSON type that does not belong there: one sentence that
names the file, the record and the field. A number where a text belongs would become a prompt."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from evals import data, haystack
from evals.base import TaskEnv, TaskError
from evals.data import Content
from evals.gsm8k import Gsm8k
from evals.longbench import LongBench
from evals.longbench_v2 import LongBenchV2
from evals.mathematics import Mathematics
from evals.mrcr import Mrcr
from evals.multiturn import Multiturn
from evals.perplexity import WikiText2
from evals.ruler import Ruler, qa
from evals.ruler.factory import Factory
from evals.scbench import SCBench
from harness.models import snapshots
from harness.models.hub import read_config
from tests.evals.counting import CountedText
from tests.evals.test_ruler_files import NIAH
from tests.test_architecture import ROOT

Place = tuple[str | int, ...]  # of a value in a sample
WRONG: dict[str, Any] = {
    "null": None,
    "a number": 5,
    "a fraction": 0.5,
    "nan": float("nan"),
    "true": True,
    "a list": ["a text"],
    "lists": [[]],
    "an object": {"a": "text"},
    "a text": "a text",
    "half a character": "\ud83d",
}
DAMAGED = ("nan", "half a character")  # wrong where such a type belongs, too
MISSING = object()
SCBENCH: dict[str, Any] = json.loads((ROOT / "tests" / "evals" / "scbench_prompts.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Reader:
    """`write` puts records into a folder and says which file; `read` reads it. `sample` holds every field that is used.
    `also`: what may stand in a field beside what stands there, of WRONG; "missing" and "null" among them. `shown`: how
    errors name the second record."""

    sample: Any
    write: Callable[[Path, Sequence[Any]], Path]
    read: Callable[[Path], object]
    shown: str = "row 2 of"
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def env(folder: Path) -> TaskEnv:
    return TaskEnv(text=CountedText(), seed=1, data_root=folder, window=4096)


def lines(name: str) -> Callable[[Path, Sequence[Any]], Path]:
    def write(folder: Path, records: Sequence[Any]) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write


def listed(name: str) -> Callable[[Path, Sequence[Any]], Path]:
    def write(folder: Path, records: Sequence[Any]) -> Path:
        (folder / name).write_text(json.dumps(records))
        return folder / name

    return write


def single(name: str, dump: Callable[[Any], str] = json.dumps) -> Callable[[Path, Sequence[Any]], Path]:
    """The last record alone is the file."""

    def write(folder: Path, records: Sequence[Any]) -> Path:
        (folder / name).write_text(dump(records[-1]))
        return folder / name

    return write


def columns(*names: str) -> Callable[[Path, Sequence[Any]], Path]:
    """Parquet files of the last record: a column has one type."""

    def write(folder: Path, records: Sequence[Any]) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.Table.from_pylist([records[-1]]), folder / name)
        return folder / names[0]

    return write


def talk(folder: Path, records: Sequence[Any]) -> Path:
    """Of MRCR: the last record is the conversation."""
    return MRCR_FILES(folder, [MRCR | {"prompt": json.dumps(records[-1])}])


def parquet_content(folder: Path) -> Content:
    return Content((folder / "rows.parquet").read_bytes(), "rows.parquet", "")


def examples(task: Any) -> Callable[[Path], object]:
    return lambda folder: list(task.examples(env(folder)))


NAME = ("a number",)  # a record may be named by a whole number
OPTIONAL = ("null", "missing")
LONGBENCH = {
    "context": "A long text.",
    "input": "What?",
    "answers": ["This."],
    "all_classes": ["This.", "That."],
    "length": 3,
    "_id": "first",
}
LONGBENCH_V2 = {
    **{
        name: "Some text." for name in ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "domain")
    },
    "_id": "first",
    "difficulty": "easy",
    "length": "short",
    "answer": "A",
}
MRCR_TALK = [{"role": role, "content": "Some text."} for role in ("user", "assistant", "user")]
MRCR = {"prompt": json.dumps(MRCR_TALK), "answer": "xYA text.", "random_string_to_prepend": "xY"}
MRCR_FILES = columns("mrcr/2needle/2needle_0.parquet", "mrcr/2needle/2needle_1.parquet")
TALK = {
    "id": "first",
    "conversations": [{"from": "human", "value": "Who is Ada?"}, {"from": "gpt", "value": "A mathematician."}],
}
SCBENCH_ALSO = {
    "scbench_vt": {"answer": ("a list",)},
    "scbench_mf": {
        "answer": ("a number", "a fraction"),
        "context": ("a text",),
        **{f"context[{number}]": ("a fraction",) for number in range(4)},
    },
    **{name: {"answer": ("a list",)} for name in ("scbench_qa_eng", "scbench_qa_chn", "scbench_many_shot")},
}


def scbench(name: str) -> Reader:
    row = {key: value for key, value in SCBENCH[name]["row"].items() if key in ("context", "multi_turns")}
    row["multi_turns"] = row["multi_turns"][:2]
    also = SCBENCH_ALSO.get(name, {})
    of_turns = {f"multi_turns[{turn}].answer": also.get("answer", ()) for turn in range(2)}
    read = examples(SCBench(tasks=name))
    return Reader(row, lines(f"scbench/{name}.jsonl"), read, also={**also, **of_turns})


READERS = {
    "essays": Reader(
        {"text": "Some words. More words."},
        single("PaulGrahamEssays.json"),
        lambda folder: haystack.load("essays", env(folder)),
        shown="PaulGrahamEssays.json",
    ),
    "english words": Reader(
        {"0": "word", "1": "other"},
        single("english_words.json"),
        lambda folder: Factory(env(folder), ["cwe"], "pydoc")._english,
        shown="english_words.json",
        also={"0": ("missing",), "1": ("missing",), "": ("an object",)},
    ),
    "RULER's own files": Reader(
        {name: value for name, value in NIAH.items() if name != "index"},
        lines("4096/niah_single_1.jsonl"),
        lambda folder: examples(Ruler(tasks=["niah_single_1"], lengths=[4096], samples=2, source=str(folder)))(folder),
        shown="line 2",
        also={"length": OPTIONAL, "answer_prefix": OPTIONAL, "outputs": ("a list",)},
    ),
    "SQuAD": Reader(
        {
            "data": [
                {
                    "paragraphs": [
                        {
                            "context": "A text.",
                            "qas": [{"question": "What?", "is_impossible": False, "answers": [{"text": "This."}]}],
                        }
                    ]
                }
            ]
        },
        single("squad.json"),
        lambda folder: qa.load("qa_1", env(folder)),
        shown="squad.json",
    ),
    "SQuAD of the hub": Reader(
        {"title": "A title", "context": "A text.", "question": "What?", "answers": {"text": ["This."]}},
        columns("rows.parquet"),
        lambda folder: qa._read_squad(parquet_content(folder), "SQuAD"),
        shown="row 1 of",
        also={"answers.text": ("a list",)},
    ),
    "HotpotQA": Reader(
        {
            "question": "What?",
            "answer": "This.",
            "supporting_facts": [["A title", 0]],
            "context": [["A title", ["A text."]], ["Another", ["A text."]]],
        },
        listed("hotpotqa.json"),
        lambda folder: qa.load("qa_2", env(folder)),
        also={"context[0][1]": ("a list",), "context[1][1]": ("a list",)},
    ),
    "LongBench": Reader(
        LONGBENCH,
        lines("longbench/qasper.jsonl"),
        examples(LongBench(datasets=["qasper"])),
        also={
            "answers": ("a list",),
            "all_classes": (*OPTIONAL, "a list"),
            "length": OPTIONAL,
            "_id": (*NAME, *OPTIONAL),
        },
    ),
    "LongBench v2": Reader(
        LONGBENCH_V2,
        listed("longbench_v2.json"),
        examples(LongBenchV2()),
        also={"_id": NAME, "domain": OPTIONAL},
    ),
    "MRCR": Reader(MRCR, MRCR_FILES, examples(Mrcr(needles=[2])), shown="row 1 of"),
    "a conversation of MRCR": Reader(MRCR_TALK, talk, examples(Mrcr(needles=[2])), shown="row 1 of"),
    "MATH": Reader(
        {"problem": "How many?", "answer": "2"},
        lines("math/math500.jsonl"),
        examples(Mathematics()),
        also={"answer": NAME},
    ),
    "GSM8K": Reader(
        {"question": "How many?", "answer": "Two.\n#### 2"},
        lines("gsm8k/test.jsonl"),
        examples(Gsm8k(prompt="lm_eval")),
    ),
    "ShareGPT": Reader(
        TALK,
        listed("talks.json"),
        examples(Multiturn(source="talks.json", conversations=1)),
        also={"id": (*NAME, *OPTIONAL)},
    ),
    "MT-bench": Reader(
        {"question_id": 81, "turns": ["Write a post.", "Rewrite it."]},
        lines("questions.jsonl"),
        examples(Multiturn(source="questions.jsonl", conversations=1)),
        also={"question_id": ("a text", *OPTIONAL), "turns": ("a list",)},
    ),
    "a model's config": Reader(
        {
            "architectures": ["LlamaForCausalLM"],
            "is_causal": True,
            "rope_parameters": {"rope_theta": 10000.0, "factor": 2.0},
            "attn_logit_softcapping": 0.5,
        },
        single("config.json"),
        read_config,
        shown="config.json",
        also={
            "": ("an object",),
            "architectures": (*OPTIONAL, "a list"),
            "is_causal": OPTIONAL,
            "rope_parameters": (*OPTIONAL, "an object"),
            **dict.fromkeys(
                ("rope_parameters.rope_theta", "rope_parameters.factor", "attn_logit_softcapping"),
                ("a number", *OPTIONAL),
            ),
        },
    ),
    "an index of weights": Reader(
        {"weight_map": {"lm_head.weight": "model-1.safetensors"}},
        single("model.safetensors.index.json"),
        snapshots.has_weights,
        shown="model.safetensors.index.json",
        also={"weight_map": ("an object",), "weight_map.lm_head.weight": ("missing",)},
    ),
    **{name: scbench(name) for name in SCBENCH},
}


def shown(place: Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*place, key))


def at(value: Any, place: Place) -> Any:
    for part in place:
        value = value[part]
    return value


def changed(sample: Any, place: Place, wrong: Any) -> Any:
    if not place:
        return wrong
    made = json.loads(json.dumps(sample))
    if wrong is MISSING:
        del at(made, place[:-1])[place[-1]]
    else:
        at(made, place[:-1])[place[-1]] = wrong
    return made


def wrongs(reader: Reader, place: Place) -> Iterator[tuple[str, Any]]:
    """What does not belong at a place of the sample, and must be refused there."""
    usual, also = at(reader.sample, place), reader.also.get(shown(place), ())
    for name, wrong in WRONG.items():
        is_own = type(wrong) is type(usual) and not isinstance(wrong, list | dict)
        if name not in also and (name in DAMAGED or not is_own):
            yield name, wrong
    if place and isinstance(place[-1], str) and "missing" not in also:
        yield "missing", MISSING


@pytest.mark.parametrize("name", READERS)
def test_a_sound_record_is_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.write(tmp_path, [reader.sample, renamed(reader.sample)])
    reader.read(tmp_path)


def renamed(sample: Any) -> Any:
    return {**sample, "id": "second"} if "id" in sample else sample


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_type_is_refused_in_a_sentence_that_names_file_record_and_field(name: str, tmp_path: Path) -> None:
    reader, tried = READERS[name], 0
    for place in places(reader.sample):
        for wrong_name, wrong in wrongs(reader, place):
            case = f"{shown(place) or 'the record'}: {wrong_name}"
            try:
                file = reader.write(tmp_path, [renamed(reader.sample), changed(reader.sample, place, wrong)])
            except (pa.ArrowException, UnicodeEncodeError, AttributeError):
                assert reader.shown == "row 1 of", case  # a column of such values cannot be written
                continue
            with pytest.raises(ValueError, match=re.escape(reader.shown)) as told:
                reader.read(tmp_path)
                pytest.fail(f"{case} is read")
            said, tried = str(told.value), tried + 1
            assert file.name in said, case
            if "this is not YAML (found invalid Unicode" in said:
                continue  # half a character, which libyaml refuses before anybody reads a field
            whole = place[:-1] if place and isinstance(place[-1], int) else place  # of text or a list, the list is told
            assert shown(place) in said or shown(whole) in said, (case, said)
            assert re.search(r" (has .+ as .+, which should be|is .+, which should be|lacks) ", said), (case, said)
    assert tried > 5 * len(list(places(reader.sample))) / 2


EMPTY = {
    "RULER's own files": "outputs",
    "HotpotQA": "context",
    "scbench_kv": "multi_turns",
    "scbench_vt": "multi_turns[0].answer",
    "scbench_mf": "multi_turns[0].answer",
}


@pytest.mark.parametrize(("name", "field"), EMPTY.items())
def test_an_empty_list_is_refused_where_a_prompt_or_a_score_needs_an_item(
    name: str, field: str, tmp_path: Path
) -> None:
    reader = READERS[name]
    (place,) = (one for one in places(reader.sample) if shown(one) == field)
    reader.write(tmp_path, [reader.sample, changed(reader.sample, place, [])])
    with pytest.raises(ValueError, match=rf"2.* has \[\] as '{re.escape(field)}', which should be "):
        reader.read(tmp_path)


def test_doctests() -> None:
    assert doctest.testmod(data) == (0, 2)


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.test.raw").write_bytes(b"A line\xff")
    with pytest.raises(TaskError, match=r"wiki\.test\.raw"):
        list(WikiText2().examples(env(tmp_path)))
