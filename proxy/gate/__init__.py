"""Which new version may go live, and how sure one can be that it is no worse than the live one."""
