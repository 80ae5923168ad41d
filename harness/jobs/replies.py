"""Makes records of answers, whether our own engine or a server gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.base import Example, Task
from harness.jobs.examples import PreparedExample
from harness.prompts.prompt import Tokenizer
from harness.prompts.stops import StopRule
from harness.prompts.thinking import ThoughtfulAnswer
from harness.results.records import Record, Reply, made, whole

Rule = StopRule | ThoughtfulAnswer


def stop_rule(turn: PreparedExample, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Rule:
    """Return the rule that says when an answer to `turn` ends, and which of its tokens are text."""
    example = turn.example
    rule = StopRule(tokenizer, eos_ids, example.stop, example.min_new_tokens)
    return (
        rule if turn.thought is None else ThoughtfulAnswer(turn.thought, rule, turn.answer_tokens)
    )


def scored(
    task: Task,
    turn: PreparedExample,
    example: Example,
    rule: Rule,
    output: str,
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Return what is known of the answer `tokens`, whose text is `output`, by the keys of a line, with
    its score."""
    score = task.score(example, output)
    return {
        "prompt_tokens": len(turn.prompt.ids),
        "output": output,
        "tokens": tokens,
        "score": score.value if rule.answers(tokens) else 0.0,
        "details": dict(score.details),
        "data": dict(example.data),
        **rule.facts(tokens),
    }


def record_of(
    item: PreparedExample,
    replies: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    *,
    save_prompts: bool,
) -> Record:
    """Return the record of an example. `replies`: what is known of each turn; `facts`: of all of them."""
    ids = [token for turn in item.turns for token in turn.prompt.ids]
    known = {
        "id": item.example.id,
        "group": item.example.group,
        "prompt_sha256": item.sha256,
        **(whole([made(Reply, reply) for reply in replies]) if item.further else replies[0]),
        **item.facts,
        **facts,
        "prompt_ids": ids if save_prompts else None,
    }
    return made(Record, known)
