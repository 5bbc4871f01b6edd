"""What several test files share; on the path by `pythonpath` in pyproject.toml."""
