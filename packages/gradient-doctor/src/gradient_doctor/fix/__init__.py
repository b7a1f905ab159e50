"""`gradient-doctor fix`: edits for mechanical faults, proven by running both versions.

source    a file, its tree, edits of its text
recipes   from a finding to proposed edits
folders   copies of the script's folders, in which trials run
trial     one version, run for a few steps under the doctor
judge     did it help?
search    one fix at a time, then together
text, command   what is printed, and the command line
"""
