"""Bands of Full: what Full has scored before on a model and task, in bands.json, and whether a run of Full lies there.

A wrong template, scorer, rotation or dtype shows in Full first. `python -m harness.bands DIR...` derives the file from
finished runs; nobody types it in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from evals import stats
from harness.config import plugins
from harness.config.settings import GenerationSettings
from harness.results import files
from harness.results.compared import FULL
from harness.results.identity import model_name
from harness.results.records import Record
from harness.results.run_folder import StoredRun

FILE = Path(__file__).with_name("bands.json")
# Parameters by which a task says how many examples of which groups to run. They change no example.
CHOICE = ("lengths", "samples", "rounds", "tasks", "datasets")
PLACES = 6  # decimals of a stored score
LEVEL = 0.9  # of intervals that must touch: two of the same truth are apart in fewer than 2 of 100 cases

About = dict[str, Any]
Scores = Mapping[str, Sequence[float]]  # by group


class Outside(NamedTuple):
    """One mean of a Full, and what it was expected to be. `group` is None for the mean over all of them."""

    group: str | None
    mean: float
    here: stats.Interval
    expected: float
    band: stats.Interval
    examples: int


@dataclass(frozen=True, slots=True)
class Band:
    """All that Full has scored under one model, task, template, scorer version and dtype."""

    about: About
    scores: Scores
    sources: Sequence[Mapping[str, Any]]  # the runs behind it

    def plain(self) -> dict[str, Any]:
        """As bands.json holds it; means and ranges are there for the reader."""
        groups = {name: _told({name: scores}) | {"scores": _counted(scores)} for name, scores in self.scores.items()}
        return {"about": self.about, **_told(self.scores), "groups": groups, "sources": list(self.sources)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Band:
        scores = {
            group: [float(score) for score, count in known["scores"].items() for _ in range(count)]
            for group, known in plain["groups"].items()
        }
        return cls(plain["about"], scores, plain["sources"])


def stored(file: Path | None = None) -> list[Band]:
    file = file or FILE
    return [Band.of_plain(plain) for plain in files.read_json(file)["bands"]] if file.exists() else []


def about(run: StoredRun) -> About | None:
    """What a score of Full depends on, but for the draw of examples; None where the task cannot be had here."""
    config, usual = run.config, asdict(GenerationSettings())
    if (task := _task(config.get("task"))) is None:
        return None
    return {
        "model": model_name(config),
        "revision": (run.info.get("identity") or {}).get("model_revision"),
        "task": task,
        "scorer": run.scorer,
        "chat": config.get("chat", "template"),
        "generation": {key: value for key, value in (config.get("generation") or {}).items() if value != usual[key]},
        "dtype": config.get("dtype"),
    }


def _task(config: Any) -> dict[str, Any] | None:
    """Its class and what is not at its default, so that a new parameter leaves old bands valid."""
    try:
        task = plugins.build(config, "task")
    except (TypeError, ValueError):  # of another version, or of a plug-in that is not on this machine
        return None
    usual = {key: _listed(value) for key, value in plugins.defaults(task).items()}
    given = {key: value for key, value in config.items() if key not in (*CHOICE, "haystack")}
    return {key: value for key, value in given.items() if key not in usual or value != usual[key]}


def outside(run: StoredRun, bands: Sequence[Band]) -> list[Outside]:
    """The means of a Full that its band excludes: over all groups that the band knows, then each group's own.

    A mean is outside where its interval and the band's do not touch, both at 90 % over all means that are looked at.
    """
    own, here = about(run), _by_group(run.records)
    known = next((band for band in bands if band.about == own), None)
    if known is None:
        return []
    groups = [group for group in here if group in known.scores]
    sets = [groups, *([group] for group in groups if len(groups) > 1)] if groups else []
    parts = [({name: here[name] for name in names}, {name: known.scores[name] for name in names}) for names in sets]
    found = [_held(*part, len(sets)) for part in parts]
    return [one for one in found if one is not None]


def derived(runs: Sequence[StoredRun]) -> list[Band]:
    """A band from the finished runs of Full of each kind. A prompt that several of them had counts once."""
    kinds: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        if run.info.get("method") == FULL and run.status == "complete" and (known := about(run)):
            kinds[files.canonical(known)].append(run)
    return [_band(same) for same in kinds.values()]


def write(bands: Sequence[Band], file: Path = FILE) -> None:
    """Replaces stored groups of the same conditions; all others stay."""
    every = {files.canonical(band.about): band for band in stored(file)}
    for band in bands:
        key = files.canonical(band.about)
        every[key] = _over(every[key], band) if key in every else band
    files.write_json(file, {"bands": [every[key].plain() for key in sorted(every)]})


def _over(before: Band, band: Band) -> Band:
    stays = before.scores.keys() - band.scores.keys()
    return Band(band.about, {**before.scores, **band.scores}, [*(before.sources if stays else ()), *band.sources])


def _band(runs: Sequence[StoredRun]) -> Band:
    records = {record.prompt_sha256: record for run in reversed(runs) for record in run.records}
    known = about(runs[0])
    assert known is not None
    return Band(known, _by_group(list(records.values())), [_source(run) for run in runs])


def _source(run: StoredRun) -> dict[str, Any]:
    commit = run.provenance("git").get("commit")
    return {"folder": run.folder.name, "ended": run.info.get("ended"), "commit": commit}


def _by_group(records: Sequence[Record]) -> Scores:
    """By group, and by the text that needles were hidden in: another haystack is not as hard."""
    scores: dict[str, list[float]] = defaultdict(list)
    for record in records:
        text = record.data.get("haystack")
        scores[f"{record.group} ({text})" if text else record.group].append(round(record.score, PLACES))
    return scores


def _held(here: Scores, band: Scores, looks: int) -> Outside | None:
    if mean(here) == mean(band):  # as most are, and an interval takes time
        return None
    level = 1 - (1 - LEVEL) / looks
    mine = interval(here, level)
    if mine.low <= mean(band) <= mine.high:  # the band's interval holds its mean: they touch
        return None
    theirs = interval(band, level)
    if mine.low <= theirs.high and theirs.low <= mine.high:
        return None
    group = next(iter(here)) if len(here) == 1 else None
    return Outside(group, mean(here), mine, mean(band), theirs, sum(map(len, here.values())))


def interval(scores: Scores, level: float = 1 - stats.ALPHA) -> stats.Interval:
    flat = [(score, group) for group, some in scores.items() for score in some]
    found = stats.interval(*zip(*flat, strict=True), level=level)
    assert found is not None
    return found


def mean(scores: Scores) -> float:
    """Of group means."""
    return fmean(map(fmean, scores.values()))


def _told(scores: Scores) -> dict[str, Any]:
    ends = interval(scores, LEVEL)
    band = [round(ends.low, 4), round(ends.high, 4)]
    return {"n": sum(map(len, scores.values())), "mean": round(mean(scores), 4), "range": band}


def _counted(scores: Sequence[float]) -> dict[str, int]:
    return {f"{score:g}" if score in (0, 1) else str(score): n for score, n in sorted(Counter(scores).items())}


def _listed(value: Any) -> Any:
    """As a yaml file holds it."""
    return list(value) if isinstance(value, tuple) else value
