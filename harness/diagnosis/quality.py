"""Why a run scores as it does, in sentences. Each rests on a number that it prints; what was not measured is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evals.stats import ALPHA
from harness.diagnosis.subject import Subject
from harness.results import triage
from harness.results.alarms.alarm import AlarmRow
from harness.results.alarms.table import alarms
from harness.results.alarms.times import SHARED
from harness.results.compared import group_means, paired
from harness.results.folder.names import ERROR
from harness.results.run_folder import StoredRun
from harness.results.summary import detectable
from harness.terminal.tables import digits, percent, probability

ONE = {"are": "is", "have": "has", "give": "gives"}


def failure(run: StoredRun) -> Iterator[str]:
    """Why it failed, and where the traceback lies, in sentences; none for a run that did not."""
    if run.status != "failed":
        return
    reason = " ".join(str(run.info.get("error") or "no reason was left").split()).rstrip(".")
    yield f"It failed: {reason}."
    if (path := run.folder / ERROR).is_file():
        yield f"The traceback is in {path}."


def sentences(subject: Subject) -> Iterator[str]:
    if why := list(failure(subject.run)):
        made = subject.summary["num_examples"]
        yield from [*why, f"The {made} examples that it made are kept." if made else "It made no example."]
        return
    if not subject.run.records:
        yield f"It is {subject.run.status} and holds no example, so there is nothing to explain."
        return
    yield from _score(subject)
    yield from _weakest(subject)
    yield from _budget(subject)
    yield from _fidelity(subject)
    yield from _causes(subject)
    yield from _endings(subject)
    yield from _alarms(subject)


def _score(subject: Subject) -> Iterator[str]:
    row, beside = subject.summary, subject.summary["full"]
    yield f"It scores {_with_ends(row['score'])} over {row['num_examples']} examples."
    if subject.is_full:
        return
    if not beside or subject.full is None:
        if subject.damage:
            yield f"How Full does on these prompts is not known where {'; '.join(subject.damage)}."
        else:
            yield "How Full does on these prompts was not measured: run with baseline=run."
        return
    told = f"Full scores {percent(beside['mean'])} on the same prompts"
    if not beside["diff"]:
        yield f"{told}: there is no difference."
        return
    ends = ", ".join(percent(end, 1, sign=True) for end in beside["ci95"])
    yield (
        f"{told}; the difference is {percent(beside['diff'], 1, sign=True)} points (95 % interval {ends}; "
        f"p {_p(beside['p'])}). {_verdict(subject, beside['p'])}"
    )


def _verdict(subject: Subject, p: float) -> str:
    if p < ALPHA:
        return "That is more than chance."
    assert subject.full is not None
    loss = detectable(subject.run.records, subject.full.records, 1)
    if loss is None:
        return "With so few examples no difference, however large, could be told from chance."
    return (
        f"These examples cannot tell it from chance: with 80 % power they would show a loss of {percent(loss)} points "
        "or more."
    )


def _weakest(subject: Subject) -> Iterator[str]:
    """The group that loses most, where there are several."""
    pairs = paired(subject.run.records, subject.full.records if subject.full else [])
    ours, theirs = (group_means([pair[side] for pair in pairs]) for side in (0, 1))
    lost = {group: theirs[group] - ours[group] for group in ours}
    if len(lost) < 2 or max(lost.values()) <= 0:
        return
    group = max(lost, key=lambda one: lost[one])
    count = sum(pair[0].group == group for pair in pairs)
    yield (
        f"It loses most in {group}: {percent(ours[group])} where Full has {percent(theirs[group])} ({count} examples)."
    )


def _budget(subject: Subject) -> Iterator[str]:
    asked, read, union = (subject.summary["budget"][key] for key in ("asked", "attended", "union"))
    if subject.is_full:
        return
    if read["share"] is None:
        yield "How much of the prompt its steps read was not measured: no answer had a step behind the seal."
        return
    words = "" if asked is None else f" (asked for: {_asked(asked)})"
    told = f"A step read {percent(read['share'])} % of the prompt, {digits(read['tokens'])} tokens{words}"
    more = union["share"] is not None and union["share"] > 1.02 * read["share"]
    yield told + (f", and {percent(union['share'])} % per KV head, over its query heads." if more else ".")


def _fidelity(subject: Subject) -> Iterator[str]:
    found = subject.summary["fidelity"]
    if subject.is_full:
        return
    if not found:
        yield "How much of the exact attention that leaves out was not measured: run with fidelity=8."
        return
    told = (
        f"It read {percent(found['recall'])} % of as many tokens with the largest exact weights (recall), and the "
        f"tokens that it read hold {percent(found['mass'])} % of the exact attention (mass)"
    )
    kl = found.get("kl")
    yield told + (f"; its next-token distribution is {digits(kl)} nats from Full's (KL)." if kl is not None else ".")


def _causes(subject: Subject) -> Iterator[str]:
    wrong, found = len(triage.wrong(subject.run.records)), subject.summary.get("triage")
    if not wrong:
        yield "No answer is wrong."
        return
    if not found:
        yield f"Why {_answers(wrong)} below the full score was not measured: run with triage=on."
        return
    parts = [_said(count, triage.CAUSES[cause][1]) for cause, count in found["causes"].items()]
    yield f"{_answers(wrong)} below the full score: {'; '.join(parts)}."
    if found["examined"] < wrong:
        yield f"{wrong - found['examined']} of them were not looked at: run with triage=on."
    if found["held"] is not None:
        yield (
            f"Up to where these answers leave Full's, a head held {percent(found['held'])} % of the needle's tokens, "
            f"and gave them {percent(found['mass'], 2)} % of its attention, Full {percent(found['full_mass'], 2)} %."
        )


def _endings(subject: Subject) -> Iterator[str]:
    records = subject.run.records
    stopped = [record for record in records if record.stop == "length"]
    if stopped and not subject.run.config.get("generation", {}).get("force_length"):
        low = sum(record.score < 1 for record in stopped)
        yield f"{len(stopped)} of {len(records)} answers hit the token limit, {low} of them below the full score."
    share = subject.summary["score"]["averages"].get("leading_digits_share")
    if share is not None and share < 1:
        yield f"Of the numbers asked for, the first {percent(share)} % of the digits came out right on average."


def _alarms(subject: Subject) -> Iterator[str]:
    """What the run's own records give away, and what a table with Full alone would say."""
    rows = [AlarmRow("Full", subject.full, None, subject.full_summary)] if subject.full and subject.full_summary else []
    p = (subject.summary["full"] or {}).get("p")
    rows.append(AlarmRow("this run", subject.run, subject.full, subject.summary, p))
    raised = [alarm.text for alarm in alarms(rows) if alarm.kind != SHARED]  # speed.py says what is to say of times
    told = [*subject.summary["warnings"], *raised]
    if told:
        yield f"Alarms: {'; '.join(one.rstrip('.') for one in dict.fromkeys(told))}."
    else:
        yield "There is no alarm."


def _answers(count: int) -> str:
    return f"{count} answer is" if count == 1 else f"{count} answers are"


def _said(count: int, words: str) -> str:
    """`words` as they are said of several answers."""
    verb, _, rest = words.partition(" ")
    return f"1 {ONE.get(verb, verb)} {rest}" if count == 1 else f"{count} {words}"


def _with_ends(score: Mapping[str, Any]) -> str:
    ends = ", ".join(percent(end) for end in score["ci95"]) if score["ci95"] else ""
    return f"{percent(score['mean'])} (95 % interval {ends})" if ends else percent(score["mean"])


def _asked(budget: float) -> str:
    return f"{100 * budget:g} %" if isinstance(budget, float) else f"{budget} tokens"


def _p(p: float) -> str:
    return "< .001" if p < 0.001 else f"= {probability(p)}"
