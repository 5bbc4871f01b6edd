"""Code for a kind's own environment. It imports only the kind's packages, `client/` and the standard library."""
