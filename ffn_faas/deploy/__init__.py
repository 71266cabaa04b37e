"""Deployments: rendered manifests run as processes on one machine, and recipes that derive both sides' commands.

The manifests themselves live in the source tree under deploy/; nothing here is needed to serve.
"""
