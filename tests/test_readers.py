"""Every reader of data and every field that it uses, with every JSON type that does not belong there: one sentence that
names the file, the record and the field. A number where a text belongs would become a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from evals import haystack
from evals.base import TaskEnv, TaskError
from evals.data import Content
from evals.gsm8k import Gsm8k
from evals.longbench import LongBench
from evals.longbench_v2 import LongBenchV2
from evals.mathematics import Mathematics
from evals.mrcr import Mrcr
from evals.multiturn import Multiturn
from evals.perplexity import WikiText2
from evals.rows import Rows
from evals.ruler import Ruler, qa
from evals.ruler.factory import Factory
from evals.scbench import SCBench
from harness.models import adapter, snapshots
from harness.models.hub import read_config
from tests.evals.counting import CountedText
from tests.evals.test_ruler_files import NIAH
from tests.test_architecture import ROOT

Place = tuple[str | int, ...]  # of a value in a sample
WRONG: dict[str, Any] = {
    "null": None, "a number": 5, "a fraction": 0.5, "nan": float("nan"), "true": True, "a list": ["a text"],
    "lists": [[]], "an object": {"a": "text"}, "a text": "a text", "half a character": "\ud83d",
}  # fmt: skip
DAMAGED = ("nan", "half a character")  # wrong where such a type belongs, too
MISSING = object()
SCBENCH: dict[str, Any] = json.loads((ROOT / "tests" / "evals" / "scbench_prompts.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Reader:
    """`files` are what `read` reads below a folder. `sample` holds every field that is used. `also`: what may stand in
    a field beside what stands there, of WRONG; "missing" and "null" among them. `shown`: how errors name the second
    record."""

    sample: Any
    files: str
    read: Callable[[Path], object]
    shown: str = "row 2 of"
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def write(self, folder: Path, records: Sequence[Any]) -> Path:
        """Write records as lines or as a list; the last one alone where a file has one, or a column one type."""
        for file in (folder / name for name in self.files.split()):
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".jsonl":
                file.write_text("".join(json.dumps(record) + "\n" for record in records))
            elif file.suffix == ".json":
                file.write_text(json.dumps(records if self.shown == "row 2 of" else records[-1]))
            else:
                row = MRCR | {"prompt": json.dumps(records[-1])} if self.sample is MRCR_TALK else records[-1]
                parquet.write_table(pa.Table.from_pylist([row]), file)
        return folder / self.files.split()[0]


def env(folder: Path) -> TaskEnv:
    return TaskEnv(text=CountedText(), seed=1, data_root=folder, window=4096)


def parquet_content(folder: Path) -> Content:
    return Content((folder / "rows.parquet").read_bytes(), "rows.parquet", "")


def examples(task: Any) -> Callable[[Path], object]:
    return lambda folder: list(task.examples(env(folder)))


def official(folder: Path) -> object:
    return examples(Ruler(tasks=["niah_single_1"], lengths=[4096], samples=2, source=str(folder)))(folder)


LIST, NAME, OPTIONAL = ("a list",), ("a number",), ("null", "missing")  # a record may be named by a whole number
LONGBENCH = {"context": "A long text.", "input": "What?", "answers": ["This."], "length": 3, "_id": "first"}
LONGBENCH_V2 = dict.fromkeys(
    ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "domain"), "Some text."
) | {"_id": "first", "difficulty": "easy", "length": "short", "answer": "A"}
MRCR_TALK = [{"role": role, "content": "Some text."} for role in ("user", "assistant", "user")]
MRCR = {"prompt": json.dumps(MRCR_TALK), "answer": "xYA text.", "random_string_to_prepend": "xY"}
MRCR_FILES = "mrcr/2needle/2needle_0.parquet mrcr/2needle/2needle_1.parquet"
TALK = [{"from": "human", "value": "Who is Ada?"}, {"from": "gpt", "value": "A mathematician."}]
HOTPOTQA_TEXTS = [["A title", ["A text."]], ["Another", ["A text."]]]
SQUAD_ENTRY = {"question": "What?", "is_impossible": False, "answers": [{"text": "This."}]}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "is_causal": True,
    "rope_parameters": {"rope_theta": 10000.0, "factor": 2.0},
    "attn_logit_softcapping": 0.5,
}
FRACTIONS = ("rope_parameters.rope_theta", "rope_parameters.factor", "attn_logit_softcapping")
SCBENCH_ALSO = {
    "scbench_vt": {"answer": LIST},
    "scbench_mf": {
        "answer": ("a number", "a fraction"),
        "context": ("a text",),
        **{f"context[{number}]": ("a fraction",) for number in range(4)},
    },
    **{name: {"answer": LIST} for name in ("scbench_qa_eng", "scbench_qa_chn", "scbench_many_shot")},
}


def scbench(name: str) -> Reader:
    row = {key: value for key, value in SCBENCH[name]["row"].items() if key in ("context", "multi_turns")}
    row["multi_turns"] = row["multi_turns"][:2]
    also = SCBENCH_ALSO.get(name, {})
    of_turns = {f"multi_turns[{turn}].answer": also.get("answer", ()) for turn in range(2)}
    return Reader(row, f"scbench/{name}.jsonl", examples(SCBench(tasks=name)), also={**also, **of_turns})


READERS = {
    "essays": Reader(
        {"text": "Some words. More words."},
        "PaulGrahamEssays.json",
        lambda folder: haystack.load("essays", env(folder)),
        "PaulGrahamEssays.json",
    ),
    "english words": Reader(
        {"0": "word", "1": "other"},
        "english_words.json",
        lambda folder: Factory(env(folder), ["cwe"], "pydoc")._english,
        "english_words.json",
        {"0": ("missing",), "1": ("missing",), "": ("an object",)},
    ),
    "RULER's own files": Reader(
        {name: value for name, value in NIAH.items() if name != "index"},
        "4096/niah_single_1.jsonl",
        official,
        "line 2",
        {"length": OPTIONAL, "answer_prefix": OPTIONAL, "outputs": LIST},
    ),
    "SQuAD": Reader(
        {"data": [{"paragraphs": [{"context": "A text.", "qas": [SQUAD_ENTRY]}]}]},
        "squad.json",
        lambda folder: qa.load("qa_1", env(folder)),
        "squad.json",
    ),
    "SQuAD of the hub": Reader(
        {"title": "A title", "context": "A text.", "question": "What?", "answers": {"text": ["This."]}},
        "rows.parquet",
        lambda folder: qa._read_squad(parquet_content(folder), "SQuAD"),
        "row 1 of",
        {"answers.text": LIST},
    ),
    "HotpotQA": Reader(
        {"question": "What?", "answer": "This.", "supporting_facts": [["A title", 0]], "context": HOTPOTQA_TEXTS},
        "hotpotqa.json",
        lambda folder: qa.load("qa_2", env(folder)),
        also={"context[0][1]": LIST, "context[1][1]": LIST},
    ),
    "LongBench": Reader(
        LONGBENCH | {"all_classes": ["This.", "That."]},
        "longbench/qasper.jsonl",
        examples(LongBench(datasets=["qasper"])),
        also={"answers": LIST, "all_classes": (*OPTIONAL, *LIST), "length": OPTIONAL, "_id": (*NAME, *OPTIONAL)},
    ),
    "LongBench v2": Reader(
        LONGBENCH_V2, "longbench_v2.json", examples(LongBenchV2()), also={"_id": NAME, "domain": OPTIONAL}
    ),
    "MRCR": Reader(MRCR, MRCR_FILES, examples(Mrcr(needles=[2])), "row 1 of"),
    "a conversation of MRCR": Reader(MRCR_TALK, MRCR_FILES, examples(Mrcr(needles=[2])), "row 1 of"),
    "MATH": Reader(
        {"problem": "How many?", "answer": "2"}, "math/math500.jsonl", examples(Mathematics()), also={"answer": NAME}
    ),
    "GSM8K": Reader(
        {"question": "How many?", "answer": "Two.\n#### 2"}, "gsm8k/test.jsonl", examples(Gsm8k(prompt="lm_eval"))
    ),
    "ShareGPT": Reader(
        {"id": "first", "conversations": TALK},
        "talks.json",
        examples(Multiturn(source="talks.json", conversations=1)),
        also={"id": (*NAME, *OPTIONAL)},
    ),
    "MT-bench": Reader(
        {"question_id": 81, "turns": ["Write a post.", "Rewrite it."]},
        "questions.jsonl",
        examples(Multiturn(source="questions.jsonl", conversations=1)),
        also={"question_id": ("a text", *OPTIONAL), "turns": LIST},
    ),
    "rows of one's own": Reader(
        {"context": "A long text.", "question": "What?", "answers": "This.", "kind": "first"},
        "rows.jsonl",
        lambda folder: examples(Rows(str(folder / "rows.jsonl"), group="kind"))(folder),
        "row 2 ",
        {"answers": (*LIST, *NAME), "kind": NAME},
    ),
    "chats of one's own": Reader(
        {"messages": [{"role": "user", "content": "What?"}], "answers": "This."},
        "chats.jsonl",
        lambda folder: examples(Rows(str(folder / "chats.jsonl")))(folder),
        "row 2 ",
        {"answers": (*LIST, *NAME)},
    ),
    "an adapter's config": Reader(
        {"peft_type": "LORA", "base_model_name_or_path": "owner/name"},
        "adapter_config.json",
        adapter._read,
        "adapter_config.json",
        {"": ("an object",), "base_model_name_or_path": OPTIONAL},
    ),
    "a model's config": Reader(
        CONFIG,
        "config.json",
        read_config,
        "config.json",
        {"": ("an object",), "architectures": (*OPTIONAL, *LIST), "is_causal": OPTIONAL}
        | {"rope_parameters": (*OPTIONAL, "an object")}
        | dict.fromkeys(FRACTIONS, ("a number", *OPTIONAL)),
    ),
    "an index of weights": Reader(
        {"weight_map": {"lm_head.weight": "model-1.safetensors"}},
        "model.safetensors.index.json",
        snapshots.has_weights,
        "model.safetensors.index.json",
        {"weight_map": ("an object",), "weight_map.lm_head.weight": ("missing",)},
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


def renamed(sample: Any) -> Any:
    return {**sample, "id": "second"} if "id" in sample else sample


# lists that a prompt or a score needs an item of
FILLED = {
    "RULER's own files": ("outputs",),
    "HotpotQA": ("context",),
    "scbench_kv": ("multi_turns",),
    "scbench_vt": ("multi_turns[0].answer",),
    "scbench_mf": ("multi_turns[0].answer",),
}


@pytest.mark.parametrize("name", READERS)
def test_a_wrong_type_is_refused_in_a_sentence_that_names_file_record_and_field(name: str, tmp_path: Path) -> None:
    """And a sound record is read."""
    reader, tried = READERS[name], 0
    reader.write(tmp_path, [reader.sample, renamed(reader.sample)])
    reader.read(tmp_path)
    for place in places(reader.sample):
        empty = [("empty", [])] if shown(place) in FILLED.get(name, ()) else []
        for wrong_name, wrong in [*wrongs(reader, place), *empty]:
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


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2-raw").mkdir()
    (tmp_path / "wikitext-2-raw" / "wiki.test.raw").write_bytes(b"A line\xff")
    with pytest.raises(TaskError, match=r"wiki\.test\.raw"):
        list(WikiText2().examples(env(tmp_path)))
