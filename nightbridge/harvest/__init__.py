"""The harvest: a run's output is stored and checked, and counts only once its manifest is there.

`harvesting` runs it: `selection` chooses the files, `upload` sends them without secrets, `manifest` commits them.
`node_harvest` has a compute node do that. `restore` checks and fetches stored runs, `retention` finds those that may be
removed. How objects are kept is the subject of `store`; what files mean, of `outputs`.
"""
