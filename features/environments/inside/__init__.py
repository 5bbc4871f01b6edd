"""Code for a kind's own environment. It imports only the kind's package, `client/` and the standard library."""
