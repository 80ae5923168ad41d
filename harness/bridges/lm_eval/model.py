"""Provides a model under a KV method for lm-evaluation-harness: `--model kv_harness`."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from sqlitedict import SqliteDict
from tqdm import tqdm

from harness.bridges.lm_eval.texts import (
    Asked,
    Text,
    free_answer,
    scored_question,
    scored_window,
    side_by_side,
)
from harness.config import plugins
from harness.config.catalogue import plain
from harness.config.compose import built, composed
from harness.config.entry import LM_EVAL
from harness.config.settings import ENTRIES, Settings, SettingsError
from harness.config.settings import INSTEAD as GONE
from harness.config.values import orders
from harness.engine.engine import Engine, NotFiniteError
from harness.engine.graph import CudaGraphs
from harness.engine.hf import routed
from harness.engine.sampling import Greedy, Sampled, Sampler
from harness.jobs.alignment import AlignedBudget
from harness.jobs.job import attach
from harness.jobs.machine import check_machine
from harness.jobs.model_check import check_against_generate
from harness.jobs.resolve import resolve
from harness.models.base import LoadedModel, ModelSource, is_listed, load
from harness.prompts.prompt import calibration_text, check_keywords, in_template
from harness.prompts.stops import StopRule
from harness.prompts.thinking import (
    ThinkingTokenizer,
    Thought,
    ThoughtfulAnswer,
    marks_ending_in,
)
from harness.results import identity
from harness.results.files import digest
from harness.terminal.notices import alike, say_once, warn
from kernels import ops
from methods.full import Full

# texts of context and continuation, and their tokens
EncodedPair = tuple[tuple[str, str], list[int], list[int]]
_SETTINGS = [key for key, entry in ENTRIES.items() if LM_EVAL in entry.read_by]
# keys of a run that are read here; the keywords of the chat template come last, since many requests have none
READ = ("model", "method", *sorted(_SETTINGS, key="template_kwargs".__eq__))
OWN = (
    "batch_size",
    "max_length",
    "max_gen_toks",
    "rolling_context",
    "add_bos_token",
    "seed",
    "config_dir",
    "enable_thinking",
    "think_end_token",
)  # fmt: skip; the other arguments of `KVHarnessLM`
INSTEAD = {
    **GONE,
    "thinking": "set enable_thinking",
    "too_long": "what is too long is cut on the left, as by lm-eval's hf",
    "pretrained": "set model=hf and model.name",
}
ITS_DEVICE = "cuda:0"  # the default of lm-eval's command, also on machines without a GPU
FROM_FILE = "{} answers are from the file of --use_cache, and kv_fell_back and kv_cut_left do not count them"
# keywords of a request that say how tokens are picked
DRAWN = ("do_sample", "temperature", "top_k", "top_p")


def ready(
    words: Mapping[str, Any], config_dir: str | None = None
) -> tuple[LoadedModel, Engine, Settings, ModelSource]:
    """Return the model, the engine of its attached method, the settings, and where the model is from, configured by
    `words` as `python -m harness KEY=VALUE ...` is. `config_dir`: a folder with method/NAME.yaml and model/NAME.yaml of
    a user's own, as for `--config-dir`. Raises `SettingsError` for a key that has no effect here."""
    for key in words:
        if key.endswith(("}", "]")):
            raise SettingsError(
                f"{key} is the end of a value cut at its comma: give model_args as a mapping, not a text."
            )
        if key.partition(".")[0] not in READ:
            advice = INSTEAD.get(key, f"use one of {', '.join((*READ, *OWN))}")
            raise SettingsError(f"{key} is not a key of lm-eval's model: {advice}.")
    folders = [] if config_dir is None else [Path(config_dir)]
    try:
        given, _, source, wanted = built(
            composed([f"{key}={plain(value)}" for key, value in words.items()], folders)
        )
    except SettingsError as error:  # the advice names an option of our own command
        raise SettingsError(str(error).replace("--config-dir", "config_dir", 1)) from error
    check_machine(wanted)
    described = source.describe()
    resolved = resolve(wanted, given, described)
    for note in filter(None, [*resolved.notes, described.caution]):
        say_once(note)
    settings = resolved.settings
    if isinstance(resolved.budget, AlignedBudget):  # whether it can be met depends on the prompts
        raise SettingsError(
            f"budget={plain(wanted.budget)} budget_rule={wanted.budget_rule} stands for bytes, which need prompts that "
            "are known before the run: give a share or a number of tokens, and budget_rule=read."
        )
    ops.prefer(orders(settings.backends))
    loaded = load(source, settings.dtype, settings.device, settings.template_kwargs)
    check_keywords(loaded.tokenizer, settings.template_kwargs or {})
    if not is_listed(loaded.model):
        check_against_generate(loaded, calibration_text(loaded.tokenizer))
    attachment = attach(loaded, resolved.method, resolved.budget, settings)
    graphs = CudaGraphs(loaded.model.device) if settings.graphs == "on" else None
    return (
        loaded,
        Engine(attachment, prefill_chunk=settings.prefill_chunk, graphs=graphs),
        settings,
        source,
    )


class KVHarnessLM(TemplateLM):
    """Provide lm-eval's interface to a model under a KV method: answers and likelihoods as in our
    own loop. A batch steps sequences together, each with a cache of its own, so an answer does not
    depend on the batch."""

    backend = "causal"

    def __init__(
        self,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        rolling_context: float = 0.5,
        add_bos_token: bool | None = None,
        seed: int = 42,
        config_dir: str | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        **words: Any,
    ) -> None:
        """`rolling_context`: the share of each window of a rolling likelihood that is the prompt.
        `add_bos_token`: as in lm-eval's `hf`. `seed`: for drawn tokens. `config_dir`: a folder with
        a user's own methods. `enable_thinking`, `think_end_token`: as in lm-eval's `hf`, but stop
        strings count only after a thought, and one that does not end has no answer. `words`: keys of
        a run, such as model=, method=, budget=."""
        super().__init__()
        self.batch_size = _whole("batch_size", batch_size)
        if max_batch_size is not None:
            raise SettingsError(
                "max_batch_size goes with batch_size=auto, which is refused: leave it out."
            )
        chosen = {} if device in (None, ITS_DEVICE) else {"device": device}
        self.loaded, self.engine, self.settings, self.source = ready(words | chosen, config_dir)
        self.template_kwargs = self.settings.template_kwargs or {}
        self.tokenizer: Any = self.loaded.tokenizer
        if add_bos_token is not None:  # lm-eval's `hf` loads the tokenizer with it
            self.tokenizer.add_bos_token = add_bos_token
        # requests, and for how many the method fell back, by reason
        self.requests, self.fell_back = 0, Counter[str]()
        self.from_file = 0  # answers that lm-eval has taken from the file of its `--use_cache`
        # requests whose prompts were too long and lost their beginning, as in lm-eval's `hf`
        self.cut_left = 0
        self.max_length = (
            self.loaded.window if max_length is None else _whole("max_length", max_length)
        )
        self.max_gen_toks = _whole("max_gen_toks", max_gen_toks)
        self.add_bos_token, self.seed = add_bos_token, seed
        # how often each text was asked for drawn tokens, since the last list of requests
        self._asked = Counter[str]()
        self.think_end_token = think_end_token
        self._set_thinking(enable_thinking, think_end_token)
        if (
            not isinstance(rolling_context, (int, float))
            or not (0 if self._full else 1e-9) <= rolling_context < 1
        ):
            raise SettingsError(
                f"rolling_context={rolling_context!r} is no share of a window to seal: give a number like 0.5; only "
                "method=full takes 0."
            )
        self.rolling_context = rolling_context
        self._device = self.loaded.model.device

    def _set_thinking(self, enable: bool | None, end: str | int | None) -> None:
        """Set whether the chat template lets the model think (`enable`; None: as it is), and the
        marks of thoughts to take out of answers, which the token or text `end` gives, else the
        template. Raises `SettingsError` where these are unknown."""
        self.enable_thinking, self.cut_thoughts, self._in_template = enable, 0, False
        self.marks = None
        self._eos_ids = set(self.loaded.eos_ids)
        if not (enable is None or isinstance(enable, bool)):
            raise SettingsError(
                f"enable_thinking={enable} is neither True nor False: give one, or leave it out."
            )
        told: Any = ThinkingTokenizer(self.tokenizer, self.template_kwargs, on=enable)
        self.chat_tokenizer = told
        known = told.thinking
        if end is not None:
            self.marks = marks_ending_in(
                self.tokenizer.decode([int(end)]) if str(end).isdecimal() else str(end)
            )
        elif enable and (known is None or known.wrapped):
            raise SettingsError(
                "enable_thinking=True: the chat template shows no text at which a thought ends and its answer begins; "
                "give think_end_token."
            )
        elif enable and known is not None:
            self.marks = known.marks
        elif enable is None and known is not None and known.marks.go_on:
            # ends a message alone, also a thought
            self._eos_ids -= {self.tokenizer.convert_tokens_to_ids(known.marks.go_on)}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Have lm-eval find answers in its file of `--use_cache` under keys that hold a hash of all
        that decides an answer; its own keys hold the text of a request only. Count the answers that
        are found. Raise `SettingsError` if the keys of this file cannot be changed."""
        super().set_cache_hook(cache_hook)
        if (kept := cache_hook.dbdict) is None:
            return
        if not isinstance(kept, SqliteDict):
            raise SettingsError(
                f"--use_cache of lm-eval {version('lm_eval')} does not tell methods apart: leave it out, or install "
                "lm-eval 0.4.13."
            )
        asker, decode = self._asker(), kept.decode

        def found(value: Any) -> Any:
            say_once("the file of --use_cache has answers; kv_from_file in the results counts them")
            self.from_file += 1
            return decode(value)

        kept.encode_key, kept.decode = lambda key: f"{asker}/{key}", found

    def _asker(self) -> str:
        """Return a hash of all that decides an answer besides its request."""
        attachment, source = self.engine.attachment, self.source
        named = {"method": attachment.method, "model": source}
        config = asdict(self.settings) | {
            kind: plugins.describe(plugin) for kind, plugin in named.items()
        }
        own = [key for key in OWN if key not in ("batch_size", "config_dir")]
        return digest(
            identity.asked(config, named)
            | {key: getattr(self, key) for key in own}
            | {
                "core": identity.CORE_VERSION,
                "code": identity.code_of(attachment.method, source, self),
                "model_revision": self.loaded.revision,
                "measured": dict(attachment.method.measured(attachment.prepared)),
            }
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers, cut_before = [""] * len(requests), self.cut_thoughts
        self._asked.clear()
        texts = (self._answer(number, *request.args) for number, request in enumerate(requests))
        for asked in self._run(texts, "answers", len(requests), disable_tqdm):
            number, slot = asked.number, asked.slot
            context, keywords = requests[number].args
            answers[number] = self._text(slot.out.tokens[0], keywords, slot.stops[0])
            self.cache_hook.add_partial("generate_until", (context, keywords), answers[number])
        if cut := self.cut_thoughts - cut_before:
            warn(
                f"note: {cut} of {len(requests)} thoughts did not end, so there is no answer: give a larger "
                "max_gen_toks in --gen_kwargs, which thought and answer share"
            )
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        sums = [0.0] * len(requests)
        windows = [
            window
            for number, request in enumerate(requests)
            for window in self._windows(number, *request.args)
        ]
        for asked in self._run(iter(windows), "windows", len(windows), disable_tqdm):
            sums[asked.number] += asked.log_likelihood()
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[EncodedPair], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        if self.enable_thinking:
            raise SettingsError(
                "enable_thinking=True suits no task that scores given texts: leave it out for these."
            )
        scores = [(0.0, False)] * len(requests)
        texts = self._questions(requests)
        for asked in self._run(texts, "continuations", len(requests), disable_tqdm):
            number, likeliest = asked.number, asked.slot.out.likeliest or [False]
            scores[number] = asked.log_likelihood(), likeliest[0]
            self.cache_hook.add_partial("loglikelihood", requests[number][0], scores[number])
        return scores

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **more: Any,
    ) -> list[int]:
        adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(
            str(self.tokenizer.decode(self.prefix_token_id))
        ):
            adds = False
        asked = {} if adds is None else {"add_special_tokens": adds}
        return self.tokenizer.encode(string, **asked)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands before the first token of a text: BOS, or EOS where there is
        no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which lm-eval keeps the prompts that it made (`--cache_requests`); prompts
        made with another chat template, or with other keywords of it, get another one."""
        # lm-eval asks only under --apply_chat_template, also where it keeps the prompts
        self._in_template = True
        made_by = [
            self.loaded.revision,
            self.tokenizer.chat_template,
            self.template_kwargs,
            self.enable_thinking,
        ]
        return f"{self.loaded.name.replace('/', '__')}-{digest({'made_by': made_by})[:8]}"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        self._in_template = True
        return in_template(
            self.chat_tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval records about the model, besides the words of `--model_args`."""
        model, attachment = self.loaded.model, self.engine.attachment
        from_file = FROM_FILE.format(self.from_file) if self.from_file else None
        return {
            "model_num_parameters": model.num_parameters(),
            "model_dtype": str(model.dtype),
            "model_revision": self.loaded.revision,
            # lm-eval writes down what was asked for, and `cuda:0` where nothing was
            "kv_device": str(model.device),
            "kv_method": repr(attachment.method),
            "kv_budget": None if attachment.budget is None else str(attachment.budget),
            "kv_requests": self.requests,
            "kv_from_file": self.from_file,
            "kv_cut_left": self.cut_left,
            "kv_fell_back": dict(alike(list(self.fell_back.elements()))),
            **({"kv_cut_thoughts": self.cut_thoughts} if self.marks else {}),
            "kv_cautions": list(filter(None, [self.source.describe().caution, from_file])),
        }

    def _run(self, texts: Iterator[Text], what: str, count: int, quiet: bool) -> Iterator[Asked]:
        if (self.template_kwargs or self.enable_thinking) and not self._in_template:
            raise SettingsError(
                "template_kwargs and enable_thinking=True are for the chat template, which lm-eval applies only with "
                "--apply_chat_template: add it, or leave them out."
            )
        fell_back: dict[int, str] = {}
        numbers: set[int] = set()
        with (
            routed(self.loaded.model),
            tqdm(total=count, desc=f"Running {what}", disable=quiet) as bar,
        ):
            for asked in side_by_side(self.engine, texts, self.batch_size):
                number, out = asked.number, asked.slot.out
                if out.not_finite is not None:
                    raise NotFiniteError(
                        f"The logits of request {number} hold NaN or infinity in {self.loaded.model.dtype}: check "
                        "the weights or take another dtype; `python -m harness` with this model names the layer."
                    )
                numbers.add(number)
                if out.fallback:
                    fell_back.setdefault(number, out.fallback)
                yield asked
                bar.update()
        self.requests += len(numbers)
        self.fell_back.update(fell_back.values())
        for reason, times in alike(list(fell_back.values())):
            name = type(self.engine.attachment.method).__name__
            warn(f"note: {name} fell back on {times} of {len(numbers)} requests: {reason}")

    def _answer(self, number: int, context: str, keywords: dict[str, Any]) -> Text:
        wanted = normalize_gen_kwargs(keywords, self.max_gen_toks)
        new = wanted["max_gen_toks"]
        if new >= self.max_length:
            raise SettingsError(
                f"max_gen_toks={new} leaves no room for a prompt in {self.max_length} tokens."
            )
        if unknown := sorted(wanted.keys() - {*DRAWN, "max_gen_toks", "until"}):
            raise SettingsError(
                f"{', '.join(unknown)} of a request are unknown here: leave them out of gen_kwargs."
            )
        ids = self._left_cut(self.tok_encode(context), self.max_length - new)
        stops = [stop for stop in self._until(keywords) if stop]
        sampler = self._sampler(wanted, context)
        rule: Any = StopRule(self.tokenizer, self._eos_ids, stops, 0)
        if self.marks is not None:
            opened = bool(self.marks.opening) and context.rstrip().endswith(self.marks.opening)
            rule = ThoughtfulAnswer(Thought(self.marks, opened), rule).picking(
                sampler.pick, sampler.pick
            )
            sampler = rule
        ending = {"max_new_tokens": new, "stops": [rule], "sampler": sampler}
        return partial(free_answer, self.engine, number, ids, ending)

    def _sampler(self, wanted: dict[str, Any], context: str) -> Sampler:
        if not wanted["do_sample"]:
            return Greedy()
        # not the number of the request, which is another one when `--use_cache` goes on
        self._asked[context] += 1
        drawn = hashlib.sha256(f"{self.seed}/{self._asked[context]}/{context}".encode()).digest()
        generator = torch.Generator(self.loaded.model.device).manual_seed(int.from_bytes(drawn[:4]))
        return Sampled(
            wanted["temperature"] or 1.0,
            wanted.get("top_k") or 0,
            wanted.get("top_p") or 1.0,
            generator,
        )

    def _until(self, keywords: dict[str, Any]) -> list[str]:
        until = keywords.get("until")
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        return handle_stop_sequences(
            list(until) if isinstance(until, (list, tuple)) else until, eos=eos
        )

    def _text(self, tokens: Sequence[int], keywords: dict[str, Any], rule: Any) -> str:
        """Return the answer, decoded and cut as lm-eval's own models do; empty if its thought did not
        end, which is counted. `rule`: ended the answer."""
        start, skip, end = 0, 0, None
        if isinstance(rule, ThoughtfulAnswer):
            (start, skip), end = rule.start(tokens), rule.thought.marks.end
            self.cut_thoughts += start == len(tokens)
        text = self.tokenizer.decode(list(tokens[start:]), skip_special_tokens=True)[skip:]
        return postprocess_generated_text(text, stop=self._until(keywords), think_end_token=end)

    def _questions(self, requests: Sequence[EncodedPair]) -> Iterator[Text]:
        """Yield the requests for likelihoods as questions, one for each context with all of its
        continuations. A context that is too long for its continuation is cut on the left."""
        by_context = defaultdict[tuple[int, ...], dict[int, list[int]]](dict)
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise SettingsError(
                    f"A continuation has {len(continuation)} tokens: max_length={self.max_length} is less."
                )
            by_context[tuple(self._left_cut(context, room))][number] = continuation
        return (
            partial(scored_question, self.engine, context, asked)
            for context, asked in by_context.items()
        )

    def _left_cut(self, ids: list[int], room: int) -> list[int]:
        """Return the last `room` tokens of a prompt, and count it if it has more."""
        if len(ids) > room:
            self.cut_left += 1
            say_once(
                f"prompts that exceed max_length={self.max_length} with their answers lose their beginning, as in "
                "lm-eval's hf; kv_cut_left in the results counts them"
            )
        return ids[-room:]

    def _windows(self, number: int, string: str) -> Iterator[Text]:
        ids, most = self.tok_encode(string), self.max_length
        for window in get_rolling_token_windows(
            ids, self.prefix_token_id, max_seq_len=most, context_len=1
        ):
            context, scored = make_disjoint_window(window)
            fed = len(context) + len(scored) - 1
            sealed = fed if self._full else max(1, int(self.rolling_context * fed))
            tokens = [*context, *scored]
            yield partial(scored_window, self.engine, number, tokens, len(scored), sealed)

    @property
    def _full(self) -> bool:
        return isinstance(self.engine.attachment.method, Full)


def _whole(key: str, number: int | str) -> int:
    if str(number).startswith("auto"):
        raise SettingsError(
            f"{key}={number} is refused: it is how many sequences step together, so give a number."
        )
    if not str(number).isdigit() or not int(number):
        raise SettingsError(f"{key}={number} should be a whole number from 1.")
    return int(number)
