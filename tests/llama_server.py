"""llama.cpp's own server as the wheel `xllamacpp` builds it: `python llama_server.py GGUF PORT NAME CACHE SLOTS`.

CACHE is the type of keys and values, and SLOTS how many requests run at once. One thread computes, and no prompt's
cache is kept for the next."""

import signal
import sys

import xllamacpp

GGUF, PORT, NAME, CACHE, SLOTS = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.model_alias, params.port = GGUF, {NAME}, int(PORT)
params.n_parallel, params.n_ctx = int(SLOTS), 2048 * int(SLOTS)
params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{CACHE.upper()}")
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_prompt = False
server = xllamacpp.Server(params)
signal.pause()
