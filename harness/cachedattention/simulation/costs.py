"""The costs of a token, a byte and an hour, read from a yaml that a user can replace; costs.yaml is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from evals.data import check
from harness.config.plugins import suggestion
from harness.config.settings import SettingsError
from harness.results.files import read_yaml
from harness.results.records import StoreError

FILE = Path(__file__).with_name("costs.yaml")
KINDS = {"float": "a number above 0", "int": "a whole number above 0", "bool": "true or false"}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of a machine. `disk_duplex`: the disk reads as if it did not write meanwhile."""

    pcie_bytes_per_s: float
    disk_bytes_per_s: float
    disk_duplex: bool = False


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a machine's parts, in dollars per hour."""

    gpu_usd_per_hour: float
    dram_usd_per_gb_hour: float
    ssd_usd_per_gb_hour: float

    def usd(self, hours: float, gpus: int, host_bytes: int, disk_bytes: int) -> tuple[float, float]:
        """Return what GPUs cost for `hours`, and the storage that is reserved meanwhile."""
        storage = host_bytes / 1e9 * self.dram_usd_per_gb_hour + disk_bytes / 1e9 * self.ssd_usd_per_gb_hour
        return hours * gpus * self.gpu_usd_per_hour, hours * storage


@dataclass(frozen=True, kw_only=True)
class Served:
    """The costs of a model as it is served. `window`: tokens of context; `batch`: slots; `decode_step_s`: of a whole
    batch."""

    kv_bytes_per_token: int
    window: int
    gpus: int
    batch: int
    prefill_s_per_token: float
    decode_step_s: float


@dataclass(frozen=True)
class Costs:
    hardware: Hardware
    prices: Prices
    models: Mapping[str, Served]

    def model(self, name: str) -> Served:
        if name not in self.models:
            raise SettingsError(f"The costs know no model {name!r}{suggestion(name, self.models)}")
        return self.models[name]


def load(path: Path = FILE) -> Costs:
    """Read a table of costs. Raise `SettingsError` with the key that is wrong."""
    try:
        plain = read_yaml(path)
    except StoreError as error:
        raise SettingsError(f"--costs: {error}.") from error
    if plain.keys() - {"hardware", "prices", "models"}:
        raise SettingsError(f"--costs {path} should have the keys hardware, prices and models, as {FILE.name} has.")
    check(plain, {"hardware": "an object", "prices": "an object", "models": {str: "an object"}}, str(path))
    models = {name: _made(Served, one, f"models.{name}", path) for name, one in plain["models"].items()}
    hardware = _made(Hardware, plain["hardware"], "hardware", path)
    return Costs(hardware, _made(Prices, plain["prices"], "prices", path), models)


def _made(kind: Any, values: Any, place: str, path: Path) -> Any:
    shape = {f"{one.name}{'?' * (one.default is not MISSING)}": KINDS[str(one.type)] for one in fields(kind)}
    check({place: values}, {place: shape}, str(path))
    known = [field.name for field in fields(kind)]
    for name in values.keys() - set(known):
        raise SettingsError(f"{path}: {place} has no key {name!r}{suggestion(name, known)}")
    return kind(**{name: value for name, value in values.items() if value is not None})
