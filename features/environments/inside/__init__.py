"""Code that runs in a kind's own environment. It only imports the kind's package, `client/`, the standard library."""
