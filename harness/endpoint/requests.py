"""Makes the requests of one example: its prompt as token ids, as text or as messages, and what an
answer may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.config.settings import Settings
from harness.endpoint.source import Endpoint
from harness.jobs.examples import PreparedExample, sampling_seed
from harness.prompts.prompt import Tokenizer, shell, start_tokens
from harness.prompts.thinking import ENABLE, Thinking

CHAT, PLAIN = "chat/completions", "completions"


@dataclass
class Talk:
    """Hold what a server has been told of one example, to which each turn adds: a server keeps no
    conversation, so each request has all of it."""

    model: Endpoint
    settings: Settings
    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, turn: PreparedExample) -> tuple[str, dict[str, Any]]:
        """Add the user's turn, and return the path and the body of the request for its answer."""
        wanted, example = self.settings.generation, turn.example
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": turn.new_tokens,
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            # as we do, and whatever the model's generation_config.json says
            "frequency_penalty": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if example.stop and not wanted.force_length:
            body["stop"] = list(example.stop)
        if wanted.temperature:
            body["seed"] = sampling_seed(self.settings.seed, example.id)
        if self.model.extended:
            body |= {
                "repetition_penalty": 1.0,
                "top_k": wanted.top_k or -1,
                "ignore_eos": wanted.force_length,
                "min_tokens": min(example.min_new_tokens, turn.new_tokens),
            }
        if self.model.engine == "vllm":
            body["return_token_ids"] = True
        return self._with_prompt(turn, body)

    def answered(self, turn: PreparedExample, text: str, tokens: Sequence[int], eos: Any) -> None:
        """Add the model's answer, unless the next turn brings another in its place."""
        if not turn.prompt.replaces_answer:
            self.ids += tokens[: len(tokens) - (list(tokens[-1:]) == [eos])]
            self.text += text
        if self.messages and self.messages[-1]["role"] == "assistant":  # its first words
            text = self.messages.pop()["content"] + text
        reply = turn.example.reply
        self.messages.append({"role": "assistant", "content": text if reply is None else reply})

    def echoed(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the body of a request for the likelihoods of `tokens` behind what has been said."""
        return {
            "model": self.model.name,
            "prompt": [*self.ids, *tokens],
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        }

    def _with_prompt(
        self, turn: PreparedExample, body: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        prompt = turn.prompt
        if self.model.prompts == "chat":
            self._add_messages(turn)
            keywords = dict(self.settings.template_kwargs or {})
            if Thinking.of(self.tokenizer, keywords) is not None:
                keywords[ENABLE] = self.settings.thinks
            if keywords:
                body["chat_template_kwargs"] = keywords
            if turn.example.prefix:
                body |= {"add_generation_prompt": False, "continue_final_message": True}
            return CHAT, body | {"messages": list(self.messages)}
        # a server puts these before a text itself
        start = "" if self.ids or prompt.bos_added else self._start()
        self.ids += prompt.ids
        self.text += prompt.text.removeprefix(start)
        return PLAIN, body | {"prompt": self.ids if self.model.prompts == "ids" else self.text}

    def _start(self) -> str:
        tokens: Any = start_tokens(self.tokenizer)
        return str(self.tokenizer.decode(tokens)) if tokens else ""

    def _add_messages(self, turn: PreparedExample) -> None:
        """Add the messages of a turn: its system text and what was said earlier, the user's text as our
        template left it, and the first words of the answer."""
        example = turn.example
        if self.messages:
            user = example.question
        else:
            if example.system:
                self.messages.append({"role": "system", "content": example.system})
            for place, said in enumerate(example.earlier):
                role = "assistant" if place % 2 else "user"
                self.messages.append({"role": role, "content": said})
            around = shell(self.tokenizer, example.system, earlier=example.earlier)
            rest = len(around.tail) + len(example.prefix)
            user = turn.prompt.text[len(around.head) : len(turn.prompt.text) - rest]
        self.messages.append({"role": "user", "content": user})
        if example.prefix:
            self.messages.append({"role": "assistant", "content": example.prefix})
