"""Models whose answers are known: after each token they say the one that a script names, whatever stands before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from harness.models.hub import HuggingFace

TURN, END = "<|turn|>", "<|over|>"  # what opens the assistant's turn in two of the templates, and the EOS
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TALK = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}OPENING{% endif %}"
EMPTY = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATES = {
    "empty block": TALK.replace("OPENING", f"{TURN}{EMPTY}"),  # as Qwen3's
    "open block": TALK.replace("OPENING", f"{TURN}<think>\n"),  # as those of R1's distillations
    "harmony": TALK.replace("OPENING", "<|start|>assistant").replace("content }}", "content }}<|end|>"),  # as gpt-oss's
    "none": TALK.replace("OPENING", TURN),
}
SPECIAL = (TURN, END, FINAL, "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ADDED = ("<think>", "</think>", "\n\n")  # no special tokens, as in Qwen3's vocabulary
THOUGHT = ["so", " we", " stop", " there"]
SAYS: dict[str, list[list[str]]] = {  # by the kind of template: a thought, and "The key is 7", or "42" after "Answer:"
    "empty block": [[TURN, "<think>", "\n", *THOUGHT, "</think>", "\n\n"]],
    "open block": [["\n", *THOUGHT, "</think>", "\n\n"]],
    "harmony": [["assistant", "<|channel|>", "analysis", "<|message|>", *THOUGHT, "<|end|>", FINAL, "The"]],
    "none": [[TURN, "The"]],
}
ANSWERS = [["\n\n", "The", " key", " is", " 7", " stop!", " more"], ["Answer"], [":", " 42", " stop!"]]


def scripted(folder: Path, template: str, scripts: Sequence[Sequence[str]] = (), window: int = 400) -> HuggingFace:
    """Save a model with one of TEMPLATES in `folder`, and return it. Each of `scripts` is a list of tokens that follow
    each other, by default those of SAYS and ANSWERS; what no script goes on with ends."""
    scripts = [*(scripts or SAYS[template]), *ANSWERS]
    words = dict.fromkeys(_spelled(token) for script in scripts for token in script if token not in SPECIAL + ADDED)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[unk]", *words])}, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in ADDED])
    named = {"eos_token": END, "unk_token": "[unk]", "chat_template": TEMPLATES[template]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.save_pretrained(folder)
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, head_dim=2, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=1, intermediate_size=2, max_position_embeddings=window, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    follows = dict.fromkeys(range(size), tokenizer.eos_token_id)
    for script in scripts:
        spelled = [token if token in SPECIAL + ADDED else _spelled(token) for token in script]
        follows |= dict(pairwise(tokenizer.convert_tokens_to_ids(spelled)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float("norm" in name))  # the layers add nothing
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for token, after in follows.items():
            model.lm_head.weight[after, token] = 1.0
    model.save_pretrained(folder)
    return HuggingFace(str(folder))


def _spelled(word: str) -> str:
    """Return a word as a byte-level vocabulary spells it."""
    return word.replace(" ", "Ġ").replace("\n", "Ċ")
