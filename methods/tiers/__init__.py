"""Says where rows of keys and values lie (device, host memory, disk), how they are written, and how
they move.

It is plain torch that takes a device and a folder, and knows no method, no request and no
conversation. `methods/pools/` and the harness's store of conversations stand on it. `tier.py` and
`codecs.py` are tables that import no torch, for whoever has to name a tier or a codec before torch
is loaded."""
