"""Where models come from: one `ModelSource` per kind, built from `conf/model/*.yaml`."""
