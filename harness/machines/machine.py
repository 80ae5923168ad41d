"""Machines as files: what each can hold and how fast it is, as `harness.bench calibrate` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal

from harness.machines.costs import CostTable, LinkCost
from harness.results.files import read_yaml, write_yaml
from methods.tiers.tier import DEVICE, TIERS
from methods.tiers.transfer.ways import BLOCK_BYTES

KNOWN = Path(__file__).with_name("machines.yaml")
Basis = Literal["published", "extrapolated", "measured"]
BASES: tuple[Basis, ...] = ("published", "extrapolated", "measured")


class MachineError(ValueError):
    """A machine that nobody knows, or a file that does not say what it should; the message says what to do."""


@dataclass(frozen=True, slots=True)
class MethodConstants:
    """What was fitted of a method's steps on a machine: seconds of a layer beside its bytes, `layer_s` of every layer
    and `token_s` for each token of a prompt, and `hits`, of the rows that a step chooses, the share that lies on the
    device from the step before. All are of a placement. `basis` where it is another than the machine's."""

    layer_s: float = 0.0
    token_s: float = 0.0
    hits: float = 0.0
    placement: str = DEVICE
    basis: Basis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device and its host. `basis` says where its speeds come from: fitted to published points, carried over from
    another machine by data sheets, or measured on it. `reserve_bytes` is what a system keeps free on the device. From
    `block_bytes` on a piece of host memory travels by itself (methods/tiers/transfer/ways.py)."""

    name: str
    device: str  # cuda or cpu
    device_bytes: int
    read_gb_s: float
    basis: Basis
    source: str
    host_bytes: int | None = None  # None: as much as it takes
    reserve_bytes: int = 0
    matmul_gflop_s: Mapping[str, float] = field(default_factory=dict)
    to_device_gb_s: float | None = None
    to_host_gb_s: float | None = None
    disk_gb_s: float | None = None
    block_bytes: int = BLOCK_BYTES
    methods: Mapping[str, MethodConstants] = field(default_factory=dict)

    def costs(self, dtype: str, constants: MethodConstants, tokens: int = 0) -> CostTable:
        """Of steps over `tokens` tokens of prompts, all sequences together. Lanes of unknown speed are infinitely fast;
        `require` refuses a step that needs one of them."""
        return CostTable(
            read_bytes_s=1e9 * self.read_gb_s,
            flop_s=1e9 * self.matmul_gflop_s.get(dtype, inf),
            layer_s=constants.layer_s + tokens * constants.token_s,
            to_device=_link(self.to_device_gb_s),
            to_host=_link(self.to_host_gb_s),
            disk=_link(self.disk_gb_s),
        )

    def require(self, placement: str) -> None:
        """Raise `MachineError` where the machine does not say how fast rows come from such a place."""
        needed = {"host": ["to_device_gb_s"], "disk": ["to_device_gb_s", "disk_gb_s"]}.get(placement, [])
        for name in needed:
            if getattr(self, name) is None:
                raise MachineError(
                    f"{self.name} has no {name}, which placement={placement} needs: add it to the machine's file, or "
                    "leave that placement out."
                )


def _link(gb_s: float | None) -> LinkCost:
    return LinkCost() if gb_s is None else LinkCost(1e9 * gb_s)


def known() -> dict[str, Machine]:
    """The machines that come with the harness."""
    return read(KNOWN)


def machine(asked: str) -> Machine:
    """A known machine by its name, or the one in a file of that name. Raises `MachineError`."""
    if (found := known().get(asked)) is not None:
        return found
    file = Path(asked).expanduser()
    if file.is_dir():
        file /= "machine.yaml"
    if not file.is_file():
        raise MachineError(
            f"The machine {asked} is unknown: choose one of {', '.join(known())}, or the file that "
            "`python -m harness.bench calibrate` writes for the one you are on."
        )
    of_file = read(file)
    if len(of_file) != 1:
        raise MachineError(f"{file} describes {len(of_file)} machines: leave one in it.")
    return next(iter(of_file.values()))


def read(file: Path) -> dict[str, Machine]:
    """By their names. Raises `MachineError` for what is no machine."""
    return {name: _machine(file, name, facts) for name, facts in read_yaml(file).items()}


def write(file: Path, made: Machine) -> None:
    """As `read` reads it, without what is as it would be anyway."""
    facts = {key.name: getattr(made, key.name) for key in fields(made) if key.name not in ("name", "methods")}
    methods = {name: _told(constants) for name, constants in made.methods.items()}
    told = {name: value for name, value in (facts | {"methods": methods}).items() if value not in (None, {}, 0)}
    write_yaml(file, {made.name: told})


def _told(constants: MethodConstants) -> dict[str, Any]:
    return {key.name: value for key in fields(constants) if (value := getattr(constants, key.name)) != key.default}


def _machine(file: Path, name: str, facts: Any) -> Machine:
    keys = {key.name for key in fields(Machine)} - {"name"}
    if not isinstance(facts, dict) or (wrong := sorted(set(facts) - keys)):
        said = f"{name}.{wrong[0]} is no fact of a machine" if isinstance(facts, dict) else f"{name} has no facts"
        raise MachineError(f"{file}: {said}: choose among {', '.join(sorted(keys))}.")
    if not isinstance(facts.get("methods", {}), dict):
        raise MachineError(f"{file}: {name}.methods should name methods, each with what was fitted of it.")
    try:
        methods = {method: MethodConstants(**constants) for method, constants in facts.get("methods", {}).items()}
        made = Machine(name=name, **facts | {"methods": methods})
    except TypeError as error:
        raise MachineError(f"{file}: {name} is not complete ({error}).") from None
    _check(file, made)
    return made


def _check(file: Path, made: Machine) -> None:
    for method, constants in made.methods.items():
        seconds = 0 <= constants.layer_s < inf and 0 <= constants.token_s < inf
        right = seconds and 0 <= constants.hits < 1 and constants.placement in TIERS
        if not right or constants.basis not in (None, *BASES):
            raise MachineError(
                f"{file}: {made.name}.methods.{method} needs a layer_s and a token_s from 0, hits from 0 to below 1, a "
                f"placement ({', '.join(TIERS)}) and a basis ({', '.join(BASES)}), or none of them."
            )
    if made.basis not in BASES or made.device not in ("cuda", "cpu"):
        raise MachineError(f"{file}: {made.name} needs a basis ({', '.join(BASES)}) and a device (cuda or cpu).")
    speeds = ("device_bytes", "read_gb_s", "to_device_gb_s", "to_host_gb_s", "disk_gb_s", "host_bytes", "block_bytes")
    numbers = {name: getattr(made, name) for name in speeds} | dict(made.matmul_gflop_s)
    for name, value in numbers.items():
        unknown = value is None and name not in ("device_bytes", "read_gb_s", "block_bytes")
        if not unknown and (value is None or isinstance(value, str | bool) or not 0 < value < inf):
            raise MachineError(f"{file}: {made.name}.{name}={value} should be a number above 0.")
