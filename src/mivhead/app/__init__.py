"""`miv app`: a page in the browser to make a classifier, without the command line.

`journal` and `project` keep a folder on disk, `learner` fits and predicts in the background,
`server` answers the page in `static/`, `downloads` makes the files that it offers.
"""
