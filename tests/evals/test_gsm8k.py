"""GSM8K: prompts rebuilt from the data, and four readings of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.gsm8k import PQCACHE_SHOTS, READERS, Gsm8k, final_number


def task(**changes: Any) -> Gsm8k:
    fields = {"prompt": "lm_eval", "extraction": "flexible", "samples": None, "max_new_tokens": 256, "chat": False}
    return Gsm8k(**{**fields, "revision": "main", **changes})


def env(root: Path) -> TaskEnv:
    return TaskEnv(text=cast(Any, None), seed=0, data_root=root)


def example(gold: str, **changes: Any) -> Example:
    return Example(id="", group="gsm8k", context="", references=(gold,), max_new_tokens=1, **changes)


def write(root: Path, split: str, rows: list[dict[str, str]]) -> None:
    (root / "gsm8k").mkdir(exist_ok=True)
    (root / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class TestPrompt:
    def test_pqcaches_ten_examples(self, shared_data: Path) -> None:
        recipe = json.loads((shared_data / "gsm8k" / "pqcache_prompt_recipe.json").read_text())
        assert tuple(recipe["train_indices_0based"]) == PQCACHE_SHOTS
        wanted = task(prompt="pqcache", extraction="pqcache")
        examples = list(wanted.examples(env(shared_data)))
        assert len(examples) == 1319
        assert len(examples[0].context.encode()) == recipe["bytes"]
        assert wanted.provenance()["prompt_sha256"] == recipe["sha256_of_result"]
        assert wanted.provenance()["test"]["sha256"].startswith("3730d312f6e3440559ac")
        assert examples[1].question.startswith("\nQuestion: A robe takes 2 bolts")
        assert (examples[1].question[-1], examples[1].references, examples[1].chat) == ("\n", ("3",), False)

    def test_other_train_rows_do_not_pass_for_pqcaches(self, tmp_path: Path) -> None:
        write(tmp_path, "test", [{"question": "1+1?", "answer": "#### 2"}])
        for count, message in ((3, "has 3 rows"), (7473, "does not make PQCache's prompt")):
            write(tmp_path, "train", [{"question": "1+1?", "answer": "It is <<1+1=2>>2\n#### 2"}] * count)
            with pytest.raises(TaskError, match=message):
                next(task(prompt="pqcache").examples(env(tmp_path)))


class TestReadings:
    def test_vectors(self, shared_data: Path) -> None:
        vectors = json.loads((shared_data / "golden" / "gsm8k_extraction_vectors.json").read_text())
        assert len(vectors) == 8
        for vector in vectors:
            gold = final_number(vector["gold"])
            for name, reader in READERS.items():
                answer = reader.extract(vector["output"])
                assert answer == (None if vector[name] == "[invalid]" else vector[name]), (name, vector)
                if name != "openai":
                    assert (answer is not None and reader.equal(answer, gold)) == vector[f"{name}_ok"], (name, vector)

    @pytest.mark.parametrize(
        ("output", "gold", "right"),
        [
            ("She has 9+9. The answer is 18.", "18", {"strict", "flexible", "pqcache"}),
            ("The answer is 18", "18", {"flexible", "pqcache"}),
            ("so $1,234\n#### 1,234", "1234", {"flexible", "pqcache", "openai"}),
            ("The answer is 12.50.", "12.5", {"pqcache"}),
            ("The answer is 10.", "-10", {"pqcache"}),
            ("The answer is -10.", "-10", {"strict", "flexible", "pqcache"}),
            ("The answer is 18. Then 5.", "18", {"strict"}),
            ("The answer is 18\nQuestion: How many 99?", "18", {"pqcache"}),
            ("no number", "3", set()),
        ],
    )
    def test_each_paper_reads_its_way(self, output: str, gold: str, right: set[str]) -> None:
        details = task().score(example(gold), output).details
        assert {name for name in READERS if details[name]} == right
