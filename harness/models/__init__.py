"""Provides models: one `ModelSource` per kind, built from `conf/model/*.yaml`."""
