"""Describes the model that a server serves: what the user says of it, and what the server says itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, NoReturn, Self

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.endpoint.client import Client, ServerGone, ServerRefused
from harness.jobs.examples import PreparedExample
from harness.models.base import WINDOW, Identity, ModelError, ModelInfo, no_window
from harness.models.hub import HuggingFace, read_config
from harness.models.probe import Heads
from harness.models.remote import RemoteModel

# parameters that change no answer, or that no folder of results may hold
NOT_RECORDED: Any = {"recorded": False}
# keys of an entry of /v1/models that are others for each request
PASSING = ("created", "permission", "object")
# numbers of a model that a server does not say
OF_WEIGHTS = (
    "rotary_dim", "hidden_size", "inner_size", "chosen_experts", "num_parameters",
)  # fmt: skip
RUNNER = "harness.endpoint.runner"  # found by its name, since it knows this module
# engines whose requests have more words than OpenAI's: a least length, EOS that is ignored, top_k, first words of an
# answer; and whose model list names what they serve
EXTENDED = ("vllm", "sglang")
# engines whose /v1/models lists a cache of files, not what is served
LISTS_FILES = ("transformers",)


@dataclass(frozen=True)
class Endpoint(RemoteModel):
    """Ask a server of an OpenAI-compatible interface. `name`: the model, as the server calls it.
    `checkpoint`: hub id or folder of what is served, whose tokenizer counts tokens and makes prompts,
    and with whose runs rows are paired. `prompts`: what is sent, token ids, text, or messages for the
    server's own chat template. `rate`: requests that begin per second, in place of `batch` at a
    time."""

    name: str
    url: str | None = field(default=None, metadata=NOT_RECORDED)
    checkpoint: str | None = None
    engine: Literal["vllm", "sglang", "llama.cpp", "transformers"] | None = None
    notes: str | None = None
    prompts: Literal["ids", "text", "chat"] = "ids"
    rate: float | None = None
    window: int | None = None
    key: str = field(default="OPENAI_API_KEY", metadata=NOT_RECORDED)
    timeout_s: float = field(default=600.0, metadata=NOT_RECORDED)

    def __post_init__(self) -> None:
        for name in ("rate", "window", "timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ModelError(f"model.{name}={value} must be more than 0.")

    @property
    def called(self) -> str:
        return self.engine or "endpoint"

    @property
    def extended(self) -> bool:
        """True if the engine takes more than OpenAI's own parameters (EXTENDED)."""
        return self.engine in EXTENDED

    @property
    def client(self) -> Client:
        if self.url is None:
            raise ModelError(
                "model.url=null names no server: give its address, as model.url=http://localhost:8000/v1."
            )
        return Client(self.url.rstrip("/"), self.key, self.timeout_s)

    @property
    def _files(self) -> HuggingFace:
        return HuggingFace(self.checkpoint or self.name)

    def identity(self) -> Identity:
        return self._files.identity()

    def config(self) -> NoReturn:
        raise ModelError(f"{self.name} is behind a server, and this command needs its config here.")

    def tokenizer(self) -> Any:
        return self._files.tokenizer()

    def context_window(self) -> int:
        if self.window is not None:
            return self.window
        config = read_config(self._files.folder())
        if known := config.get(WINDOW) or config.get("text_config", {}).get(WINDOW):
            return int(known)
        raise no_window(self.checkpoint or self.name)

    def describe(self) -> ModelInfo:
        """Return the description of the model, in which all that only its weights tell is empty."""
        window = self.context_window()
        unknown: Any = dict.fromkeys(OF_WEIGHTS, 0)
        return ModelInfo(
            *self.identity(),
            architecture="",
            window=window,
            trained_window=window,
            num_layers=1,
            layer_heads=(Heads(0, 0, 0, 0),),
            dtype="fp32",
            layer_windows=(None,),
            sink_logits=False,
            **unknown,
        )

    @cached_property
    def _entry(self) -> dict[str, Any]:
        """Return what /v1/models says of the model; empty if it says nothing, or lists other things."""
        if self.engine in LISTS_FILES:
            return {}
        try:
            known = self.client.whole("models").get("data") or []
        except (ServerGone, ServerRefused) as error:
            raise ModelError(str(error)) from error
        ids = [str(entry.get("id")) for entry in known]
        if self.name in ids:
            return dict(known[ids.index(self.name)])
        if ids:
            raise ModelError(
                f"model.name={self.name} is not what the server serves: choose one of {', '.join(ids)}."
            )
        return {}

    def asked(self) -> Self:
        try:
            self._files.folder()
        except ModelError as error:
            raise ModelError(
                f"The tokenizer of what is served makes the prompts: let model.checkpoint name its folder or hub id. "
                f"{error}"
            ) from error
        of_llama = (self._entry.get("meta") or {}).get("n_ctx")
        window = self.window or self._entry.get("max_model_len") or of_llama
        return replace(self, window=int(window or self.context_window()))

    def said(self) -> dict[str, Any]:
        return {key: value for key, value in self._entry.items() if key not in PASSING}

    def check(self, items: Sequence[PreparedExample], settings: Settings) -> None:
        wanted, turns = settings.generation, [turn for item in items for turn in item.turns]
        if self.rate is not None and settings.batch != 1:
            raise SettingsError(
                f"model.rate={self.rate:g} begins requests whether others have ended or not: leave batch out."
            )
        for name in ("top_k", "force_length"):
            if getattr(wanted, name) and not self.extended:
                raise SettingsError(
                    f"generation.{name} is no word of OpenAI's interface: leave it out, or say by "
                    f"model.engine={' or '.join(EXTENDED)} that the server knows it."
                )
        if any(turn.thought and (turn.thought.prefix or self.prompts == "chat") for turn in turns):
            raise SettingsError(
                f"thinking={settings.thinking} cannot be followed here: set thinking=off, or model.prompts=ids and a "
                "task that gives no first words of the answer."
            )
        given = any(turn.given for turn in turns)
        if given and self.prompts != "ids":
            raise ModelError(
                f"This task asks how likely given texts are, which model.prompts={self.prompts} cannot: set "
                "model.prompts=ids."
            )
        if self.prompts == "chat" and not all(turn.prompt.template for turn in turns):
            raise ModelError(
                "model.prompts=chat wraps every prompt in the server's template, and this task or chat=none wants some "
                "bare: set model.prompts=ids or text."
            )
        if self.prompts == "chat" and not self.extended and any(t.example.prefix for t in turns):
            raise ModelError(
                "This task gives the first words of the answer, which messages cannot say to this server: set "
                f"model.prompts=ids or text, or model.engine={' or '.join(EXTENDED)} if it is one."
            )

    def runner(self, task: Task, settings: Settings) -> Any:
        return import_module(RUNNER).EndpointRunner(task, settings, self)
