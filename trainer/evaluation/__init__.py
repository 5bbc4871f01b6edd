"""Evaluates new versions on held-out tasks beside training, and keeps the best version."""
