"""What runs in a kind's own environment. It imports the kind's package, `client/` and the standard library."""
