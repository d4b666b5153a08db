"""The paper alone: the methods that it compares with, its authors' layer, its numbers and tables.

Nobody who trains on own data has to read this folder. Each of its parts stands on a floor of its own: `authors` among
the layers, `methods` above the networks, `published` above the settings, and `tables` within the report.
"""
