"""The conformance kit: what every method, model and data set promises, and how it is checked.

`pluribus check` and `pluribus.check` run it on a user's own code, and the tests of this library on all methods.
"""
