"""Decides which new version may go live, and how sure it is that it is no worse than the live one."""
