"""Publishes new weights as candidates, which go live once they are shown to be no worse."""
