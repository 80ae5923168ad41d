"""What a token, a byte and an hour cost in a simulation, read from a YAML file that a user can
replace (--costs); costs.yaml is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.plugins import suggestion
from harness.config.settings import SettingsError
from harness.results.files import read_yaml
from harness.results.records import StoreError

FILE = Path(__file__).with_name("costs.yaml")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of a simulated machine, in bytes per second. `disk_duplex`: the disk reads at full
    speed while it writes."""

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
        """Return two sums in dollars: what `gpus` GPUs cost for so many hours, and what the storage
        that is reserved for as long does."""
        storage = (
            host_bytes / 1e9 * self.dram_usd_per_gb_hour
            + disk_bytes / 1e9 * self.ssd_usd_per_gb_hour
        )
        return hours * gpus * self.gpu_usd_per_hour, hours * storage


@dataclass(frozen=True, kw_only=True)
class Served:
    """The costs of running one model on a simulated server. `window`: tokens of context; `batch`:
    slots, which are turns that run side by side; `decode_step_s`: seconds for a step of a whole
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
    """Read a table of costs: speeds, prices and models. Raise `SettingsError` with the key that is
    wrong."""
    try:
        plain = read_yaml(path)
        models = {name: _numbers(Served, values) for name, values in plain["models"].items()}
        return Costs(
            _numbers(Hardware, plain["hardware"]), _numbers(Prices, plain["prices"]), models
        )
    except (StoreError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingsError(
            f"--costs {path} cannot be read ({error}): write the keys that {FILE.name} has."
        ) from error


def _numbers(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass `kind` with these values; raise ValueError where a number
    is not above 0."""
    for name, value in values.items():
        if not (isinstance(value, bool) or value > 0):
            raise ValueError(f"{name}={value} should be a number above 0")
    return kind(**values)
