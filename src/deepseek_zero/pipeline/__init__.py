"""Pipelines: the schedule as a table of actions, the cut of a model into stages, and what runs both."""
