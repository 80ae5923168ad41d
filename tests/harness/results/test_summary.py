"""One row from many lines: numbers worked out by hand, and every warning where it belongs and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evals import stats
from harness.cachedattention.facts import HISTORY
from harness.jobs.facts import PEAKS
from harness.results.records import Record
from harness.results.run_folder import load
from harness.results.summary import against, decode_throughput, quantiles, summarise, summary_of, total_throughput
from tests.fake_records import config, record, records, rewrite, talk, turn, write_run

INFO: dict[str, Any] = {"status": "complete", "method": "quest", "task": "niah", "task_info": {"chance": 0.0}}
KEYS = (
    "schema status method task model presets budget protocol placement codec dtype device batch seed num_examples "
    "num_failed num_skipped num_cut prompt_tokens score full likelihood served prefills lost_turns recomputed turns "
    "turns_ago ttft_s ttft_later_s tt2t_s tpot_s seal_s throughput_tok_s e2e_tok_s prepare_s memory fidelity trace "
    "simulated traced host_is_cpu warnings"
)
MEMORY = (
    "state_bytes kv_device_bytes kv_host_bytes kv_disk_bytes device_peak_bytes host_peak_bytes "
    + " ".join(f"{name}_peak_bytes" for name in PEAKS)
    + " moved_bytes_per_step from_disk_bytes_per_step exposed_s_per_step hidden_s_per_step hit_rate read_bytes_per_step"
)
SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}


def summary(lines: list[Record], full: list[Record] | None = None, **info: Any) -> dict[str, Any]:
    return summarise(lines, config=config("quest"), info=INFO | info, full=full)


def averages(folder: Path) -> dict[str, float]:
    return summary_of(load(folder), None)["score"]["averages"]  # type: ignore[no-any-return]


def warnings(lines: list[Record], full: list[Record] | None = None, **info: Any) -> str:
    return "\n".join(summary(lines, full, **info)["warnings"])


@pytest.fixture
def good() -> list[Record]:
    """Twelve right answers of a Full."""
    return records([1.0] * 12)


def test_keys_are_the_documented_ones(good: list[Record]) -> None:
    row = summary(records([1.0, 0.0], **SPARSE), good)
    assert " ".join(row) == KEYS
    assert " ".join(row["memory"]) == MEMORY
    assert (
        " ".join(row["budget"])
        == "asked bytes layers attended union capped_share counts extra_rows total_tokens not_kept"
    )
    assert row["prompt_tokens"] == {"min": 100, "median": 100, "max": 100}
    assert list(row["score"]) == ["mean", "ci95", "groups", "averages"]
    assert list(row["full"]) == ["mean", "diff", "ci95", "p"]
    assert list(row["ttft_s"]) == list(row["tpot_s"]) == ["mean", "p50", "p90"]


def test_score_is_the_mean_of_group_means() -> None:
    lines = records([1.0, 1.0, 1.0, 0.0], group="a") + records([0.0, 0.0], "f", group="b")
    row = summary(lines)["score"]
    assert row["mean"] == pytest.approx((0.75 + 0.0) / 2)
    assert row["groups"] == {"a": {"mean": 0.75, "n": 4}, "b": {"mean": 0.0, "n": 2}}
    known = stats.interval([1, 1, 1, 0, 0, 0], list("aaaabb"))
    assert known is not None
    assert row["ci95"] == [known.low, known.high]


def test_full_is_paired_over_shared_prompts(good: list[Record]) -> None:
    lines = [*records([1.0, 0.0, 1.0], **SPARSE), record("e3", prompt_sha256="another", score=0.0)]
    row = summary(lines, good)
    assert (row["full"]["diff"], row["full"]["mean"], row["full"]["p"]) == (pytest.approx(-1 / 3), 1.0, 1.0)
    assert "3 of 4" in "\n".join(row["warnings"])
    assert against(lines, None) is None
    assert against([record("x")], good) is None


def test_times_pool_intervals_and_leave_nulls_out() -> None:
    lines = [record("a", token_s=[1, 2, 3, 7]), record("b", token_s=[3, 4]), record("c", token_s=[5, 9, 11])]
    row = summary(lines)
    assert row["ttft_s"]["mean"] == pytest.approx(3.0)
    assert row["tt2t_s"]["p50"] == 4.0
    assert row["tpot_s"]["mean"] == pytest.approx((1 + 4 + 2) / 3)
    assert row["tpot_s"]["p50"] == 2.0
    assert row["throughput_tok_s"] == pytest.approx(3 / 7)
    assert row["e2e_tok_s"] == pytest.approx(9 / (7 + 4 + 11))
    assert "no TPOT" in "\n".join(row["warnings"])
    assert quantiles([None, 1.0, 3.0, None]) == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8)}
    empty = quantiles([None])
    assert empty == {"mean": None, "p50": None, "p90": None}
    simulated = summary(lines, simulated=True)  # shows no speed but its memory
    assert simulated["ttft_s"] == simulated["tt2t_s"] == simulated["tpot_s"] == empty
    assert simulated["throughput_tok_s"] is simulated["e2e_tok_s"] is None
    assert simulated["memory"]["kv_device_bytes"] == 1000


def test_decode_throughput_starts_at_the_second_token() -> None:
    """The 8 s before token 2 are prefill and seal, not decoding."""
    slow_seal = record(token_s=[1.0, 9.0, 9.5, 10.0])
    assert decode_throughput([slow_seal]) == pytest.approx(2 / 1.0)
    assert total_throughput([slow_seal]) == pytest.approx(4 / 10.0)
    assert decode_throughput([record(token_s=[1.0, 2.0])]) is None


def test_sequences_of_a_batch_share_the_seconds_of_their_steps() -> None:
    """Two run together, 0.5 s a step; the shorter one leaves, and the longer one has the last step for itself."""
    long = record("a", token_s=[1.0, 2.0, 2.5, 3.0], share_s=2.25, decode_share_s=0.75)
    short = record("b", token_s=[1.0, 2.0, 2.5], share_s=1.75, decode_share_s=0.25)
    alone = record("c", token_s=[1.25, 2.0, 4.0])  # as older lines are
    lines = [short, long, alone]
    assert decode_throughput(lines) == pytest.approx((1 + 2 + 1) / (0.25 + 0.75 + 2.0))
    assert total_throughput(lines) == pytest.approx((3 + 4 + 3) / (1.75 + 2.25 + 4.0))


def test_memory_is_the_largest_and_traffic_the_mean() -> None:
    changes = [
        {"kv_device_bytes": 5, "moved_bytes_per_step": 2.0},
        {"kv_device_bytes": 3, "moved_bytes_per_step": None},
    ]
    row = summary([record(str(i), **change) for i, change in enumerate(changes)])["memory"]
    assert (row["kv_device_bytes"], row["moved_bytes_per_step"], row["device_peak_bytes"]) == (5, 2.0, None)


def test_attended_is_told_in_tokens_and_as_a_share_of_what_was_sealed() -> None:
    lines = [
        record("a", attended_prompt=10.0, union_prompt=20.0, attended_p10=2.0, attended_p90=30.0),
        record("b", attended_prompt=10.0, union_prompt=30.0, context_tokens=50, attended_p10=4.0, attended_p90=30.0),
        record("c", attended_prompt=None, attended_total=None),
    ]
    budget = summary(lines)["budget"]
    assert budget["attended"] == pytest.approx({"tokens": 10.0, "share": 0.15, "p10": 0.05, "p50": None, "p90": 0.45})
    assert budget["union"] == {"tokens": 25.0, "share": pytest.approx(0.4)}
    capped = [record("a", capped_share=0.5), record("b", capped_share=1.0), lines[2]]
    assert summary(capped)["budget"]["capped_share"] == 0.75


def test_full_near_guessing_is_said(good: list[Record]) -> None:
    poor = records([1.0] + [0.0] * 11)
    assert "Full scores 8.3" in warnings(records([0.0] * 12, **SPARSE), poor)
    assert "Full scores 8.3" in warnings(poor, method="full")
    assert warnings(records([0.0] * 12, **SPARSE), good) == ""  # a poor method is no floor
    assert warnings(good, method="full") == ""
    guessing = {"task_info": {"chance": 0.25}}
    assert "the 25 of" in warnings(records([1.0, 0.0, 0.0] * 4), method="full", **guessing)


def test_what_went_otherwise_than_asked_is_counted_and_alike_warnings_are_one() -> None:
    lines = [
        record("a", fallback="all is read: the prompt of 31 tokens is short", warnings=["12 tokens were cut"]),
        record("b", sealed=False, attended_prompt=None, attended_total=None),
        record("c", stop="length", fallback="all is read: the prompt of 28 tokens is short"),
        record("d", warnings=["300 tokens were cut"]),
    ]
    fallback, sealed, limit, cut = warnings(lines).splitlines()
    assert "2 of 4" in fallback
    assert "28 to 31" in fallback
    assert "sealed" in sealed
    assert "limit" in limit
    assert "12 to 300" in cut


def test_the_task_says_what_else_its_groups_amount_to(tmp_path: Path) -> None:
    """With the run's end that is recorded; of an older run the task is asked, if it is one of conf/."""
    lines = [record(f"e{n}", details={"strict": float(n > 1), "strict_answer": "7"}) for n in range(4)]
    task = {
        "_target_": "evals.gsm8k.Gsm8k", "prompt": "lm_eval", "extraction": "flexible", "samples": None,
        "max_new_tokens": 9, "chat": False, "revision": "main",
    }  # fmt: skip
    old = write_run(tmp_path, lines, task=task)
    assert averages(old) == {"mean": 1.0, "strict": 0.5}
    gone = write_run(tmp_path, lines, task=task | {"no_longer_there": 1})
    assert averages(gone) == {}  # a class that is not what the run was made with
    rewrite(gone, averages={"mean": 1.0, "strict": 0.25})
    assert averages(gone) == {"mean": 1.0, "strict": 0.25}


def test_no_example_is_a_summary_too() -> None:
    row = summary([], status="failed")
    assert (row["num_examples"], row["score"]["mean"], row["status"]) == (0, None, "failed")
    assert len(row["warnings"]) == 1


def between(low: float, high: float) -> list[Any]:
    return [pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3)]


def test_a_conversation_counts_turn_by_turn() -> None:
    first, second = (turn(score=1.0, prompt_tokens=100), turn(score=0.5, history_tokens=104, token_s=[0.1, 0.2, 0.4]))
    third = turn(score=0.0, history_tokens=104, token_s=[0.3], hit_tier="disk", reused_tokens=103, load_s=0.1)
    row = summary([talk("a", first, second), talk("b", first, third)])
    assert row["score"]["mean"] == pytest.approx((0.75 + 0.5) / 2)
    unknown = dict.fromkeys(key for key, fact in HISTORY.items() if fact.by_turn and key != "hit_tier")
    assert row["turns"] == {
        "1": {"n": 2, "score": 1.0, "ci95": between(0.158, 1.0), "ttft_s": 1.0, "tokens": 100, "hits": {}} | unknown,
        "2": {"n": 2, "score": 0.25, "ci95": between(0.006, 0.888), "ttft_s": pytest.approx(0.2), "tokens": 114}
        | {"hits": {"disk": 1}}
        | unknown
        | {"reused_tokens": 103, "load_s": 0.1},
    }
    assert (row["ttft_s"]["p50"], row["ttft_later_s"]["p50"]) == (1.0, pytest.approx(0.2))
    assert row["tpot_s"]["mean"] == pytest.approx((2 * 0.1 + 2 * 0.1 + 0.2) / 5)  # no gap between two turns is one
    assert row["prefills"] == 2


def test_times_of_a_turn_are_medians_and_its_tokens_means() -> None:
    turns = (("a", 1.0, 8), ("b", 2.0, 16), ("c", 9.0, 0))
    talks = [talk(name, turn(load_s=seconds, reused_tokens=tokens)) for name, seconds, tokens in turns]
    row = summary(talks)["turns"]["1"]
    assert (row["load_s"], row["reused_tokens"]) == (2.0, 8)
    assert summary(talks, simulated=True)["turns"]["1"]["load_s"] is None


def test_scores_by_turns_ago_count_a_conversation_as_one() -> None:
    """Of ten turns of one conversation nothing is learnt about others; far ones share a class."""
    far = [turn(score=float(ago > 5), data={"turns_ago": ago}) for ago in (0, 1, 4, 7, 8, 15, 16)]
    made = summary([talk("a", *far), talk("b", turn(score=0.0, data={"turns_ago": 0}), turn())])["turns_ago"]
    assert {name: (row["n"], row["score"]) for name, row in made.items()} == {
        "0": (2, 0.0), "1": (1, 0.0), "4-7": (2, 0.5), "8-15": (2, 1.0), "16-31": (1, 1.0)
    }  # fmt: skip
    assert made["8-15"]["ci95"] == made["16-31"]["ci95"]


def test_questions_on_a_context_pay_for_one_prefill() -> None:
    lines = [record("a", token_s=[3.0, 3.5]), record("b", token_s=[0.2, 0.3], seal_s=None, prefilled_by="a")]
    row = summary(lines)
    assert row["prefills"] == 1
    assert (row["ttft_s"]["mean"], row["ttft_later_s"]["mean"], row["tt2t_s"]["mean"]) == (3.0, 0.2, 3.5)
    assert row["turns"] is row["turns_ago"] is None
