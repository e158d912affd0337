"""`miv app`: a page in the browser to make a classifier, without the command line.

`history` and `project` keep a folder on disk, `learner` fits and predicts in the background,
`routes` answers the page in `static/`, `outputs` makes the files that it offers, and `example` the
project to start from.
"""
