"""Listeners: what is done with the events of a tree of runs. Each is a module of its own, loaded where it is used."""
