"""Reports of nights, sweeps and parity: as HTML pages, Markdown, tables for a terminal, and JUnit XML."""
