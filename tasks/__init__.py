"""One Prefect task per stage, in stage order: clone, container, validate, submit, watch, harvest, compare, report.

A task is thin: retry policy, logging, artifacts and progress around one call into `nightbridge`. No task reads another
stage's files by guessing a path; it takes the models before it and returns the next.
"""
