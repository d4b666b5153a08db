"""The reproduction of the paper: the methods that it compares with, its authors' layer, its numbers and its tables.

To train on your own data, you need none of it. Its parts are in different layers of the package: `authors` beside the
convolutions, `methods` above the networks, `published` above the settings, and `tables` above the report's tables.
"""
