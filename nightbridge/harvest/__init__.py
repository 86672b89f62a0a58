"""The harvest: what a run left goes to the store, checked, and counts only once its manifest is there.

`selection` chooses the files, `upload` sends them without secrets, `manifest` commits them, `restore` checks and
fetches them, and `retention` finds what may be removed. How objects are kept is the subject of `store`; what files
mean, of `outputs`.
"""
