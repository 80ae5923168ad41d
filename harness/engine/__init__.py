"""One model under one method: prefill, seal, decode, and what is measured on the way."""
