"""The list of features. Each is a folder. To remove a feature, delete its folder, its line here and its tests.

A folder has any of: `config.py` (settings), `proxy.py` (a plugin for the proxy), `trainer.py` (a plugin for the
trainer), `commands.py` (commands), `schema.sql` (tables) and `views/` (views for the page).
"""

# In this order: a feature may add options to the commands of those before it.
FEATURES = (
    "prompts",
    "optimize",
    "judge",
    "page",
    "experiment",
    "environments",
    "agl",
    "costs",
    "otel",
    "litellm",
    "evaluation",
    "promotion",
    "contexts",
    "algorithms",
    "teacher",
    "tune",
    "distributed",
    "tinker",
    "ray",
)
