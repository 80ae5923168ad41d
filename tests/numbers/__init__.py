"""Numbers of README and of the pages of measurements, computed again from the published files: a module per page."""
