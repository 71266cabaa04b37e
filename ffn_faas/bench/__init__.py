"""Measurements of one remote layer, one module for each backend; imported by the ``bench`` command."""
