"""Exact arithmetic of the quantized experts: how weights are stored, and how rows become int8.

Functions take and return torch tensors on any device; torch is imported when they are called.
"""
