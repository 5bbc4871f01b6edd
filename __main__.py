"""`python -m lightning_proxy` is the command `lightning-proxy`."""

from .cli import app

app(prog_name="lightning-proxy")
