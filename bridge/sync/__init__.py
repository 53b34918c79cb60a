"""Writing a precision into Megatron's configs: the routes, the plan, the check on copies, the application."""

from bridge.sync.report import SyncReport, SyncRow
from bridge.sync.routes import ROUTES, Route

__all__ = ["ROUTES", "Route", "SyncReport", "SyncRow"]
