"""Reports of nights, sweeps and parity: as HTML pages, Markdown, tables for a terminal, and JUnit XML.

`night_report` gathers a night from the store, `night_page` lays it out; `overview` has all tests, `trend_table` the
nights of one, `sweeps` the points of a swept one. `tables` has the words of verdicts, `charts` the drawings. `queries`
answers what a person asks about stored runs.
"""
