"""What ``import isthmus`` gives: runs and their results, comparisons, sweeps and reproductions as Python objects.

The command line calls the same functions and prints what they return.
"""
