"""Engines behind one port: what runs a model, whoever runs it."""
