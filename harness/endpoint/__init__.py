"""Runs tasks on a model that a server of an OpenAI-compatible interface serves (vLLM, SGLang, llama.cpp): asks it over
HTTP, follows its streams with a clock, and makes the same records of them as of our own engine."""
