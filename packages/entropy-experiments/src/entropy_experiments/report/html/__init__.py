"""One offline HTML file of a run: `write_report` of `page`."""
