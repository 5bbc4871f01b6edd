"""Code that runs in a kind's own Python. It imports only the kind's packages, `client/` and the standard library."""
