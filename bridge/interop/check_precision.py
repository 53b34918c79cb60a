"""`check_precision` under its earlier import path; it stands in `bridge.pytorch`."""

from bridge.pytorch.check_precision import PrecisionReport, check_precision

__all__ = ["PrecisionReport", "check_precision"]
