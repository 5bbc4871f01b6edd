"""How features, and packages of others, plug into the proxy: one typed shape. docs/plugins.md explains it."""

from ..api.requests import AdminRoute, AgentRoute
from ..hooks import Core, Hooks, ProxyPlugin

__all__ = ["AdminRoute", "AgentRoute", "Core", "Hooks", "ProxyPlugin"]
