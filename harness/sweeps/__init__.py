"""Many jobs as one command: which of them run together, and how Hydra's launchers get them."""
