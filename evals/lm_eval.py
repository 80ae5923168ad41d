"""Runs a task of EleutherAI's lm-evaluation-harness (0.4.13), or a yaml in its form: its documents
are the examples, its filters and metrics the scores.

A task that generates gives prompts with its stop strings; one with choices gives texts that are fed
after one prompt, and its metrics get their likelihoods (`Example.choices`). Prompts are those of
lm-eval's own command without a chat template; few shots are drawn with its seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import version as installed
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from evals.base import Example, Score, Task, TaskEnv, TaskError, read_choices
from evals.data import CORRECT, data_errors_in_a_sentence, no_answer

SHOTS_SEED = 1234  # the seed with which lm-eval's command draws few shots
SCORING = (
    "metric_list",
    "filter_list",
    "process_results",
    "doc_to_target",
    "doc_to_choice",
    "target_delimiter",
)
ELSEWHERE = "ask it by `kv-harness lm-eval run` instead"


class Leaf(NamedTuple):
    """Hold one of lm-eval's tasks (a group contains several) with its documents."""

    name: str
    task: Any
    docs: Any


@dataclass(frozen=True)
class LmEval(Task):
    """Ask every document of one of lm-eval's tasks, or of all tasks of a group. The score is the
    first of the task's metrics that grows with quality, unless `score_by` names another."""

    seeded = False
    metric = "lm-eval's metric"
    chance = None

    name: str = "gsm8k"
    include_path: str | None = None
    num_fewshot: int | None = None
    samples: int | None = None
    score_by: str | None = None
    chat: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        says = "makes no sense: give {} or more, or null for what the task says"
        self._refuse_below(says, samples=1, num_fewshot=0)
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise TaskError(
                f"include_path={self.include_path} is not a folder: name the one that holds your yaml files"
            )

    @property
    def version(self) -> str:  # type: ignore[override]
        """Return a text that changes whenever scores may: our version, that of lm-eval, and a hash
        of the scoring parts of the tasks' yaml files."""
        own = {
            leaf.name: {key: leaf.task.dump_config().get(key) for key in SCORING}
            for leaf in self._leaves()
        }
        scoring = sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()
        return f"1, lm-eval {installed('lm_eval')}, {scoring[:12]}"

    def require(self, data_root: Path | None) -> None:
        if find_spec("lm_eval") is None:
            raise TaskError(
                "lm-evaluation-harness is not installed: run `pip install 'kv-harness[lm-eval]'`"
            )

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        self.require(env.data_root)
        if self.include_path is not None:
            _leaves.cache_clear()  # a yaml or data file may have been corrected, as in a notebook
        for leaf in self._leaves():
            files = getattr(leaf.docs, "cache_files", None)
            self._opened[leaf.name] = {
                "version": leaf.task.VERSION,
                "data": leaf.task.config.dataset_path,
                # the hub's commit, or a hash of local files: `datasets` names the folder after it
                # in which it keeps the rows
                "revision": Path(files[0]["filename"]).parent.name if files else None,
            }
            leaf.task.set_fewshot_seed(SHOTS_SEED)
            for number, doc in leaf.task.doc_iterator(limit=self.samples, rank=0, world_size=1):
                with _naming_row(leaf, number, doc):
                    example = self._example(leaf, number, doc)
                yield example

    def score(self, example: Example, output: str) -> Score:
        (leaf,) = (leaf for leaf in self._leaves() if leaf.name == example.group)
        doc = leaf.docs[example.data["doc"]]
        resps = [tuple(choice) for choice in read_choices(output)] if example.choices else [output]
        numbers = dict(_metrics(leaf, doc, resps))
        return Score(self._main(leaf, numbers), numbers)

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return `mean`, and the mean of each of the task's metrics, named with its filter."""
        return super().averages(groups) | dict(details or {})

    def provenance(self) -> dict[str, Any]:
        return {"lm_eval": installed("lm_eval"), "tasks": super().provenance()}

    def _leaves(self) -> tuple[Leaf, ...]:
        metadata = json.dumps(self.metadata, sort_keys=True)
        return _leaves(self.name, self.include_path, self.num_fewshot, metadata)

    def _example(self, leaf: Leaf, number: int, doc: Any) -> Example:
        from lm_eval.models.utils import normalize_gen_kwargs

        task = leaf.task
        shots = task.config.num_fewshot or 0
        references = _references(leaf, number, doc)
        with _no_nulls(task.config):
            prefix = task.doc_to_prefix(doc) or ""
            text = task.fewshot_context(doc, num_fewshot=shots, gen_prefix=prefix)
            made = task.construct_requests(doc=doc, ctx=text, metadata=(leaf.name, number, 1))
        requests = made if isinstance(made, list) else [made]
        if any(len(request.args) > 2 for request in requests):
            raise TaskError(
                f"{leaf.name} asks about images or sound, which no model here takes: choose another task"
            )
        if not isinstance(text, str) or any(request.args[0] != text for request in requests):
            raise TaskError(f"{leaf.name} puts its choices behind different prompts: {ELSEWHERE}")
        choices, text = self._choices(task, doc, requests, text)
        wanted: dict[str, Any] = {} if choices else normalize_gen_kwargs(dict(requests[0].args[1]))
        if wanted.get("do_sample"):
            raise TaskError(f"{leaf.name} draws its answers (do_sample): {ELSEWHERE}")
        # scoring may read any field
        digest = sha256(json.dumps(doc, sort_keys=True, default=str).encode()).hexdigest()
        context, question, prefix = _split(text, task.doc_to_text(doc), prefix)
        return Example(
            id=f"{leaf.name}-{number}",
            group=leaf.name,
            context=context,
            question=question,
            long_question=True,
            prefix=prefix,
            references=references,
            choices=choices,
            chat=self.chat,
            data={"doc": number, "sha256": digest},
            max_new_tokens=wanted.get("max_gen_toks", 1),
            stop=tuple(filter(None, wanted.get("until", ()))),
        )

    def _choices(
        self, task: Any, doc: Any, requests: Sequence[Any], text: str
    ) -> tuple[tuple[str, ...], str]:
        """Return the choices as texts to be fed after the prompt, and the prompt `text` for them;
        no choices for a task that generates. White space at the prompt's end moves to the choices,
        as in lm-eval. In a chat nothing stands between the assistant's header and a choice."""
        if requests[0].request_type != "loglikelihood":
            return (), text
        if task.config.doc_to_choice is not None and None in task.doc_to_choice(doc):
            raise ValueError("a choice is null")
        choices = [request.args[1] for request in requests]
        if self.chat:
            return tuple(
                choice.removeprefix(task.config.target_delimiter) for choice in choices
            ), text
        stripped = text.rstrip()
        return tuple(text[len(stripped) :] + choice for choice in choices), stripped

    def _main(self, leaf: Leaf, numbers: Mapping[str, float]) -> float:
        grows = leaf.task.higher_is_better()
        named = [name for name in numbers if grows.get(name.rpartition(",")[0], True)]
        if self.score_by is not None and self.score_by not in numbers:
            raise TaskError(
                f"score_by={self.score_by} is not a metric of {leaf.name}: choose one of {'; '.join(numbers)}"
            )
        if self.score_by is None and not named:
            raise TaskError(
                f"{leaf.name} has no metric that is a number for each document: {ELSEWHERE}"
            )
        name = self.score_by or named[0]
        if not 0 <= numbers[name] <= 1:
            raise TaskError(
                f"{name} of {leaf.name} is {numbers[name]}, not between 0 and 1: set score_by to another"
            )
        return numbers[name]


@cache
def _leaves(
    name: str, include_path: str | None, num_fewshot: int | None, metadata: str
) -> tuple[Leaf, ...]:
    """Return the tasks that `name` stands for: itself, or all of a group. lm-eval's own tasks are
    listed, which takes long, only if the folder `include_path` has none of that name. `metadata`:
    as JSON."""
    from lm_eval.tasks import TaskManager

    for own in (True, False) if include_path is None else (False, True):
        manager = TaskManager(
            include_path=include_path, include_defaults=own, metadata=json.loads(metadata)
        )
        if name in {*manager.all_tasks, *manager.all_tags}:
            break
    else:
        raise TaskError(f"lm-eval has no task {name!r}: `kv-harness lm-eval ls tasks` lists them")
    try:
        with data_errors_in_a_sentence():
            found = manager.load([name])["tasks"]
    except ImportError as error:
        raise TaskError(
            f"{name} wants a package more ({error}): docs/tasks.md names lm-eval's extras"
        ) from error
    except OSError as error:
        raise TaskError(
            f"lm-eval found no data of {name} ({error}): run once with a network, or name files in a yaml of your own"
        ) from error
    return tuple(_leaf(leaf, task, num_fewshot) for leaf, task in found.items())


def _leaf(name: str, task: Any, num_fewshot: int | None) -> Leaf:
    config = task.config
    if config.output_type == "loglikelihood_rolling":
        raise TaskError(f"{name} scores whole texts by rolling likelihoods: {ELSEWHERE}")
    if getattr(task, "UNSAFE_CODE", False):
        raise TaskError(
            f"{name} runs code that the model has written: {ELSEWHERE}, with --confirm_run_unsafe_code"
        )
    if (config.repeats or 1) > 1:
        raise TaskError(f"{name} asks each question {config.repeats} times: {ELSEWHERE}")
    if num_fewshot and config.num_fewshot == 0:
        raise TaskError(
            f"num_fewshot={num_fewshot} suits no {name}, which says itself that it takes none: leave it out"
        )
    if num_fewshot is not None:
        task.set_config(key="num_fewshot", value=num_fewshot)
    return Leaf(name, task, task.eval_docs)


def _split(text: str, asked: object, prefix: str) -> tuple[str, str, str]:
    """Split a prompt into context, question and `prefix`, the first words of the answer. If few
    shots or a description precede the document's own text, `asked`, they are the context and
    `asked` is the question; otherwise all is context."""
    prefix = prefix if text.endswith(prefix) else ""
    body = text.removesuffix(prefix)
    if isinstance(asked, str) and asked and len(body) > len(asked) and body.endswith(asked):
        return body.removesuffix(asked), asked, prefix
    return body, "", prefix


@contextmanager
def _naming_row(leaf: Leaf, number: int, doc: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error that is raised inside, while row `number` becomes an example, into a `TaskError`
    that names the row and the fields that it leaves empty. Raises it, too, where the prompt would
    have a gap in place of the question."""
    config, place = leaf.task.config, _place(leaf, number)
    asked = _fields(leaf, config.doc_to_text)
    gaps = _gaps(leaf, doc, config.doc_to_text)
    own = "data_files" in (config.dataset_kwargs or {})  # else nobody here can correct it
    if gaps and (gaps == [*asked] or (own and any(asked[name] for name in gaps))):
        raise TaskError(
            f"{place} leaves {', '.join(map(repr, gaps))} empty, which the prompt is made of: {CORRECT}"
        )
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        gaps += _gaps(leaf, doc, config.doc_to_choice)
        empty = f"leaves {', '.join(map(repr, gaps))} empty"
        why = empty if gaps else f"does not fit its yaml: {error}"
        raise TaskError(f"{place} {why}; correct the file or the yaml, or drop the row") from error


@contextmanager
def _no_nulls(config: Any) -> Iterator[None]:
    """Have lm-eval's templates raise `ValueError` where they would write a null as "None", unless code
    of the task reads the rows itself."""
    from lm_eval.utils import env

    def written(value: object) -> object:
        if value is None:
            raise ValueError('it, or a row that is shown before it, would write a null as "None"')
        return value

    before = env.finalize
    env.finalize = before if config.process_results else written
    try:
        yield
    finally:
        env.finalize = before


def _references(leaf: Leaf, number: int, doc: Any) -> tuple[str, ...]:
    """Return the right answers to a document of lm-eval as texts. Raises `TaskError` if it has none
    and the task scores by them. `number`: the row of the document."""
    config = leaf.task.config
    scored_by = config.process_results is None and config.doc_to_target not in (None, "")
    gaps = _gaps(leaf, doc, config.doc_to_target)
    try:
        with _no_nulls(config):
            target = leaf.task.doc_to_target(doc)
    except Exception as error:
        if not scored_by or not gaps:
            raise
        raise no_answer(_place(leaf, number), gaps) from error
    if isinstance(target, int) and config.doc_to_choice is not None:
        choices = leaf.task.doc_to_choice(doc)
        # a label of -1 stands for none
        target = choices[target] if 0 <= target < len(choices) else None
    answers = tuple(target) if isinstance(target, (list, tuple)) else (target,)
    if scored_by and all(map(_is_empty, answers)):
        raise no_answer(_place(leaf, number), gaps)
    return tuple(map(str, answers))


def _fields(leaf: Leaf, template: Any) -> Mapping[str, bool]:
    """Return the fields of a document that a template of lm-eval (Jinja, or a field's name) fills
    in. For each, say whether the template always writes it: under no condition and without a
    default."""
    if not isinstance(template, str):
        return {}
    return {template: True} if template in leaf.task.features else _variables(template)


def _gaps(leaf: Leaf, doc: Mapping[str, Any], template: Any) -> list[str]:
    """Return the fields of a document that a template fills in and that are empty."""
    return [name for name in _fields(leaf, template) if _is_empty(doc.get(name))]


@cache
def _variables(template: str) -> Mapping[str, bool]:
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables
    from lm_eval.utils import env

    parsed = env.parse(template)
    parts = [
        node for output in parsed.body if isinstance(output, nodes.Output) for node in output.nodes
    ]
    plain = [part for part in parts if not any(map(_is_guard, (part, *part.find_all(nodes.Expr))))]
    names = [name for part in plain for name in (part, *part.find_all(nodes.Name))]
    written = {name.name for name in names if isinstance(name, nodes.Name)}
    return {name: name in written for name in sorted(find_undeclared_variables(parsed))}


def _is_guard(node: Any) -> bool:
    return type(node).__name__ in ("CondExpr", "Or") or getattr(node, "name", None) == "default"


def _is_empty(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list) and all(map(_is_empty, value)))


def _place(leaf: Leaf, number: int) -> str:
    """Return the task, the number of a row, and the file that it stands in, for an error."""
    config = leaf.task.config
    row = "row" if config.process_docs is None else "document"  # which may leave rows out
    files = (config.dataset_kwargs or {}).get("data_files", config.dataset_path)
    if isinstance(files, Mapping):
        files = files.get(config.test_split or config.validation_split, files)
    return f"{leaf.name}: {row} {number + 1} of {files}"


def _metrics(leaf: Leaf, doc: Any, resps: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yield each of the task's metrics for one document, by its name and that of its filter.
    `resps`: the model's responses to the requests that the document makes."""
    from lm_eval.api.instance import Instance

    kind = leaf.task.config.output_type
    requests = [
        Instance(kind, doc, ("",), number, metadata=(leaf.name, 0, 1), resps=[resp])
        for number, resp in enumerate(resps)
    ]
    for ensemble in leaf.task._filters:
        ensemble.apply(requests)
    for key in requests[0].filtered_resps:
        answers = [request.filtered_resps[key] for request in requests]
        for name, value in leaf.task.process_results(doc, answers).items():
            if isinstance(value, Real) and math.isfinite(value):
                yield f"{name},{key}", float(value)
