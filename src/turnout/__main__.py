"""`python -m turnout` is the command line."""

from turnout.cli import main

main()
