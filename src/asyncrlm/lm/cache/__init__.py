"""Replies that are kept on disk: for equal calls to come, or to run a run again."""
