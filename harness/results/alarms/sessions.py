"""When and where the sessions of a run went on, and whether others used the machine meanwhile.

A run's own threads make a load, too. What they leave unexplained is others' work. So is a run of another process that
went on at the same time on the same processor, whatever the load says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.results.lock import holder
from harness.results.store import StoredRun
from methods.tiers.tier import DEVICE, TIERS

Info = Mapping[str, Any]
MARGIN, MARGIN_SHARE = 0.5, 0.1  # load that the system makes by itself: of a CPU, or a share of them where that is more


@dataclass(frozen=True, slots=True)
class Session:
    """One process' part of a run, times in ISO 8601, UTC. Where nobody noted processor or process, they are null."""

    began: str
    ended: str
    processor: str | None
    process: int | None
    own: int  # load that it makes by itself
    cpus: int | None
    loads: tuple[float, ...]  # over the minute before it began, and before it ended; as far as they were recorded

    @property
    def crowded(self) -> bool:
        """Whether others used the machine."""
        system = max(MARGIN, MARGIN_SHARE * (self.cpus or 0))
        return any(load > self.own + system for load in self.loads)

    def beside(self, other: Session) -> bool:
        """Whether it went on at the same time in another process, on the same processor."""
        if self.processor is None or self.processor != other.processor or self.process == other.process:
            return False
        return self.began < other.ended and other.began < self.ended


def sessions(run: StoredRun) -> list[Session]:
    """The last one at the end."""
    earlier = [_session(run.config, one, {}) for one in run.info.get("earlier") or []]
    return [*earlier, _session(run.config, run.info, holder(run.folder))]


def _session(config: Info, info: Info, locked_by: Info) -> Session:
    """info: run.json, or what it says of an earlier session. locked_by: where older runs alone noted their process."""
    known = info.get("provenance") or {}
    machine, process = known.get("machine") or {}, known.get("process") or locked_by
    cpus, began = machine.get("cpus_usable"), str(info.get("started") or "")
    loads = [one[0] for one in (machine.get("load_average"), info.get("load_average_ended")) if one]
    return Session(
        began=began,
        ended=str(info.get("ended") or began),
        processor=_processor(config, process, machine),
        process=process.get("pid"),
        own=_own_load(config, machine),
        cpus=cpus,
        loads=tuple(loads) if cpus else (),
    )


def _processor(config: Info, process: Info, machine: Info) -> str | None:
    """Hosts may share a name (containers do), so what is known of the hardware goes with it."""
    device = "cpu" if config.get("device") == "cpu" else machine.get("device_id")
    host = process.get("host")
    return f"{host} {device} {machine.get('cpu')} {machine.get('memory_bytes')}" if host and device else None


def _own_load(config: Info, machine: Info) -> int:
    """Its threads, and one more where files are read and written beside them. A GPU needs one CPU that is free."""
    cpus = machine.get("cpus_usable") or 0
    threads = (machine.get("threads") or cpus) if config.get("device", "cpu") == "cpu" else cpus - 1
    placement = TIERS.get(config.get("placement", DEVICE))
    return threads + ((placement is not None and placement.in_files) or config.get("history") == "store")
