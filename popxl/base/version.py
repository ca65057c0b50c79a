"""The version of the project: the only place that says it."""

VERSION = "0.1.0"
