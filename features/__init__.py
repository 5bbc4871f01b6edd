"""What some users never need, a folder each. To remove a feature, delete its folder, its line below and its tests.

A folder has any of: `config.py` (its keys), `proxy.py` (its plugin of the proxy), `trainer.py` (its plugin of the
trainer), `commands.py` (its commands), `schema.sql` (its tables) and `views/` (what the page shows of it).
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
